"""Simulated devices that submit manipulated updates, to test the robustness of a method.

An adversary runs its task as any other device, except for its labels or its update. The update passes the same rounds,
store and checks. With the received tensor x, and the tensor y of an honest update:

    scaled           x + factor (y - x)
    sign_flip        x - factor (y - x)
    label_flip       y, learned from examples of class c as if they were of class classes - 1 - c
    inner_product    x - factor (mean of the honest boards' y - x): all adversaries send the same, and know what the
                     others send in this round (Xie, Koyejo and Gupta, Fall of Empires, UAI 2019, arXiv 1903.03936)

A tensor that was not received counts as received with zeros: it is a difference already. Integer tensors (counters),
weights and metrics stay honest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import metrics
from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import AdversarySettings, JobSettings
from fedquilt.core import ClientContext, ClientResult, DeviceUpdate, Examples, Method, Task, derive_seed
from fedquilt.edge_agent.task.protocol import WorkRequest

KEY: Final = "adversary"  # of an order's data: the attack, and for "inner_product" the file with the honest mean


def choose_adversaries(job: JobSettings, devices: Collection[str]) -> frozenset[str]:
    """Return the adversaries of a fleet, or none without [fleet] adversaries.

    The job's seed determines the choice.
    """
    lying = job.fleet.adversaries
    if lying is None:
        return frozenset()
    count = math.ceil(lying.share * len(devices) - 1e-9)
    return frozenset(sorted(devices, key=lambda device: derive_seed(job.seed, "adversary", device))[:count])


def make_attack_data(lying: AdversarySettings) -> dict[str, Any]:
    """Return the entry of `WorkRequest.data` that makes `corrupt_method` attack."""
    return {KEY: {"attack": lying.attack, "factor": lying.factor}}


def honest_file(order: WorkRequest) -> str | None:
    """Return the file that `add_honest_mean` put into an order, or None."""
    honest: str | None = order.data.get(KEY, {}).get("honest")
    return honest


def add_honest_mean(order: WorkRequest, honest: Path | str) -> WorkRequest:
    """Return an adversary's work request with the path of the file that `write_mean` has written."""
    return msgspec.structs.replace(order, data={**order.data, KEY: {**order.data[KEY], "honest": str(honest)}})


def corrupt_method(method: Method, given: Mapping[str, Any]) -> Method:
    """Return the method as the device of a work request runs it, unchanged for honest devices."""
    told = given.get(KEY)
    if told is None:
        return method

    def work(task: Task, site: ClientContext) -> ClientResult:
        if told["attack"] == "label_flip":
            return method.work(task, replace(site, train=mirror_labels(site.train, task.params.get("network", {}))))
        answer = method.work(task, site)
        received = {name: site.load(name) for name in answer.bundles if name in task.bundles}
        honest = tensors.read_tensors(Path(told["honest"])) if "honest" in told else {}
        bundles = {
            bundle: {
                name: _corrupt_tensor(told, value, received.get(bundle, {}).get(name), honest.get(f"{bundle}/{name}"))
                for name, value in sent.items()
            }
            for bundle, sent in answer.bundles.items()
        }
        return replace(answer, bundles=bundles)

    return replace(method, work=work)


def mirror_labels(examples: Examples, network: Mapping[str, Any]) -> Examples:
    """Return examples with mirrored labels: class c becomes classes - 1 - c.

    Regression targets are mirrored within their range.
    """
    y = examples.y
    if metrics.task_from_network(network) == "classes" and "classes" in network:
        return Examples(examples.x, (network["classes"] - 1 - y.astype(np.int64)).astype(y.dtype))
    return Examples(examples.x, (y.min(axis=0) + y.max(axis=0) - y).astype(y.dtype))


def _corrupt_tensor(
    told: Mapping[str, Any], value: np.ndarray, received: np.ndarray | None, honest: np.ndarray | None
) -> np.ndarray:
    kind = value.dtype
    if kind.kind != "f":
        return value
    start = np.zeros_like(value) if received is None or received.shape != value.shape else received
    if told["attack"] == "inner_product" and honest is not None and honest.shape == value.shape:
        value = honest
    factor = told["factor"] if told["attack"] == "scaled" else -told["factor"]
    return np.asarray(start + factor * (value.astype(np.float64) - start)).astype(kind)


class HonestUpdates:
    def __init__(self) -> None:
        self._round = -1
        self._sent: dict[str, dict[str, np.ndarray]] = {}  # device -> its tensors, named by bundle and name

    def add_update(self, given: DeviceUpdate) -> None:
        """Store the update of an honest device, and delete the updates of earlier rounds."""
        if given.round != self._round:
            self._round, self._sent = given.round, {}
        self._sent[given.device] = {f"{b}/{name}": a for b, sent in given.bundles.items() for name, a in sent.items()}

    def list_devices(self, round: int) -> frozenset[str]:
        return frozenset(self._sent) if round == self._round else frozenset()

    def write_mean(self, path: Path) -> Path:
        """Write the float32 mean of all stored float tensors to `path` and return `path`.

        Tensors that differ in shape or are missing in an update are left out.
        """
        heard = [self._sent[device] for device in sorted(self._sent)]
        found: dict[str, np.ndarray] = {}
        for name, first in heard[0].items():
            others = [sent[name] for sent in heard if name in sent and sent[name].shape == first.shape]
            if first.dtype.kind == "f" and len(others) == len(heard):
                total = np.zeros(first.shape)
                for array in others:
                    total = total + array
                found[name] = np.asarray(total / len(others)).astype(np.float32)
        path.write_bytes(tensors.encode_tensors(found))
        return path

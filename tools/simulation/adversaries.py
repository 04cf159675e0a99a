"""Simulated devices that submit manipulated updates, to test the robustness of a method.

An adversary runs its task as any other device, except for its labels or its update. The update passes the same rounds,
store and checks. With the received tensor x, and the tensor y of an honest update:

    scaled           x + factor (y - x)
    sign_flip        x - factor (y - x)
    label_flip       y, trained with the label classes - 1 - c for class c
    inner_product    x - factor (mean of the honest devices' y - x): all adversaries send the same update, and
                     know the honest updates of the round (Xie, Koyejo and Gupta, Fall of Empires, UAI 2019,
                     arXiv 1903.03936)

A tensor that was not received is a difference, so x is zero. Integer tensors (counters), weights and metrics stay
honest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import metrics
from fedquilt.arrays import tensors
from fedquilt.coordinator.settings import AdversarySettings, JobSettings
from fedquilt.core import ClientContext, ClientResult, DeviceUpdate, Examples, Method, Task
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.tools.simulation import draw_devices

# Key in `WorkRequest.data` of the attack and, for "inner_product", of the file with the honest mean.
ATTACK_KEY: Final = "adversary"


def choose_adversaries(job: JobSettings, devices: Collection[str]) -> frozenset[str]:
    """Return the adversaries of a fleet, chosen by the job's seed, or none without [fleet] adversaries."""
    settings = job.fleet.adversaries
    if settings is None:
        return frozenset()
    return frozenset(draw_devices(job.seed, "adversary", settings.share, devices))


def make_attack_data(settings: AdversarySettings) -> dict[str, Any]:
    return {ATTACK_KEY: {"attack": settings.attack, "factor": settings.factor}}


def get_honest_mean_path(request: WorkRequest) -> str | None:
    path: str | None = request.data.get(ATTACK_KEY, {}).get("honest")
    return path


def add_honest_mean(request: WorkRequest, path: Path | str) -> WorkRequest:
    """Return an adversary's work request with the path of the file that `write_mean` has written."""
    return msgspec.structs.replace(
        request, data={**request.data, ATTACK_KEY: {**request.data[ATTACK_KEY], "honest": str(path)}}
    )


def corrupt_method(method: Method, request_data: Mapping[str, Any]) -> Method:
    """Return the method with the attack of a work request, or unchanged for an honest device."""
    attack = request_data.get(ATTACK_KEY)
    if attack is None:
        return method

    def work(task: Task, site: ClientContext) -> ClientResult:
        if attack["attack"] == "label_flip":
            return method.work(task, replace(site, train=mirror_labels(site.train, task.params.get("network", {}))))
        result = method.work(task, site)
        received = {name: site.load(name) for name in result.bundles if name in task.bundles}
        honest = tensors.read_tensors(Path(attack["honest"])) if "honest" in attack else {}
        bundles = {
            bundle: {
                name: _corrupt_tensor(attack, value, received.get(bundle, {}).get(name), honest.get(f"{bundle}/{name}"))
                for name, value in arrays.items()
            }
            for bundle, arrays in result.bundles.items()
        }
        return replace(result, bundles=bundles)

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
    attack: Mapping[str, Any], value: np.ndarray, received: np.ndarray | None, honest: np.ndarray | None
) -> np.ndarray:
    dtype = value.dtype
    if dtype.kind != "f":
        return value
    start = np.zeros_like(value) if received is None or received.shape != value.shape else received
    if attack["attack"] == "inner_product" and honest is not None and honest.shape == value.shape:
        value = honest
    factor = attack["factor"] if attack["attack"] == "scaled" else -attack["factor"]
    return np.asarray(start + factor * (value.astype(np.float64) - start)).astype(dtype)


class HonestUpdates:
    def __init__(self) -> None:
        self._round = -1
        self._tensors: dict[str, dict[str, np.ndarray]] = {}  # by device, then by bundle/name

    def add_update(self, update: DeviceUpdate) -> None:
        """Store the update of an honest device, and delete the updates of earlier rounds."""
        if update.round != self._round:
            self._round, self._tensors = update.round, {}
        self._tensors[update.device] = {
            f"{b}/{name}": a for b, arrays in update.bundles.items() for name, a in arrays.items()
        }

    def list_devices(self, round: int) -> frozenset[str]:
        return frozenset(self._tensors) if round == self._round else frozenset()

    def write_mean(self, path: Path) -> Path:
        """Write the float32 mean of all stored float tensors to `path` and return `path`.

        Tensors that differ in shape or are missing in an update are left out.
        """
        updates = [self._tensors[device] for device in sorted(self._tensors)]
        means: dict[str, np.ndarray] = {}
        for name, first_tensor in updates[0].items():
            same_shape = [
                update_tensors[name]
                for update_tensors in updates
                if name in update_tensors and update_tensors[name].shape == first_tensor.shape
            ]
            if first_tensor.dtype.kind == "f" and len(same_shape) == len(updates):
                total = np.zeros(first_tensor.shape)
                for array in same_shape:
                    total = total + array
                means[name] = np.asarray(total / len(same_shape)).astype(np.float32)
        path.write_bytes(tensors.encode_tensors(means))
        return path

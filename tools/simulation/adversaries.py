"""Adversaries: simulated boards that lie, to see what a method does about it. No real board ever does.

An adversary's task is carried out as every other, but for what it sends or learns from; the coordinator receives that
through the same rounds, store and checks. With x, the received tensor, and y, the one that honest work would send:

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

from fedquilt import metrics, tensors
from fedquilt.coordinator.settings import Adversaries, Job
from fedquilt.core import Answer, Contribution, Examples, Method, Site, Task, derive_seed
from fedquilt.edge_agent.task.protocol import Order

KEY: Final = "adversary"  # of an order's data: the attack, and for "inner_product" the file with the honest mean


def drawn(job: Job, devices: Collection[str]) -> frozenset[str]:
    """The devices of a fleet that lie in all rounds, drawn by the job's seed; none without [fleet] adversaries."""
    lying = job.fleet.adversaries
    if lying is None:
        return frozenset()
    count = math.ceil(lying.share * len(devices) - 1e-9)
    return frozenset(sorted(devices, key=lambda device: derive_seed(job.seed, "adversary", device))[:count])


def data(lying: Adversaries) -> dict[str, Any]:
    """What an adversary's orders hold in their data, for `corrupted`."""
    return {KEY: {"attack": lying.attack, "factor": lying.factor}}


def honest_file(order: Order) -> str | None:
    """Return the file that `informed` put into an order, or None."""
    honest: str | None = order.data.get(KEY, {}).get("honest")
    return honest


def informed(order: Order, honest: Path | str) -> Order:
    """An adversary's order with the file that `Overheard.write` has written."""
    return msgspec.structs.replace(order, data={**order.data, KEY: {**order.data[KEY], "honest": str(honest)}})


def corrupted(method: Method, given: Mapping[str, Any]) -> Method:
    """The method as the board that these data of an order belong to carries it out; an honest board's is unchanged."""
    told = given.get(KEY)
    if told is None:
        return method

    def work(task: Task, site: Site) -> Answer:
        if told["attack"] == "label_flip":
            return method.work(task, replace(site, train=mirrored(site.train, task.params.get("network", {}))))
        answer = method.work(task, site)
        received = {name: site.load(name) for name in answer.bundles if name in task.bundles}
        honest = tensors.read(Path(told["honest"])) if "honest" in told else {}
        bundles = {
            bundle: {
                name: _sent(told, value, received.get(bundle, {}).get(name), honest.get(f"{bundle}/{name}"))
                for name, value in sent.items()
            }
            for bundle, sent in answer.bundles.items()
        }
        return replace(answer, bundles=bundles)

    return replace(method, work=work)


def mirrored(examples: Examples, network: Mapping[str, Any]) -> Examples:
    """The examples with mirrored labels: class c as classes - 1 - c, numbers within their range, 0 and 1 swapped."""
    y = examples.y
    if metrics.task_of(network) == "classes" and "classes" in network:
        return Examples(examples.x, (network["classes"] - 1 - y.astype(np.int64)).astype(y.dtype))
    return Examples(examples.x, (y.min(axis=0) + y.max(axis=0) - y).astype(y.dtype))


def _sent(
    told: Mapping[str, Any], value: np.ndarray, received: np.ndarray | None, honest: np.ndarray | None
) -> np.ndarray:
    """A tensor as an adversary sends it in place of `value`."""
    kind = value.dtype
    if kind.kind != "f":
        return value
    start = np.zeros_like(value) if received is None or received.shape != value.shape else received
    if told["attack"] == "inner_product" and honest is not None and honest.shape == value.shape:
        value = honest
    factor = told["factor"] if told["attack"] == "scaled" else -told["factor"]
    return np.asarray(start + factor * (value.astype(np.float64) - start)).astype(kind)


class Overheard:
    """What the honest boards send in a round, for adversaries who know it."""

    def __init__(self) -> None:
        self._round = -1
        self._sent: dict[str, dict[str, np.ndarray]] = {}  # device -> its tensors, named by bundle and name

    def hear(self, given: Contribution) -> None:
        """Note what an honest device sends; what was sent in another round is forgotten."""
        if given.round != self._round:
            self._round, self._sent = given.round, {}
        self._sent[given.device] = {f"{b}/{name}": a for b, sent in given.bundles.items() for name, a in sent.items()}

    def heard(self, round: int) -> frozenset[str]:
        """Devices that have been heard in a round."""
        return frozenset(self._sent) if round == self._round else frozenset()

    def write(self, path: Path) -> Path:
        """Write the mean of what all have sent, float32, without tensors that differ in shape; returns the path."""
        heard = [self._sent[device] for device in sorted(self._sent)]
        found: dict[str, np.ndarray] = {}
        for name, first in heard[0].items():
            others = [sent[name] for sent in heard if name in sent and sent[name].shape == first.shape]
            if first.dtype.kind == "f" and len(others) == len(heard):
                total = np.zeros(first.shape)
                for array in others:
                    total = total + array
                found[name] = np.asarray(total / len(others)).astype(np.float32)
        path.write_bytes(tensors.encode(found))
        return path

"""A method's two halves in one process, without a network: baselines, ablations, tests.

What travels is what would travel: a task's parameters go through JSON, bundles through safetensors
bytes, and each is counted; a device gets the same content once. Who is asked is drawn as a coordinator
draws. There is no deadline and no failure: whoever is asked answers.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.coordinator import cohort
from fedquilt.core import (
    BlobRef,
    Bundle,
    Contribution,
    DeviceView,
    Examples,
    Method,
    Order,
    Site,
    Task,
    Tensors,
    derive_seed,
)

BUDGET_BYTES = 1 << 40  # nothing is refused here


@dataclass(frozen=True)
class Member:
    """One device: its own examples, and its held-out share."""

    device: str
    train: Examples
    held: Examples


@dataclass
class Spent:
    """What all tasks of a run took together."""

    tasks: int = 0
    rounds: int = 0
    cpu_s: float = 0.0  # of the devices' own work, on this machine
    down_bytes: int = 0
    up_bytes: int = 0


@dataclass
class _Device:
    """What a device has kept."""

    member: Member
    local: Tensors = field(default_factory=dict)
    rounds: tuple[int, ...] = ()
    blobs: set[str] = field(default_factory=set)  # sha256 of what it has been sent


def search_alone(*args: Any, **options: Any) -> Any:
    """The last of `states`: with one member the baseline "Local"."""
    *_, last = states(*args, **options)
    return last


def states(
    method: Method,
    bundle: Bundle,
    path: Callable[[str], Path],
    engine: Any,
    members: Sequence[Member],
    params: Any,
    *,
    seed: int = 0,
    rounds: int = 1000,
    per_round: int = 0,
    keep: Callable[[Tensors], Tensors] | None = None,
    spent: Spent | None = None,
) -> Iterator[Any]:
    """The method's state before the first round and after each, until it is done or after so many rounds.

    Args:
        path: finds a bundle's file on disk.
        per_round: devices asked in a round; 0: all.
        keep: what of its private state a device keeps from one task to the next, and then its cache goes;
            none: it keeps all, and the cache.
        spent: is added to.
    """
    spent = spent or Spent()
    devices = {member.device: _Device(member) for member in members}
    with tempfile.TemporaryDirectory() as caches:
        state = method.init(bundle, params, seed)
        yield state
        for number in range(rounds):
            if method.done(state):
                return
            total = None
            for name in cohort.sample(seed, number, devices, per_round or len(devices)):
                device, cache = devices[name], Path(caches) / name
                order = method.send(state, DeviceView(name, None, device.rounds))
                if order is None:
                    continue
                if keep is not None:
                    device.local = keep(device.local)
                    shutil.rmtree(cache, ignore_errors=True)
                task, site = delivered(method, order, number, seed, device.member, engine, path, device.local, cache)
                began_s = time.process_time()
                answer = method.work(task, site)
                spent.cpu_s += time.process_time() - began_s
                spent.tasks += 1
                spent.down_bytes += _received(device, order)
                device.local, device.rounds = answer.local, (*device.rounds, number)
                encoded = {what: tensors.encode(value) for what, value in answer.bundles.items()}
                spent.up_bytes += sum(map(len, encoded.values()))
                sent = {what: tensors.decode(value) for what, value in encoded.items()}
                total = method.fold(state, total, Contribution(name, number, answer.weight, answer.metrics, sent))
            state = method.step(state, total)
            spent.rounds += 1
            yield state


def _received(device: _Device, order: Order) -> int:
    """Bytes that an order takes to the device: its parameters, and content that the device does not have yet."""
    size = len(msgspec.json.encode(order.params))
    for value in order.bundles.values():
        if isinstance(value, BlobRef):
            sha256, length = value.sha256, value.size
        else:
            payload = tensors.encode(value)
            sha256, length = hashlib.sha256(payload).hexdigest(), len(payload)
        size += length * (sha256 not in device.blobs)
        device.blobs.add(sha256)
    return size


def delivered(
    method: Method,
    order: Order,
    number: int,
    seed: int,
    member: Member,
    engine: Any,
    path: Callable[[str], Path],
    local: Any,
    cache: Path,
) -> tuple[Task, Site]:
    """An order as a device gets it."""
    task = Task(
        job="local",
        round=number,
        attempt=0,
        method="local",
        engine=method.engines[0],
        actions=("work",),
        params=msgspec.json.decode(msgspec.json.encode(order.params)),
        bundles={name: value for name, value in order.bundles.items() if isinstance(value, BlobRef)},
        work=order.work,
        seed=derive_seed(seed, "local", number, member.device),
        deadline_s=0.0,
    )

    def load(name: str) -> dict[str, np.ndarray]:
        value = order.bundles[name]
        if isinstance(value, BlobRef):
            return tensors.read(path(name))
        return tensors.decode(tensors.encode(value))

    def find(name: str) -> Path:
        assert name in order.bundles, f"{name} is not part of the task"
        return path(name)

    rng = tensors.rng(task.seed)
    return task, Site(member.device, BUDGET_BYTES, engine, rng, member.train, member.held, local, load, find, cache)

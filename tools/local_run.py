"""A method's two halves in one process, without a network: baselines, ablations, tests.

What travels is what would travel: a task's parameters go through JSON, bundles through safetensors
bytes. There is no deadline and no failure; every device answers in every round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.core import BlobRef, Bundle, Contribution, DeviceView, Examples, Method, Order, Site, Task, derive_seed

BUDGET_BYTES = 1 << 40  # nothing is refused here


@dataclass(frozen=True)
class Member:
    """One device: its own examples, and its held-out share."""

    device: str
    train: Examples
    held: Examples


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
) -> Iterator[Any]:
    """The method's state before the first round and after each, until it is done or after so many rounds.

    `path` finds a bundle's file on disk. Answers are folded in the order in which a coordinator folds.
    """
    with tempfile.TemporaryDirectory() as caches:
        yield from _states(method, bundle, path, engine, members, params, seed, rounds, Path(caches))


def _states(
    method: Method,
    bundle: Bundle,
    path: Callable[[str], Path],
    engine: Any,
    members: Sequence[Member],
    params: Any,
    seed: int,
    rounds: int,
    caches: Path,
) -> Iterator[Any]:
    state = method.init(bundle, params, seed)
    yield state
    local: dict[str, Any] = {member.device: {} for member in members}
    history: dict[str, tuple[int, ...]] = {member.device: () for member in members}
    for number in range(rounds):
        if method.done(state):
            return
        total = None
        for member in sorted(members, key=lambda member: member.device):
            order = method.send(state, DeviceView(member.device, None, history[member.device]))
            if order is None:
                continue
            task, site = delivered(method, order, number, seed, member, engine, path, local[member.device], caches)
            answer = method.work(task, site)
            local[member.device] = answer.local
            history[member.device] += (number,)
            sent = {name: tensors.decode(tensors.encode(value)) for name, value in answer.bundles.items()}
            update = Contribution(member.device, number, answer.weight, answer.metrics, sent)
            total = method.fold(state, total, update)
        state = method.step(state, total)
        yield state


def delivered(
    method: Method,
    order: Order,
    number: int,
    seed: int,
    member: Member,
    engine: Any,
    path: Callable[[str], Path],
    local: Any,
    caches: Path,
) -> tuple[Task, Site]:
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
    return task, Site(member.device, BUDGET_BYTES, engine, rng, member.train, member.held, local, load, find, caches / member.device)

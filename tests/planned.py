"""Tasks and events for an agent that decides what is next."""

from __future__ import annotations

from typing import Any

import plain

from fedquilt.core import BlobRef, Task, Update, Usage, WorkEstimate
from fedquilt.edge_agent.state_machine import (
    Action,
    Capabilities,
    DeviceState,
    Event,
    PublishClaim,
    TaskCompleted,
    TaskReceived,
    advance,
)
from fedquilt.wire import Claim

MEANS = Capabilities(budget_bytes=100 << 20, engines=("numpy",), methods=("fedavg",))
A, B = BlobRef(sha256="a" * 64, size=10), BlobRef(sha256="b" * 64, size=20)


def task(round: int = 0, **changes: Any) -> Task:
    values: dict[str, Any] = {"job": "j-1", "round": round, "seed": 1, "bundles": {"model": A}}
    return plain.task(**{**values, "work": WorkEstimate(peak_bytes=1 << 20), **changes})


def update(round: int = 0, base_bytes: int | None = None, attempt: int = 0, **changes: Any) -> Update:
    values: dict[str, Any] = {"job": "j-1", "round": round, "attempt": attempt, "device": "d", "weight": 1.0}
    return Update(**{**values, "bundles": {}, "metrics": {}, "usage": Usage(base_bytes=base_bytes), **changes})


def claim(round: int = 0, attempt: int = 0) -> PublishClaim:
    return PublishClaim(Claim(job="j-1", round=round, attempt=attempt, accepted=True))


def after(
    *events: Event, now_s: float = 0.0, state: DeviceState = DeviceState(MEANS)
) -> tuple[DeviceState, tuple[Action, ...]]:
    """The state after events, and what the last one asked for."""
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = advance(state, event, now_s)
    return state, actions


def done(private: bool = False, round: int = 0) -> DeviceState:
    return after(TaskReceived(task(round)), TaskCompleted(update(round), private))[0]

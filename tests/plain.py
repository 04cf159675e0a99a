"""Profiles, tasks and updates with nothing special about them: a test names what it is about, and no more."""

from __future__ import annotations

from typing import Any

from fedquilt.core import Profile, Task, Update, Usage, WorkEstimate


def profile(**changes: Any) -> Profile:
    """Of a board with a byte for a task and two of memory, without engines."""
    values: dict[str, Any] = {"device": "a", "board": "b", "memory_bytes": 2, "budget_bytes": 1, "engines": ()}
    return Profile(**{**values, "versions": {}, **changes})


def budgeted(budget_bytes: int, **changes: Any) -> Profile:
    """Of a board that has twice its budget, and torch."""
    return profile(**{"memory_bytes": 2 * budget_bytes, "budget_bytes": budget_bytes, "engines": ("torch",), **changes})


def task(**changes: Any) -> Task:
    """FedAvg of round 0 in numpy, due in a minute."""
    values: dict[str, Any] = {"job": "j", "round": 0, "attempt": 0, "method": "fedavg", "engine": "numpy"}
    values |= {"actions": ("work",), "params": {}, "bundles": {}, "work": WorkEstimate(), "seed": 0, "deadline_s": 60.0}
    return Task(**{**values, **changes})


def update(**changes: Any) -> Update:
    """Of device a in round 0, without tensors, metrics or costs."""
    values: dict[str, Any] = {"job": "j", "round": 0, "attempt": 0, "device": "a", "weight": 1.0}
    return Update(**{**values, "bundles": {}, "metrics": {}, "usage": Usage(), **changes})

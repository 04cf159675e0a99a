"""A state of every kind of field, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Inner:
    weights: dict[str, np.ndarray]
    place: tuple[int, int]


@dataclass(frozen=True)
class State:
    model: dict[str, np.ndarray]
    layers: tuple[Inner, ...]
    by_round: dict[int, float]
    name: str
    best: np.ndarray | None = None


STATE = State(
    model={
        "w": np.array([[0.1, -0.0], [np.inf, 5e-324]]),
        "half": np.array([1.5, -2], np.float16),
        "seen": np.array(7),
        "none": np.zeros((0, 3), np.float32),
        "mask": np.array([True, False]),
        "turned": np.arange(6, dtype=np.uint8).reshape(2, 3).T,
    },
    layers=(Inner({"a": np.array([1.0], np.float32)}, (1, 2)), Inner({}, (3, 4))),
    by_round={0: 0.1 + 0.2, 12: -0.0},
    name="étape",
)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two states have equal types, shapes and bits in all their parts."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, State | Inner):
        return type(a) is type(b) and same_bits(vars(a), vars(b))
    return repr(a) == repr(b)

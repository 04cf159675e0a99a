"""Memory of pure functions for one call: the devices of a cohort ask for the same, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def latest(function: Callable[P, T]) -> Callable[P, T]:
    """A pure function that returns its latest result again when it is called with equal arguments.

    Arguments need no hash, as those of `functools.lru_cache` do; nobody may change them, or the result, afterwards.
    """
    known: tuple[tuple[object, ...], dict[str, object], T] | None = None

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        nonlocal known
        before = known  # as another thread may set it meanwhile
        if before is not None and before[0] == args and before[1] == named:
            return before[2]
        result = function(*args, **named)
        known = args, named, result
        return result

    return call

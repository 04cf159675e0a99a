"""Cache of a pure function's last result.

The devices of a cohort often need the same result, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cache_last_call(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that repeats its last result if the arguments equal those of the last call.

    In contrast to `functools.lru_cache`, arguments need not be hashable, but must support `==` (arrays do not). Callers
    must not change arguments or results.
    """
    latest_call: tuple[tuple[object, ...], dict[str, object], T] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal latest_call
        cached_call = latest_call  # Another thread may set it meanwhile.
        if cached_call is not None and cached_call[0] == args and cached_call[1] == kwargs:
            return cached_call[2]
        result = function(*args, **kwargs)
        latest_call = args, kwargs, result
        return result

    return call

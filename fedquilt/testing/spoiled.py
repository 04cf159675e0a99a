"""Spoiled updates, each with one thing wrong, and comparison to the bit: for `fedquilt.testing.conformance`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from fedquilt.core import Contribution


def spoiled(update: Contribution) -> Iterator[tuple[str, Contribution]]:
    """Yield the update with one thing wrong, in each of its bundles' tensors in turn."""

    def put(bundle: str, name: str, array: np.ndarray | None) -> Contribution:
        held = {**update.bundles[bundle], name: array}
        kept = {key: value for key, value in held.items() if value is not None}
        return replace(update, bundles={**update.bundles, bundle: kept})

    for bundle, held in update.bundles.items():
        for name, array in held.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", put(bundle, name, _with(array, np.nan))
                yield f"{bundle}/{name} is infinite", put(bundle, name, _with(array, np.inf))
            for odd, other in strange(array):
                yield f"{bundle}/{name} {odd}", put(bundle, name, other)
            yield f"{bundle}/{name} is missing", put(bundle, name, None)
            yield f"{bundle}/{name} is longer", put(bundle, name, _longer(array))
        yield f"{bundle} has a stranger", put(bundle, "stranger", np.zeros(1, np.float32))
        without = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is absent", replace(update, bundles=without)


def strange(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield finite arrays of another type, or beyond the bounds for sums."""
    floats, integers = (np.float32, np.float64), (np.int32, np.int64, np.uint8)
    for kind in (*floats, *integers):
        if array.dtype != kind:
            yield f"is {np.dtype(kind)}", array.astype(kind)
    if array.dtype.kind == "f" and array.size:
        yield "is too large", np.full_like(array, np.finfo(array.dtype).max)
        yield "is 1e300", np.full(array.shape, 1e300)
    elif array.dtype == np.int64 and array.size:
        yield "is too large", np.full_like(array, np.iinfo(np.int64).max)
        yield "is below 0", np.full_like(array, -1)


def _with(array: np.ndarray, value: float) -> np.ndarray:
    """Copy with another first number."""
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


def _longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array.reshape(1, -1), array.reshape(1, -1)], axis=1).reshape(-1)


def require_alike(found: Any, wanted: Any, at: str = "state") -> None:
    """Assert the same values, and of every array the same dtype, shape and bits."""
    assert not isinstance(wanted, np.generic), f"{at}: arithmetic has made a scalar of an array"
    assert isinstance(found, np.ndarray) == isinstance(wanted, np.ndarray), at
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), at
    elif is_dataclass(wanted):
        assert type(found) is type(wanted), at
        for field in fields(wanted):
            require_alike(getattr(found, field.name), getattr(wanted, field.name), f"{at}.{field.name}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), at
        for key in wanted:
            require_alike(found[key], wanted[key], f"{at}[{key!r}]")
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted), at
        for index, each in enumerate(wanted):
            require_alike(found[index], each, f"{at}[{index}]")

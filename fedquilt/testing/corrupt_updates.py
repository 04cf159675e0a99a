"""Corrupted updates with one error each, and comparison of values bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from fedquilt.core import DeviceUpdate


def corrupted_updates(update: DeviceUpdate) -> Iterator[tuple[str, DeviceUpdate]]:
    """Yield copies of an update with one error each, and a description of the error."""

    def replace_tensor(bundle: str, name: str, array: np.ndarray | None) -> DeviceUpdate:
        held = {**update.bundles[bundle], name: array}
        kept = {key: value for key, value in held.items() if value is not None}
        return replace(update, bundles={**update.bundles, bundle: kept})

    for bundle, held in update.bundles.items():
        for name, array in held.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", replace_tensor(bundle, name, _with_first_value(array, np.nan))
                yield f"{bundle}/{name} is infinite", replace_tensor(bundle, name, _with_first_value(array, np.inf))
            for odd, other in invalid_arrays(array):
                yield f"{bundle}/{name} {odd}", replace_tensor(bundle, name, other)
            yield f"{bundle}/{name} is missing", replace_tensor(bundle, name, None)
            yield f"{bundle}/{name} is longer", replace_tensor(bundle, name, _repeat_array(array))
        yield f"{bundle} has a stranger", replace_tensor(bundle, "stranger", np.zeros(1, np.float32))
        without = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is absent", replace(update, bundles=without)


def invalid_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield copies of an array with another dtype or with too large values, and descriptions."""
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


def _with_first_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


def _repeat_array(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array.reshape(1, -1), array.reshape(1, -1)], axis=1).reshape(-1)


def require_identical(found: Any, wanted: Any, at: str = "state") -> None:
    """Assert that two values are equal, and all arrays equal in dtype, shape and bits."""
    assert not isinstance(wanted, np.generic), f"{at}: arithmetic has made a scalar of an array"
    assert isinstance(found, np.ndarray) == isinstance(wanted, np.ndarray), at
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), at
    elif is_dataclass(wanted):
        assert type(found) is type(wanted), at
        for field in fields(wanted):
            require_identical(getattr(found, field.name), getattr(wanted, field.name), f"{at}.{field.name}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), at
        for key in wanted:
            require_identical(found[key], wanted[key], f"{at}[{key!r}]")
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted), at
        for index, each in enumerate(wanted):
            require_identical(found[index], each, f"{at}[{index}]")

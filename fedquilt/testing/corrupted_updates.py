"""Corrupted copies of an update, which a method must reject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fedquilt.core import DeviceUpdate


def corrupted_updates(update: DeviceUpdate) -> Iterator[tuple[str, DeviceUpdate]]:
    """Yield, for each possible error, a description and a copy of the update with this error."""

    def replace_tensor(bundle: str, name: str, array: np.ndarray | None) -> DeviceUpdate:
        changed = {**update.bundles[bundle], name: array}
        remaining = {key: value for key, value in changed.items() if value is not None}
        return replace(update, bundles={**update.bundles, bundle: remaining})

    for bundle, bundle_tensors in update.bundles.items():
        for name, array in bundle_tensors.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", replace_tensor(bundle, name, _with_first_value(array, np.nan))
                yield f"{bundle}/{name} is infinite", replace_tensor(bundle, name, _with_first_value(array, np.inf))
            for problem, invalid_array in invalid_arrays(array):
                yield f"{bundle}/{name} {problem}", replace_tensor(bundle, name, invalid_array)
            yield f"{bundle}/{name} is missing", replace_tensor(bundle, name, None)
            yield f"{bundle}/{name} is longer", replace_tensor(bundle, name, _repeat_array(array))
        yield f"{bundle} has an unknown tensor", replace_tensor(bundle, "stranger", np.zeros(1, np.float32))
        other_bundles = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is missing", replace(update, bundles=other_bundles)


def invalid_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield, for another dtype and values out of range, a description and a copy of the array with them."""
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

"""Updates with one thing wrong, and values compared to the bit: for `fedquilt.testing.conformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from fedquilt.core import Contribution


def spoiled(update: Contribution) -> Iterator[tuple[str, Contribution]]:
    """The update with one thing wrong, in each of its bundles' tensors in turn."""

    def with_bundle(bundle: str, change: Callable[[dict[str, Any]], None]) -> Contribution:
        held = {name: array.copy() for name, array in update.bundles[bundle].items()}
        change(held)
        return replace(update, bundles={**update.bundles, bundle: held})

    for bundle, held in update.bundles.items():
        for name, array in held.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", with_bundle(bundle, lambda some, n=name: _put(some[n], np.nan))
                yield f"{bundle}/{name} is infinite", with_bundle(bundle, lambda some, n=name: _put(some[n], np.inf))
            for odd, other in strange(array):
                yield f"{bundle}/{name} {odd}", with_bundle(bundle, lambda some, n=name, o=other: some.update({n: o}))
            yield f"{bundle}/{name} is missing", with_bundle(bundle, lambda some, n=name: some.pop(n))
            yield (
                f"{bundle}/{name} is longer",
                with_bundle(bundle, lambda some, n=name: some.update({n: _longer(some[n])})),
            )
        yield (
            f"{bundle} has a stranger",
            with_bundle(bundle, lambda some: some.update(stranger=np.zeros(1, np.float32))),
        )
        without = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is absent", replace(update, bundles=without)


def strange(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """An array of finite numbers that is of another type, or beyond what may be added up."""
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


def _put(array: np.ndarray, value: float) -> None:
    array.reshape(-1)[0] = value


def _longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array.reshape(1, -1), array.reshape(1, -1)], axis=1).reshape(-1)


def require_alike(found: Any, wanted: Any, at: str = "state") -> None:
    """The same values, and of every array its dtype, its shape and its bits."""
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

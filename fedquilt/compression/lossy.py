"""Lossy codecs, a tensor at a time: `fedquilt.compression` describes their output and use.

On the device they work in blocks: a board holds the tensor, its start and its rest, and
nothing else of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedquilt.core import DivergedError, UpdateError
from fedquilt.tensors import Shaped

BLOCK: Final = 1 << 16  # entries processed at once


@dataclass(frozen=True)
class Coder:
    """One lossy codec. `start` is the tensor's value before the change."""

    parts: tuple[str, ...]
    put: Callable[[np.ndarray, np.ndarray | None, np.ndarray | None, float], Sequence[np.ndarray]]
    """(array, start, rest, keep) -> the parts. `rest`, left out before, becomes the part left out now."""
    take: Callable[[Sequence[np.ndarray], np.ndarray, float], np.ndarray]  # (parts, start or 0, keep) -> the tensor
    told: Callable[[Sequence[Shaped], tuple[int, ...], float], tuple[int, ...] | None]
    """(parts, shape expected, keep) -> the tensor's shape; None: parts of other types or shapes than `put` makes."""
    remembers: bool  # whether its rest is sent next time
    alone: bool  # whether it works without a start


def _require_finite(array: np.ndarray, mend: str) -> np.ndarray:
    """Return the array, or raise DivergedError with this fix if a value is not finite."""
    if not np.isfinite(array).all():
        raise DivergedError(f"values that are too large: {mend}")
    return array


def _blocks(size: int) -> Iterator[slice]:
    """Split a large tensor's entries, so that nothing else of its size is held."""
    return (slice(first, min(first + BLOCK, size)) for first in range(0, size, BLOCK))


def _aimed(array: np.ndarray, start: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Add the tensor's change to `rest`, flat."""
    flat, now, then = rest.reshape(-1), array.reshape(-1), start.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _blocks(flat.size):
            flat[block] += now[block] - then[block]
    return _require_finite(flat, "32 bits do not hold how far it moved")


def _halved(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    halves, now = np.empty(array.shape, np.float16), array.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _blocks(now.size):
            halves.reshape(-1)[block] = now[block] if start is None else now[block] - start.reshape(-1)[block]
    return (_require_finite(halves, "16 bits hold up to 65504; [wire] codec = 'int8' or 'raw'"),)


def _unhalved(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    (halves,) = parts
    if halves.dtype != np.float16:
        raise UpdateError(f"part fp16: {halves.dtype}, wanted float16")
    found, flat = np.empty(start.shape, np.float32), halves.reshape(-1)
    for block in _blocks(flat.size):
        found.reshape(-1)[block] = start.reshape(-1)[block] + flat[block].astype(np.float32)
    return found


def _halves(parts: Sequence[Shaped], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    return parts[0].shape if parts[0].dtype == np.float16 else None


def _stepped(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    moved = array.reshape(-1) if start is None or rest is None else _aimed(array, start, rest)
    step = np.float32(max(moved.max(), -moved.min()) / np.float32(127))
    counts = np.zeros(array.shape, np.int8)
    if not step:  # no change, or less than a float32 can divide
        return counts, np.zeros(1, np.float32)
    for block in _blocks(moved.size):
        steps = np.rint(moved[block] / step).clip(-127, 127)
        counts.reshape(-1)[block] = steps
        if start is not None and rest is not None:
            then = start.reshape(-1)[block]
            moved[block] -= (then + steps * step) - then  # as the coordinator will round it
    return counts, np.full(1, step, np.float32)


def _unstepped(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    counts, step = parts
    if counts.dtype != np.int8 or step.dtype != np.float32 or step.shape != (1,):
        raise UpdateError(
            f"parts int8 and step: {counts.dtype} and {step.shape} {step.dtype}, wanted int8 and (1,) float32"
        )
    if not 0 <= step[0] < np.inf:
        raise UpdateError(f"part step: {step[0]:g}, wanted a number of at least 0")
    found, flat = np.empty(start.shape, np.float32), counts.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _blocks(flat.size):
            moved = start.reshape(-1)[block] + flat[block].astype(np.float32) * step
            found.reshape(-1)[block] = _require_finite(moved, f"its step is {step[0]:g}")
    return found


def _steps(parts: Sequence[Shaped], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    counts, step = parts
    fits = counts.dtype == np.int8 and step == Shaped((1,), np.dtype(np.float32))
    return counts.shape if fits else None


def _picked(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    assert start is not None
    assert rest is not None
    moved = _aimed(array, start, rest)
    at = _farthest(moved, _count(moved.size, keep))
    now, then = array.reshape(-1)[at], start.reshape(-1)[at]
    told = now + (moved[at] - (now - then))  # the tensor's own entry to the last bit, if nothing was left out before
    moved[at] -= told - then
    return at.astype(np.min_scalar_type(moved.size - 1)), told


def _farthest(moved: np.ndarray, count: int) -> np.ndarray:
    """Places of the largest magnitudes, in order; of equals the first, whatever a machine's sort."""
    edge = _edge(moved, count)

    def found(where: Callable[[np.ndarray], np.ndarray], most: int) -> list[np.ndarray]:
        places: list[np.ndarray] = []
        for block in _blocks(moved.size):
            if most <= 0:
                break
            places.append(np.flatnonzero(where(np.abs(moved[block])))[:most] + block.start)
            most -= len(places[-1])
        return places

    above = found(lambda sizes: sizes > edge, count)
    level = found(lambda sizes: sizes == edge, count - sum(map(len, above)))
    return np.sort(np.concatenate([*above, *level]))


def _edge(moved: np.ndarray, count: int) -> np.ndarray:
    """The `count`-th largest magnitude: ordered like their bits, so by the upper 16 and then the lower."""

    def bits(block: slice) -> np.ndarray:
        return np.abs(moved[block]).view(np.uint32)

    def reached(counts: np.ndarray, wanted: int) -> tuple[int, int]:
        """The bin in which the wanted one lies, from above, and how many lie above that bin."""
        beyond = np.cumsum(counts[::-1])
        index = int(np.searchsorted(beyond, wanted))
        return len(counts) - 1 - index, int(beyond[index] - counts[::-1][index])

    upper, lower = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
    for block in _blocks(moved.size):
        upper += np.bincount(bits(block) >> 16, minlength=1 << 16)
    high, above = reached(upper, count)
    for block in _blocks(moved.size):
        some = bits(block)
        lower += np.bincount(some[some >> 16 == high] & 0xFFFF, minlength=1 << 16)
    low, _ = reached(lower, count - above)
    return np.array(high << 16 | low, np.uint32).view(np.float32)


def _unpicked(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    at, values = parts
    count = _count(start.size, keep)
    if at.dtype.kind != "u" or values.dtype != np.float32 or not at.shape == values.shape == (count,):
        raise UpdateError(
            f"parts at and value: {at.shape} {at.dtype} and {values.shape} {values.dtype}, wanted {count} places as "
            "unsigned numbers and as many float32 values"
        )
    if (at[1:] <= at[:-1]).any() or at[-1] >= start.size:
        raise UpdateError(f"part at: places that are repeated, out of order or beyond its {start.size} entries")
    found = start.flatten()
    found[at] = values
    return found.reshape(start.shape)


def _picks(parts: Sequence[Shaped], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    at, values = parts
    count = _count(math.prod(shape), keep)
    fits = at.dtype.kind == "u" and values.dtype == np.float32 and at.shape == values.shape == (count,)
    return shape if fits else None


def _count(size: int, keep: float) -> int:
    """Number of `size` entries that are sent."""
    return min(max(math.ceil(keep * size), 1), size)


CODERS: Final[Mapping[str, Coder]] = {
    "fp16": Coder(("fp16",), _halved, _unhalved, _halves, remembers=False, alone=True),
    "int8": Coder(("int8", "step"), _stepped, _unstepped, _steps, remembers=True, alone=True),
    "topk": Coder(("at", "value"), _picked, _unpicked, _picks, remembers=True, alone=False),
}

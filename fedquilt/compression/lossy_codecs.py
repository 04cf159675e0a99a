"""Lossy codecs for single tensors, with outputs described in `fedquilt.compression`.

Encoding works in blocks: a device holds the tensor, its start and its residual, and no other array of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import DivergedError, UpdateError

BLOCK: Final = 1 << 16  # entries processed at once


@dataclass(frozen=True)
class LossyCodec:
    """Functions of one lossy codec. `start` is the tensor's value before the change."""

    parts: tuple[str, ...]
    put: Callable[[np.ndarray, np.ndarray | None, np.ndarray | None, float], Sequence[np.ndarray]]
    """(array, start, rest, keep) -> the parts. `rest`, left out before, becomes the part left out now."""
    take: Callable[[Sequence[np.ndarray], np.ndarray, float], np.ndarray]  # (parts, start or 0, keep) -> the tensor
    told: Callable[[Sequence[TensorSpec], tuple[int, ...], float], tuple[int, ...] | None]
    """(parts, shape expected, keep) -> the tensor's shape; None: parts of other types or shapes than `put` makes."""
    remembers: bool  # whether its rest is sent next time
    alone: bool  # whether it works without a start


def _require_finite(array: np.ndarray, mend: str) -> np.ndarray:
    """Return the array, or raise DivergedError with this fix if a value is not finite."""
    if not np.isfinite(array).all():
        raise DivergedError(f"values that are too large: {mend}")
    return array


def _split_blocks(size: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, size)) for first in range(0, size, BLOCK))


def _add_change(array: np.ndarray, start: np.ndarray, rest: np.ndarray) -> np.ndarray:
    # The sum replaces `rest`, to save memory. The result is flat.
    flat, now, then = rest.reshape(-1), array.reshape(-1), start.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(flat.size):
            flat[block] += now[block] - then[block]
    return _require_finite(flat, "32 bits do not hold how far it moved")


def _encode_fp16(
    array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    halves, now = np.empty(array.shape, np.float16), array.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(now.size):
            halves.reshape(-1)[block] = now[block] if start is None else now[block] - start.reshape(-1)[block]
    return (_require_finite(halves, "16 bits hold up to 65504; [wire] codec = 'int8' or 'raw'"),)


def _decode_fp16(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    (halves,) = parts
    if halves.dtype != np.float16:
        raise UpdateError(f"part fp16: {halves.dtype}, wanted float16")
    found, flat = np.empty(start.shape, np.float32), halves.reshape(-1)
    for block in _split_blocks(flat.size):
        found.reshape(-1)[block] = start.reshape(-1)[block] + flat[block].astype(np.float32)
    return found


def _fp16_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    return parts[0].shape if parts[0].dtype == np.float16 else None


def _encode_int8(
    array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    moved = array.reshape(-1) if start is None or rest is None else _add_change(array, start, rest)
    step = np.float32(max(moved.max(), -moved.min()) / np.float32(127))
    counts = np.zeros(array.shape, np.int8)
    if not step:  # no change, or less than a float32 can divide
        return counts, np.zeros(1, np.float32)
    for block in _split_blocks(moved.size):
        steps = np.rint(moved[block] / step).clip(-127, 127)
        counts.reshape(-1)[block] = steps
        if start is not None and rest is not None:
            then = start.reshape(-1)[block]
            moved[block] -= (then + steps * step) - then  # as the coordinator will round it
    return counts, np.full(1, step, np.float32)


def _decode_int8(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    counts, step = parts
    if counts.dtype != np.int8 or step.dtype != np.float32 or step.shape != (1,):
        raise UpdateError(
            f"parts int8 and step: {counts.dtype} and {step.shape} {step.dtype}, wanted int8 and (1,) float32"
        )
    if not 0 <= step[0] < np.inf:
        raise UpdateError(f"part step: {step[0]:g}, wanted a number of at least 0")
    found, flat = np.empty(start.shape, np.float32), counts.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(flat.size):
            moved = start.reshape(-1)[block] + flat[block].astype(np.float32) * step
            found.reshape(-1)[block] = _require_finite(moved, f"its step is {step[0]:g}")
    return found


def _int8_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    counts, step = parts
    fits = counts.dtype == np.int8 and step == TensorSpec((1,), np.dtype(np.float32))
    return counts.shape if fits else None


def _encode_topk(
    array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    assert start is not None
    assert rest is not None
    moved = _add_change(array, start, rest)
    at = _largest_indices(moved, _sent_count(moved.size, keep))
    now, then = array.reshape(-1)[at], start.reshape(-1)[at]
    told = now + (moved[at] - (now - then))  # the tensor's own entry to the last bit, if nothing was left out before
    moved[at] -= told - then
    return at.astype(np.min_scalar_type(moved.size - 1)), told


def _largest_indices(moved: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted indices of the largest magnitudes. Of equal ones the first are selected."""
    edge = _kth_largest(moved, count)

    def select_indices(where: Callable[[np.ndarray], np.ndarray], most: int) -> list[np.ndarray]:
        places: list[np.ndarray] = []
        for block in _split_blocks(moved.size):
            if most <= 0:
                break
            places.append(np.flatnonzero(where(np.abs(moved[block])))[:most] + block.start)
            most -= len(places[-1])
        return places

    above = select_indices(lambda sizes: sizes > edge, count)
    level = select_indices(lambda sizes: sizes == edge, count - sum(map(len, above)))
    return np.sort(np.concatenate([*above, *level]))


def _kth_largest(moved: np.ndarray, count: int) -> np.ndarray:
    """Return the `count`-th largest magnitude.

    Magnitudes of floats are ordered like their bits, so the upper 16 bits are searched first, and then the lower 16.
    """

    def magnitude_bits(block: slice) -> np.ndarray:
        return np.abs(moved[block]).view(np.uint32)

    def find_bin(counts: np.ndarray, wanted: int) -> tuple[int, int]:
        beyond = np.cumsum(counts[::-1])
        index = int(np.searchsorted(beyond, wanted))
        return len(counts) - 1 - index, int(beyond[index] - counts[::-1][index])

    upper, lower = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
    for block in _split_blocks(moved.size):
        upper += np.bincount(magnitude_bits(block) >> 16, minlength=1 << 16)
    high, above = find_bin(upper, count)
    for block in _split_blocks(moved.size):
        some = magnitude_bits(block)
        lower += np.bincount(some[some >> 16 == high] & 0xFFFF, minlength=1 << 16)
    low, _ = find_bin(lower, count - above)
    return np.array(high << 16 | low, np.uint32).view(np.float32)


def _decode_topk(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    at, values = parts
    count = _sent_count(start.size, keep)
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


def _topk_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    at, values = parts
    count = _sent_count(math.prod(shape), keep)
    fits = at.dtype.kind == "u" and values.dtype == np.float32 and at.shape == values.shape == (count,)
    return shape if fits else None


def _sent_count(size: int, keep: float) -> int:
    return min(max(math.ceil(keep * size), 1), size)


CODERS: Final[Mapping[str, LossyCodec]] = {
    "fp16": LossyCodec(("fp16",), _encode_fp16, _decode_fp16, _fp16_shape, remembers=False, alone=True),
    "int8": LossyCodec(("int8", "step"), _encode_int8, _decode_int8, _int8_shape, remembers=True, alone=True),
    "topk": LossyCodec(("at", "value"), _encode_topk, _decode_topk, _topk_shape, remembers=True, alone=False),
}

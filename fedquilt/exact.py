"""Exact sums: their bits depend neither on the order of the addends nor on how these are grouped.

A sum of arrays is kept as limbs: arrays of the same shape that add up to it. Each addend is added to the first limb,
what rounding loses of that to the second, and so on, by Knuth's TwoSum, which loses nothing (Knuth, The Art of Computer
Programming, vol. 2, 4.2.2, theorem B). So the limbs add up to the addends exactly, in whatever order these came; they
are rounded once, when the value is asked for (Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997).

What is added is `array * weight` in float64: exact where float32 meets a whole weight below 2^29, else rounded once,
by itself. Finite numbers below 1.3e154 may be added up 2^53 times, which is no limit to any round.

Memory: 12 bytes an entry, the second limb in float32, as long as that is exact: for n boards of up to 2^14 examples
while the magnitudes that meet in an entry differ by less than 2^40 / n^2. Then the second limb is float64: 16 bytes. A
third one is made where they differ by more than 2^50 / n^2. Small arrays have their second limb in float64.
Within `laid` the limbs of large arrays are on the disk, and in memory only while something is added to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from fedquilt import tensors
from fedquilt.core import Tensors, UpdateError
from fedquilt.on_disk import Scratch

LIMBS_MOST: Final = 16  # far more than numbers of any range need
BLOCK: Final = 1 << 14  # entries added at a time: what they need fits into a processor's cache
SHORT: Final = 1 << 16  # entries from which on the second limb begins as float32


@dataclass(frozen=True)
class Total:
    """Exact sum of arrays; of integers (counters) the largest instead.

    Attributes:
        limbs: arrays of the sum's shape, whose exact sum it is: float64, then float32 or float64. One of integers.
            Those on the disk are `on_disk.OnDisk`, which numpy reads where it needs them.
    """

    limbs: tuple[np.ndarray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sum."""
        return self.limbs[0].shape

    @property
    def counter(self) -> bool:
        """Whether it is of integers."""
        return self.limbs[0].dtype.kind in "iu"

    def value(self) -> np.ndarray:
        """The sum rounded to float64, to nearest, and 0 without a sign; of integers the largest."""
        first, *rest = map(np.asarray, self.limbs)
        if self.counter or not rest:
            return np.array(first) if self.counter else first + np.float64(0)
        found = np.asarray(first + rest[0], np.float64)
        if len(rest) > 1:
            odd = np.any([limb != 0 for limb in rest[1:]], axis=0)
            found[odd] = [math.fsum(parts) for parts in zip(*(limb[odd] for limb in (first, *rest)), strict=True)]
        return np.add(found, 0.0, out=found)


def add(total: Total | None, array: np.ndarray, weight: float = 1.0) -> Total:
    """Add `array * weight` to a sum, in place: the sum given is part of the one returned, and no longer of use.

    Args:
        total: None: nothing was added yet.
        array: finite; its shape is the sum's. Of integers, the larger of both is kept and the weight does not count.
        weight: factor.
    """
    if array.dtype.kind in "iu":
        largest = array if total is None else np.maximum(total.limbs[0], array, dtype=total.limbs[0].dtype)
        return _kept((np.array(largest),), total)
    if total is None:
        first = np.asarray(np.multiply(array, weight, dtype=np.float64, order="C"))
        return _kept((first, _second(array.shape)))
    limbs = [np.asarray(limb).reshape(-1) for limb in total.limbs]
    given = array.reshape(-1)
    for start in range(0, array.size, BLOCK):
        place = slice(start, start + BLOCK)
        as_it_is = weight == 1.0 and given.dtype == np.float64
        _add(limbs, place, given[place] if as_it_is else np.multiply(given[place], weight, dtype=np.float64))
    return _kept(tuple(limb.reshape(array.shape) for limb in limbs), total)


_room: ContextVar[Scratch | None] = ContextVar("room", default=None)


@contextmanager
def laid(room: Scratch | None) -> Iterator[None]:
    """Keep large sums that are made or added to in the body on the disk; None: in memory."""
    before = _room.set(room)
    try:
        yield
    finally:
        _room.reset(before)


def _kept(limbs: tuple[np.ndarray, ...], before: Total | None = None) -> Total:
    """Sum of these limbs, where it is to be kept; it takes the place of the one before."""
    room = _room.get()
    if room is None:
        return Total(limbs)
    places = zip_longest(limbs, before.limbs if before else ())
    return Total(tuple(room.put(limb, place) for limb, place in places))  # type: ignore[misc]


def merge(one: Total, other: Total) -> Total:
    """Sum of two sums of different boards, in place of the first."""
    for limb in other.limbs:
        if (values := np.asarray(limb)).any():  # as the second one seldom does
            one = add(one, values)
    return one


def plus(total: Mapping[str, Total], arrays: Mapping[str, np.ndarray], weight: float = 1.0) -> dict[str, Total]:
    """Add arrays to the sums of the same names, in place; a name that has no sum gets one."""
    return {**total, **{name: add(total.get(name), array, weight) for name, array in arrays.items()}}


def values(total: Mapping[str, Total]) -> dict[str, np.ndarray]:
    """Rounded values of sums by name."""
    return {name: each.value() for name, each in total.items()}


def _add(limbs: list[np.ndarray], place: slice, rest: np.ndarray) -> None:
    """Add `rest` to one place of the limbs."""
    for index, limb in enumerate(limbs):
        held = limb[place]
        found = held + rest
        gap = found - held
        rest = rest - gap
        np.subtract(found, gap, out=gap)
        rest += np.subtract(held, gap, out=gap)  # what found lacks of the sum: TwoSum
        if limb.dtype == np.float32:
            with np.errstate(over="ignore", under="ignore"):
                held[...] = found
            if not np.array_equal(held, found):
                limbs[index] = limb.astype(np.float64)
                limbs[index][place] = found
        else:
            held[...] = found
        if not rest.any():  # as most often: nothing is left for another limb
            return
    limbs.append(np.zeros_like(limbs[0]))
    limbs[-1][place] = rest


def _second(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32 if math.prod(shape) >= SHORT else np.float64)


def require(given: Mapping[str, Total], like: Tensors, weight: float) -> None:
    """Check sums that came from elsewhere.

    Args:
        given: sums by name.
        like: tensors that were added up: their names, shapes and types.
        weight: that they were added up with.

    Raises:
        UpdateError: names, shapes or types differ, a limb is no float, or a number is not finite or too large.
    """
    if odd := sorted(given.keys() ^ like.keys()):
        raise UpdateError(f"names of sums differ: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
    for name, total in given.items():
        _require(name, total, like[name], weight)


def _require(name: str, total: Total, like: np.ndarray, weight: float) -> None:
    if not 1 <= len(total.limbs) <= LIMBS_MOST or any(limb.shape != like.shape for limb in total.limbs):
        raise UpdateError(f"sum {name!r} has {len(total.limbs)} parts, or one that is not of shape {like.shape}")
    if like.dtype.kind in "iu":
        if len(total.limbs) > 1:
            raise UpdateError(f"sum {name!r} has {len(total.limbs)} parts: counters have one")
        return tensors.require_same({name: np.asarray(total.limbs[0])}, {name: like})
    kinds = [limb.dtype for limb in total.limbs]
    if kinds[0] != np.float64 or not set(kinds) <= {np.dtype(np.float64), np.dtype(np.float32)}:
        raise UpdateError(f"sum {name!r} has parts of {', '.join(map(str, kinds))}: float64 is wanted")
    most = 2 * weight * tensors.bounds(like.dtype)[1]
    for limb in map(np.asarray, total.limbs):
        tensors.require_finite({name: limb})
        if limb.size and float(np.abs(limb).max()) > most:
            raise UpdateError(f"sum {name!r} holds numbers beyond {most:g}, which updates of this weight cannot have")
    return None


# -- whole accumulators ---------------------------------------------------------------------------


def join(one: Any, other: Any) -> Any:
    """Merge two accumulators of different devices, in place of the first.

    Args:
        one: a dataclass or mapping of exact sums, whole numbers and further such values (`core.adds_up`); one that has
            a method `merged` is merged by that.
        other: of the same type.

    Raises:
        TypeError: it holds a value that is none of these.
    """
    if isinstance(one, Total):
        return merge(one, other)
    if hasattr(one, "merged"):
        return one.merged(other)
    if isinstance(one, int):
        return one + other
    if isinstance(one, Mapping):
        return {**one, **{name: join(one[name], each) if name in one else held(each) for name, each in other.items()}}
    if is_dataclass(one) and not isinstance(one, type):
        names = [each.name for each in fields(one)]
        return type(one)(**{name: join(getattr(one, name), getattr(other, name)) for name in names})
    raise TypeError(f"accumulators cannot be merged that hold a {type(one).__name__}")


def laid_out(value: Any, keep: Callable[[Any], Any], other: Callable[[Any], Any] = lambda array: array) -> Any:
    """An accumulator whose sums have other limbs: what `keep` returns for each. `other` is for arrays beside sums."""
    if isinstance(value, Total):
        return Total(tuple(keep(limb) for limb in value.limbs))
    if isinstance(value, Mapping):
        return {name: laid_out(each, keep, other) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{each.name: laid_out(getattr(value, each.name), keep, other) for each in fields(value)})
    return other(value) if isinstance(value, np.ndarray) else value


def held(value: Any) -> Any:
    """An accumulator that may be added to, while the one given stays as it is."""
    room = _room.get()
    return laid_out(value, np.array if room is None else room.put)


# -- numbers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """Exact sum of numbers: floats that add up to it."""

    parts: tuple[float, ...] = ()

    def __float__(self) -> float:
        """Rounded to nearest; infinite where it is beyond what a float holds."""
        try:
            return math.fsum(self.parts)
        except (OverflowError, ValueError):
            return math.inf

    def plus(self, *numbers: float) -> Number:
        """Add numbers."""
        parts = list(self.parts)
        for number in numbers:
            kept, rest = [], float(number)
            for part in parts:
                big, small = (rest, part) if abs(rest) >= abs(part) else (part, rest)
                rest = big + small
                if low := small - (rest - big):
                    kept.append(low)
            parts = [*kept, rest]
        return Number(tuple(parts))

    def merged(self, other: Number) -> Number:
        """Sum of two sums."""
        return self.plus(*other.parts)

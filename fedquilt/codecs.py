"""How the tensors of an update go up: as they are, or in fewer bytes at the price of a small error.

    raw    as they are                                                                4 bytes an entry
    fp16   16-bit floats                                                              2 bytes an entry
    int8   multiples of one step, a tensor's largest magnitude over 127               1 byte, and 4 a tensor
    topk   the ceil(keep n) of n entries that moved most, with their places    4 + 1, 2 or 4 bytes an entry sent

Where the task sent a bundle of the same name, and in it a tensor of the same name and shape, what is rounded is how
far that tensor has moved; "topk" sets the entries that it tells and leaves all others as they were sent. What int8
and topk leave out stays on the device and is added to what it tells next time (error feedback: Seide et al.,
Interspeech 2014; Karimireddy et al., arXiv 1901.09847, EF-SGD), so that over the rounds nothing is lost.
Any other tensor is rounded by itself, without memory, and by topk not at all. Only float32 arrays with axes are
rounded: counters, bits, scalars, float64 sums and the running statistics of batch normalisation (a variance may
not come out below 0) travel as they are under every codec.

Down everything is lossless: one content serves all devices, is named by its sha256, and goes to each only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fedquilt import tensors
from fedquilt.core import Answer, Encoding, ModelError, Tensors, UpdateError
from fedquilt.models.layers import STATISTICS

UNSENT: Final = "unsent/"  # in a device's private state: before the names of what codecs have left out
MARK: Final = "#"  # between a tensor's name and that of a part it is sent in
BLOCK: Final = 1 << 16  # entries that are worked on at once


@dataclass(frozen=True)
class Coder:
    """One lossy codec. `start` is what a tensor has moved from."""

    parts: tuple[str, ...]
    put: Callable[[np.ndarray, np.ndarray | None, np.ndarray | None, float], Sequence[np.ndarray]]
    """(array, start, rest, keep) -> the parts. `rest`, what was left out before, becomes what is left out now."""
    take: Callable[[Sequence[np.ndarray], np.ndarray, float], np.ndarray]  # (parts, start or 0, keep) -> the tensor
    remembers: bool  # whether what it has left out is told next time
    alone: bool  # whether it can do without a start


# -- on the device --------------------------------------------------------------------------------


def own(private: Tensors) -> dict[str, np.ndarray]:
    """What of a device's private state is the method's."""
    return {name: array for name, array in private.items() if not name.startswith(UNSENT)}


def encoded(
    wire: Encoding, answer: Answer, base: Callable[[str], Tensors | None], private: Callable[[], Tensors]
) -> Answer:
    """The answer as it travels, and beside its private state what was left out.

    Args:
        base: what the task sent as the bundle of that name; None: there was none.
        private: the state that the task began with; asked for only now, so that work need not hold it. Its arrays
            are used up.

    Raises:
        UpdateError: a value is not finite, or too large for the codec.
        ModelError: a tensor's name could be taken for a part's.
    """
    if wire.codec == "raw":
        return answer
    begun = private()
    kept = {name: begun[name] for name in begun if name.startswith(UNSENT)}
    bundles = {}
    for bundle, given in answer.bundles.items():
        tensors.require_finite(given)
        prefix = f"{UNSENT}{bundle}/"
        before = {name.removeprefix(prefix): array for name, array in kept.items() if name.startswith(prefix)}
        bundles[bundle], unsent = encode(wire, given, base(bundle) or {}, before)
        kept = {name: array for name, array in kept.items() if not name.startswith(prefix)}
        kept |= {prefix + name: array for name, array in unsent.items()}
    return replace(answer, bundles=bundles, local={**answer.local, **kept})


def encode(
    wire: Encoding, given: Tensors, base: Tensors, unsent: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A bundle as it travels, and what is left out of it until the next time.

    Args:
        base: the bundle that it has moved from; {}: none.
        unsent: what was left out before, by tensor. Its arrays are written over: a board has no room for both.

    Raises:
        UpdateError, ModelError: as `encoded`.
    """
    coder, sent, left = CODERS[wire.codec], {}, dict(unsent)
    for name, array in given.items():
        if MARK in name:
            raise ModelError(f"tensor {name!r}: a name with {MARK} cannot be told from a part's; [wire] codec = 'raw'")
        start = _start(base, name, array.shape)
        if not _rounded(name, array) or (start is None and not coder.alone):
            sent[name] = array
            continue
        before, rest = left.pop(name, None), None
        if start is not None and coder.remembers:
            rest = np.zeros(array.shape, np.float32) if before is None or before.shape != array.shape else before
        try:
            parts = coder.put(np.ascontiguousarray(array), start, rest, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}, {error}") from None
        sent |= {f"{name}{MARK}{part}": value for part, value in zip(coder.parts, parts, strict=True)}
        if rest is not None and rest.any():
            left[name] = rest
    return sent, left


# -- on the coordinator ---------------------------------------------------------------------------


def decoded(
    wire: Encoding, bundles: Mapping[str, Tensors], base: Callable[[str], Tensors | None]
) -> Mapping[str, Tensors]:
    """An update's bundles as the method has made them, as far as they were told. `base`: as of `encoded`.

    Raises:
        UpdateError: as `decode`.
    """
    if wire.codec == "raw":
        return bundles
    return {name: decode(wire, sent, base(name) or {}) for name, sent in bundles.items()}


def decode(wire: Encoding, sent: Tensors, base: Tensors) -> dict[str, np.ndarray]:
    """The bundle that `encode` was given, as far as it was told.

    Raises:
        UpdateError: it is not what this codec makes from that base; says which tensor.
    """
    tensors.require_finite(sent)
    coder = CODERS[wire.codec]
    plain: dict[str, np.ndarray] = {}
    split: dict[str, dict[str, np.ndarray]] = {}
    for name, array in sent.items():
        of, _, part = name.rpartition(MARK)
        if of and part in coder.parts:
            split.setdefault(of, {})[part] = array
        else:
            plain[name] = array
    for name, parts in split.items():
        if name in plain or parts.keys() != set(coder.parts):
            told = ", ".join([*(["itself"] if name in plain else []), *sorted(parts)])
            raise UpdateError(f"tensor {name!r} was sent as {told}; {wire.codec} wants {' and '.join(coder.parts)}")
        start = _start(base, name, None if not coder.alone else parts[coder.parts[0]].shape)
        if start is None and not coder.alone:
            raise UpdateError(f"tensor {name!r} was sent by {wire.codec}, but there is none that it moved from")
        origin = np.zeros(parts[coder.parts[0]].shape, np.float32) if start is None else start
        try:
            plain[name] = coder.take([parts[part] for part in coder.parts], origin, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}, {error}") from None
    return dict(sorted(plain.items()))


def _start(base: Tensors, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    """What a tensor has moved from; None: there is nothing of its name and shape. Without a shape: any."""
    found = base.get(name)
    if found is None or not _rounded(name, found) or shape not in (None, found.shape):
        return None
    return found


def _rounded(name: str, array: np.ndarray) -> bool:
    """Whether a lossy codec may touch it."""
    return bool(array.dtype == np.float32 and array.ndim and array.size and name.rpartition(".")[2] not in STATISTICS)


# -- the codecs -----------------------------------------------------------------------------------


def _finite(array: np.ndarray, mend: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise UpdateError(f"values that are too large: {mend}")
    return array


def _blocks(size: int) -> Iterator[slice]:
    """A large tensor's entries some at a time, so that nothing else of its size is held."""
    return (slice(first, min(first + BLOCK, size)) for first in range(0, size, BLOCK))


def _aimed(array: np.ndarray, start: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """`rest`, flat: with how far the tensor has moved added."""
    flat, now, then = rest.reshape(-1), array.reshape(-1), start.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _blocks(flat.size):
            flat[block] += now[block] - then[block]
    return _finite(flat, "32 bits do not hold how far it moved")


def _halved(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    halves, now = np.empty(array.shape, np.float16), array.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _blocks(now.size):
            halves.reshape(-1)[block] = now[block] if start is None else now[block] - start.reshape(-1)[block]
    return (_finite(halves, "16 bits hold up to 65504; [wire] codec = 'int8' or 'raw'"),)


def _unhalved(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    (halves,) = parts
    if halves.dtype != np.float16:
        raise UpdateError(f"part fp16: {halves.dtype}, wanted float16")
    return start + halves.astype(np.float32)


def _stepped(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    moved = array.reshape(-1) if start is None or rest is None else _aimed(array, start, rest)
    step = np.float32(max(moved.max(), -moved.min()) / np.float32(127))
    counts = np.zeros(array.shape, np.int8)
    if not step:  # nothing has moved, or by less than a float32 can divide
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
    with np.errstate(over="ignore"):
        return _finite(start + counts.astype(np.float32) * step, f"its step is {step[0]:g}")


def _picked(array: np.ndarray, start: np.ndarray | None, rest: np.ndarray | None, keep: float) -> Sequence[np.ndarray]:
    assert start is not None
    assert rest is not None
    moved = _aimed(array, start, rest)
    at = _farthest(moved, _count(moved.size, keep))
    now, then = array.reshape(-1)[at], start.reshape(-1)[at]
    told = now + (moved[at] - (now - then))  # the tensor's own entry to the last bit, where nothing was left out before
    moved[at] -= told - then
    return at.astype(np.min_scalar_type(moved.size - 1)), told


def _farthest(moved: np.ndarray, count: int) -> np.ndarray:
    """Where the largest magnitudes are, in order; of equals the first, whatever way a machine sorts."""
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
    """The `count`-th largest magnitude: they are ordered as their bits are, so by the upper 16 and then the lower."""

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


def _count(size: int, keep: float) -> int:
    """How many of `size` entries are told."""
    return min(max(math.ceil(keep * size), 1), size)


CODERS: Final[Mapping[str, Coder]] = {
    "fp16": Coder(("fp16",), _halved, _unhalved, remembers=False, alone=True),
    "int8": Coder(("int8", "step"), _stepped, _unstepped, remembers=True, alone=True),
    "topk": Coder(("at", "value"), _picked, _unpicked, remembers=True, alone=False),
}

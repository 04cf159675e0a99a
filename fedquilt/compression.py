"""Compression of updates: tensors are sent unchanged, or in fewer bytes with a small error.

    raw    unchanged                                                             4 bytes per entry
    fp16   16-bit floats                                                         2 bytes per entry
    int8   multiples of one step, a tensor's largest magnitude over 127          1 byte per entry, 4 per tensor
    topk   the ceil(keep n) of n entries that changed most, with their indices   4 + 1, 2 or 4 bytes per entry sent

If the task's bundle of the same name has a tensor of the same name and shape, the tensor's change is rounded. With
"topk", entries that are not sent keep their received values. The residual of int8 and topk is stored on the device and
added to the next update (error feedback: Seide et al., Interspeech 2014, and Karimireddy et al., arXiv 1901.09847,
EF-SGD). Any other tensor is rounded by itself, without a residual, and topk sends it unchanged. Only float32 arrays
with axes are rounded. Counters, bits, scalars, float64 sums and the network's buffers (`Encoding.unchanged`, set by
`exclude_buffers`) are sent unchanged by every codec.

Downloads are lossless: one blob serves all devices, and each device fetches it only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.core import ClientResult, DivergedError, Encoding, ModelError, Tensors, UpdateError
from fedquilt.formats import tensor_register

UNSENT: Final = "unsent/"  # in a device's private state: prefix of the rests that codecs have left out
MARK: Final = "#"  # separates a tensor's name from that of a part it is sent in

T = TypeVar("T")


def exclude_buffers(wire: Encoding, meta: Mapping[str, Any]) -> Encoding:
    """Return a job's encoding with its network's buffers excluded, from the metadata of the job's bundle."""
    network = meta.get("network")
    if wire.codec == "raw" or not network:
        return wire
    register = tensor_register.register_from_table(
        {**network, **{key: meta[key] for key in ("register",) if key in meta}}
    )
    buffers = [entry.name for entry in register.tensors if entry.kind != "parameter"]
    return msgspec.structs.replace(wire, unchanged=tuple(dict.fromkeys((*wire.unchanged, *buffers))))


def method_state(private: Tensors) -> dict[str, np.ndarray]:
    return {name: array for name, array in private.items() if not name.startswith(UNSENT)}


def encode_update(
    wire: Encoding, answer: ClientResult, base: Callable[[str], Tensors | None], private: Callable[[], Tensors]
) -> ClientResult:
    """Return an update as sent. The arrays of `private`, called only now to save memory, are overwritten."""
    if wire.codec == "raw":
        return answer
    begun = private()
    kept = {name: begun[name] for name in begun if name.startswith(UNSENT)}
    bundles = {}
    for bundle, given in answer.bundles.items():
        tensors.require_finite(given)
        prefix = f"{UNSENT}{bundle}/"
        before = {name.removeprefix(prefix): array for name, array in kept.items() if name.startswith(prefix)}
        bundles[bundle], unsent = encode_bundle(wire, given, base(bundle) or {}, before)
        kept = {name: array for name, array in kept.items() if not name.startswith(prefix)}
        kept |= {prefix + name: array for name, array in unsent.items()}
    return replace(answer, bundles=bundles, private_state={**answer.private_state, **kept})


def encode_bundle(
    wire: Encoding, given: Tensors, base: Tensors, unsent: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a bundle as sent, and the residuals to add to the next update. `unsent` is overwritten."""
    coder, sent, left, unchanged = CODERS[wire.codec], {}, dict(unsent), frozenset(wire.unchanged)
    for name, array in given.items():
        if MARK in name:
            raise ModelError(f"tensor {name!r}: a name with {MARK} cannot be told from a part's; [wire] codec = 'raw'")
        start = _find_matching_start(base, name, array.shape)
        if name in unchanged or not _can_round(array) or (start is None and not coder.alone):
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


def decode_update(
    wire: Encoding, bundles: Mapping[str, Tensors], base: Callable[[str], Tensors | None]
) -> Mapping[str, Tensors]:
    if wire.codec == "raw":
        return bundles
    return {name: decode_bundle(wire, sent, base(name) or {}) for name, sent in bundles.items()}


def decode_bundle(wire: Encoding, sent: Tensors, base: Tensors) -> dict[str, np.ndarray]:
    """Return the bundle given to `encode_bundle`, up to the codec's error, or raise UpdateError."""
    tensors.require_finite(sent)
    coder = CODERS[wire.codec]
    plain, split = _group_parts(wire, sent)
    for name, parts in split.items():
        start = _find_matching_start(base, name, None if not coder.alone else parts[coder.parts[0]].shape)
        if start is None and not coder.alone:
            raise UpdateError(f"tensor {name!r} was sent by {wire.codec}, but there is none that it moved from")
        # broadcast, so that no update doubles its memory on the coordinator
        origin = np.broadcast_to(np.float32(0), parts[coder.parts[0]].shape) if start is None else start
        try:
            plain[name] = coder.take([parts[part] for part in coder.parts], origin, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}, {error}") from None
    return dict(sorted(plain.items()))


def decoded_specs(wire: Encoding, sent: Mapping[str, TensorSpec], like: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return types and shapes that `decode_bundle` would return. Shapes that are not sent are those of `like`."""
    if wire.codec == "raw":
        return dict(sent)
    coder = CODERS[wire.codec]
    plain, split = _group_parts(wire, sent)
    for name, parts in split.items():
        shape = coder.told([parts[part] for part in coder.parts], getattr(like.get(name), "shape", ()), wire.keep)
        if shape is None:
            raise UpdateError(f"tensor {name!r} is told in parts of types or shapes that {wire.codec} does not make")
        plain[name] = TensorSpec(shape, np.dtype(np.float32))
    return plain


def _group_parts(wire: Encoding, sent: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    coder = CODERS[wire.codec]
    plain: dict[str, T] = {}
    split: dict[str, dict[str, T]] = {}
    for name, each in sent.items():
        of, _, part = name.rpartition(MARK)
        if of and part in coder.parts:
            split.setdefault(of, {})[part] = each
        else:
            plain[name] = each
    if odd := split.keys() & set(wire.unchanged):
        raise UpdateError(f"tensor {min(odd)!r} was sent by {wire.codec}, and is a buffer, which travels unchanged")
    for name, parts in split.items():
        if name in plain or parts.keys() != set(coder.parts):
            given = ", ".join([*(["itself"] if name in plain else []), *sorted(parts)])
            raise UpdateError(f"tensor {name!r} was sent as {given}; {wire.codec} wants {' and '.join(coder.parts)}")
    return plain, split


def _find_matching_start(base: Tensors, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    found = base.get(name)
    if found is None or not _can_round(found) or shape not in (None, found.shape):
        return None
    return found


def _can_round(array: np.ndarray) -> bool:
    return bool(array.dtype == np.float32 and array.ndim and array.size)


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

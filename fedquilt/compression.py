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

RESIDUAL_PREFIX: Final = "unsent/"  # prefix of residuals in a device's private state
SEPARATOR: Final = "#"  # between the names of a tensor and of a part

T = TypeVar("T")


def exclude_buffers(wire: Encoding, meta: Mapping[str, Any]) -> Encoding:
    """Return an encoding that leaves the network's buffers unchanged. The bundle's metadata lists them."""
    network = meta.get("network")
    if wire.codec == "raw" or not network:
        return wire
    register_entry = {"register": meta["register"]} if "register" in meta else {}
    register = tensor_register.register_from_table({**network, **register_entry})
    buffers = [entry.name for entry in register.tensors if entry.kind != "parameter"]
    return msgspec.structs.replace(wire, unchanged=tuple(dict.fromkeys((*wire.unchanged, *buffers))))


def remove_residuals(private: Tensors) -> dict[str, np.ndarray]:
    return {name: array for name, array in private.items() if not name.startswith(RESIDUAL_PREFIX)}


def encode_update(
    wire: Encoding, result: ClientResult, base: Callable[[str], Tensors | None], private: Callable[[], Tensors]
) -> ClientResult:
    """Return a result with encoded bundles, and with the new residuals in its private state.

    The codec "raw" returns the result itself, unchecked. `base` returns the received bundle of a name, or None.
    `private` loads the device's private state. It is called late to save memory, and its arrays are overwritten.

    Raises:
        UpdateError: If a value is not finite or too large for the codec.
        ModelError: If a tensor's name contains SEPARATOR.
    """
    if wire.codec == "raw":
        return result
    private_state = private()
    residuals = {name: private_state[name] for name in private_state if name.startswith(RESIDUAL_PREFIX)}
    bundles = {}
    for bundle, bundle_tensors in result.bundles.items():
        tensors.require_finite(bundle_tensors)
        prefix = f"{RESIDUAL_PREFIX}{bundle}/"
        names = [name for name in residuals if name.startswith(prefix)]
        bundle_residuals = {name.removeprefix(prefix): residuals.pop(name) for name in names}
        bundles[bundle], new_residuals = encode_bundle(wire, bundle_tensors, base(bundle) or {}, bundle_residuals)
        residuals |= {prefix + name: array for name, array in new_residuals.items()}
    return replace(result, bundles=bundles, private_state={**result.private_state, **residuals})


def encode_bundle(
    wire: Encoding, bundle_tensors: Tensors, base: Tensors, residuals: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the encoded bundle, and the residuals to add to the next update. Overwrites `residuals`."""
    codec, encoded, remaining, unchanged = LOSSY_CODECS[wire.codec], {}, dict(residuals), frozenset(wire.unchanged)
    for name, array in bundle_tensors.items():
        if SEPARATOR in name:
            problem = f"{SEPARATOR!r} in a name is reserved for parts of encoded tensors"
            raise ModelError(f"tensor {name!r}: {problem}; set [wire] codec = 'raw'")
        start = _find_matching_start(base, name, array.shape)
        if name in unchanged or not _can_round(array) or (start is None and not codec.works_without_start):
            encoded[name] = array
            continue
        residual = remaining.pop(name, None)
        if start is None or not codec.has_residual:
            residual = None
        elif residual is None or residual.shape != array.shape:
            residual = np.zeros(array.shape, np.float32)
        try:
            parts = codec.encode(np.ascontiguousarray(array), start, residual, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}: {error}") from None
        encoded |= {f"{name}{SEPARATOR}{part}": value for part, value in zip(codec.parts, parts, strict=True)}
        if residual is not None and residual.any():
            remaining[name] = residual
    return encoded, remaining


def decode_update(
    wire: Encoding, bundles: Mapping[str, Tensors], base: Callable[[str], Tensors | None]
) -> Mapping[str, Tensors]:
    """Return the decoded bundles of an update. With the codec "raw", they are returned unchecked."""
    if wire.codec == "raw":
        return bundles
    return {name: decode_bundle(wire, encoded, base(name) or {}) for name, encoded in bundles.items()}


def decode_bundle(wire: Encoding, encoded: Tensors, base: Tensors) -> dict[str, np.ndarray]:
    """Return the tensors that `encode_bundle` encoded, up to the codec's error.

    Raise UpdateError for invalid parts. Tensors without encoded parts are returned unchecked: their names and shapes
    may differ from those of `base`.
    """
    tensors.require_finite(encoded)
    codec = LOSSY_CODECS[wire.codec]
    decoded, split = _group_parts(wire, encoded)
    for name, parts in split.items():
        shape = parts[codec.parts[0]].shape if codec.works_without_start else None
        start = _find_matching_start(base, name, shape)
        if start is None and not codec.works_without_start:
            raise UpdateError(f"tensor {name!r} was sent as a change ({wire.codec}), but the task has no such tensor")
        # The broadcast saves memory: no update takes twice its size on the coordinator.
        origin = np.broadcast_to(np.float32(0), parts[codec.parts[0]].shape) if start is None else start
        try:
            decoded[name] = codec.decode([parts[part] for part in codec.parts], origin, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}: {error}") from None
    return dict(sorted(decoded.items()))


def decoded_specs(
    wire: Encoding, encoded: Mapping[str, TensorSpec], reference: Mapping[str, Any]
) -> dict[str, TensorSpec]:
    """Return the types and shapes that `decode_bundle` would return. Raise UpdateError for invalid parts.

    Shapes that the encoding does not contain are those of `reference`.
    """
    if wire.codec == "raw":
        return dict(encoded)
    codec = LOSSY_CODECS[wire.codec]
    specs, split = _group_parts(wire, encoded)
    for name, parts in split.items():
        expected_shape = getattr(reference.get(name), "shape", ())
        shape = codec.decoded_shape([parts[part] for part in codec.parts], expected_shape, wire.keep)
        if shape is None:
            raise UpdateError(f"tensor {name!r}: parts have types or shapes that {wire.codec} does not produce")
        specs[name] = TensorSpec(shape, np.dtype(np.float32))
    return specs


def _group_parts(wire: Encoding, encoded: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Return unchanged tensors by name, and encoded parts by tensor. Raise UpdateError for missing parts."""
    codec = LOSSY_CODECS[wire.codec]
    plain: dict[str, T] = {}
    split: dict[str, dict[str, T]] = {}
    for name, value in encoded.items():
        tensor, _, part = name.rpartition(SEPARATOR)
        if tensor and part in codec.parts:
            split.setdefault(tensor, {})[part] = value
        else:
            plain[name] = value
    if buffers := split.keys() & set(wire.unchanged):
        raise UpdateError(f"tensor {min(buffers)!r} is a buffer, but was encoded by {wire.codec}: send it unchanged")
    for name, parts in split.items():
        if name in plain or parts.keys() != set(codec.parts):
            part_names = ", ".join([*(["whole"] if name in plain else []), *sorted(parts)])
            required_names = " and ".join(codec.parts)
            raise UpdateError(f"tensor {name!r} has the parts {part_names}, but {wire.codec} needs {required_names}")
    return plain, split


def _find_matching_start(base: Tensors, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    candidate = base.get(name)
    if candidate is None or not _can_round(candidate) or shape not in (None, candidate.shape):
        return None
    return candidate


def _can_round(array: np.ndarray) -> bool:
    return bool(array.dtype == np.float32 and array.ndim and array.size)


BLOCK: Final = 1 << 16  # entries processed at once


@dataclass(frozen=True)
class LossyCodec:
    """Functions of a lossy codec. Their argument `start` is the tensor's value before the change."""

    parts: tuple[str, ...]
    encode: Callable[[np.ndarray, np.ndarray | None, np.ndarray | None, float], Sequence[np.ndarray]]
    """(array, start, residual, keep) -> the parts. The array `residual` is overwritten with the new residual."""
    decode: Callable[[Sequence[np.ndarray], np.ndarray, float], np.ndarray]  # (parts, start or 0, keep) -> the tensor
    decoded_shape: Callable[[Sequence[TensorSpec], tuple[int, ...], float], tuple[int, ...] | None]
    """(parts, expected shape, keep) -> the tensor's shape, or None if `encode` makes no such parts."""
    has_residual: bool  # whether the error is added to the next update
    works_without_start: bool


def _require_finite(array: np.ndarray, problem: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise DivergedError(problem)
    return array


def _split_blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def _add_change(array: np.ndarray, start: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Add an array's change to `residual` in place, and return it flat. Raise DivergedError on overflow."""
    flat, values, start_values = residual.reshape(-1), array.reshape(-1), start.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(flat.size):
            flat[block] += values[block] - start_values[block]
    return _require_finite(flat, "a change is too large for float32")


def _encode_fp16(
    array: np.ndarray, start: np.ndarray | None, residual: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    halves, values = np.empty(array.shape, np.float16), array.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(values.size):
            halves.reshape(-1)[block] = values[block] if start is None else values[block] - start.reshape(-1)[block]
    return (_require_finite(halves, "a value is above 65504, the limit of fp16: set [wire] codec = 'int8' or 'raw'"),)


def _decode_fp16(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    (halves,) = parts
    if halves.dtype != np.float16:
        raise UpdateError(f"part fp16 has type {halves.dtype} instead of float16")
    decoded, flat = np.empty(start.shape, np.float32), halves.reshape(-1)
    for block in _split_blocks(flat.size):
        decoded.reshape(-1)[block] = start.reshape(-1)[block] + flat[block].astype(np.float32)
    return decoded


def _fp16_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    return parts[0].shape if parts[0].dtype == np.float16 else None


def _encode_int8(
    array: np.ndarray, start: np.ndarray | None, residual: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    changes = array.reshape(-1) if start is None or residual is None else _add_change(array, start, residual)
    step = np.float32(max(changes.max(), -changes.min()) / np.float32(127))
    counts = np.zeros(array.shape, np.int8)
    if not step:  # no change, or less than a float32 can divide
        return counts, np.zeros(1, np.float32)
    for block in _split_blocks(changes.size):
        steps = np.rint(changes[block] / step).clip(-127, 127)
        counts.reshape(-1)[block] = steps
        if start is not None and residual is not None:
            start_values = start.reshape(-1)[block]
            changes[block] -= (start_values + steps * step) - start_values  # rounded as on the coordinator
    return counts, np.full(1, step, np.float32)


def _decode_int8(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    counts, step = parts
    if counts.dtype != np.int8 or step.dtype != np.float32 or step.shape != (1,):
        raise UpdateError(
            f"parts int8 and step are {counts.dtype} and {step.shape} {step.dtype} instead of int8 and (1,) float32"
        )
    if not 0 <= step[0] < np.inf:
        raise UpdateError(f"part step is {step[0]:g}, which is not a number of at least 0")
    decoded, flat = np.empty(start.shape, np.float32), counts.reshape(-1)
    with np.errstate(over="ignore"):
        for block in _split_blocks(flat.size):
            values = start.reshape(-1)[block] + flat[block].astype(np.float32) * step
            decoded.reshape(-1)[block] = _require_finite(values, f"step {step[0]:g} is too large for float32")
    return decoded


def _int8_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    counts, step = parts
    is_valid = counts.dtype == np.int8 and step == TensorSpec((1,), np.dtype(np.float32))
    return counts.shape if is_valid else None


def _encode_topk(
    array: np.ndarray, start: np.ndarray | None, residual: np.ndarray | None, keep: float
) -> Sequence[np.ndarray]:
    assert start is not None
    assert residual is not None
    changes = _add_change(array, start, residual)
    indices = _largest_indices(changes, _sent_count(changes.size, keep))
    current_values, start_values = array.reshape(-1)[indices], start.reshape(-1)[indices]
    # Without a residual, each sent value is bit-identical to the tensor's entry.
    sent_values = current_values + (changes[indices] - (current_values - start_values))
    changes[indices] -= sent_values - start_values
    return indices.astype(np.min_scalar_type(changes.size - 1)), sent_values


def _largest_indices(changes: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted indices of the `count` largest magnitudes. Of equal magnitudes, the first win."""
    threshold = _kth_largest(changes, count)

    def select_indices(condition: Callable[[np.ndarray], np.ndarray], limit: int) -> list[np.ndarray]:
        index_blocks: list[np.ndarray] = []
        for block in _split_blocks(changes.size):
            if limit <= 0:
                break
            index_blocks.append(np.flatnonzero(condition(np.abs(changes[block])))[:limit] + block.start)
            limit -= len(index_blocks[-1])
        return index_blocks

    larger = select_indices(lambda sizes: sizes > threshold, count)
    equal = select_indices(lambda sizes: sizes == threshold, count - sum(map(len, larger)))
    return np.sort(np.concatenate([*larger, *equal]))


def _kth_largest(changes: np.ndarray, count: int) -> np.ndarray:
    # Magnitudes of floats are ordered like their bits, so the upper 16 bits are searched first, and then the lower 16.
    def magnitude_bits(block: slice) -> np.ndarray:
        return np.abs(changes[block]).view(np.uint32)

    def find_bin(counts: np.ndarray, rank: int) -> tuple[int, int]:
        cumulative_counts = np.cumsum(counts[::-1])
        index = int(np.searchsorted(cumulative_counts, rank))
        return len(counts) - 1 - index, int(cumulative_counts[index] - counts[::-1][index])

    upper, lower = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
    for block in _split_blocks(changes.size):
        upper += np.bincount(magnitude_bits(block) >> 16, minlength=1 << 16)
    high, larger_count = find_bin(upper, count)
    for block in _split_blocks(changes.size):
        bits = magnitude_bits(block)
        lower += np.bincount(bits[bits >> 16 == high] & 0xFFFF, minlength=1 << 16)
    low, _ = find_bin(lower, count - larger_count)
    return np.array(high << 16 | low, np.uint32).view(np.float32)


def _decode_topk(parts: Sequence[np.ndarray], start: np.ndarray, keep: float) -> np.ndarray:
    indices, values = parts
    count = _sent_count(start.size, keep)
    if indices.dtype.kind != "u" or values.dtype != np.float32 or not indices.shape == values.shape == (count,):
        raise UpdateError(
            f"parts at and value are {indices.shape} {indices.dtype} and {values.shape} {values.dtype} "
            f"instead of {count} unsigned indices and {count} float32 values"
        )
    if (indices[1:] <= indices[:-1]).any() or indices[-1] >= start.size:
        raise UpdateError(f"part at has indices that are repeated, out of order or beyond the {start.size} entries")
    decoded = start.flatten()
    decoded[indices] = values
    return decoded.reshape(start.shape)


def _topk_shape(parts: Sequence[TensorSpec], shape: tuple[int, ...], keep: float) -> tuple[int, ...] | None:
    indices, values = parts
    count = _sent_count(math.prod(shape), keep)
    is_valid = indices.dtype.kind == "u" and values.dtype == np.float32 and indices.shape == values.shape == (count,)
    return shape if is_valid else None


def _sent_count(size: int, keep: float) -> int:
    return min(max(math.ceil(keep * size), 1), size)


LOSSY_CODECS: Final[Mapping[str, LossyCodec]] = {
    "fp16": LossyCodec(
        ("fp16",), _encode_fp16, _decode_fp16, _fp16_shape, has_residual=False, works_without_start=True
    ),
    "int8": LossyCodec(
        ("int8", "step"), _encode_int8, _decode_int8, _int8_shape, has_residual=True, works_without_start=True
    ),
    "topk": LossyCodec(
        ("at", "value"), _encode_topk, _decode_topk, _topk_shape, has_residual=True, works_without_start=False
    ),
}

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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.arrays.tensors import TensorSpec
from fedquilt.compression.lossy_codecs import CODERS
from fedquilt.core import ClientResult, Encoding, ModelError, Tensors, UpdateError
from fedquilt.formats import tensor_register

UNSENT: Final = "unsent/"  # in a device's private state: prefix of the rests that codecs have left out
MARK: Final = "#"  # separates a tensor's name from that of a part it is sent in

T = TypeVar("T")


def exclude_buffers(wire: Encoding, meta: Mapping[str, Any]) -> Encoding:
    """Return a job's encoding with its network's buffers excluded from compression.

    Args:
        wire: Encoding of the job.
        meta: Metadata of the job's bundle.

    Raises:
        ModelError: If the bundle has a network without a register.
    """
    network = meta.get("network")
    if wire.codec == "raw" or not network:
        return wire
    register = tensor_register.register_from_table(
        {**network, **{key: meta[key] for key in ("register",) if key in meta}}
    )
    buffers = [entry.name for entry in register.tensors if entry.kind != "parameter"]
    return msgspec.structs.replace(wire, unchanged=tuple(dict.fromkeys((*wire.unchanged, *buffers))))


# -- on the device --------------------------------------------------------------------------------


def method_state(private: Tensors) -> dict[str, np.ndarray]:
    return {name: array for name, array in private.items() if not name.startswith(UNSENT)}


def encode_update(
    wire: Encoding, answer: ClientResult, base: Callable[[str], Tensors | None], private: Callable[[], Tensors]
) -> ClientResult:
    """Return an update as sent, with the codec's residuals in its private state.

    Args:
        wire: Codec and its parameter.
        answer: Update made by the method.
        base: Function that returns the task's bundle with a name, or None if the task has none.
        private: Function that returns the private state of the task's start. It is called only now, to save memory
            during training, and its arrays are overwritten.

    Raises:
        UpdateError: If a value is not finite, or too large for the codec.
        ModelError: If a tensor's name contains the separator of parts.
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
        bundles[bundle], unsent = encode_bundle(wire, given, base(bundle) or {}, before)
        kept = {name: array for name, array in kept.items() if not name.startswith(prefix)}
        kept |= {prefix + name: array for name, array in unsent.items()}
    return replace(answer, bundles=bundles, local={**answer.local, **kept})


def encode_bundle(
    wire: Encoding, given: Tensors, base: Tensors, unsent: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a bundle as sent, and the residuals to add to the next update.

    Args:
        wire: Codec and its parameter.
        given: Tensors of the bundle.
        base: Bundle at the start of the task, or {}.
        unsent: Residuals of earlier updates, by tensor. The arrays are overwritten to save memory.

    Raises:
        UpdateError: If a value is not finite, or too large for the codec.
        ModelError: If a tensor's name contains the separator of parts.
    """
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


# -- on the coordinator ---------------------------------------------------------------------------


def decode_update(
    wire: Encoding, bundles: Mapping[str, Tensors], base: Callable[[str], Tensors | None]
) -> Mapping[str, Tensors]:
    """Decode each bundle of an update, or return the bundles unchanged for the codec "raw"."""
    if wire.codec == "raw":
        return bundles
    return {name: decode_bundle(wire, sent, base(name) or {}) for name, sent in bundles.items()}


def decode_bundle(wire: Encoding, sent: Tensors, base: Tensors) -> dict[str, np.ndarray]:
    """Return the bundle given to `encode_bundle`, up to the codec's error.

    Raises:
        UpdateError: If a tensor is not an output of this codec for this base.
    """
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
    """Return the types and shapes of the tensors that `decode_bundle` would return.

    Args:
        wire: Codec of the job.
        sent: Types and shapes of the tensors as sent, from the manifest.
        like: Expected tensors, whose shapes are used where the codec sends none.

    Raises:
        UpdateError: If a tensor has types or shapes that this codec does not make.
    """
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

"""Compression of updates: tensors travel unchanged, or in fewer bytes with a small error.

    raw    unchanged                                                                  4 bytes an entry
    fp16   16-bit floats                                                              2 bytes an entry
    int8   multiples of one step, a tensor's largest magnitude over 127               1 byte, and 4 a tensor
    topk   the ceil(keep n) of n entries that moved most, with their places    4 + 1, 2 or 4 bytes an entry sent

If the task sent a bundle of the same name with a tensor of the same name and shape, the tensor's change
is rounded; "topk" sets the entries that it sends and leaves all others at their received values. The rest that int8
and topk leave out stays on the device and is added to the next update (error feedback: Seide et al.,
Interspeech 2014; Karimireddy et al., arXiv 1901.09847, EF-SGD), so that over the rounds nothing is lost.
Any other tensor is rounded by itself, without memory, and by topk not at all. Only float32 arrays with axes are
rounded: counters, bits, scalars, float64 sums and the network's buffers (a running variance may not become negative)
travel unchanged under every codec. The task names the buffers (`Encoding.unchanged`), which `sparing` reads from the
bundle's register.

Downloads are lossless: one content serves all devices, is named by its sha256, and goes to each only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from fedquilt import tensor_register, tensors
from fedquilt.compression.lossy import CODERS
from fedquilt.core import Answer, Encoding, ModelError, Tensors, UpdateError
from fedquilt.tensors import Shaped

UNSENT: Final = "unsent/"  # in a device's private state: prefix of the rests that codecs have left out
MARK: Final = "#"  # separates a tensor's name from that of a part it is sent in

T = TypeVar("T")


def sparing(wire: Encoding, meta: Mapping[str, Any]) -> Encoding:
    """Return the encoding of a job with the names of its network's buffers, which travel unchanged.

    Args:
        wire: Encoding that the job asks for.
        meta: Meta of the job's bundle.

    Raises:
        ModelError: If the bundle has a network without a register.
    """
    network = meta.get("network")
    if wire.codec == "raw" or not network:
        return wire
    register = tensor_register.register_of({**network, **{key: meta[key] for key in ("register",) if key in meta}})
    buffers = [entry.name for entry in register.tensors if entry.kind != "parameter"]
    return msgspec.structs.replace(wire, unchanged=tuple(dict.fromkeys((*wire.unchanged, *buffers))))


# -- on the device --------------------------------------------------------------------------------


def own(private: Tensors) -> dict[str, np.ndarray]:
    """Part of a device's private state that belongs to the method."""
    return {name: array for name, array in private.items() if not name.startswith(UNSENT)}


def encoded(
    wire: Encoding, answer: Answer, base: Callable[[str], Tensors | None], private: Callable[[], Tensors]
) -> Answer:
    """Answer as it travels, with the rests left out in its private state.

    Args:
        wire: codec and its parameter.
        answer: of the method.
        base: returns the task's bundle of a name; None: it had none.
        private: returns the state that the task began with, read only now, so that the work need not hold it. Its
            arrays are overwritten.

    Raises:
        UpdateError: a value is not finite, or too large for the codec.
        ModelError: a tensor's name could be mistaken for a part's.
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
    """Bundle as it travels, and the rest that is left out until the next time.

    Args:
        wire: codec and its parameter.
        given: tensors of the bundle.
        base: bundle that it started from; {}: none.
        unsent: rests of earlier updates, by tensor. Its arrays are overwritten: a board has no room for both.

    Raises:
        UpdateError, ModelError: as `encoded`.
    """
    coder, sent, left, unchanged = CODERS[wire.codec], {}, dict(unsent), frozenset(wire.unchanged)
    for name, array in given.items():
        if MARK in name:
            raise ModelError(f"tensor {name!r}: a name with {MARK} cannot be told from a part's; [wire] codec = 'raw'")
        start = _start(base, name, array.shape)
        if name in unchanged or not _rounded(array) or (start is None and not coder.alone):
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
    """Bundles of an update as the method made them, up to the codec's error. `base`: as of `encoded`.

    Raises:
        UpdateError: as `decode`.
    """
    if wire.codec == "raw":
        return bundles
    return {name: decode(wire, sent, base(name) or {}) for name, sent in bundles.items()}


def decode(wire: Encoding, sent: Tensors, base: Tensors) -> dict[str, np.ndarray]:
    """Bundle given to `encode`, up to the codec's error.

    Raises:
        UpdateError: it is no output of this codec for that base; names the tensor.
    """
    tensors.require_finite(sent)
    coder = CODERS[wire.codec]
    plain, split = _apart(wire, sent)
    for name, parts in split.items():
        start = _start(base, name, None if not coder.alone else parts[coder.parts[0]].shape)
        if start is None and not coder.alone:
            raise UpdateError(f"tensor {name!r} was sent by {wire.codec}, but there is none that it moved from")
        # one zero stands for all of them: an update may not make the coordinator hold twice what it tells
        origin = np.broadcast_to(np.float32(0), parts[coder.parts[0]].shape) if start is None else start
        try:
            plain[name] = coder.take([parts[part] for part in coder.parts], origin, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}, {error}") from None
    return dict(sorted(plain.items()))


def told(wire: Encoding, sent: Mapping[str, Shaped], like: Mapping[str, Any]) -> dict[str, Shaped]:
    """Types and shapes of the tensors that `decode` would make, for checking a manifest.

    Args:
        wire: codec of the job.
        sent: types and shapes of the tensors as they travel.
        like: expected tensors; their shapes are used where a codec does not send one.

    Raises:
        UpdateError: it is not what this codec makes; says which tensor.
    """
    if wire.codec == "raw":
        return dict(sent)
    coder = CODERS[wire.codec]
    plain, split = _apart(wire, sent)
    for name, parts in split.items():
        shape = coder.told([parts[part] for part in coder.parts], getattr(like.get(name), "shape", ()), wire.keep)
        if shape is None:
            raise UpdateError(f"tensor {name!r} is told in parts of types or shapes that {wire.codec} does not make")
        plain[name] = Shaped(shape, np.dtype(np.float32))
    return plain


def _apart(wire: Encoding, sent: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Tensors that travel as they are, and the parts of each that does not, by its name.

    Raises:
        UpdateError: a tensor has some of the codec's parts only, travels in both ways, or has to travel unchanged.
    """
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


def _start(base: Tensors, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    """Tensor that a change starts from; None: there is none of its name and shape. Without a shape: any."""
    found = base.get(name)
    if found is None or not _rounded(found) or shape not in (None, found.shape):
        return None
    return found


def _rounded(array: np.ndarray) -> bool:
    """Whether a lossy codec may change a tensor of this type and shape."""
    return bool(array.dtype == np.float32 and array.ndim and array.size)

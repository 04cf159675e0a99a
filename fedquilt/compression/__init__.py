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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fedquilt import tensors
from fedquilt.compression.lossy import CODERS
from fedquilt.core import Answer, Encoding, ModelError, Tensors, UpdateError
from fedquilt.layers import STATISTICS
from fedquilt.tensors import Shaped

UNSENT: Final = "unsent/"  # in a device's private state: before the names of what codecs have left out
MARK: Final = "#"  # between a tensor's name and that of a part it is sent in


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
        # one zero stands for all of them: an update may not make the coordinator hold twice what it tells
        origin = np.broadcast_to(np.float32(0), parts[coder.parts[0]].shape) if start is None else start
        try:
            plain[name] = coder.take([parts[part] for part in coder.parts], origin, wire.keep)
        except UpdateError as error:
            raise UpdateError(f"tensor {name!r}, {error}") from None
    return dict(sorted(plain.items()))


def told(wire: Encoding, sent: Mapping[str, Shaped], like: Mapping[str, Any]) -> dict[str, Shaped]:
    """Types and shapes that `decode` makes of tensors of these, so that a manifest can be checked.

    Args:
        sent: of what travels.
        like: what is expected, as far as a codec does not tell a shape.

    Raises:
        UpdateError: it is not what this codec makes; says which tensor.
    """
    if wire.codec == "raw":
        return dict(sent)
    coder = CODERS[wire.codec]
    plain: dict[str, Shaped] = {}
    split: dict[str, dict[str, Shaped]] = {}
    for name, each in sent.items():
        of, _, part = name.rpartition(MARK)
        if of and part in coder.parts:
            split.setdefault(of, {})[part] = each
        else:
            plain[name] = each
    for name, parts in split.items():
        if name in plain or parts.keys() != set(coder.parts):
            raise UpdateError(f"tensor {name!r} is told as {', '.join(sorted(parts))}, not as {wire.codec} sends it")
        shape = coder.told([parts[part] for part in coder.parts], getattr(like.get(name), "shape", ()), wire.keep)
        if shape is None:
            raise UpdateError(f"tensor {name!r} is told in parts of types or shapes that {wire.codec} does not make")
        plain[name] = Shaped(shape, np.dtype(np.float32))
    return plain


def _start(base: Tensors, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    """What a tensor has moved from; None: there is nothing of its name and shape. Without a shape: any."""
    found = base.get(name)
    if found is None or not _rounded(name, found) or shape not in (None, found.shape):
        return None
    return found


def _rounded(name: str, array: np.ndarray) -> bool:
    """Whether a lossy codec may touch it."""
    return bool(array.dtype == np.float32 and array.ndim and array.size and name.rpartition(".")[2] not in STATISTICS)

"""Neuron masks: which hidden neurons of a network are used, and which of its tensors' entries that covers.

A neuron is an output of a fully connected layer or a channel of a convolution. Neurons that an addition
ties together, or that a normalisation or a depthwise convolution hands on, form one group with one mask.
An entry of a weight is covered where both its output's and its input's neuron are, one of a bias or a
normalisation where its neuron is: the subnetwork and nothing else. Inputs and scores are never masked.

numpy only. `fedquilt.models.partial.trace` makes the plan of a network, at `fedquilt prepare`;
`fedquilt.models.partial.torch_masks` masks the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fedquilt.core import ModelError, Tensors, UpdateError


@dataclass(frozen=True)
class Follow:
    """The groups along one tensor's first axis and along its second, one after another; (): none is masked."""

    shape: tuple[int, ...]
    out: tuple[str, ...] = ()
    into: tuple[str, ...] = ()
    repeat: int = 1  # entries of the second axis for each neuron of `into`: pixels, after a flattening


@dataclass(frozen=True)
class Plan:
    """The groups of a network's neurons, in its own order, and what follows them.

    A mask of the network is one array of `neurons` entries, the groups one after another.
    """

    widths: dict[str, int]  # of each group that may be masked
    pinned: dict[str, int]  # of each that may not, though it stands beside one that may
    follows: dict[str, Follow]  # by tensor; one that is not here is always covered

    @property
    def neurons(self) -> int:
        """h: how many neurons may be masked."""
        return sum(self.widths.values())


def dense(layers: Mapping[str, tuple[int, int]]) -> Plan:
    """The plan of a chain of fully connected layers, as `models.partial.trace` reads it of one.

    Args:
        layers: (outputs, inputs) of each by its path, first to last; the last one's outputs are the scores.
    """
    hidden = {path: out for path, (out, _) in list(layers.items())[:-1]}
    follows: dict[str, Follow] = {}
    before: tuple[str, ...] = ()
    for path, (out, into) in layers.items():
        own = (path,) if path in hidden else ()
        if own or before:
            follows[f"{path}.weight"] = Follow((out, into), own, before)
        if own:
            follows[f"{path}.bias"] = Follow((out,), own)
        before = own
    return Plan(hidden, {}, follows)


def require(plan: Plan, model: Tensors) -> None:
    """Raises ModelError unless the groups make the shapes that the plan gives, and the model's tensors have them."""
    known = {**plan.pinned, **plan.widths}
    for name, follow in plan.follows.items():
        for axis, along, repeat in ((0, follow.out, 1), (1, follow.into, follow.repeat)):
            width = sum(known.get(each, 0) for each in along) * repeat
            if along and (not known.keys() >= set(along) or follow.shape[axis : axis + 1] != (width,)):
                raise ModelError(f"the plan of masks is damaged at {name!r}: run `fedquilt prepare` anew")
        if name not in model or model[name].shape != follow.shape:
            raise ModelError(
                f"the plan of masks is another network's: its tensor {name!r} of shape {follow.shape} is not in "
                "the model: run `fedquilt prepare` anew"
            )


def to_array(plan: Plan) -> np.ndarray:
    """The plan as bytes, uint8: a tensor that travels once."""
    return np.frombuffer(msgspec.json.encode(plan), np.uint8)


def from_array(given: np.ndarray) -> Plan:
    """The plan again.

    Raises:
        ModelError: it is none.
    """
    try:
        return msgspec.json.decode(given.tobytes(), type=Plan)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"what was sent as a plan of masks is none: {error}") from None


def part(plan: Plan, index: int, parts: int) -> np.ndarray:
    """The neurons (h,) of part `index` when every group is split into so many parts: the parts' sum is one."""
    marks = []
    for width in plan.widths.values():
        mark = np.zeros(width, bool)
        mark[index * width // parts : (index + 1) * width // parts] = True
        marks.append(mark)
    return np.concatenate(marks) if marks else np.zeros(0, bool)


def groups(plan: Plan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """The mask (h,) by group, the pinned ones all covered."""
    found, first = {name: np.ones(width, bool) for name, width in plan.pinned.items()}, 0
    for name, width in plan.widths.items():
        found[name] = neurons[first : first + width].astype(bool)
        first += width
    return found


def covered(plan: Plan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """For each tensor that follows, which entries the mask (h,) covers: booleans in the tensor's shape."""
    by_group = groups(plan, neurons)
    found = {}
    for name, follow in plan.follows.items():
        mark = np.ones((1,) * len(follow.shape), bool)
        if follow.out:
            mark = mark & _side([by_group[each] for each in follow.out], 1, len(follow.shape), 0)
        if follow.into:
            mark = mark & _side([by_group[each] for each in follow.into], follow.repeat, len(follow.shape), 1)
        found[name] = np.broadcast_to(mark, follow.shape)
    return found


def take(model: Tensors, marks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What travels of a masked model: of a tensor that follows its covered entries (n,), all else whole."""
    return {name: array[marks[name]] if name in marks else array for name, array in model.items()}


def put(sent: Tensors, marks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The masked model again, 0 where nothing is covered.

    Raises:
        UpdateError: a tensor's size is not that of its mask.
    """
    found = {}
    for name, array in sent.items():
        mark = marks.get(name)
        if mark is None:
            found[name] = array
            continue
        if array.shape != (wanted := int(mark.sum()),):
            raise UpdateError(f"tensor {name!r} has shape {array.shape}, its mask covers {wanted} entries")
        found[name] = np.zeros(mark.shape, array.dtype)
        found[name][mark] = array
    return found


def to_bits(neurons: np.ndarray) -> np.ndarray:
    """The mask (h,) in ceil(h / 8) bytes, uint8."""
    return np.packbits(neurons.astype(bool))


def from_bits(bits: np.ndarray, count: int) -> np.ndarray:
    """The mask (count,) again.

    Raises:
        UpdateError: not so many bits.
    """
    if bits.dtype != np.uint8 or bits.shape != (-(-count // 8),):
        raise UpdateError(f"a mask of {count} neurons is {-(-count // 8)} bytes, here are {bits.dtype} {bits.shape}")
    return np.unpackbits(bits, count=count).astype(bool)


def _side(marks: Sequence[np.ndarray], repeat: int, axes: int, axis: int) -> np.ndarray:
    """Marks of neurons along one axis of a tensor."""
    return np.repeat(np.concatenate(marks), repeat).reshape([-1 if each == axis else 1 for each in range(axes)])

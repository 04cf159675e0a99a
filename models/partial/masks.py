"""Neuron masks: which hidden neurons of a network are used, and which entries of its tensors they cover.

A neuron is an output of a fully connected layer or a channel of a convolution. Neurons that an addition
ties together, or that a normalisation or a depthwise convolution passes on, form one group with one mask.
An entry of a weight is covered where both its output's and its input's neuron are, one of a bias or a
normalisation where its neuron is: the subnetwork and nothing else. Inputs and scores are never masked.

numpy only. `fedquilt.models.partial.trace` makes the plan of a network, at `fedquilt prepare`;
`fedquilt.models.partial.torch_masks` masks the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fedquilt.core import UNDECODABLE, Bundle, ModelError, Tensors, UpdateError


@dataclass(frozen=True)
class Follow:
    """Groups along one tensor's first axis and along its second, in order; (): none is masked."""

    shape: tuple[int, ...]
    out: tuple[str, ...] = ()
    into: tuple[str, ...] = ()
    repeat: int = 1  # entries of the second axis for each neuron of `into`: pixels, after a flattening


@dataclass(frozen=True)
class Plan:
    """Groups of a network's neurons, in its own order, and the tensors that follow them.

    A mask of the network is one array of `neurons` entries, the groups one after another.
    """

    widths: dict[str, int]  # of each group that may be masked
    pinned: dict[str, int]  # of each that may not, though it stands beside one that may
    follows: dict[str, Follow]  # by tensor; others are always covered
    whole: dict[str, str] = field(default_factory=dict)  # layer whose neurons none may leave out -> what reads them

    @property
    def neurons(self) -> int:
        """Number h of neurons that may be masked."""
        return sum(self.widths.values())


def dense(layers: Mapping[str, tuple[int, int]]) -> Plan:
    """Plan of a chain of fully connected layers, as `models.partial.trace` makes it.

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


def describe_whole_layers(plan: Plan) -> str:
    """Return a sentence on the layers that cannot be masked and what reads them, or ""."""
    some = [f"{layer!r} ({reader})" for layer, reader in plan.whole.items()]
    if not some:
        return ""
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return f"layers that stay whole, each with what reads it and is not followed: {', '.join(some[:4])}{more}"


def require(plan: Plan, model: Tensors) -> None:
    """Raise ModelError unless the groups make the shapes in the plan, and the model's tensors have them."""
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


def of_bundle(bundle: Bundle, model: Tensors) -> Plan:
    """Return the plan that `fedquilt prepare` stored.

    Raises:
        ModelError: There is none, or none of the network's hidden neurons may be left out.
    """
    if "masks" not in bundle.files:
        missing = "the bundle has no plan of the network's hidden neurons: run `fedquilt prepare` anew"
        raise ModelError(str(bundle.meta.get("untraced", missing)))
    plan = from_array(bundle.load("masks")["json"])
    require(plan, model)
    if not plan.neurons:
        why = describe_whole_layers(plan) or "it has no hidden layer"
        raise ModelError(
            f"no hidden neuron of this network can be left out: take a method that trains the whole network; {why}"
        )
    return plan


def to_array(plan: Plan) -> np.ndarray:
    """Encode the plan as bytes, uint8: a tensor that travels once."""
    return np.frombuffer(msgspec.json.encode(plan), np.uint8)


def from_array(given: np.ndarray) -> Plan:
    """Decode a plan.

    Raises:
        ModelError: the bytes are no plan.
    """
    try:
        return msgspec.json.decode(given.tobytes(), type=Plan)
    except UNDECODABLE as error:
        raise ModelError(f"what was sent as a plan of masks is none: {error}") from None


def part(plan: Plan, index: int, parts: int) -> np.ndarray:
    """Neurons (h,) of part `index` when every group is split into `parts`: the parts' sum is one."""
    marks = []
    for width in plan.widths.values():
        mark = np.zeros(width, bool)
        mark[index * width // parts : (index + 1) * width // parts] = True
        marks.append(mark)
    return np.concatenate(marks) if marks else np.zeros(0, bool)


def groups(plan: Plan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """Mask (h,) by group, the pinned ones all covered."""
    found, first = {name: np.ones(width, bool) for name, width in plan.pinned.items()}, 0
    for name, width in plan.widths.items():
        found[name] = neurons[first : first + width].astype(bool)
        first += width
    return found


def covered(plan: Plan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """Entries that the mask (h,) covers, for each tensor that follows: booleans in the tensor's shape."""
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
    """Tensors of a masked model that travel: covered entries (n,) of tensors that follow, others whole."""
    return {name: array[marks[name]] if name in marks else array for name, array in model.items()}


def put(sent: Tensors, marks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rebuild the masked model, 0 where nothing is covered.

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
    """Pack the mask (h,) into ceil(h / 8) bytes, uint8."""
    return np.packbits(neurons.astype(bool))


def from_bits(bits: np.ndarray, count: int) -> np.ndarray:
    """Unpack the mask (count,).

    Raises:
        UpdateError: another number of bits.
    """
    if bits.dtype != np.uint8 or bits.shape != (-(-count // 8),):
        raise UpdateError(f"a mask of {count} neurons is {-(-count // 8)} bytes, here are {bits.dtype} {bits.shape}")
    return np.unpackbits(bits, count=count).astype(bool)


def _side(marks: Sequence[np.ndarray], repeat: int, axes: int, axis: int) -> np.ndarray:
    """Marks of neurons along one axis of a tensor."""
    return np.repeat(np.concatenate(marks), repeat).reshape([-1 if each == axis else 1 for each in range(axes)])

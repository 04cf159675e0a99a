"""Masks of hidden neurons, and the tensor entries that they cover.

A neuron is an output of a fully connected layer or a channel of a convolution. Neurons that an addition ties together,
or that a normalisation or a depthwise convolution passes on, form one group with one mask. An entry of a weight is
covered if the neurons of its output and of its input are, an entry of a bias or a normalisation if its neuron is.
Inputs and scores are never masked.

Requires numpy only. `fedquilt.models.partial.dependency_trace` makes the plan of a network in `fedquilt prepare`, and
`fedquilt.models.partial.torch_masks` masks the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fedquilt.core import DECODE_ERRORS, Bundle, ModelError, Tensors, UpdateError


@dataclass(frozen=True)
class TensorGroups:
    """Groups of neurons along the first and second axis of a tensor, () if not masked."""

    shape: tuple[int, ...]
    out: tuple[str, ...] = ()
    into: tuple[str, ...] = ()
    repeat: int = 1  # entries of the second axis for each neuron of `into`: pixels, after a flattening


@dataclass(frozen=True)
class MaskPlan:
    """Groups of a network's neurons, in order, and the tensors that depend on the groups.

    A mask of the network is one array of `neurons` entries, one group after another.
    """

    widths: dict[str, int]  # of each group that may be masked
    pinned: dict[str, int]  # neurons of each layer that may not be masked, although others of the layer may
    follows: dict[str, TensorGroups]  # by tensor; others are always covered
    whole: dict[str, str] = field(default_factory=dict)  # layer whose neurons none may leave out -> what reads them

    @property
    def neurons(self) -> int:
        return sum(self.widths.values())


def plan_from_layers(layers: Mapping[str, tuple[int, int]]) -> MaskPlan:
    """Return the plan of a chain of fully connected layers."""
    hidden = {path: out for path, (out, _) in list(layers.items())[:-1]}
    follows: dict[str, TensorGroups] = {}
    before: tuple[str, ...] = ()
    for path, (out, into) in layers.items():
        own = (path,) if path in hidden else ()
        if own or before:
            follows[f"{path}.weight"] = TensorGroups((out, into), own, before)
        if own:
            follows[f"{path}.bias"] = TensorGroups((out,), own)
        before = own
    return MaskPlan(hidden, {}, follows)


def describe_unmaskable_layers(plan: MaskPlan) -> str:
    """Return a phrase with up to four layers that cannot be masked and their readers, or "" without any."""
    some = [f"{layer!r} ({reader})" for layer, reader in plan.whole.items()]
    if not some:
        return ""
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return f"layers that stay whole, each with what reads it and is not followed: {', '.join(some[:4])}{more}"


def validate_plan(plan: MaskPlan, model: Tensors) -> None:
    """Raise ModelError unless the plan is consistent and matches the model's tensors."""
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


def plan_from_bundle(bundle: Bundle, model: Tensors) -> MaskPlan:
    if "masks" not in bundle.files:
        missing = "the bundle has no plan of the network's hidden neurons: run `fedquilt prepare` anew"
        raise ModelError(str(bundle.meta.get("untraced", missing)))
    plan = plan_from_array(bundle.load("masks")["json"])
    validate_plan(plan, model)
    if not plan.neurons:
        why = describe_unmaskable_layers(plan) or "it has no hidden layer"
        raise ModelError(
            f"no hidden neuron of this network can be left out: take a method that trains the whole network; {why}"
        )
    return plan


def plan_to_array(plan: MaskPlan) -> np.ndarray:
    return np.frombuffer(msgspec.json.encode(plan), np.uint8)


def plan_from_array(given: np.ndarray) -> MaskPlan:
    try:
        return msgspec.json.decode(given.tobytes(), type=MaskPlan)
    except DECODE_ERRORS as error:
        raise ModelError(f"what was sent as a plan of masks is none: {error}") from None


def mask_of_equal_part(plan: MaskPlan, index: int, parts: int) -> np.ndarray:
    """Return the mask (h,) of part `index` of `parts`. In each group, sizes of parts differ by at most 1."""
    marks = []
    for width in plan.widths.values():
        mark = np.zeros(width, bool)
        mark[index * width // parts : (index + 1) * width // parts] = True
        marks.append(mark)
    return np.concatenate(marks) if marks else np.zeros(0, bool)


def split_by_group(plan: MaskPlan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    found, first = {name: np.ones(width, bool) for name, width in plan.pinned.items()}, 0
    for name, width in plan.widths.items():
        found[name] = neurons[first : first + width].astype(bool)
        first += width
    return found


def covered_entries(plan: MaskPlan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """Return the entries covered by a mask (h,), as booleans in the shape of each tensor."""
    by_group = split_by_group(plan, neurons)
    found = {}
    for name, follow in plan.follows.items():
        mark = np.ones((1,) * len(follow.shape), bool)
        if follow.out:
            mark = mark & _expand_along_axis([by_group[each] for each in follow.out], 1, len(follow.shape), 0)
        if follow.into:
            mark = mark & _expand_along_axis(
                [by_group[each] for each in follow.into], follow.repeat, len(follow.shape), 1
            )
        found[name] = np.broadcast_to(mark, follow.shape)
    return found


def select_covered(model: Tensors, marks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[marks[name]] if name in marks else array for name, array in model.items()}


def restore_masked_tensors(sent: Tensors, marks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sent entries where the mask covers, and 0 elsewhere. Tensors without a mask stay as sent."""
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


def pack_mask(neurons: np.ndarray) -> np.ndarray:
    return np.packbits(neurons.astype(bool))


def unpack_mask(bits: np.ndarray, count: int) -> np.ndarray:
    if bits.dtype != np.uint8 or bits.shape != (-(-count // 8),):
        raise UpdateError(f"a mask of {count} neurons is {-(-count // 8)} bytes, here are {bits.dtype} {bits.shape}")
    return np.unpackbits(bits, count=count).astype(bool)


def _expand_along_axis(marks: Sequence[np.ndarray], repeat: int, axes: int, axis: int) -> np.ndarray:
    return np.repeat(np.concatenate(marks), repeat).reshape([-1 if each == axis else 1 for each in range(axes)])

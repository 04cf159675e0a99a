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

    widths: dict[str, int]  # group that may be masked -> neurons
    pinned: dict[str, int]  # layer -> neurons that are never masked, although other neurons of the layer may be
    follows: dict[str, TensorGroups]  # tensor -> groups; other tensors are always covered
    whole: dict[str, str] = field(default_factory=dict)  # layer that is never masked -> unsupported reader

    @property
    def neurons(self) -> int:
        return sum(self.widths.values())


def plan_from_layers(layers: Mapping[str, tuple[int, int]]) -> MaskPlan:
    """Return the plan of fully connected layers in order, given as path -> (outputs, inputs)."""
    hidden = {path: outputs for path, (outputs, _) in list(layers.items())[:-1]}
    follows: dict[str, TensorGroups] = {}
    previous_groups: tuple[str, ...] = ()
    for path, (outputs, inputs) in layers.items():
        groups = (path,) if path in hidden else ()
        if groups or previous_groups:
            follows[f"{path}.weight"] = TensorGroups((outputs, inputs), groups, previous_groups)
        if groups:
            follows[f"{path}.bias"] = TensorGroups((outputs,), groups)
        previous_groups = groups
    return MaskPlan(hidden, {}, follows)


def describe_unmaskable_layers(plan: MaskPlan) -> str:
    """Return text with up to four unmaskable layers and their reasons, or "" if all can be masked."""
    descriptions = [f"{layer!r} ({reader})" for layer, reader in plan.whole.items()]
    if not descriptions:
        return ""
    rest = f" and {len(descriptions) - 4} more" if len(descriptions) > 4 else ""
    return f"layers that cannot be masked (with the unsupported operation): {', '.join(descriptions[:4])}{rest}"


def validate_plan(plan: MaskPlan, model: Tensors) -> None:
    """Raise ModelError unless the plan is consistent and matches the model's tensors."""
    widths = {**plan.pinned, **plan.widths}
    for name, follow in plan.follows.items():
        for axis, groups, repeat in ((0, follow.out, 1), (1, follow.into, follow.repeat)):
            width = sum(widths.get(group, 0) for group in groups) * repeat
            if groups and (not widths.keys() >= set(groups) or follow.shape[axis : axis + 1] != (width,)):
                raise ModelError(f"the plan of masks is damaged at {name!r}: run `fedquilt prepare` again")
        if name not in model or model[name].shape != follow.shape:
            raise ModelError(
                f"the plan of masks belongs to another network, with a tensor {name!r} of shape {follow.shape}: "
                "run `fedquilt prepare` again"
            )


def plan_from_bundle(bundle: Bundle, model: Tensors) -> MaskPlan:
    """Return the bundle's plan, or raise ModelError if it is missing, masks no neuron or does not fit."""
    if "masks" not in bundle.files:
        missing = "the bundle has no plan of the network's hidden neurons: run `fedquilt prepare` again"
        raise ModelError(str(bundle.meta.get("untraced", missing)))
    plan = plan_from_array(bundle.load("masks")["json"])
    validate_plan(plan, model)
    if not plan.neurons:
        reason = describe_unmaskable_layers(plan) or "it has no hidden layer"
        raise ModelError(
            f"no hidden neuron of this network can be masked ({reason}): use a method that trains the whole network"
        )
    return plan


def plan_to_array(plan: MaskPlan) -> np.ndarray:
    return np.frombuffer(msgspec.json.encode(plan), np.uint8)


def plan_from_array(array: np.ndarray) -> MaskPlan:
    try:
        return msgspec.json.decode(array.tobytes(), type=MaskPlan)
    except DECODE_ERRORS as error:
        raise ModelError(f"the plan of masks cannot be decoded: {error}") from None


def mask_of_equal_part(plan: MaskPlan, index: int, parts: int) -> np.ndarray:
    """Return the mask (h,) of part `index` when each group is divided into `parts` nearly equal parts."""
    group_masks = []
    for width in plan.widths.values():
        group_mask = np.zeros(width, bool)
        group_mask[index * width // parts : (index + 1) * width // parts] = True
        group_masks.append(group_mask)
    return np.concatenate(group_masks) if group_masks else np.zeros(0, bool)


def split_by_group(plan: MaskPlan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """Split a mask (h,) by group. Pinned groups, which are never masked, are added as True."""
    masks = {name: np.ones(width, bool) for name, width in plan.pinned.items()}
    offset = 0
    for name, width in plan.widths.items():
        masks[name] = neurons[offset : offset + width].astype(bool)
        offset += width
    return masks


def covered_entries(plan: MaskPlan, neurons: np.ndarray) -> dict[str, np.ndarray]:
    """Return the entries covered by a mask (h,), as booleans in the shape of each tensor."""
    by_group = split_by_group(plan, neurons)
    covered_by_tensor = {}
    for name, follow in plan.follows.items():
        covered = np.ones((1,) * len(follow.shape), bool)
        if follow.out:
            covered = covered & _expand_along_axis([by_group[group] for group in follow.out], 1, len(follow.shape), 0)
        if follow.into:
            covered = covered & _expand_along_axis(
                [by_group[group] for group in follow.into], follow.repeat, len(follow.shape), 1
            )
        covered_by_tensor[name] = np.broadcast_to(covered, follow.shape)
    return covered_by_tensor


def select_covered(model: Tensors, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[masks[name]] if name in masks else array for name, array in model.items()}


def restore_masked_tensors(packed: Tensors, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sent entries where the mask covers, and 0 elsewhere. Tensors without a mask stay as sent.

    Raise UpdateError if a tensor does not have as many entries as its mask covers.
    """
    restored = {}
    for name, array in packed.items():
        mask = masks.get(name)
        if mask is None:
            restored[name] = array
            continue
        covered_count = int(mask.sum())
        if array.shape != (covered_count,):
            raise UpdateError(f"tensor {name!r} has shape {array.shape}, but its mask covers {covered_count} entries")
        restored[name] = np.zeros(mask.shape, array.dtype)
        restored[name][mask] = array
    return restored


def pack_mask(neurons: np.ndarray) -> np.ndarray:
    return np.packbits(neurons.astype(bool))


def unpack_mask(bits: np.ndarray, count: int) -> np.ndarray:
    if bits.dtype != np.uint8 or bits.shape != (-(-count // 8),):
        raise UpdateError(f"the mask is {bits.dtype} {bits.shape}, not {-(-count // 8)} bytes for {count} neurons")
    return np.unpackbits(bits, count=count).astype(bool)


def _expand_along_axis(masks: Sequence[np.ndarray], repeat: int, axes: int, axis: int) -> np.ndarray:
    return np.repeat(np.concatenate(masks), repeat).reshape([-1 if index == axis else 1 for index in range(axes)])

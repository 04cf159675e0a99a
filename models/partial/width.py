"""Sub-networks by width: cutting tensors, and averaging the entries that devices return.

A plan of masks (`fedquilt.models.partial.masks`) gives the dependencies between units. Requires numpy only, and torch
in `shrink_module`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import ModelError, Profile, Tensors, UpdateError
from fedquilt.costs import peak_memory
from fedquilt.models.partial.masks import MaskPlan

TensorCut = Mapping[str, tuple[np.ndarray | None, np.ndarray | None]]
"""Tensor of the sub-network -> indices along its first and second axis, None for a whole axis."""


def select_by_tier(profile: Profile | None, values: Sequence[Any]) -> Any:
    """Select one of five values by memory tier: under 1 GB or unknown, 1, 2, 4 and 8 GB."""
    tiers = (peak_memory.BELOW_SMALLEST_TIER, *peak_memory.TIER_BYTES)
    return values[tiers.index(peak_memory.tier_from_profile(profile)) if profile is not None else 0]


def leading_units(plan: MaskPlan, rate: float) -> dict[str, np.ndarray]:
    return {name: np.arange(unit_count(width, rate)) for name, width in plan.widths.items()}


def strongest_units(plan: MaskPlan, model: Tensors, rate: float) -> dict[str, np.ndarray]:
    """Return the ceil(rate * width) units of each group with the largest L1 norm, in ascending order."""
    units_by_group = {}
    for group, width in plan.widths.items():
        norm = np.zeros(width)
        for name, follow in plan.follows.items():
            if follow.out == (group,) and model[name].ndim > 1:
                norm += np.abs(model[name].astype(np.float64)).reshape(width, -1).sum(axis=1)
        units_by_group[group] = np.sort(np.argsort(-norm, kind="stable")[: unit_count(width, rate)])
    return units_by_group


def unit_count(width: int, rate: float) -> int:
    """Return ceil(rate * width), at least 1, without binary rounding errors."""
    return max(1, math.ceil(round(rate * width, 9)))


def unit_indices_by_tensor(plan: MaskPlan, model: Tensors, units_by_group: Mapping[str, np.ndarray]) -> TensorCut:
    """Return the row and column indices of the units in every tensor, or None for a whole axis.

    Groups that `units_by_group` does not name keep all units.
    """
    widths = {**plan.pinned, **plan.widths}

    def along(groups: Sequence[str], repeat: int = 1) -> np.ndarray | None:
        if not groups or all(
            name not in units_by_group or len(units_by_group[name]) == widths[name] for name in groups
        ):
            return None
        parts, offset = [], 0
        for name in groups:
            parts.append(offset + units_by_group.get(name, np.arange(widths[name])))
            offset += widths[name]
        units = np.concatenate(parts)
        return units if repeat == 1 else (units[:, None] * repeat + np.arange(repeat)).reshape(-1)

    indices = {}
    for name in model:
        follow = plan.follows.get(name)
        indices[name] = (along(follow.out), along(follow.into, follow.repeat)) if follow else (None, None)
    return indices


def cut_tensors(model: Tensors, cut: TensorCut) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(model[name][_numpy_index(axes)]).reshape(_cut_shape(model[name], axes))
        for name, axes in cut.items()
    }


@dataclass(frozen=True)
class WeightedEntrySums:
    """Sums of each entry and of its weights over the devices that sent it: sum_k n_k x_k and sum_k n_k."""

    total: dict[str, exact_sums.ExactSum] = field(default_factory=dict)  # for counters the maximum
    weight: dict[str, exact_sums.ExactSum] = field(default_factory=dict)


def add_entries(
    model: Tensors, sums: WeightedEntrySums | None, sub_model: Tensors, cut: TensorCut, weight: float
) -> WeightedEntrySums:
    """Add a device's sub-network to a round's sums, or raise UpdateError if its shapes do not fit `cut`."""
    tensors.require_addable(sub_model, cut_shapes(model, cut))
    sums = sums or WeightedEntrySums()
    total, weights = dict(sums.total), dict(sums.weight)
    for name, axes in cut.items():
        entries, entry_weights = np.zeros_like(model[name]), np.zeros(model[name].shape)
        entries[_numpy_index(axes)], entry_weights[_numpy_index(axes)] = sub_model[name], weight
        total[name] = exact_sums.add_to_sum(total.get(name), entries, weight)
        weights[name] = exact_sums.add_to_sum(weights.get(name), entry_weights)
    return WeightedEntrySums(total, weights)


def cut_shapes(model: Tensors, cut: TensorCut) -> dict[str, tensors.TensorSpec]:
    return {name: tensors.TensorSpec(_cut_shape(model[name], axes), model[name].dtype) for name, axes in cut.items()}


def average_entries(model: Tensors, sums: WeightedEntrySums | None) -> dict[str, np.ndarray]:
    """Return the model with the mean of each entry over the devices that sent the entry, if any."""
    averages = dict(model)
    for name, total in sums.total.items() if sums else ():
        weight = sums.weight[name].rounded_value()  # type: ignore[union-attr]
        mean = total.rounded_value() if total.is_counter else total.rounded_value() / np.where(weight > 0, weight, 1.0)
        averages[name] = np.where(weight > 0, mean, model[name]).astype(model[name].dtype)
    return averages


def recognise_cut(model: Tensors, sub_model: Tensors, candidates: Sequence[TensorCut]) -> TensorCut:
    """Return the candidate whose tensors have the names and shapes of `sub_model`, or raise UpdateError."""
    shapes = {name: array.shape for name, array in sub_model.items()}
    for cut in candidates:
        if shapes == {name: _cut_shape(model[name], axes) for name, axes in cut.items()}:
            return cut
    raise UpdateError("the names and shapes of the tensors fit no sub-network of this job")


def _numpy_index(axes: tuple[np.ndarray | None, np.ndarray | None]) -> Any:
    rows, columns = axes
    if rows is None:
        return ... if columns is None else (slice(None), columns)
    return rows if columns is None else np.ix_(rows, columns)


def _cut_shape(array: np.ndarray, axes: tuple[np.ndarray | None, np.ndarray | None]) -> tuple[int, ...]:
    sizes = [size if indices is None else len(indices) for size, indices in zip(array.shape, axes, strict=False)]
    return (*sizes, *array.shape[len(sizes) :])


def shrink_module(module: Any, start: Tensors, *, scaled: bool) -> Any:
    """Shrink the tensors of a module to their shapes in `start`, filled with zeros, and return the module.

    Args:
        module: Whole network.
        start: Tensors of the sub-network.
        scaled: Whether to multiply a narrower layer's outputs by full width / own width (HeteroFL's Scaler).
    """
    import torch
    from torch import nn

    cut_by_id: dict[int, Any] = {}  # id of a tensor of the whole network -> smaller tensor, which modules may share
    first_names: dict[int, str] = {}  # id of a tensor -> first name
    for name, value in module.state_dict(keep_vars=True).items():
        first_names.setdefault(id(value), name)
    for path, submodule in module.named_modules():
        own_tensors = dict(submodule.named_parameters(recurse=False)) | dict(submodule.named_buffers(recurse=False))
        names = {key: first_names[id(value)] for key, value in own_tensors.items() if id(value) in first_names}
        if odd := [name for name in names.values() if name not in start]:
            raise ModelError(f"the sub-network has no tensor {odd[0]!r}: run `fedquilt prepare` again")
        new_shapes = {
            attribute: start[name].shape
            for attribute, name in names.items()
            if start[name].shape != tuple(own_tensors[attribute].shape)
        }
        if not new_shapes:
            continue
        weight = getattr(submodule, "weight", None)
        for attribute, shape in new_shapes.items():
            zeros = torch.zeros(shape, dtype=own_tensors[attribute].dtype)
            zeros = nn.Parameter(zeros) if isinstance(own_tensors[attribute], nn.Parameter) else zeros
            setattr(submodule, attribute, cut_by_id.setdefault(id(own_tensors[attribute]), zeros))
        depthwise = _resize_layer(submodule, path)
        if scaled and not depthwise and weight is not None and weight.ndim > 1 and len(submodule.weight) < len(weight):
            factor = len(weight) / len(submodule.weight)
            submodule.register_forward_hook(lambda layer, inputs, output, factor=factor: output * factor)
    return module


def _resize_layer(layer: Any, path: str) -> bool:
    """Set the layer's sizes to those of its tensors. Return whether the layer is a depthwise convolution."""
    from torch import nn

    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
        return False
    if isinstance(layer, nn.modules.conv._ConvNd) and not layer.transposed:
        depthwise = layer.groups > 1
        layer.out_channels = len(layer.weight)
        layer.in_channels = layer.groups = len(layer.weight) if depthwise else layer.groups
        if not depthwise:
            layer.in_channels = layer.weight.shape[1]
        return depthwise
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        layer.num_features = len(layer.weight if layer.affine else layer.running_mean)
        return False
    raise ModelError(f"layer {path!r} is a {type(layer).__name__}, which cannot be cut by width: use another network")


def mask_classes(module: Any, present_classes: np.ndarray) -> Any:
    """Set the training scores of absent classes to 0, and return the module. `present_classes` is boolean."""
    import torch

    def zero_scores(network: Any, inputs: Any, scores: Any) -> Any:
        return scores * torch.from_numpy(present_classes).to(scores) if network.training else None

    module.register_forward_hook(zero_scores)
    return module


class BatchNormMoments:
    """Batch norm statistics over all examples that pass through a network in evaluation mode.

    Each mini-batch is normalised by its own statistics. The variance is that of all examples together, not the mean of
    the mini-batches' variances.

    Args:
        frozen_names: Tensors whose layers keep their running statistics.
    """

    def __init__(self, frozen_names: Collection[str] = ()) -> None:
        self._frozen_modules = {name.rpartition(".")[0] for name in frozen_names}  # modules
        self._sums: dict[str, tuple[float, np.ndarray, np.ndarray]] = {}  # by layer: n, mean, sum of squared distances

    def add_recording_hooks(self, module: Any) -> Any:
        for path, layer in batch_norms_with_statistics(module).items():
            if path not in self._frozen_modules:
                layer.register_forward_pre_hook(self._make_recording_hook(path))
        return module

    def statistics(self) -> dict[str, np.ndarray]:
        """Return the recorded statistics, float32, under the names of the network's tensors."""
        result: dict[str, np.ndarray] = {}
        for path, (count, mean, squared_sum) in self._sums.items():
            result[f"{path}.running_mean"] = mean.astype(np.float32)
            result[f"{path}.running_var"] = (squared_sum / count).astype(np.float32)
        return result

    def _make_recording_hook(self, path: str) -> Any:
        """Return a hook that normalises by the batch's own moments and records them, in evaluation mode."""
        import torch

        def record_input(layer: Any, inputs: tuple[Any, ...]) -> None:
            if layer.training:  # the engine probes the network's memory without real examples
                return
            x = inputs[0]
            axes = [axis for axis in range(x.ndim) if axis != 1]
            var, mean = torch.var_mean(x, dim=axes, correction=0)
            layer.running_mean, layer.running_var = mean, var
            count = x.numel() / x.shape[1]
            self._merge_batch_moments(path, count, *(moment.double().cpu().numpy() for moment in (mean, var * count)))

        return record_input

    def _merge_batch_moments(self, path: str, count: float, mean: np.ndarray, squared_sum: np.ndarray) -> None:
        previous = self._sums.get(path)
        if previous is None:
            self._sums[path] = (count, mean, squared_sum)
            return
        total, step = previous[0] + count, mean - previous[1]
        squared_sum = previous[2] + squared_sum + np.square(step) * previous[0] * count / total
        self._sums[path] = (total, previous[1] + step * count / total, squared_sum)


def batch_norms_with_statistics(module: Any) -> dict[str, Any]:
    from torch.nn.modules.batchnorm import _BatchNorm

    inner = module.named_modules()
    return {path: layer for path, layer in inner if isinstance(layer, _BatchNorm) and layer.running_mean is not None}

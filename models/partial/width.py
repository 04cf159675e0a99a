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

Places = Mapping[str, tuple[np.ndarray | None, np.ndarray | None]]
"""Tensor -> indices along its first and its second axis; None: the whole axis. A tensor not in it is left out."""


def select_by_tier(profile: Profile | None, values: Sequence[Any]) -> Any:
    """Select a value by memory tier: under 1 GB or unknown, 1, 2, 4 and 8 GB."""
    order = (peak_memory.BELOW, *peak_memory.SIZES)
    return values[order.index(peak_memory.tier_from_profile(profile)) if profile is not None else 0]


def leading_units(plan: MaskPlan, rate: float) -> dict[str, np.ndarray]:
    return {name: np.arange(unit_count(width, rate)) for name, width in plan.widths.items()}


def strongest_units(plan: MaskPlan, model: Tensors, rate: float) -> dict[str, np.ndarray]:
    """Return the ceil(rate * width) units of each group with the largest L1 norm, in order."""
    found = {}
    for group, width in plan.widths.items():
        norm = np.zeros(width)
        for name, follow in plan.follows.items():
            if follow.out == (group,) and model[name].ndim > 1:
                norm += np.abs(model[name].astype(np.float64)).reshape(width, -1).sum(axis=1)
        found[group] = np.sort(np.argsort(-norm, kind="stable")[: unit_count(width, rate)])
    return found


def unit_count(width: int, rate: float) -> int:
    """Return ceil(rate * width), at least 1, without binary rounding errors."""
    return max(1, math.ceil(round(rate * width, 9)))


def unit_indices_by_tensor(plan: MaskPlan, model: Tensors, kept: Mapping[str, np.ndarray]) -> Places:
    """Return the kept units' row and column indices in every tensor of the model, None for a whole axis."""
    widths = {**plan.pinned, **plan.widths}

    def along(groups: Sequence[str], repeat: int = 1) -> np.ndarray | None:
        if not groups or all(name not in kept or len(kept[name]) == widths[name] for name in groups):
            return None
        parts, first = [], 0
        for name in groups:
            parts.append(first + kept.get(name, np.arange(widths[name])))
            first += widths[name]
        units = np.concatenate(parts)
        return units if repeat == 1 else (units[:, None] * repeat + np.arange(repeat)).reshape(-1)

    found = {}
    for name in model:
        follow = plan.follows.get(name)
        found[name] = (along(follow.out), along(follow.into, follow.repeat)) if follow else (None, None)
    return found


def cut_tensors(model: Tensors, at: Places) -> dict[str, np.ndarray]:
    """Return copies of the entries at the places `at`, for the tensors named there alone."""
    return {
        name: np.ascontiguousarray(model[name][_numpy_index_of_place(place)]).reshape(_cut_shape(model[name], place))
        for name, place in at.items()
    }


@dataclass(frozen=True)
class WeightedEntrySums:
    """Sums of every entry over the devices that sent the entry: sum_k n_k x_k and sum_k n_k."""

    total: dict[str, exact_sums.ExactSum] = field(default_factory=dict)  # counters: the largest
    weight: dict[str, exact_sums.ExactSum] = field(default_factory=dict)


def add_entries(
    model: Tensors, so_far: WeightedEntrySums | None, sent: Tensors, at: Places, weight: float
) -> WeightedEntrySums:
    """Add a device's sub-network to a round's sums, in place."""
    tensors.require_addable(sent, cut_shapes(model, at))
    so_far = so_far or WeightedEntrySums()
    total, weights = dict(so_far.total), dict(so_far.weight)
    for name, place in at.items():
        share, many = np.zeros_like(model[name]), np.zeros(model[name].shape)
        share[_numpy_index_of_place(place)], many[_numpy_index_of_place(place)] = sent[name], weight
        total[name] = exact_sums.add_to_sum(total.get(name), share, weight)
        weights[name] = exact_sums.add_to_sum(weights.get(name), many)
    return WeightedEntrySums(total, weights)


def cut_shapes(model: Tensors, at: Places) -> dict[str, tensors.TensorSpec]:
    return {name: tensors.TensorSpec(_cut_shape(model[name], place), model[name].dtype) for name, place in at.items()}


def average_entries(model: Tensors, counted: WeightedEntrySums | None) -> dict[str, np.ndarray]:
    """Return the mean of every entry over its senders. Entries without senders stay."""
    found = dict(model)
    for name, total in counted.total.items() if counted else ():
        weight = counted.weight[name].rounded_value()  # type: ignore[union-attr]
        mean = total.rounded_value() if total.is_counter else total.rounded_value() / np.where(weight > 0, weight, 1.0)
        found[name] = np.where(weight > 0, mean, model[name]).astype(model[name].dtype)
    return found


def recognise_cut(model: Tensors, sent: Tensors, candidates: Sequence[Places]) -> Places:
    """Return the candidate whose tensors have the names and shapes of `sent`."""
    shapes = {name: array.shape for name, array in sent.items()}
    for at in candidates:
        if shapes == {name: _cut_shape(model[name], place) for name, place in at.items()}:
            return at
    raise UpdateError("the tensors have the names and shapes of none of the sub-models that this job sends")


def _numpy_index_of_place(place: tuple[np.ndarray | None, np.ndarray | None]) -> Any:
    rows, columns = place
    if rows is None:
        return ... if columns is None else (slice(None), columns)
    return rows if columns is None else np.ix_(rows, columns)


def _cut_shape(array: np.ndarray, place: tuple[np.ndarray | None, np.ndarray | None]) -> tuple[int, ...]:
    along = [size if some is None else len(some) for size, some in zip(array.shape, place, strict=False)]
    return (*along, *array.shape[len(along) :])


def shrink_module(module: Any, start: Tensors, *, scaled: bool) -> Any:
    """Replace tensors that are smaller in `start` by zeros of that shape, in place, and return the module.

    Args:
        module: Whole network.
        start: Tensors of the sub-network.
        scaled: Whether to multiply a narrower layer's outputs by full width / own width (HeteroFL's Scaler).
    """
    import torch
    from torch import nn

    made: dict[int, Any] = {}  # a tensor of the whole network -> its cut, which modules may share
    first: dict[int, str] = {}  # and its name
    for name, value in module.state_dict(keep_vars=True).items():
        first.setdefault(id(value), name)
    for path, each in module.named_modules():
        own = {**dict(each.named_parameters(recurse=False)), **dict(each.named_buffers(recurse=False))}
        names = {leaf: first[id(value)] for leaf, value in own.items() if id(value) in first}
        if odd := [name for name in names.values() if name not in start]:
            raise ModelError(f"the sub-model has no tensor {odd[0]!r}, the network does")
        news = {leaf: start[name].shape for leaf, name in names.items() if start[name].shape != tuple(own[leaf].shape)}
        if not news:
            continue
        weight = getattr(each, "weight", None)
        for leaf, shape in news.items():
            fresh = torch.zeros(shape, dtype=own[leaf].dtype)
            fresh = nn.Parameter(fresh) if isinstance(own[leaf], nn.Parameter) else fresh
            setattr(each, leaf, made.setdefault(id(own[leaf]), fresh))
        depthwise = _resize_layer(each, path)
        if scaled and not depthwise and weight is not None and weight.ndim > 1 and len(each.weight) < len(weight):
            factor = len(weight) / len(each.weight)
            each.register_forward_hook(lambda layer, inputs, output, factor=factor: output * factor)
    return module


def _resize_layer(layer: Any, path: str) -> bool:
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
    raise ModelError(f"layer {path!r} is a {type(layer).__name__}: it cannot be cut by width")


def mask_classes(module: Any, held: np.ndarray) -> Any:
    """Set the training scores of classes that are not `held` to 0, and return the module."""
    import torch

    def zero_scores(whole: Any, inputs: Any, scores: Any) -> Any:
        return scores * torch.from_numpy(held).to(scores) if whole.training else None

    module.register_forward_hook(zero_scores)
    return module


class BatchNormMoments:
    """Batch norm statistics over all examples that pass through a network in evaluation mode.

    Each mini-batch is normalised by its own statistics. The variance is that of all examples together, not the mean of
    the mini-batches' variances.

    Args:
        still: Tensors whose normalisations keep their running statistics.
    """

    def __init__(self, still: Collection[str] = ()) -> None:
        self._still = {name.rpartition(".")[0] for name in still}  # modules
        self._sums: dict[str, tuple[float, np.ndarray, np.ndarray]] = {}  # by layer: n, mean, sum of squared distances

    def add_recording_hooks(self, module: Any) -> Any:
        for path, layer in batch_norms_with_statistics(module).items():
            if path not in self._still:
                layer.register_forward_pre_hook(self._make_recording_hook(path))
        return module

    def statistics(self) -> dict[str, np.ndarray]:
        """Return the recorded statistics, float32, under the names of the network's tensors."""
        told: dict[str, np.ndarray] = {}
        for path, (count, mean, apart) in self._sums.items():
            told[f"{path}.running_mean"] = mean.astype(np.float32)
            told[f"{path}.running_var"] = (apart / count).astype(np.float32)
        return told

    def _make_recording_hook(self, path: str) -> Any:
        """Return a hook that, in evaluation mode, normalises with the batch's own moments and adds them to the sums."""
        import torch

        def record_input(layer: Any, inputs: tuple[Any, ...]) -> None:
            if layer.training:  # the engine's probe of how much memory the network takes, on no real examples
                return
            x = inputs[0]
            axes = [axis for axis in range(x.ndim) if axis != 1]
            var, mean = torch.var_mean(x, dim=axes, correction=0)
            layer.running_mean, layer.running_var = mean, var
            count = x.numel() / x.shape[1]
            self._merge_batch_moments(path, count, *(each.double().cpu().numpy() for each in (mean, var * count)))

        return record_input

    def _merge_batch_moments(self, path: str, count: float, mean: np.ndarray, apart: np.ndarray) -> None:
        before = self._sums.get(path)
        if before is None:
            self._sums[path] = (count, mean, apart)
            return
        total, step = before[0] + count, mean - before[1]
        apart = before[2] + apart + np.square(step) * before[0] * count / total
        self._sums[path] = (total, before[1] + step * count / total, apart)


def batch_norms_with_statistics(module: Any) -> dict[str, Any]:
    from torch.nn.modules.batchnorm import _BatchNorm

    inner = module.named_modules()
    return {path: each for path, each in inner if isinstance(each, _BatchNorm) and each.running_mean is not None}

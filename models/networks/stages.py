"""Division of a network into stages, cuts after the first stages, and classifiers between stages.

A stage is one or more consecutive blocks. Between two stages the network has one value, the input of the first layer of
the next stage. The order of layers comes from the trace of `fedquilt prepare` and is checked when the network runs.
torch is imported when a function that builds a network is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.formats.tensor_register import TensorRegister


@dataclass(frozen=True)
class Stage:
    entrance: str  # first layer, whose input is the stage's only input
    width: int  # channels of that input
    names: tuple[str, ...]  # tensors of the stage, running statistics included


def keep_first_stages(
    module: Any,
    start: Tensors,
    recorded_stages: Sequence[Stage],
    compute_scores: Callable[[list[Any], Any], Any],
    *,
    keep_later_stages: bool,
) -> Any:
    """Cut a module to its first stages, in place, and return the module.

    Args:
        module: Whole network.
        start: Tensors that remain.
        recorded_stages: Stages whose inputs are recorded, in order. Unless `keep_later_stages`, the forward pass ends
            at the last of these inputs.
        compute_scores: Function from the pooled inputs, (n, width) each, and the network's scores to scores. The
            network's scores are None unless `keep_later_stages`.
        keep_later_stages: Whether to keep the stages after the last of `recorded_stages`.
    """
    from torch import nn

    called: set[str] = set()
    kept_tensor_ids = {id(value) for name, value in module.state_dict(keep_vars=True).items() if name in start}
    stage_inputs: dict[int, Any] = {}
    inner = dict(module.named_modules())
    kept_paths = {
        path
        for path, submodule in inner.items()
        if any(id(value) in kept_tensor_ids for value in _own_tensors(submodule))
    }
    for index, stage in enumerate(recorded_stages):
        is_last = index == len(recorded_stages) - 1 and not keep_later_stages
        inner[stage.entrance].register_forward_pre_hook(_StageHook(stage_inputs, index, stage, is_last))
    for path, submodule in inner.items():
        if not path or not _own_tensors(submodule):
            continue
        if path in kept_paths:
            submodule.register_forward_pre_hook(lambda layer, inputs, path=path: called.add(path))
        elif not any(submodule.children()) and not any(path == stage.entrance for stage in recorded_stages):
            _replace_with_identity(module, path)
        else:  # only the layer's input, or that of a layer inside, is read
            for attribute in [
                *dict(submodule.named_parameters(recurse=False)),
                *dict(submodule.named_buffers(recurse=False)),
            ]:
                setattr(submodule, attribute, None)
    parents = {path: inner[path.rpartition(".")[0]] for path in kept_paths if path}
    expected_calls = {
        path for path, submodule in parents.items() if not isinstance(submodule, nn.MultiheadAttention)
    }  # attention reads its children's weights without calling them
    plain = _capture_original_forward(module)

    def forward(x: Any) -> Any:
        stage_inputs.clear()
        called.clear()
        scores = None
        with contextlib.suppress(_StageReached):
            scores = plain(x)
        pooled_inputs = [stage_inputs[index] for index in range(len(recorded_stages)) if index in stage_inputs]
        result = compute_scores(pooled_inputs, scores) if len(pooled_inputs) == len(recorded_stages) else None
        if result is None or called < expected_calls:
            missing = ", ".join(sorted(expected_calls - called)[:3]) or "a stage"
            raise ModelError(f"this network did not run {missing} in the recorded order: use another network")
        return result

    module.forward = forward
    return module


def add_exits(module: Any, stages: Sequence[Stage], classes: int) -> Any:
    """Add a classifier of each stage's pooled input as `module.exit`, in place, and return the module."""
    from torch import nn

    module.add_module("exit", nn.ModuleList(nn.Linear(stage.width, classes) for stage in stages))
    return module


def build_exits_network(module: Any, entrances: Sequence[Sequence[Any]], classes: int) -> Any:
    """Return the network with an exit at each stage. Scores are the mean over all classifiers."""
    import torch

    stages = [Stage(str(entrance), int(width), ()) for entrance, width in entrances]

    def mean_scores(pooled_inputs: list[Any], scores: Any) -> Any:
        return torch.stack([*(linear(x) for linear, x in zip(module.exit, pooled_inputs, strict=True)), scores]).mean(
            dim=0
        )

    return add_exits(
        keep_first_stages(module, module.state_dict(), stages, mean_scores, keep_later_stages=True), stages, classes
    )


def _own_tensors(module: Any) -> list[Any]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _capture_original_forward(module: Any) -> Callable[[Any], Any]:
    # A Sequential would also run modules that are added later, so copy its modules.
    from torch import nn

    return nn.Sequential(*module) if type(module) is nn.Sequential else module.forward


class _StageReached(Exception): ...


class _StageHook:
    def __init__(self, stage_inputs: dict[int, Any], index: int, stage: Stage, is_last: bool) -> None:
        self._stage_inputs, self._index, self._stage, self._is_last = stage_inputs, index, stage, is_last

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        pooled = _average_over_positions(layer, x)
        if pooled.shape[1] != self._stage.width:
            raise ModelError(
                f"layer {self._stage.entrance!r} read {pooled.shape[1]} channels instead of {self._stage.width}: use "
                "another network"
            )
        self._stage_inputs[self._index] = pooled
        if self._is_last:
            raise _StageReached


def _average_over_positions(layer: Any, x: Any) -> Any:
    from torch import nn

    # Subclasses are excluded, because torchvision's LayerNorm2d has its channels first.
    is_channels_last = type(layer) in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
    axes = range(1, x.ndim - 1) if is_channels_last else range(2, x.ndim)
    return x.mean(dim=tuple(axes)) if axes else x


def _replace_with_identity(module: Any, path: str) -> None:
    from torch import nn

    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, nn.Identity())


Shapes = Mapping[str, tuple[int, ...]]
"""Layer -> the shape of its weight, of two axes or more."""


@dataclass(frozen=True)
class StagedNetwork:
    stages: tuple[Stage, ...]
    head: str
    head_names: tuple[str, ...]
    features: int  # inputs of the head
    classes: int


def split_stages(model: Tensors, count: int, register: TensorRegister) -> StagedNetwork:
    """Split the network into `count` stages, or as many as it has blocks.

    Layers form a block if their names are equal up to the first number ("layer1.0"). A layer without a number is a
    block ("conv1"). A block without weights joins the previous block.
    """
    parameters_by_layer, head = register.parameters_by_layer(), register.find_classifier()
    if head is None:
        raise ModelError("this network cannot be cut by depth, as its last layer is not linear: use another network")
    register.require_plain_weight(head)
    blocks: dict[str, list[str]] = {}
    for layer in parameters_by_layer:
        if layer != head:
            blocks.setdefault(_block_name(_nearest_called_ancestor(register, layer)), []).append(layer)
    names = register.weights_by_module()
    shapes = {layer: model[names[layer]].shape for layer in parameters_by_layer if names.get(layer) in model}
    weights = {layer: shape for layer, shape in shapes.items() if len(shape) > 1}
    weighted_blocks = _merge_blocks_without_weights(weights, list(blocks.values()))
    if not weighted_blocks:
        raise ModelError("this network cannot be cut by depth, as it has only a classifier: use another network")
    parts = np.array_split(np.arange(len(weighted_blocks)), min(count, len(weighted_blocks)))
    members = [[layer for i in part for layer in weighted_blocks[i]] for part in parts]
    stages = tuple(
        Stage(
            _entrance_layer(register, stage_layers),
            _input_channels(weights, stage_layers),
            _tensors_of_layers(register, stage_layers),
        )
        for stage_layers in members
    )
    if len(stages) > 1:
        _require_separate_tensors(register, [*members, [head]])
    classes, features = weights[head]
    return StagedNetwork(stages, head, _tensors_of_layers(register, [head]), int(features), int(classes))


def _nearest_called_ancestor(register: TensorRegister, layer: str) -> str:
    path = layer
    while path and path not in register.calls:
        path = path.rpartition(".")[0]
    return path or layer


def _block_name(layer: str) -> str:
    parts = layer.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _merge_blocks_without_weights(weights: Shapes, blocks: Sequence[list[str]]) -> list[list[str]]:
    # A block without weights joins the previous block with weights. Earlier ones join the first block with weights.
    merged: list[list[str]] = []
    front: list[str] = []
    for block in blocks:
        if any(layer in weights for layer in block):
            merged.append([*block, *front])
            front = []
        else:
            (merged[-1] if merged else front).extend(block)
    return merged


def _entrance_layer(register: TensorRegister, layers: Sequence[str]) -> str:
    types = {entry.module: entry.type for entry in register.tensors}
    return next((layer for layer in layers if layer in register.calls and "." not in types.get(layer, ".")), layers[0])


def _input_channels(weights: Shapes, layers: Sequence[str]) -> int:
    # A depthwise convolution has as many input channels as outputs.
    shape = next(weights[layer] for layer in layers if layer in weights)
    return int(shape[1] if len(shape) == 2 or shape[1] > 1 else shape[0])


def _tensors_of_layers(register: TensorRegister, layers: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in register.tensors if entry.layer in layers))


def _require_separate_tensors(register: TensorRegister, members: Sequence[Sequence[str]]) -> None:
    stage = {_block_name(layer): number for number, layers in enumerate(members) for layer in layers}
    for entry in register.tensors:
        for alias in entry.aliases:
            if stage.get(_block_name(alias.rpartition(".")[0]), -1) != stage.get(_block_name(entry.layer)):
                raise ModelError(
                    f"this network cannot be cut by depth, as tensor {entry.name!r} is also {alias!r} in another "
                    "stage: give each layer its own tensor, or use another method"
                )

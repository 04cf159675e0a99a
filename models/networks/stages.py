"""Division of a network into stages, networks cut to their first stages, and classifiers at the inputs of stages.

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
    names: tuple[str, ...]  # its tensors, running statistics too


def keep_first_stages(
    module: Any, start: Tensors, looks: Sequence[Stage], answer: Callable[[list[Any], Any], Any], *, whole: bool
) -> Any:
    """Cut a module to its first stages, in place. `answer` computes scores from stage inputs.

    Args:
        module: Whole network.
        start: Tensors that remain.
        looks: Stages whose inputs are recorded, in order. Unless `whole`, the forward pass ends at the last of these
        inputs.
        answer: Function from the pooled inputs, (n, width) each, and the network's scores, None unless `whole`, to
        scores.
        whole: Whether to keep the stages after the last of `looks`.
    """
    from torch import nn

    called: set[str] = set()
    held = {id(value) for name, value in module.state_dict(keep_vars=True).items() if name in start}
    heard: dict[int, Any] = {}
    inner = dict(module.named_modules())
    kept = {path for path, each in inner.items() if any(id(value) in held for value in _own_tensors(each))}
    for index, stage in enumerate(looks):
        last = index == len(looks) - 1 and not whole
        inner[stage.entrance].register_forward_pre_hook(_StageHook(heard, index, stage, last))
    for path, each in inner.items():
        if not path or not _own_tensors(each):
            continue
        if path in kept:
            each.register_forward_pre_hook(lambda layer, inputs, path=path: called.add(path))
        elif not any(each.children()) and not any(path == stage.entrance for stage in looks):
            _replace_with_identity(module, path)
        else:  # only an input is read, of the layer or of one in it, and it is never run to its end
            for leaf in [*dict(each.named_parameters(recurse=False)), *dict(each.named_buffers(recurse=False))]:
                setattr(each, leaf, None)
    within = {path: inner[path.rpartition(".")[0]] for path in kept if path}
    used = {
        path for path, each in within.items() if not isinstance(each, nn.MultiheadAttention)
    }  # reads, calls nothing
    plain = _capture_original_forward(module)

    def forward(x: Any) -> Any:
        heard.clear()
        called.clear()
        scores = None
        with contextlib.suppress(_StageReached):
            scores = plain(x)
        told = [heard[index] for index in range(len(looks)) if index in heard]
        result = answer(told, scores) if len(told) == len(looks) else None
        if result is None or called < used:
            late = ", ".join(sorted(used - called)[:3]) or "a stage"
            raise ModelError(f"the names of this network's layers do not tell their order ({late}): take another one")
        return result

    module.forward = forward
    return module


def add_exits(module: Any, looks: Sequence[Stage], classes: int) -> Any:
    from torch import nn

    module.add_module("exit", nn.ModuleList(nn.Linear(each.width, classes) for each in looks))
    return module


def build_exits_network(module: Any, looks: Sequence[Sequence[Any]], classes: int) -> Any:
    """Return the network with an exit at each stage. Scores are the mean over all classifiers."""
    import torch

    found = [Stage(str(entrance), int(width), ()) for entrance, width in looks]

    def mean_scores(told: list[Any], scores: Any) -> Any:
        return torch.stack([*(linear(x) for linear, x in zip(module.exit, told, strict=True)), scores]).mean(dim=0)

    return add_exits(keep_first_stages(module, module.state_dict(), found, mean_scores, whole=True), found, classes)


def _own_tensors(module: Any) -> list[Any]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _capture_original_forward(module: Any) -> Callable[[Any], Any]:
    # A Sequential would also run modules that are added later, so copy its modules.
    from torch import nn

    return nn.Sequential(*module) if type(module) is nn.Sequential else module.forward


class _StageReached(Exception): ...


class _StageHook:
    def __init__(self, heard: dict[int, Any], index: int, stage: Stage, last: bool) -> None:
        self._heard, self._index, self._stage, self._last = heard, index, stage, last

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        pooled = _average_over_positions(layer, x)
        if pooled.shape[1] != self._stage.width:
            raise ModelError(
                f"layer {self._stage.entrance!r} hears {pooled.shape[1]} channels, {self._stage.width} were expected"
            )
        self._heard[self._index] = pooled
        if self._last:
            raise _StageReached


def _average_over_positions(layer: Any, x: Any) -> Any:
    from torch import nn

    # exactly these: torchvision's LayerNorm2d, a kind of LayerNorm, has its channels first
    last = type(layer) in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
    among = range(1, x.ndim - 1) if last else range(2, x.ndim)
    return x.mean(dim=tuple(among)) if among else x


def _replace_with_identity(module: Any, path: str) -> None:
    from torch import nn

    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Identity())


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

    A block is given by the first number in its layers' names ("layer1.0"), or is a layer without a number ("conv1"). A
    block without weights joins its neighbour.
    """
    found, head = register.parameters_by_layer(), register.find_classifier()
    if head is None:
        raise ModelError("this network has no last linear layer: it cannot be cut by depth")
    register.require_plain_weight(head)
    blocks: dict[str, list[str]] = {}
    for layer in found:
        if layer != head:
            blocks.setdefault(_block_name(_nearest_called_ancestor(register, layer)), []).append(layer)
    named = register.weights_by_module()
    shapes = {layer: model[named[layer]].shape for layer in found if named.get(layer) in model}
    weights = {layer: shape for layer, shape in shapes.items() if len(shape) > 1}
    whole = _merge_blocks_without_weights(weights, list(blocks.values()))
    if not whole:
        raise ModelError("this network has nothing but the layer that tells classes: it cannot be cut by depth")
    parts = np.array_split(np.arange(len(whole)), min(count, len(whole)))
    members = [[layer for i in part for layer in whole[i]] for part in parts]
    stages = tuple(
        Stage(_entrance_layer(register, some), _input_channels(weights, some), _tensors_of_layers(register, some))
        for some in members
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
    # A block without weights joins the block before it. Those at the front join the first block.
    found: list[list[str]] = []
    front: list[str] = []
    for block in blocks:
        if any(layer in weights for layer in block):
            found.append([*block, *front])
            front = []
        else:
            (found[-1] if found else front).extend(block)
    return found


def _entrance_layer(register: TensorRegister, some: Sequence[str]) -> str:
    types = {entry.module: entry.type for entry in register.tensors}
    return next((layer for layer in some if layer in register.calls and "." not in types.get(layer, ".")), some[0])


def _input_channels(weights: Shapes, some: Sequence[str]) -> int:
    # A depthwise convolution has as many input channels as outputs.
    shape = next(weights[layer] for layer in some if layer in weights)
    return int(shape[1] if len(shape) == 2 or shape[1] > 1 else shape[0])


def _tensors_of_layers(register: TensorRegister, some: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in register.tensors if entry.layer in some))


def _require_separate_tensors(register: TensorRegister, members: Sequence[Sequence[str]]) -> None:
    stage = {_block_name(layer): number for number, some in enumerate(members) for layer in some}
    for entry in register.tensors:
        for alias in entry.aliases:
            if stage.get(_block_name(alias.rpartition(".")[0]), -1) != stage.get(_block_name(entry.layer)):
                raise ModelError(
                    f"the tensor {entry.name!r} is {alias!r} as well, in another part of the network: a network whose "
                    "parts share tensors cannot be cut by depth, so give each its own or take another method"
                )

"""Division of a network into stages, from the names of its tensors.

A stage is one or more consecutive blocks. Between two stages the network has one value, the input of the first layer of
the next stage. The order of layers comes from the trace of `fedquilt prepare` and is checked when the network runs.
Requires numpy only. `models.networks.stages` builds the networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.formats.tensor_register import TensorRegister
from fedquilt.models.networks.stages import Stage

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

    Raises:
        ModelError: If there is no plain last linear layer or nothing before it, or if two stages share a tensor.
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
    """Return the first called layer of a torch.nn type, where a stage's input can be read."""
    types = {entry.module: entry.type for entry in register.tensors}
    return next((layer for layer in some if layer in register.calls and "." not in types.get(layer, ".")), some[0])


def _input_channels(weights: Shapes, some: Sequence[str]) -> int:
    # A depthwise convolution has as many input channels as outputs.
    shape = next(weights[layer] for layer in some if layer in weights)
    return int(shape[1] if len(shape) == 2 or shape[1] > 1 else shape[0])


def _tensors_of_layers(register: TensorRegister, some: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all tensors of these layers."""
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

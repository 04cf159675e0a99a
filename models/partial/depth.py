"""Sub-models by depth: the stages of a network, told from its tensors' names, and its first stages alone.

A stage is one or more consecutive blocks. Between two of them the network has one value, the input of the next one's
first layer. Which layer comes first the trace of `fedquilt prepare` tells; it is checked when the network runs.
numpy only; torch is imported by `first`, `add_exits` and `exits` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedquilt import layers
from fedquilt.core import ModelError, Tensors


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks."""

    entrance: str  # its first layer, whose input is all that the stage hears
    width: int  # channels of that input
    names: tuple[str, ...]  # its tensors, running statistics too


@dataclass(frozen=True)
class Body:
    """A network in stages, and the layer behind them that tells classes."""

    stages: tuple[Stage, ...]
    head: str
    head_names: tuple[str, ...]
    features: int  # that the head hears
    classes: int


def body(model: Tensors, count: int, calls: Sequence[str] = ()) -> Body:
    """The network in so many stages, or as many as it has blocks.

    A block is what the first number in its layers' names tells ("layer1.0"), or a layer without one ("conv1"). A block
    without weights to hear anything with, a last normalisation or the embedding of places, goes with its neighbour.

    Raises:
        ModelError: it has no last linear layer, or nothing before it.
    """
    found, head = layers.layers(model, calls), layers.head(model, calls)
    if head is None:
        raise ModelError("this network has no last linear layer: it cannot be cut by depth")
    blocks: dict[str, list[str]] = {}
    for layer in found:
        if layer != head:
            blocks.setdefault(_block(layer), []).append(layer)
    whole = _joined(model, list(blocks.values()))
    if not whole:
        raise ModelError("this network has nothing but the layer that tells classes: it cannot be cut by depth")
    parts = np.array_split(np.arange(len(whole)), min(count, len(whole)))
    members = [[layer for i in part for layer in whole[i]] for part in parts]
    stages = tuple(Stage(some[0], _heard(model, some), _all(model, found, some)) for some in members)
    classes, features = model[f"{head}.weight"].shape
    return Body(stages, head, _all(model, found, [head]), int(features), int(classes))


def _block(layer: str) -> str:
    parts = layer.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _joined(model: Tensors, blocks: Sequence[list[str]]) -> list[list[str]]:
    """Blocks with weights; one without goes behind the one before it, those at the front behind the first."""
    found: list[list[str]] = []
    front: list[str] = []
    for block in blocks:
        if _weights(model, block):
            found.append([*block, *front])
            front = []
        else:
            (found[-1] if found else front).extend(block)
    return found


def _weights(model: Tensors, some: Sequence[str]) -> list[tuple[int, ...]]:
    """Shapes of the weights that these layers hear something with: those of two dimensions or more."""
    shapes = [model[f"{layer}.weight"].shape for layer in some if f"{layer}.weight" in model]
    return [shape for shape in shapes if len(shape) > 1]


def _heard(model: Tensors, some: Sequence[str]) -> int:
    """Channels that the first of these layers hears; a depthwise convolution has as many as it gives.

    A first layer of single numbers, a gain say, hears what the first one with weights does.
    """
    shape = _weights(model, some)[0]
    return int(shape[1] if len(shape) == 2 or shape[1] > 1 else shape[0])


def _all(model: Tensors, found: dict[str, tuple[str, ...]], some: Sequence[str]) -> tuple[str, ...]:
    modules = {name.rpartition(".")[0] for layer in some for name in found[layer]}
    return tuple(sorted(name for name in model if name.rpartition(".")[0] in modules))


# -- in torch -------------------------------------------------------------------------------------


def first(
    module: Any, start: Tensors, looks: Sequence[Stage], answer: Callable[[list[Any], Any], Any], *, whole: bool
) -> Any:
    """The network with the tensors of `start` only; what is said is made of what its stages hear.

    Args:
        looks: the stages whose inputs are looked at, in order. Unless `whole`, the last of them and what
            follows is not there: its input is where the forward pass ends.
        answer: (what the looked-at stages hear, pooled to (n, width) each; the scores (n, classes), None
            unless `whole`) -> the module's scores.

    Raises:
        ModelError: names do not tell the order in which the network's layers are used.
    """
    called: set[str] = set()
    kept = {name.rpartition(".")[0] for name in start}
    heard: dict[int, Any] = {}
    inner = dict(module.named_modules())
    for index, stage in enumerate(looks):
        last = index == len(looks) - 1 and not whole
        inner[stage.entrance].register_forward_pre_hook(_Look(heard, index, stage, last))
    for path, each in inner.items():
        if not path or not [*each.parameters(recurse=False), *each.buffers(recurse=False)]:
            continue
        if path in kept:
            each.register_forward_pre_hook(lambda layer, inputs, path=path: called.add(path))
        elif not any(path == stage.entrance for stage in looks):
            _replace(module, path)
        else:  # its input is looked at, it is never run
            for leaf in [*dict(each.named_parameters(recurse=False)), *dict(each.named_buffers(recurse=False))]:
                setattr(each, leaf, None)
    used, plain = {path for path in kept if path in inner and path}, _forward(module)

    def forward(x: Any) -> Any:
        heard.clear()
        called.clear()
        scores = None
        with contextlib.suppress(_Reached):
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
    """The network with a linear layer `exit.<i>` for what each stage hears."""
    from torch import nn

    module.add_module("exit", nn.ModuleList(nn.Linear(each.width, classes) for each in looks))
    return module


def exits(of: Mapping[str, Any], looks: Sequence[Sequence[Any]], classes: int) -> Any:
    """A network of the zoo, and a classifier before each of these stages: it says the mean of what all of them say.

    Args:
        of: the network's own table.
        looks: of each stage its first layer and how many channels that hears.
    """
    import torch

    from fedquilt.models.networks import registry

    module = registry.build(of)
    found = [Stage(str(entrance), int(width), ()) for entrance, width in looks]

    def answer(told: list[Any], scores: Any) -> Any:
        return torch.stack([*(linear(x) for linear, x in zip(module.exit, told, strict=True)), scores]).mean(dim=0)

    return add_exits(first(module, module.state_dict(), found, answer, whole=True), found, classes)


def _forward(module: Any) -> Callable[[Any], Any]:
    """The forward pass as it is now: a sequence's would take what is added to it later for further layers."""
    from torch import nn

    return nn.Sequential(*module) if type(module) is nn.Sequential else module.forward


class _Reached(Exception):
    """The forward pass is where it ends."""


class _Look:
    """A hook before a stage's first layer."""

    def __init__(self, heard: dict[int, Any], index: int, stage: Stage, last: bool) -> None:
        self._heard, self._index, self._stage, self._last = heard, index, stage, last

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        pooled = _pooled(layer, x)
        if pooled.shape[1] != self._stage.width:
            raise ModelError(
                f"layer {self._stage.entrance!r} hears {pooled.shape[1]} channels, {self._stage.width} were expected"
            )
        self._heard[self._index] = pooled
        if self._last:
            raise _Reached


def _pooled(layer: Any, x: Any) -> Any:
    """What a layer hears, (n, channels, ...) or (n, ..., channels), as means (n, channels)."""
    from torch import nn

    # exactly these: torchvision's LayerNorm2d, a kind of LayerNorm, has its channels first
    last = type(layer) in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
    among = range(1, x.ndim - 1) if last else range(2, x.ndim)
    return x.mean(dim=tuple(among)) if among else x


def _replace(module: Any, path: str) -> None:
    from torch import nn

    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Identity())

"""Arithmetic, memory traffic and launches of a network's layers, and of training or running some of them.

`fedquilt prepare` traces the layers into the bundle's facts ("layers": `models.networks.layer_costs`), for an `mlp`
without torch. Bundles from before have a forward pass's FLOPs alone: one layer stands for the whole network then.
Plain numbers: no torch, no numpy arrays but for their shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt.core import Tensors, Work, shapes
from fedquilt.core.messages import ADDED

EVALUATED: Final = 64  # examples that an engine evaluates at once
STEP_LAUNCHES: Final = 12  # of a mini-batch beside its layers: taking its examples, loss, and their backward pass
MOVE_LAUNCHES: Final = {"sgd": 2, "adam": 9}  # of an optimizer's step for one tensor
MOVE_PASSES: Final = {"sgd": 3, "adam": 8}  # times a tensor's bytes that an optimizer reads and writes in a step
ADAPTER_LAUNCHES: Final = 2  # of one matrix of an adapter: the product, and scaling or adding it


class Layer(NamedTuple):
    """Forward pass of one example through what one module does itself, without the modules within it."""

    path: str  # of the module
    flops: float  # of products with its weights
    free_flops: float  # of products of activations with each other, as in attention
    bytes: float  # activations read and written
    launches: int  # operations, whatever the number of examples


class Pass(NamedTuple):
    """Cost of one example, but for the launches, which are of a mini-batch."""

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        """Both passes, the second so many times."""
        return Pass(*(a + times * b for a, b in zip(self, other, strict=True)))


def parse(meta: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Layers of a bundle's facts, in the order of their first use."""
    told = tuple(Layer(str(path), *numbers) for path, *numbers in meta.get("layers", ()))
    return told or (Layer("", float(meta.get("flops", 0)), 0.0, 0.0, 0),)


def owners(layers: Sequence[Layer], names: Iterable[str]) -> dict[str, str]:
    """Tensor -> path of the layer that uses it: the nearest module around it. The rest belong to the first layer."""
    paths, first = {layer.path for layer in layers}, layers[0].path if layers else ""
    found = {}
    for name in names:
        path = name
        while path and path not in paths:
            path = path.rpartition(".")[0]
        found[name] = path if path in paths else first
    return found


def forward(layers: Iterable[Layer]) -> Pass:
    """A forward pass of one example."""
    total = Pass()
    for layer in layers:
        total = total.plus(Pass(layer.flops + layer.free_flops, layer.bytes, layer.launches))
    return total


def training(layers: Sequence[Layer], moved: Iterable[str]) -> Pass:
    """A forward pass of one example, and the backward pass down to the first layer that is trained.

    A trained layer costs its forward pass once more for its weights' gradients, and every layer behind a trained one
    once more for its inputs'. Layers before the first trained one cost nothing backward.

    Args:
        layers: in the order of their use.
        moved: names of the trained tensors.
    """
    trained = set(owners(layers, moved).values())
    total = forward(layers)
    behind = len(layers) == 1 and not layers[0].launches  # a whole network in one: most of it is behind its beginning
    for layer in layers:
        own = layer.path in trained
        times = own + behind if layer.flops else float(own or behind)
        flops = times * layer.flops + 2 * layer.free_flops * (own or behind)
        total = total.plus(Pass(flops, times * layer.bytes, times * layer.launches))
        behind = behind or own
    return total


def split(layers: Sequence[Layer], moved: Iterable[str]) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Layers before the first one with a trained tensor, and the others."""
    trained = set(owners(layers, moved).values())
    first = next((place for place, layer in enumerate(layers) if layer.path in trained), len(layers))
    return tuple(layers[:first]), tuple(layers[first:])


def cut(layers: Sequence[Layer], whole: Tensors, part: Tensors) -> tuple[Layer, ...]:
    """Layers of a narrower or shallower part of a network: by the share of each layer's weights that is left.

    A layer without tensors has the share of outputs of the one before it.
    """
    names: dict[str, list[str]] = {}
    for name, path in owners(layers, whole).items():
        names.setdefault(path, []).append(name)
    found, rows = [], 1.0
    for layer in layers:
        own = [name for name in names.get(layer.path, ()) if whole[name].ndim]
        if own:
            widest = max(own, key=lambda name: whole[name].size)
            rows = len(part[widest]) / len(whole[widest]) if widest in part else 0.0
            share = part[widest].size / whole[widest].size if widest in part else 0.0
        else:
            share = rows
        if share:
            launches = layer.launches
            found.append(Layer(layer.path, layer.flops * share, layer.free_flops * rows, layer.bytes * rows, launches))
    return tuple(found)


def beside(layers: Sequence[Layer], backbone: Tensors, added: Tensors) -> tuple[Layer, ...]:
    """Layers with low-rank adapters beside them: each added matrix is a layer, applied as often as its neighbour.

    Added tensors are named after the layer that they lie beside; others, such as gates, cost nothing of their own.
    """
    matrices = {name: array for name, array in added.items() if array.ndim == 2 and name not in backbone}
    within = owners(layers, backbone) if layers else {}
    found: list[Layer] = []
    for layer in layers:
        found.append(layer)
        weights = [name for name, path in within.items() if path == layer.path and backbone[name].ndim > 1]
        inside = sum(backbone[name].size for name in weights)
        for name, path in owners(layers, matrices).items():
            if path == layer.path and inside:
                flops = layer.flops * matrices[name].size / inside
                found.append(Layer(name, flops, 0.0, layer.bytes / 2, ADAPTER_LAUNCHES))
    return tuple(found)


def kind(layers: Sequence[Layer], convolutions: Iterable[str]) -> str:
    """Which of an engine's workloads a network is: "conv" if most of its arithmetic is convolutions, else "dense".

    Args:
        layers: Layers of the network.
        convolutions: Paths of its convolutions.
    """
    deep = set(owners(layers, convolutions).values())
    whole = sum(layer.flops + layer.free_flops for layer in layers)
    within = sum(layer.flops for layer in layers if layer.path in deep)
    return "conv" if whole and within > whole / 2 else "dense"


def share(layers: Sequence[Layer], whole: Tensors, part: Tensors) -> tuple[float, float]:
    """Share of a forward pass's arithmetic, and of its activations, that a part of a network takes."""
    own, every = forward(cut(layers, whole, part)), forward(layers)
    return (own.flops / every.flops if every.flops else 1.0, own.bytes / every.bytes if every.bytes else 1.0)


def work(each: Pass, params: Mapping[str, Any], moved_bytes: Mapping[str, int], weights_bytes: int) -> Work:
    """Work of a training: passes over the device's own examples in mini-batches, with the optimizer's steps.

    Args:
        each: one example's training.
        params: of the method: epochs, batch, optimizer, momentum, weight_decay, clip.
        moved_bytes: size of each trained tensor.
        weights_bytes: of the whole network, read in the forward and in the backward pass.
    """
    epochs, optimizer = int(params.get("epochs", 1)), str(params.get("optimizer", "sgd"))
    more = sum(bool(params.get(key)) for key in ("momentum", "weight_decay")) + 2 * bool(params.get("clip"))
    launches = each.launches + STEP_LAUNCHES + (MOVE_LAUNCHES[optimizer] + more) * len(moved_bytes)
    traffic = 2 * weights_bytes + (MOVE_PASSES[optimizer] + more + 1) * sum(moved_bytes.values())
    return Work(
        flops_per_example=epochs * each.flops,
        bytes_per_example=epochs * each.bytes,
        launches_per_batch=epochs * launches,
        bytes_per_batch=epochs * traffic,
        batch=int(params.get("batch", 0)),
    )


def looked(each: Pass, weights_bytes: int, share: float = 1.0, batch: int = EVALUATED) -> Work:
    """Work of running a network on a share of as many examples as the device trains on, without training."""
    return Work(
        flops_per_example=share * each.flops,
        bytes_per_example=share * each.bytes,
        launches_per_batch=share * (each.launches + STEP_LAUNCHES) * batch / EVALUATED,
        bytes_per_batch=share * weights_bytes * batch / EVALUATED,
        batch=batch,
    )


def repeated(work: Work, times: float) -> Work:
    """The work so many times, in one task."""
    return msgspec.structs.replace(work, **{name: times * getattr(work, name) for name in ADDED})


def learned(model: Tensors, moved: Collection[str]) -> dict[str, int]:
    """Size in bytes of each tensor of `moved` that gradients move."""
    told = shapes(model)
    return {name: told[name].nbytes for name in moved if name in told and told[name].dtype.kind == "f"}

"""Standardisation of inputs and rescaling of predictions as nodes of an exported ONNX graph. Requires onnx.

An exported graph takes numbers as they are stored, and returns predictions in the units of the targets. The metadata
keep only what remains to be done outside of the graph, such as the size of images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from fedquilt.data import inputs


class InputScale(NamedTuple):
    """Float32 mean and standard deviation, which broadcast over examples (n, ...)."""

    mean: np.ndarray
    std: np.ndarray

    def to_table(self) -> dict[str, list[float]]:
        return {"mean": self.mean.ravel().tolist(), "std": self.std.ravel().tolist()}


class ScaledValue(NamedTuple):
    nodes: list[onnx.NodeProto]
    constants: list[onnx.TensorProto]


def input_scale(table: Mapping[str, Any], shape: Sequence[int]) -> InputScale | None:
    """Return the scale of an [input] table for network inputs (n, *shape), or None if the scale changes nothing."""
    spec = inputs.parse_input_table({key: value for key, value in table.items() if key != "standardise"})
    arrays = [np.array(values, np.float32) for values in (spec.mean, spec.std)]
    if isinstance(spec, inputs.ImageInput):
        mean, std = (array.reshape(-1, 1, 1) for array in arrays)
    else:
        mean, std = (_repeat_features(array, shape[-1]) for array in arrays)
    return InputScale(mean, std) if mean.any() or (std != 1).any() else None


def _repeat_features(values: np.ndarray, size: int) -> np.ndarray:
    # A layered network takes the steps of a series as one row.
    return values if len(values) == 1 else np.tile(values, size // len(values))


def outside_input(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an [input] table that stays outside of the graph."""
    return {key: value for key, value in table.items() if key in ("channels", "size")}


def standardise_value(value: str, scale: InputScale, result: str) -> ScaledValue:
    """Return nodes that compute (value - mean) / std."""
    names = f"{result}/mean", f"{result}/std"
    nodes = [
        helper.make_node("Sub", [value, names[0]], [f"{result}/centred"]),
        helper.make_node("Div", [f"{result}/centred", names[1]], [result]),
    ]
    return ScaledValue(nodes, _make_constants(names, scale))


def _make_constants(names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(array, name) for name, array in zip(names, arrays, strict=True)]


def standardise_inputs(model: onnx.ModelProto, scale: InputScale) -> None:
    graph = model.graph
    source = graph.input[0].name
    result = f"{source}/standardised"
    rename_value(graph.node, source, result)
    value = standardise_value(source, scale, result)
    nodes = [*value.nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(value.constants)


def rescale_outputs(model: onnx.ModelProto, mean: Sequence[float], std: Sequence[float]) -> None:
    """Add nodes that compute `output * std + mean`, with a mean and std for each output."""
    graph = model.graph
    result = graph.output[0].name
    source = f"{result}/standardised"
    rename_value(graph.node, result, source)
    names = f"{result}/std", f"{result}/mean"
    graph.node.append(helper.make_node("Mul", [source, names[0]], [f"{result}/scaled"]))
    graph.node.append(helper.make_node("Add", [f"{result}/scaled", names[1]], [result]))
    graph.initializer.extend(_make_constants(names, [np.array(std, np.float32), np.array(mean, np.float32)]))


def rename_value(nodes: Sequence[onnx.NodeProto], old: str, new: str) -> None:
    """Rename a value in all nodes and their subgraphs, in place."""
    for node in _walk_nodes(nodes):
        for values in (node.input, node.output):
            values[:] = [new if value == old else value for value in values]


def _walk_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _walk_nodes(attribute.g.node)

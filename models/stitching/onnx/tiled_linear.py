"""Division of graphs whose weights exceed a device's memory.

A large linear layer (the first of VGG-16's classifier has 411 MB) reads each weight once per micro-batch, so that a
tile of its rows can be loaded, used and dropped at a time. A graph can be cut around the layer if its output is the
only value that is used afterwards. A chain of layers (the last block of ResNet-50 has 60 MB) is also cut at such
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT_BYTES = 4

Shapes = Mapping[str, Sequence[int]]  # value -> shape with batch size 0


@dataclass(frozen=True)
class LinearNode:
    """Linear layer at node `index`: y = x W' + b, with x (n, inputs) and W (outputs, inputs)."""

    index: int
    x: str
    y: str
    weights: onnx.TensorProto
    transposed: bool  # the tensor is W', not W
    bias: onnx.TensorProto | None

    @property
    def inputs(self) -> int:
        return int(self.weights.dims[0 if self.transposed else 1])

    @property
    def outputs(self) -> int:
        return int(self.weights.dims[1 if self.transposed else 0])

    @property
    def row_bytes(self) -> int:
        return FLOAT_BYTES * (self.inputs + (self.bias is not None))


def split_into_stages(model: onnx.ModelProto, tile_bytes: int) -> list[list[onnx.ModelProto]]:
    """Split a model from "x" to "y" into stages of models, each also from "x" to "y".

    Stages run in order. The models of one stage take the same input, and their outputs are concatenated along axis 1. A
    tile holds at most `tile_bytes` of weights, or one row. Other operations are cut where only one value is used
    afterwards, into stages of at most `tile_bytes` if there are such values.
    """
    graph, shapes = model.graph, _shapes_known_behind_batch(model)
    stages: list[list[onnx.ModelProto]] = []
    first, value = 0, graph.input[0]

    def append_stages(end: int, output: onnx.ValueInfoProto) -> None:
        nonlocal first, value
        for cut, name in _iterate_stage_cuts(model, first, end, tile_bytes, shapes):
            cut_value = _value_info(name, *shapes[name][1:])
            stages.append([_extract_sub_model(model, first, cut, value, cut_value)])
            first, value = cut, cut_value
        stages.append([_extract_sub_model(model, first, end, value, output)])

    for linear in _find_layers_to_tile(model, tile_bytes, shapes):
        if first < linear.index:
            append_stages(linear.index, _value_info(linear.x, linear.inputs))
        stages.append(_split_linear_layer(model, linear, tile_bytes))
        first, value = linear.index + 1, _value_info(linear.y, linear.outputs)
    if first < len(graph.node):
        append_stages(len(graph.node), graph.output[0])
    return stages if len(stages) > 1 or len(stages[0]) > 1 else [[model]]


# -- cuts -----------------------------------------------------------------------------------------


def _find_layers_to_tile(model: onnx.ModelProto, tile_bytes: int, shapes: Shapes) -> list[LinearNode]:
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    if sum(_tensor_bytes(tensor) for tensor in tensors.values()) <= tile_bytes or _has_subgraph(graph):
        return []
    linear_nodes = [_parse_linear_node(index, node, tensors, shapes) for index, node in enumerate(graph.node)]
    return [
        linear
        for linear in linear_nodes
        if linear is not None
        and linear.row_bytes * linear.outputs > tile_bytes
        and _crossing_values(graph, linear.index + 1) == {linear.y}
    ]


def _iterate_stage_cuts(
    model: onnx.ModelProto, first: int, end: int, tile_bytes: int, shapes: Shapes
) -> Iterator[tuple[int, str]]:
    graph = model.graph
    sizes = {tensor.name: _tensor_bytes(tensor) for tensor in graph.initializer}

    def weight_bytes(start: int, stop: int) -> int:
        input_names = {name for node in graph.node[start:stop] for name in node.input}
        return sum(sizes.get(name, 0) for name in input_names)

    if weight_bytes(first, end) <= tile_bytes or _has_subgraph(graph):
        return
    cuts: list[tuple[int, str]] = []
    for cut in range(first + 1, end):
        crossing = _crossing_values(graph, cut)
        if len(crossing) == 1 and crossing <= shapes.keys() - {graph.input[0].name}:
            cuts.append((cut, crossing.pop()))
    for i, (cut, name) in enumerate(cuts):
        next_cut = cuts[i + 1][0] if i + 1 < len(cuts) else end
        if weight_bytes(first, next_cut) > tile_bytes and weight_bytes(first, cut) and weight_bytes(cut, end):
            yield cut, name
            first = cut


def _has_subgraph(graph: onnx.GraphProto) -> bool:
    # A subgraph may use outer values that are not among the node's inputs.
    return any(attribute.HasField("g") for node in graph.node for attribute in node.attribute)


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    return FLOAT_BYTES * math.prod(tensor.dims)


def _parse_linear_node(
    index: int, node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto], shapes: Shapes
) -> LinearNode | None:
    if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in tensors:
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    scaled = attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA", 0)
    bias = node.input[2] if len(node.input) == 3 else None
    if scaled or (bias is not None and bias not in tensors):
        return None
    weights = tensors[node.input[1]]
    if len(shapes.get(node.input[0], ())) != 2 or len(weights.dims) != 2:
        return None
    bias_tensor = None if bias is None else tensors[bias]
    linear = LinearNode(index, node.input[0], node.output[0], weights, not attributes.get("transB", 0), bias_tensor)
    return linear if bias_tensor is None or [*bias_tensor.dims] == [linear.outputs] else None


def _crossing_values(graph: onnx.GraphProto, index: int) -> set[str]:
    produced = {graph.input[0].name, *(name for node in graph.node[:index] for name in node.output)}
    consumed = {graph.output[0].name, *(name for node in graph.node[index:] for name in node.input)}
    return produced & consumed


def _shapes_known_behind_batch(model: onnx.ModelProto) -> dict[str, list[int]]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shape = value.type.tensor_type.shape
        if value.type.tensor_type.HasField("shape") and all(dim.dim_value for dim in shape.dim[1:]):
            shapes[value.name] = [dim.dim_value for dim in shape.dim]
    return shapes


# -- cutting --------------------------------------------------------------------------------------


def _extract_sub_model(
    model: onnx.ModelProto, first: int, end: int, x: onnx.ValueInfoProto, y: onnx.ValueInfoProto
) -> onnx.ModelProto:
    names = {x.name: "x", y.name: "y"}
    nodes = []
    for node in model.graph.node[first:end]:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
        nodes.append(copy)
    input_names = {name for node in nodes for name in node.input}
    return _make_model(
        model,
        nodes,
        _copy_with_name(x, "x"),
        _copy_with_name(y, "y"),
        [t for t in model.graph.initializer if t.name in input_names],
    )


def _split_linear_layer(model: onnx.ModelProto, linear: LinearNode, tile_bytes: int) -> list[onnx.ModelProto]:
    count = math.ceil(linear.outputs / max(tile_bytes // linear.row_bytes, 1))
    matrix = numpy_helper.to_array(linear.weights)
    matrix = matrix.T if linear.transposed else matrix  # (outputs, inputs)
    bias = None if linear.bias is None else numpy_helper.to_array(linear.bias)
    tiles = []
    for i in range(count):
        rows = slice(linear.outputs * i // count, linear.outputs * (i + 1) // count)
        arrays = {"weights": matrix[rows]} | ({} if bias is None else {"bias": bias[rows]})
        node = helper.make_node("Gemm", ["x", *arrays], ["y"], transB=1)
        x, y = _value_info("x", linear.inputs), _value_info("y", rows.stop - rows.start)
        tensors = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in arrays.items()]
        tiles.append(_make_model(model, [node], x, y, tensors))
    return tiles


def _make_model(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    x: onnx.ValueInfoProto,
    y: onnx.ValueInfoProto,
    tensors: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, model.graph.name, [x], [y], tensors)
    return helper.make_model(graph, opset_imports=model.opset_import)


def _value_info(name: str, *sizes: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *sizes])


def _copy_with_name(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = name
    return copy

"""Folding of junctions into the following convolution, if exact and cheaper.

A convolution (W, b) after a projection (A, a) equals the convolution (W A, b + W a), unless the convolution pads the
map: zeros around the projected map are not the projection of zeros if a is not zero. Therefore only convolutions
without padding are folded, such as the 1x1 convolutions that expand MobileNetV2's blocks and squeeze SqueezeNet's.
Blocks whose input goes to more than one operation (residual, dense) keep an explicit projection. Requires onnx.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper


def fold_projection(graph: onnx.GraphProto, weights: np.ndarray, bias: np.ndarray) -> onnx.GraphProto | None:
    """Fold a projection into a graph, or return None if that is inexact or costs more.

    Args:
        graph: Graph with one input, maps (n, q, h, w) or (n, q, l).
        weights: Weights of the projection, (q, p).
        bias: Bias of the projection, (q,).

    Returns:
        Graph of the unprojected maps, with p channels.
    """
    first = _find_only_reading_convolution(graph)
    if first is None:
        return None
    kernel = numpy_helper.to_array(_find_tensor(graph, first.input[1]))  # (o, q, k, k) or (o, q, k)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in first.attribute}
    if any(attributes.get("pads", ())) or attributes.get("group", 1) != 1 or attributes.get("auto_pad"):
        return None
    (q, p), area = weights.shape, int(np.prod(attributes.get("strides", (1, 1))))
    if kernel.size * p // q >= q * p * area + kernel.size:  # multiplications for each output position
        return None
    made = onnx.GraphProto()
    made.CopyFrom(graph)
    node = next(node for node in made.node if node.output[0] == first.output[0])
    offset = kernel.sum(axis=tuple(range(2, kernel.ndim))) @ bias
    if len(node.input) > 2:
        offset = offset + numpy_helper.to_array(_find_tensor(graph, node.input[2]))
    arrays = {"weight": np.einsum("oq...,qp->op...", kernel, weights), "bias": offset}
    node.input[:] = [node.input[0], *(f"{node.output[0]}/folded_{name}" for name in arrays)]
    for name, array in zip(node.input[1:], arrays.values(), strict=True):
        made.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))
    used = {name for each in made.node for name in each.input}
    idle = [tensor for tensor in made.initializer if tensor.name not in used]
    for tensor in idle:
        made.initializer.remove(tensor)
    made.input[0].type.tensor_type.shape.dim[1].dim_value = p
    return made


def _find_only_reading_convolution(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    takers = [node for node in graph.node if graph.input[0].name in node.input]
    known = {tensor.name for tensor in graph.initializer}
    if len(takers) != 1 or takers[0].op_type != "Conv" or not {*takers[0].input[1:]} <= known:
        return None
    return takers[0]


def _find_tensor(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)

"""ONNX graph of an `mlp`, built without torch. Requires onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from fedquilt.core import Tensors
from fedquilt.models.networks import numpy_init, registry

IR_VERSION: Final = 8  # onnxruntime 1.19 and later


def make_mlp_graph(network: Mapping[str, Any], weights: Tensors | None, opset: int) -> onnx.ModelProto:
    """Return the graph of an mlp from "x", (n, ...) float32, to "y", (n, outputs).

    Its initializers have the names of the network's tensors, and no values without `weights`.
    """
    sizes = numpy_init.layer_sizes(network)
    nodes = [helper.make_node("Flatten", ["x"], ["flat"], axis=1)]
    initializers = []
    value, last_layer = "flat", list(sizes)[-1]
    for layer, (outputs, inputs) in sizes.items():
        shapes = {f"{layer}.weight": (outputs, inputs), f"{layer}.bias": (outputs,)}
        initializers += [_make_initializer(name, shape, weights) for name, shape in shapes.items()]
        result = "y" if layer == last_layer else f"sum{layer}"
        nodes.append(helper.make_node("Gemm", [value, *shapes], [result], transB=1))
        if layer != last_layer:
            value = f"hidden{layer}"
            nodes.append(helper.make_node("Relu", [result], [value]))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [_float_value("x", registry.input_shape(network))],
        [_float_value("y", [sizes[last_layer][0]])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)


def _make_initializer(name: str, shape: tuple[int, ...], weights: Tensors | None) -> onnx.TensorProto:
    if weights is not None:
        return numpy_helper.from_array(np.asarray(weights[name], np.float32), name)
    return onnx.TensorProto(name=name, dims=shape, data_type=onnx.TensorProto.FLOAT)


def _float_value(name: str, shape: tuple[int, ...] | list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", *shape])

"""A graph that multiplies its input by weights, as fedquilt stores graphs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx

MB = 2**20


def product(folder: Path, weights: np.ndarray, *, external: bool = True, activation_bytes: int | None = 0) -> Path:
    """y = x @ weights as a graph under its sha256, its weights beside it under theirs."""
    tensor = onnx.numpy_helper.from_array(weights, "w")
    if external:
        payload = tensor.raw_data
        location = hashlib.sha256(payload).hexdigest()
        (folder / location).write_bytes(payload)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [value("x", onnx.TensorProto.FLOAT, ["n", weights.shape[0]])],
        [value("y", onnx.TensorProto.FLOAT, ["n", weights.shape[1]])],
        [tensor],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    if activation_bytes is not None:
        facts = {"weight_bytes": str(weights.nbytes), "activation_bytes": str(activation_bytes)}
        onnx.helper.set_model_props(model, facts)
    payload = model.SerializeToString()
    path = folder / hashlib.sha256(payload).hexdigest()
    path.write_bytes(payload)
    return path

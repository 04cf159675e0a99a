"""Quantisation of one block with ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from fedquilt.edge_agent.engines import onnx_session
from fedquilt.models.stitching import (
    export_onnx,
    onnx_memory,
)
from fedquilt.models.stitching.stitched import Block


class _Ranges(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Input of a graph."""

    def __init__(self, name: str, parts: Iterator[np.ndarray]) -> None:
        self._parts = ({name: part} for part in parts)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._parts, None)


def quantize_block(block: Block, paths: Mapping[str, Path], fed: Iterator[np.ndarray]) -> bytes | None:
    """Return the 8-bit graph of a block with its weights, or None if the block must stay float32.

    The inputs `fed` determine the ranges of the activations.
    """
    if block.kind == "start" or sum(len(stage) for stage in block.stages) > 1:
        return None
    model = export_onnx.load_graph(block.id, paths[block.stages[0][0]])
    add_pre_process_metadata(model)  # what that would do, the exporter has done
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        path = Path(folder) / "graph.onnx"
        quantization.quantize_static(
            model,
            path,
            _Ranges(model.graph.input[0].name, fed),
            quant_format=quantization.QuantFormat.QOperator,
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        made = onnx.load(path)
    if not any(tensor.data_type == TensorProto.INT8 for tensor in made.graph.initializer):
        return None
    weight_bytes = sum(numpy_helper.to_array(tensor).nbytes for tensor in made.graph.initializer)
    activation_bytes = _activation_bytes(made, block.in_shape)
    if weight_bytes + activation_bytes > block.resident_bytes + block.activation_bytes:
        return None
    del made.metadata_props[:]
    facts = {"activation_bytes": str(activation_bytes), "weight_bytes": str(weight_bytes)}
    helper.set_model_props(made, facts)
    made.producer_name, made.producer_version = "fedquilt", ""
    return bytes(made.SerializeToString(deterministic=True))


def _activation_bytes(model: onnx.ModelProto, shape: Sequence[int]) -> int:
    # float32 sizes: shapes of quantized operators cannot be inferred
    values = [name for node in model.graph.node for name in node.output if name]
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    del seen.graph.output[:]
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnx_session.create_session(seen.SerializeToString(), options)
    example = {session.get_inputs()[0].name: np.zeros((1, *shape), np.float32)}
    found = session.run(None, example) + list(example.values())
    sizes = {name: value.nbytes for name, value in zip((*values, *example), found, strict=True)}
    most = onnx_memory.peak_buffer_bytes(model.graph, sizes)
    assert most is not None
    return most

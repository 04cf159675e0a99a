"""A stitched network as one ONNX file that runs anywhere ONNX does. Imports onnx.

Input "x": prepared images (n, channels, size, size) float32 (`fedquilt.data.images.prepare`).
Output "scores": (n, labels), the largest wins. Between blocks lie the junctions of
`fedquilt.models.stitching.stitched`: two constant products that resize, and a 1x1 convolution, in the order in which
the agents do them. Labels and what preparing the images takes are in the file's metadata, as JSON under
"labels" and "input".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from fedquilt import graph_check
from fedquilt.core import ModelError, Tensors
from fedquilt.data import images
from fedquilt.models.stitching import fold_junction
from fedquilt.models.stitching.stitched import Block, grows

OPSET = 17  # of the blocks' graphs
IR_VERSION = 8
LARGEST_BYTES = 2**31 - 1  # of one protobuf file


def stitched(meta: Mapping[str, Any], arrays: Tensors, blocks: Mapping[str, Block], files: Mapping[str, Path]) -> bytes:
    """The ONNX file of a stitched network.

    Args:
        meta: of the artefact (`fedquilt.methods.fedstitch.result`).
        arrays: the artefact's tensors.
        blocks: of the bundle's stock.
        files: the bundle's files by name; the weights that graphs call lie beside them.

    Raises:
        ModelError: a block's file is missing or is no such graph, or the network says nothing about labels.
    """
    made = _Graph(arrays)
    junctions = {junction["before"]: junction for junction in meta["junctions"]}
    value = "x"
    for place, name in enumerate(meta["path"]):
        stages = _read(name, blocks, files)
        graphs = [[model.graph for model in stage] for stage in stages]
        if place and junctions[place]["kind"] == "projection":
            value, graphs[0] = made.junction(value, junctions[place], graphs[0], f"junction{place}")
        for i, stage in enumerate(graphs):
            value = made.stage(value, stage, f"block{place}/{i}/")
    path = [blocks[name] for name in meta["path"]]
    scores = made.head(value, meta["head"]) if meta["head"] else made.align(value, meta["align"])
    made.node("Identity", [scores], "scores")
    info = helper.make_tensor_value_info
    whole = helper.make_graph(
        made.nodes,
        "stitched",
        [info("x", TensorProto.FLOAT, ["n", *path[0].in_shape])],
        [info("scores", TensorProto.FLOAT, ["n", len(meta["labels"])])],
        made.initializers,
    )
    model = helper.make_model(
        whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="fedquilt"
    )
    facts = {
        "labels": json.dumps(list(meta["labels"])),
        "input": json.dumps(dict(meta["input"])),
        "path": " ".join(meta["path"]),
        "activation_bytes": str(max(block.activation_bytes for block in path)),
        "weight_bytes": str(sum(len(tensor.raw_data) for tensor in made.initializers)),
    }
    helper.set_model_props(model, facts)
    if model.ByteSize() > LARGEST_BYTES:
        raise ModelError(f"the network takes {model.ByteSize() / 1e9:.1f} GB, one ONNX file holds 2 GB at most")
    return model.SerializeToString(deterministic=True)


class _Graph:
    """Nodes and weights as they are added. Every method returns the name of the value it makes."""

    def __init__(self, arrays: Tensors) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._arrays = arrays

    def node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def stage(self, value: str, graphs: Sequence[onnx.GraphProto], prefix: str) -> str:
        """A stage of a donor's block: one graph, or tiles whose outputs lie side by side."""
        if len(graphs) == 1:
            return self._part(value, graphs[0], prefix)
        parts = [self._part(value, graph, f"{prefix}{i}/") for i, graph in enumerate(graphs)]
        return self.node("Concat", parts, f"{prefix}joined", axis=1)

    def _part(self, value: str, graph: onnx.GraphProto, prefix: str) -> str:
        """A graph, its names made unique."""
        graph = compose.add_prefix_graph(graph, prefix)
        self.node("Identity", [value], graph.input[0].name)
        self.nodes.extend(graph.node)
        self.initializers.extend(graph.initializer)
        return graph.output[0].name

    def junction(
        self, value: str, junction: Mapping[str, Any], stage: list[onnx.GraphProto], name: str
    ) -> tuple[str, list[onnx.GraphProto]]:
        """(n, c, h, w) -> (n, c_out, h_out, w_out), as `stitched.join` does it, and the stage that takes it.

        Where the projection can be folded into the stage, the value is not projected.
        """
        before, after = junction["in_shape"], junction["out_shape"]
        if grows(before, after):
            return self._resized(self._projected(value, junction, name), before, after, name), stage
        value = self._resized(value, before, after, name)
        weights, bias = self._float(junction["weights"]), self._float(junction["bias"])
        folded = fold_junction.fold(stage[0], weights, bias) if len(stage) == 1 else None
        return (self._projected(value, junction, name), stage) if folded is None else (value, [folded])

    def _resized(self, value: str, before: Sequence[int], after: Sequence[int], name: str) -> str:
        if before[1] != after[1]:
            rows = self.constant(f"{name}/rows", images.resize_matrix(before[1], after[1]))
            value = self.node("MatMul", [rows, value], f"{name}/resized_rows")
        if before[2] != after[2]:
            columns = self.constant(f"{name}/columns", images.resize_matrix(before[2], after[2]).T)
            value = self.node("MatMul", [value, columns], f"{name}/resized")
        return value

    def _projected(self, value: str, junction: Mapping[str, Any], name: str) -> str:
        weights = self.constant(f"{name}/weights", self._float(junction["weights"])[:, :, None, None])
        bias = self.constant(f"{name}/bias", self._float(junction["bias"]))
        return self.node("Conv", [value, weights, bias], f"{name}/projected")

    def head(self, value: str, head: Mapping[str, Any]) -> str:
        """A linear layer on the pooled maps."""
        pooled = self.node("GlobalAveragePool", [value], "head/pooled")
        flat = self.node("Flatten", [pooled], "head/features", axis=1)
        weights = self.constant("head/weights", self._float(head["weights"]))
        bias = self.constant("head/bias", self._float(head["bias"]))
        return self.node("Gemm", [flat, weights, bias], "head/scores", transB=1)

    def align(self, logits: str, groups: Sequence[Sequence[int]] | None) -> str:
        """logsumexp of a donor's logits over each label's classes; a label without classes never wins."""
        if not groups or not any(groups):
            raise ModelError("the stitched network has neither a head nor an alignment: nothing says what it tells")
        parts = []
        for label, group in enumerate(groups):
            if group:
                classes = self.constant(f"align/{label}", np.array(group, np.int64))
                own = self.node("Gather", [logits, classes], f"align/{label}/logits", axis=1)
                parts.append(self.node("ReduceLogSumExp", [own], f"align/{label}/score", axes=[1], keepdims=1))
            else:
                parts.append("")
        first = next(part for part in parts if part)
        shape = self.node("Shape", [first], "align/shape")
        lowest = numpy_helper.from_array(np.array([-np.inf], np.float32))
        never = self.node("ConstantOfShape", [shape], "align/never", value=lowest)
        return self.node("Concat", [part or never for part in parts], "align/scores", axis=1)

    def _float(self, name: str) -> np.ndarray:
        return self._arrays[name].astype(np.float32)


def _read(
    block: str, blocks: Mapping[str, Block], files: Mapping[str, Path]
) -> tuple[tuple[onnx.ModelProto, ...], ...]:
    """The graphs of a block by stage."""
    if block not in blocks or not files.keys() >= {name for stage in blocks[block].stages for name in stage}:
        raise ModelError(f"the bundle has no block {block!r}: it is not the one that this network was stitched from")
    return tuple(tuple(load(block, files[name]) for name in stage) for stage in blocks[block].stages)


def load(block: str, path: Path) -> onnx.ModelProto:
    """A graph of a block with its weights, which may lie beside it.

    Raises:
        ModelError: it cannot be read, is no such graph, or holds what `fedquilt.graph_check` does not permit.
    """
    try:
        graph_check.of_file(path)
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                _fetch(tensor, path.parent)
    except Exception as error:  # protobuf and the file system each have their own
        raise ModelError(f"block {block!r} cannot be read from {path}: {error}; prepare the bundle anew") from None
    opsets = [opset.version for opset in model.opset_import]
    if opsets != [OPSET] or len(model.graph.input) != 1 or len(model.graph.output) != 1:
        raise ModelError(f"block {block!r} in {path} was not made by `fedquilt prepare`: prepare the bundle anew")
    return model


def _fetch(tensor: onnx.TensorProto, folder: Path) -> None:
    """Bring a tensor's bytes into a checked graph. Not by onnx itself: it refuses files that a store has linked in."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / where["location"]).open("rb") as data:
        data.seek(int(where.get("offset", "0")))
        tensor.raw_data = data.read(int(where.get("length", "-1")))
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT

"""A stitched network as one ONNX file that runs anywhere ONNX does. Imports onnx.

Input "x": prepared examples (n, ...) float32 (`fedquilt.data.inputs.prepare`), images as (n, channels, size, size).
Output "scores": (n, labels), of which the largest wins. Paths lie side by side; their common beginnings, and the
weights of a block in several paths, are stored once. A junction (`fedquilt.models.stitching.stitched`) consists of two
constant products that resize and a 1x1 convolution, in the same order as on the agents. The taps are pooled,
concatenated and passed to one linear layer. The file's metadata holds the labels, the parameters for preparing examples
and the paths, as JSON under "labels", "input", "reading" and "taps".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fedquilt import graph_check
from fedquilt.core import ModelError, Tensors
from fedquilt.data import images
from fedquilt.models.stitching import fold_junction, onnx_memory
from fedquilt.models.stitching.stitched import Block, from_artefact, grows, junction_name, prefixes

OPSET = 17  # of the blocks' graphs
IR_VERSION = 8
LARGEST_BYTES = 2**31 - 1  # limit of a protobuf file


def export_stitched(
    meta: Mapping[str, Any],
    arrays: Tensors,
    blocks: Mapping[str, Block],
    files: Mapping[str, Path],
    reading: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a stitched network as the bytes of an ONNX file.

    Args:
        meta: of the artefact (`fedquilt.methods.fedstitch.result`).
        arrays: the artefact's tensors.
        blocks: of the bundle's stock.
        files: the bundle's files by name; the graphs' external weights lie beside them.
        reading: How files became examples (`fedquilt.data.reading`).

    Raises:
        ModelError: a block's file is missing or not usable, the network has no label scores, or it exceeds 2 GB.
    """
    network = from_artefact(meta, arrays)
    made, order = _Graph(), prefixes(network.taps)
    values: dict[tuple[str, ...], str] = {(): "x"}
    for place, ids in enumerate(order):
        stages = [[model.graph for model in stage] for stage in _read(ids[-1], blocks, files)]
        value, junction = values[ids[:-1]], network.junctions.get(junction_name(ids))
        if junction is not None:
            before, after = blocks[ids[-2]].out_shape, blocks[ids[-1]].in_shape
            value, stages[0] = made.junction(value, junction, (before, after), stages[0], f"junction{place}")
        for i, stage in enumerate(stages):
            value = made.stage(value, stage, f"block{place}/{i}/", f"{ids[-1]}/{i}/")
        values[ids] = value
    ends = [(values[tap], blocks[tap[-1]].out_shape) for tap in network.taps]
    scores = made.head(ends, network.head) if network.head is not None else made.align(ends[0][0], network.align)
    made.node("Identity", [scores], "scores")
    info = helper.make_tensor_value_info
    whole = helper.make_graph(
        made.nodes,
        "stitched",
        [info("x", TensorProto.FLOAT, ["n", *blocks[order[0][-1]].in_shape])],
        [info("scores", TensorProto.FLOAT, ["n", len(meta["labels"])])],
        made.initializers,
    )
    model = helper.make_model(
        whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="fedquilt"
    )
    facts = {
        "labels": json.dumps(list(meta["labels"])),
        "input": json.dumps(dict(meta["input"])),
        "reading": json.dumps(dict(reading or {}), sort_keys=True),
        "taps": json.dumps([list(tap) for tap in network.taps]),
        "weight_bytes": str(sum(len(tensor.raw_data) for tensor in made.initializers)),
    }
    if model.ByteSize() > LARGEST_BYTES:
        raise ModelError(f"the network takes {model.ByteSize() / 1e9:.1f} GB, one ONNX file holds 2 GB at most")
    if (alive := onnx_memory.activation_bytes(model)) is not None:  # else engines run one example at a time
        facts["activation_bytes"] = str(alive)
    helper.set_model_props(model, facts)
    return model.SerializeToString(deterministic=True)


class _Graph:
    """Builder of the graph's nodes and weights. Methods return the name of the value that they add."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._known: dict[str, bytes] = {}  # digests of blocks' weights by their name in the file

    def node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def stage(self, value: str, graphs: Sequence[onnx.GraphProto], prefix: str, home: str) -> str:
        """Add a stage of a donor's block: one graph, or tiles whose outputs lie side by side.

        Args:
            value: name of the stage's input.
            graphs: the stage's graph, or its tiles in order.
            prefix: of the names of computed values, unique in the file.
            home: prefix of the names of weights, the same wherever the block stands.
        """
        if len(graphs) == 1:
            return self._part(value, graphs[0], prefix, home)
        parts = [self._part(value, graph, f"{prefix}{i}/", f"{home}{i}/") for i, graph in enumerate(graphs)]
        return self.node("Concat", parts, f"{prefix}joined", axis=1)

    def _part(self, value: str, graph: onnx.GraphProto, prefix: str, home: str) -> str:
        """Add a graph that takes `value`; equal weights of a block in several paths are stored once."""
        names = {graph.input[0].name: value}
        for tensor in graph.initializer:
            named, digest = f"{home}{tensor.name}", hashlib.sha256(tensor.raw_data).digest()
            if self._known.get(named, digest) != digest:
                named = f"{prefix}{tensor.name}"  # a junction was folded into this or an earlier use
            names[tensor.name] = named
            if named not in self._known:
                self._known[named] = digest
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor)
                copy.name = named
                self.initializers.append(copy)
        self.nodes.extend(_renamed(node, names, prefix) for node in graph.node)
        return names.get(graph.output[0].name, f"{prefix}{graph.output[0].name}")

    def junction(
        self,
        value: str,
        junction: Tensors,
        shapes: tuple[Sequence[int], Sequence[int]],
        stage: list[onnx.GraphProto],
        name: str,
    ) -> tuple[str, list[onnx.GraphProto]]:
        """Add a junction, as `stitched.join` computes it; returns the value and the stage that takes it.

        If the projection can be folded into the stage, the value is only resized, and the stage is replaced.

        Args:
            value: name of the maps (n, c, ...) to connect.
            junction: "weights" and "bias".
            shapes: of the maps before and after, without batch.
            stage: the graphs that take the maps.
            name: prefix of the names of new values.
        """
        before, after = shapes
        if grows(before, after):
            return self._resized(self._projected(value, junction, len(before), name), before, after, name), stage
        value = self._resized(value, before, after, name)
        weights, bias = _float(junction["weights"]), _float(junction["bias"])
        folded = fold_junction.fold(stage[0], weights, bias) if len(stage) == 1 else None
        return (self._projected(value, junction, len(before), name), stage) if folded is None else (value, [folded])

    def _resized(self, value: str, before: Sequence[int], after: Sequence[int], name: str) -> str:
        if len(before) == 3 and before[1] != after[1]:
            rows = self.constant(f"{name}/rows", images.resize_matrix(before[1], after[1]))
            value = self.node("MatMul", [rows, value], f"{name}/resized_rows")
        if before[-1] != after[-1]:
            columns = self.constant(f"{name}/columns", images.resize_matrix(before[-1], after[-1]).T)
            value = self.node("MatMul", [value, columns], f"{name}/resized")
        return value

    def _projected(self, value: str, junction: Tensors, axes: int, name: str) -> str:
        kernel = _float(junction["weights"])
        weights = self.constant(f"{name}/weights", kernel.reshape(*kernel.shape, *[1] * (axes - 1)))
        bias = self.constant(f"{name}/bias", _float(junction["bias"]))
        return self.node("Conv", [value, weights, bias], f"{name}/projected")

    def head(self, taps: Sequence[tuple[str, Sequence[int]]], head: Tensors) -> str:
        """Add a linear layer on the taps' pooled maps side by side; a tap that is a vector is not pooled.

        Args:
            taps: name and shape (without batch) of each tap's value.
            head: tensors as of `fedquilt.models.stitching.stitched.Network.head`.
        """
        features = [""] * len(taps)
        # ONNX Runtime computes the last of a node's inputs in the file first. In this order the first tap is pooled,
        # and its maps are freed, before the second is computed.
        for i, (value, shape) in reversed([*enumerate(taps)]):
            name = f"head/{i}"
            pooled = self.node("GlobalAveragePool", [value], f"{name}/pooled") if len(shape) > 1 else value
            features[i] = self.node("Flatten", [pooled], f"{name}/features", axis=1)
        joined = self.node("Concat", features, "head/features", axis=1) if len(features) > 1 else features[0]
        if "hidden" in head:
            hidden = self.constant("head/hidden", _float(head["hidden"]))
            joined = self.node("Relu", [self.node("Gemm", [joined, hidden], "head/drawn", transB=1)], "head/rectified")
        weights = self.constant("head/weights", _float(head["weights"]))
        bias = self.constant("head/bias", _float(head["bias"]))
        return self.node("Gemm", [joined, weights, bias], "head/scores", transB=1)

    def align(self, logits: str, groups: Sequence[Sequence[int]] | None) -> str:
        """Add the logsumexp of a donor's logits over each label's classes; a label without classes scores -inf."""
        assert groups  # `require_labels`
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


def _renamed(node: onnx.NodeProto, names: Mapping[str, str], prefix: str) -> onnx.NodeProto:
    """Copy a node with its values renamed by `names`, or with a prefix where they are not in it."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.name = f"{prefix}{node.name}"
    for values in (made.input, made.output):
        values[:] = [names.get(value, f"{prefix}{value}") if value else "" for value in values]
    for inner in (attribute.g for attribute in made.attribute if attribute.HasField("g")):
        nodes = [_renamed(each, names, prefix) for each in inner.node]
        del inner.node[:]
        inner.node.extend(nodes)
        for own in (*inner.input, *inner.output, *inner.initializer, *inner.value_info):
            own.name = f"{prefix}{own.name}"
    return made


def _float(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def _read(
    block: str, blocks: Mapping[str, Block], files: Mapping[str, Path]
) -> tuple[tuple[onnx.ModelProto, ...], ...]:
    """Load the graphs of a block, by stage."""
    if block not in blocks or not files.keys() >= {name for stage in blocks[block].stages for name in stage}:
        raise ModelError(f"the bundle has no block {block!r}: it is not the one that this network was stitched from")
    return tuple(tuple(load(block, files[name]) for name in stage) for stage in blocks[block].stages)


def load(block: str, path: Path) -> onnx.ModelProto:
    """Load a graph of a block with its weights, internal or in the file beside it.

    Raises:
        ModelError: the file cannot be read, is no graph of `fedquilt prepare`, or `fedquilt.graph_check` refuses it.
    """
    try:
        graph_check.of_file(path)
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                _fetch(tensor, path.parent)
    except Exception as error:  # protobuf and the file system raise their own kinds
        raise ModelError(f"block {block!r} cannot be read from {path}: {error}; prepare the bundle anew") from None
    opsets = [opset.version for opset in model.opset_import]
    if opsets != [OPSET] or len(model.graph.input) != 1 or len(model.graph.output) != 1:
        raise ModelError(f"block {block!r} in {path} was not made by `fedquilt prepare`: prepare the bundle anew")
    return model


def _fetch(tensor: onnx.TensorProto, folder: Path) -> None:
    """Load a tensor's external bytes into a checked graph; onnx itself refuses files that a store has linked."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / where["location"]).open("rb") as data:
        data.seek(int(where.get("offset", "0")))
        tensor.raw_data = data.read(int(where.get("length", "-1")))
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT

"""Export of a stitched network as one ONNX file.

Input "x": prepared examples (n, ...) float32 (`data.inputs.prepare_inputs`), images as (n, channels, size, size).
Output "scores": (n, labels), of which the largest is the prediction. Paths are parallel. Their common prefixes, and the
weights of a block in several paths, are stored once. A junction (`fedquilt.models.stitching.stitched_network`) consists
of two constant products that resize and a 1x1 convolution, in the same order as on the agents. The taps are pooled,
concatenated and passed to one linear layer. The file's metadata has the labels, the parameters for preparing examples
and the paths, as JSON under "labels", "input", "reading" and "taps". A cascade takes one example at a time, and an `If`
holds the blocks that only some examples need. Requires onnx.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fedquilt.core import ModelError, Tensors
from fedquilt.data import inputs
from fedquilt.models.stitching.onnx import memory
from fedquilt.models.stitching.stitched_network import (
    Block,
    StitchedNetwork,
    enlarges_maps,
    from_artefact,
    junction_name,
    path_prefixes,
)
from fedquilt.onnx import graph_check

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
        meta: Meta of the artefact (`fedquilt.methods.fedstitch.result`).
        arrays: Tensors of the artefact.
        blocks: Blocks of the donor pool, by id.
        files: Files of the bundle by name, next to the graphs' external weights.
        reading: Settings by which files became examples (`fedquilt.data.reading_settings`).

    Raises:
        ModelError: If a block's file is missing or unusable, if there are no label scores, or if the file exceeds 2 GB.
    """
    network = from_artefact(meta, arrays)
    made, early = _GraphBuilder(), network.early
    first = path_prefixes(early.taps) if early is not None else []
    order = list(dict.fromkeys([*first, *path_prefixes(network.taps)]))
    values: dict[tuple[str, ...], str] = {(): "x"}
    if early is not None:
        _add_prefix_blocks(made, network, first, values, blocks, files)
        ends = [(values[tap], blocks[tap[-1]].out_shape) for tap in early.taps]
        first_scores, first_nodes = made.add_head(ends, early.head, "early"), made.take_nodes()
    _add_prefix_blocks(made, network, order[len(first) :], values, blocks, files)
    ends = [(values[tap], blocks[tap[-1]].out_shape) for tap in network.taps]
    scores = (
        made.add_head(ends, network.head) if network.head is not None else made.add_alignment(ends[0][0], network.align)
    )
    shapes = blocks[order[0][-1]].in_shape, (len(meta["labels"]),)
    if early is None:
        made.add_node("Identity", [scores], "scores")
        model = made.make_model("n", *shapes)
        alive = memory.peak_activation_bytes(model)
    else:
        later_nodes = made.take_nodes()
        made.nodes += [*first_nodes, *later_nodes, helper.make_node("Max", [first_scores, scores], ["scores"])]
        alive = memory.peak_activation_bytes(made.make_model("n", *shapes))  # of all blocks, without branches
        if alive is not None:  # while the branch runs, the runtime holds all that it reads
            read = {name for node in later_nodes for name in node.input}
            alive += sum(4 * prod(blocks[ids[-1]].out_shape) for ids in first if values[ids] in read)
        made.nodes = first_nodes
        made.add_node("Identity", [made.add_choice(first_scores, scores, later_nodes, early.margin)], "scores")
        model = made.make_model(1, *shapes)  # each example takes its own branch
    facts = {
        "labels": json.dumps(list(meta["labels"])),
        "input": json.dumps(dict(meta["input"])),
        "reading": json.dumps(dict(reading or {}), sort_keys=True),
        "taps": json.dumps([list(tap) for tap in network.taps]),
        "weight_bytes": str(sum(len(tensor.raw_data) for tensor in made.initializers)),
    }
    if model.ByteSize() > LARGEST_BYTES:
        raise ModelError(f"the network takes {model.ByteSize() / 1e9:.1f} GB, one ONNX file holds 2 GB at most")
    if alive is not None:  # else engines run one example at a time
        facts["activation_bytes"] = str(alive)
    helper.set_model_props(model, facts)
    return model.SerializeToString(deterministic=True)


def _add_prefix_blocks(
    made: _GraphBuilder,
    network: StitchedNetwork,
    order: Sequence[tuple[str, ...]],
    values: dict[tuple[str, ...], str],
    blocks: Mapping[str, Block],
    files: Mapping[str, Path],
) -> None:
    """Add the last block of each prefix after its junction, and its value to `values`."""
    for ids in order:
        place = len(values) - 1
        stages = [[model.graph for model in stage] for stage in _load_block_graphs(ids[-1], blocks, files)]
        value, junction = values[ids[:-1]], network.junctions.get(junction_name(ids))
        if junction is not None:
            before, after = blocks[ids[-2]].out_shape, blocks[ids[-1]].in_shape
            value, stages[0] = made.add_junction(value, junction, (before, after), stages[0], f"junction{place}")
        for i, stage in enumerate(stages):
            value = made.add_stage(value, stage, f"block{place}/{i}/", f"{ids[-1]}/{i}/")
        values[ids] = value


class _GraphBuilder:
    """Builder of the graph's nodes and weights. Methods return the name of the value that they add."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.late_weights: set[str] = set()  # names of initializers that a branch holds
        self._known: dict[str, bytes] = {}  # digests of blocks' weights by their name in the file

    def add_node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def take_nodes(self) -> list[onnx.NodeProto]:
        nodes, self.nodes = self.nodes, []
        return nodes

    def add_choice(self, early: str, late: str, nodes: Sequence[onnx.NodeProto], margin: float) -> str:
        """Add the choice of the early scores, or else of the late ones, whose nodes run only then."""
        two = self.add_constant("early/two", np.array([2], np.int64))
        signs = self.add_constant("early/signs", np.array([[1.0], [-1.0]], np.float32))
        least = self.add_constant("early/least", np.array([[margin]], np.float32))
        self.nodes.append(helper.make_node("TopK", [early, two], ["early/best", "early/places"], name="early/best"))
        apart = self.add_node("MatMul", ["early/best", signs], "early/margin")
        leaves = self.add_node("GreaterOrEqual", [apart, least], "early/leaves")
        read, read_late = ({name for node in some for name in node.input} for some in (self.nodes, nodes))
        self.late_weights = read_late - read  # within their branch, where the runtime packs them
        weights = [tensor for tensor in self.initializers if tensor.name in self.late_weights]
        branches = []
        for value, name, inner, held in ((early, "early", (), ()), (late, "late", nodes, weights)):
            info = helper.make_tensor_value_info(f"{name}/answer", TensorProto.FLOAT, None)
            inner = [*inner, helper.make_node("Identity", [value], [f"{name}/answer"])]
            branches.append(helper.make_graph(inner, name, [], [info], held))
        return self.add_node("If", [leaves], "answer", then_branch=branches[0], else_branch=branches[1])

    def make_model(self, count: str | int, in_shape: Sequence[int], out_shape: Sequence[int]) -> onnx.ModelProto:
        """Return the model of all nodes, for `count` examples."""
        info = helper.make_tensor_value_info
        whole = helper.make_graph(
            self.nodes,
            "stitched",
            [info("x", TensorProto.FLOAT, [count, *in_shape])],
            [info("scores", TensorProto.FLOAT, [count, *out_shape])],
            [tensor for tensor in self.initializers if tensor.name not in self.late_weights],
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(whole, opset_imports=opsets, ir_version=IR_VERSION, producer_name="fedquilt")

    def add_constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add_stage(self, value: str, graphs: Sequence[onnx.GraphProto], prefix: str, home: str) -> str:
        if len(graphs) == 1:
            return self._add_graph(value, graphs[0], prefix, home)
        parts = [self._add_graph(value, graph, f"{prefix}{i}/", f"{home}{i}/") for i, graph in enumerate(graphs)]
        return self.add_node("Concat", parts, f"{prefix}joined", axis=1)

    def _add_graph(self, value: str, graph: onnx.GraphProto, prefix: str, home: str) -> str:
        # Equal weights of a block in several paths are stored once.
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
        self.nodes.extend(_copy_with_renamed_values(node, names, prefix) for node in graph.node)
        return names.get(graph.output[0].name, f"{prefix}{graph.output[0].name}")

    def add_junction(
        self,
        value: str,
        junction: Tensors,
        shapes: tuple[Sequence[int], Sequence[int]],
        stage: list[onnx.GraphProto],
        name: str,
    ) -> tuple[str, list[onnx.GraphProto]]:
        """Add a junction, folded into the stage if cheaper. Return its value and the stage after it."""
        before, after = shapes
        if enlarges_maps(before, after):
            return self._add_resize(
                self._add_projection(value, junction, len(before), name), before, after, name
            ), stage
        value = self._add_resize(value, before, after, name)
        weights, bias = _to_float32(junction["weights"]), _to_float32(junction["bias"])
        folded = fold_projection(stage[0], weights, bias) if len(stage) == 1 else None
        return (
            (self._add_projection(value, junction, len(before), name), stage) if folded is None else (value, [folded])
        )

    def _add_resize(self, value: str, before: Sequence[int], after: Sequence[int], name: str) -> str:
        if len(before) == 3 and before[1] != after[1]:
            rows = self.add_constant(f"{name}/rows", inputs.resize_matrix(before[1], after[1]))
            value = self.add_node("MatMul", [rows, value], f"{name}/resized_rows")
        if before[-1] != after[-1]:
            columns = self.add_constant(f"{name}/columns", inputs.resize_matrix(before[-1], after[-1]).T)
            value = self.add_node("MatMul", [value, columns], f"{name}/resized")
        return value

    def _add_projection(self, value: str, junction: Tensors, axes: int, name: str) -> str:
        kernel = _to_float32(junction["weights"])
        weights = self.add_constant(f"{name}/weights", kernel.reshape(*kernel.shape, *[1] * (axes - 1)))
        bias = self.add_constant(f"{name}/bias", _to_float32(junction["bias"]))
        return self.add_node("Conv", [value, weights, bias], f"{name}/projected")

    def add_head(self, taps: Sequence[tuple[str, Sequence[int]]], head: Tensors, place: str = "head") -> str:
        """Add the head: pooled and joined taps, a hidden ReLU layer if `head` has one, and a linear layer."""
        features = [""] * len(taps)
        # ONNX Runtime computes the last of a node's inputs in the file first. In this order the first tap is pooled,
        # and its maps are freed, before the second is computed.
        for i, (value, shape) in reversed([*enumerate(taps)]):
            name = f"{place}/{i}"
            pooled = self.add_node("GlobalAveragePool", [value], f"{name}/pooled") if len(shape) > 1 else value
            features[i] = self.add_node("Flatten", [pooled], f"{name}/features", axis=1)
        joined = self.add_node("Concat", features, f"{place}/features", axis=1) if len(features) > 1 else features[0]
        if "hidden" in head:
            hidden = self.add_constant(f"{place}/hidden", _to_float32(head["hidden"]))
            joined = self.add_node(
                "Relu", [self.add_node("Gemm", [joined, hidden], f"{place}/drawn", transB=1)], f"{place}/rectified"
            )
        weights = self.add_constant(f"{place}/weights", _to_float32(head["weights"]))
        bias = self.add_constant(f"{place}/bias", _to_float32(head["bias"]))
        return self.add_node("Gemm", [joined, weights, bias], f"{place}/scores", transB=1)

    def add_alignment(self, logits: str, groups: Sequence[Sequence[int]] | None) -> str:
        assert groups  # `require_label_scores`
        parts = []
        for label, group in enumerate(groups):
            if group:
                classes = self.add_constant(f"align/{label}", np.array(group, np.int64))
                own = self.add_node("Gather", [logits, classes], f"align/{label}/logits", axis=1)
                parts.append(self.add_node("ReduceLogSumExp", [own], f"align/{label}/score", axes=[1], keepdims=1))
            else:
                parts.append("")
        first = next(part for part in parts if part)
        shape = self.add_node("Shape", [first], "align/shape")
        lowest = numpy_helper.from_array(np.array([-np.inf], np.float32))
        never = self.add_node("ConstantOfShape", [shape], "align/never", value=lowest)
        return self.add_node("Concat", [part or never for part in parts], "align/scores", axis=1)


def _copy_with_renamed_values(node: onnx.NodeProto, names: Mapping[str, str], prefix: str) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.name = f"{prefix}{node.name}"
    for values in (made.input, made.output):
        values[:] = [names.get(value, f"{prefix}{value}") if value else "" for value in values]
    for inner in (attribute.g for attribute in made.attribute if attribute.HasField("g")):
        nodes = [_copy_with_renamed_values(each, names, prefix) for each in inner.node]
        del inner.node[:]
        inner.node.extend(nodes)
        for own in (*inner.input, *inner.output, *inner.initializer, *inner.value_info):
            own.name = f"{prefix}{own.name}"
    return made


def _to_float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def _load_block_graphs(
    block: str, blocks: Mapping[str, Block], files: Mapping[str, Path]
) -> tuple[tuple[onnx.ModelProto, ...], ...]:
    if block not in blocks or not files.keys() >= {name for stage in blocks[block].stages for name in stage}:
        raise ModelError(f"the bundle has no block {block!r}: it is not the one that this network was stitched from")
    return tuple(tuple(load_graph(block, files[name]) for name in stage) for stage in blocks[block].stages)


def load_graph(block: str, path: Path) -> onnx.ModelProto:
    """Load a graph of a block with its weights, if `fedquilt.onnx.graph_check` accepts it."""
    try:
        graph_check.check_file(path)
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                _inline_external_data(tensor, path.parent)
    except Exception as error:  # protobuf and the file system raise their own kinds
        raise ModelError(f"block {block!r} cannot be read from {path}: {error}; prepare the bundle anew") from None
    opsets = [opset.version for opset in model.opset_import]
    if opsets != [OPSET] or len(model.graph.input) != 1 or len(model.graph.output) != 1:
        raise ModelError(f"block {block!r} in {path} was not made by `fedquilt prepare`: prepare the bundle anew")
    return model


def _inline_external_data(tensor: onnx.TensorProto, folder: Path) -> None:
    # onnx itself refuses hard-linked files.
    where = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / where["location"]).open("rb") as data:
        data.seek(int(where.get("offset", "0")))
        tensor.raw_data = data.read(int(where.get("length", "-1")))
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT


# -- folding -----------------------------------------------------------------------------------------


def fold_projection(graph: onnx.GraphProto, weights: np.ndarray, bias: np.ndarray) -> onnx.GraphProto | None:
    """Fold a projection, weights (q, p) and bias (q,), into a graph of maps (n, q, ...), which then takes p channels.

    Return None if that is inexact or costs more.
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

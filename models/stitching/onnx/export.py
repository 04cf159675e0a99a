"""Export of a stitched network as one ONNX file.

Input "x": examples (n, ...) float32, images as (n, channels, size, size) with levels from 0 to 1. The graph first
standardises them, as the donors were trained.
Output "scores": (n, labels), of which the largest is the prediction. Paths are parallel. Their common prefixes, and the
weights of a block in several paths, are stored once. A junction (`fedquilt.models.stitching.stitched_network`) consists
of two constant products that resize and a 1x1 convolution, in the same order as on the agents. The taps are pooled,
concatenated and passed to one linear layer. The file's metadata has the labels, the parameters for preparing examples
and the paths, as JSON under "labels", "input", "scale", "reading" and "taps". A cascade takes one example at a time,
and an `If` holds the blocks that only some examples need. Requires onnx.
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
from fedquilt.models.networks import onnx_scaling
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

OPSET = 17  # opset of the blocks' graphs
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
    builder, early = _GraphBuilder(), network.early
    early_prefixes = path_prefixes(early.taps) if early is not None else []
    prefixes = list(dict.fromkeys([*early_prefixes, *path_prefixes(network.taps)]))
    in_shape = _find_block(prefixes[0][-1], blocks).in_shape
    scale = onnx_scaling.input_scale(meta["input"], in_shape)
    values: dict[tuple[str, ...], str] = {(): "x" if scale is None else builder.add_standardisation("x", scale)}
    if early is not None:
        _add_prefix_blocks(builder, network, early_prefixes, values, blocks, files)
        ends = [(values[tap], blocks[tap[-1]].out_shape) for tap in early.taps]
        first_scores, first_nodes = builder.add_head(ends, early.head, "early"), builder.take_nodes()
    _add_prefix_blocks(builder, network, prefixes[len(early_prefixes) :], values, blocks, files)
    ends = [(values[tap], blocks[tap[-1]].out_shape) for tap in network.taps]
    scores = (
        builder.add_head(ends, network.head)
        if network.head is not None
        else builder.add_alignment(ends[0][0], network.align)
    )
    shapes = in_shape, (len(meta["labels"]),)
    if early is None:
        builder.add_node("Identity", [scores], "scores")
        model = builder.make_model("n", *shapes)
        alive = memory.peak_activation_bytes(model)
    else:
        later_nodes = builder.take_nodes()
        builder.nodes += [*first_nodes, *later_nodes, helper.make_node("Max", [first_scores, scores], ["scores"])]
        alive = memory.peak_activation_bytes(builder.make_model("n", *shapes))  # all blocks, without branches
        if alive is not None:  # the runtime holds all inputs of a branch while the branch runs
            read_values = {name for node in later_nodes for name in node.input}
            alive += sum(4 * prod(blocks[ids[-1]].out_shape) for ids in early_prefixes if values[ids] in read_values)
            alive += 4 * prod(in_shape) if scale is not None and values[()] in read_values else 0
        builder.nodes = first_nodes
        builder.add_node("Identity", [builder.add_choice(first_scores, scores, later_nodes, early.margin)], "scores")
        model = builder.make_model(1, *shapes)  # each example takes its own branch
    properties = {
        "labels": json.dumps(list(meta["labels"])),
        "input": json.dumps(onnx_scaling.outside_input(meta["input"])),
        "reading": json.dumps(dict(reading or {}), sort_keys=True),
        "taps": json.dumps([list(tap) for tap in network.taps]),
        "weight_bytes": str(sum(len(tensor.raw_data) for tensor in builder.initializers)),
    }
    if scale is not None:
        properties["scale"] = json.dumps(scale.to_table())
    if model.ByteSize() > LARGEST_BYTES:
        raise ModelError(
            f"the stitched network has {model.ByteSize() / 1e9:.1f} GB, an ONNX file at most 2 GB: set `budget_mb`"
        )
    if alive is not None:  # otherwise engines run one example at a time
        properties["activation_bytes"] = str(alive)
    helper.set_model_props(model, properties)
    return model.SerializeToString(deterministic=True)


def _add_prefix_blocks(
    builder: _GraphBuilder,
    network: StitchedNetwork,
    prefixes: Sequence[tuple[str, ...]],
    values: dict[tuple[str, ...], str],
    blocks: Mapping[str, Block],
    files: Mapping[str, Path],
) -> None:
    for ids in prefixes:
        number = len(values) - 1
        stages = [[model.graph for model in stage] for stage in _load_block_graphs(ids[-1], blocks, files)]
        value, junction = values[ids[:-1]], network.junctions.get(junction_name(ids))
        if junction is not None:
            out_shape, in_shape = blocks[ids[-2]].out_shape, blocks[ids[-1]].in_shape
            value, stages[0] = builder.add_junction(
                value, junction, (out_shape, in_shape), stages[0], f"junction{number}"
            )
        for i, stage in enumerate(stages):
            value = builder.add_stage(value, stage, f"block{number}/{i}/", f"{ids[-1]}/{i}/")
        values[ids] = value


class _GraphBuilder:
    """Builder of the graph's nodes and weights. Methods return the name of the value that they add."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.late_weights: set[str] = set()  # names of initializers inside a branch
        self._digests: dict[str, bytes] = {}  # name of a block's weights in the file -> digest

    def add_node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def take_nodes(self) -> list[onnx.NodeProto]:
        nodes, self.nodes = self.nodes, []
        return nodes

    def add_choice(self, early_scores: str, late_scores: str, nodes: Sequence[onnx.NodeProto], margin: float) -> str:
        """Add an `If` that returns the early scores if their margin suffices, or else runs `nodes`."""
        two = self.add_constant("early/two", np.array([2], np.int64))
        signs = self.add_constant("early/signs", np.array([[1.0], [-1.0]], np.float32))
        threshold = self.add_constant("early/least", np.array([[margin]], np.float32))
        self.nodes.append(
            helper.make_node("TopK", [early_scores, two], ["early/best", "early/places"], name="early/best")
        )
        margins = self.add_node("MatMul", ["early/best", signs], "early/margin")
        is_early = self.add_node("GreaterOrEqual", [margins, threshold], "early/leaves")
        read, read_late = ({name for node in group_nodes for name in node.input} for group_nodes in (self.nodes, nodes))
        self.late_weights = read_late - read  # the runtime prepacks weights only inside their own branch
        weights = [tensor for tensor in self.initializers if tensor.name in self.late_weights]
        branches = []
        for value, name, inner, branch_weights in (
            (early_scores, "early", (), ()),
            (late_scores, "late", nodes, weights),
        ):
            info = helper.make_tensor_value_info(f"{name}/answer", TensorProto.FLOAT, None)
            inner = [*inner, helper.make_node("Identity", [value], [f"{name}/answer"])]
            branches.append(helper.make_graph(inner, name, [], [info], branch_weights))
        return self.add_node("If", [is_early], "answer", then_branch=branches[0], else_branch=branches[1])

    def make_model(self, count: str | int, in_shape: Sequence[int], out_shape: Sequence[int]) -> onnx.ModelProto:
        """Return the model of all nodes. A string as `count` names a batch axis of any size."""
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes,
            "stitched",
            [info("x", TensorProto.FLOAT, [count, *in_shape])],
            [info("scores", TensorProto.FLOAT, [count, *out_shape])],
            [tensor for tensor in self.initializers if tensor.name not in self.late_weights],
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="fedquilt")

    def add_constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add_standardisation(self, value: str, scale: onnx_scaling.InputScale) -> str:
        result = f"{value}/standardised"
        scaled_value = onnx_scaling.standardise_value(value, scale, result)
        self.nodes += scaled_value.nodes
        self.initializers += scaled_value.constants
        return result

    def add_stage(self, value: str, graphs: Sequence[onnx.GraphProto], prefix: str, home: str) -> str:
        if len(graphs) == 1:
            return self._add_graph(value, graphs[0], prefix, home)
        parts = [self._add_graph(value, graph, f"{prefix}{i}/", f"{home}{i}/") for i, graph in enumerate(graphs)]
        return self.add_node("Concat", parts, f"{prefix}joined", axis=1)

    def _add_graph(self, value: str, graph: onnx.GraphProto, prefix: str, home: str) -> str:
        # Equal weights of a block in several paths are stored once.
        names = {graph.input[0].name: value}
        for tensor in graph.initializer:
            stored_name, digest = f"{home}{tensor.name}", hashlib.sha256(tensor.raw_data).digest()
            if self._digests.get(stored_name, digest) != digest:
                stored_name = f"{prefix}{tensor.name}"  # a junction was folded into this or an earlier use
            names[tensor.name] = stored_name
            if stored_name not in self._digests:
                self._digests[stored_name] = digest
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor)
                copy.name = stored_name
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
        """Add a junction, or fold its projection into a copy of `stage` if cheaper.

        Return the name of the value that the next stage reads, and the graphs of that stage.
        """
        in_shape, out_shape = shapes
        if enlarges_maps(in_shape, out_shape):
            return self._add_resize(
                self._add_projection(value, junction, len(in_shape), name), in_shape, out_shape, name
            ), stage
        value = self._add_resize(value, in_shape, out_shape, name)
        weights, bias = _to_float32(junction["weights"]), _to_float32(junction["bias"])
        folded_graph = fold_projection(stage[0], weights, bias) if len(stage) == 1 else None
        return (
            (self._add_projection(value, junction, len(in_shape), name), stage)
            if folded_graph is None
            else (value, [folded_graph])
        )

    def _add_resize(self, value: str, in_shape: Sequence[int], out_shape: Sequence[int], name: str) -> str:
        if len(in_shape) == 3 and in_shape[1] != out_shape[1]:
            rows = self.add_constant(f"{name}/rows", inputs.resize_matrix(in_shape[1], out_shape[1]))
            value = self.add_node("MatMul", [rows, value], f"{name}/resized_rows")
        if in_shape[-1] != out_shape[-1]:
            columns = self.add_constant(f"{name}/columns", inputs.resize_matrix(in_shape[-1], out_shape[-1]).T)
            value = self.add_node("MatMul", [value, columns], f"{name}/resized")
        return value

    def _add_projection(self, value: str, junction: Tensors, axes: int, name: str) -> str:
        kernel = _to_float32(junction["weights"])
        weights = self.add_constant(f"{name}/weights", kernel.reshape(*kernel.shape, *[1] * (axes - 1)))
        bias = self.add_constant(f"{name}/bias", _to_float32(junction["bias"]))
        return self.add_node("Conv", [value, weights, bias], f"{name}/projected")

    def add_head(self, taps: Sequence[tuple[str, Sequence[int]]], head: Tensors, prefix: str = "head") -> str:
        """Add the head: pooled and joined taps, a hidden ReLU layer if `head` has one, and a linear layer."""
        features = [""] * len(taps)
        # ONNX Runtime computes the inputs of a node in reverse order of the file. With this order the first tap is
        # pooled and its maps are freed before the second tap is computed.
        for i, (value, shape) in reversed([*enumerate(taps)]):
            name = f"{prefix}/{i}"
            pooled = self.add_node("GlobalAveragePool", [value], f"{name}/pooled") if len(shape) > 1 else value
            features[i] = self.add_node("Flatten", [pooled], f"{name}/features", axis=1)
        joined = self.add_node("Concat", features, f"{prefix}/features", axis=1) if len(features) > 1 else features[0]
        if "hidden" in head:
            hidden = self.add_constant(f"{prefix}/hidden", _to_float32(head["hidden"]))
            joined = self.add_node(
                "Relu", [self.add_node("Gemm", [joined, hidden], f"{prefix}/drawn", transB=1)], f"{prefix}/rectified"
            )
        weights = self.add_constant(f"{prefix}/weights", _to_float32(head["weights"]))
        bias = self.add_constant(f"{prefix}/bias", _to_float32(head["bias"]))
        return self.add_node("Gemm", [joined, weights, bias], f"{prefix}/scores", transB=1)

    def add_alignment(self, logits: str, groups: Sequence[Sequence[int]] | None) -> str:
        assert groups  # `require_label_scores`
        parts = []
        for label, group in enumerate(groups):
            if group:
                classes = self.add_constant(f"align/{label}", np.array(group, np.int64))
                class_logits = self.add_node("Gather", [logits, classes], f"align/{label}/logits", axis=1)
                parts.append(
                    self.add_node("ReduceLogSumExp", [class_logits], f"align/{label}/score", axes=[1], keepdims=1)
                )
            else:
                parts.append("")
        first_part = next(part for part in parts if part)
        shape = self.add_node("Shape", [first_part], "align/shape")
        lowest = numpy_helper.from_array(np.array([-np.inf], np.float32))
        lowest_scores = self.add_node("ConstantOfShape", [shape], "align/never", value=lowest)
        return self.add_node("Concat", [part or lowest_scores for part in parts], "align/scores", axis=1)


def _copy_with_renamed_values(node: onnx.NodeProto, names: Mapping[str, str], prefix: str) -> onnx.NodeProto:
    """Return a copy in which values are renamed by `names`, or else prefixed, also in subgraphs."""
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    renamed.name = f"{prefix}{node.name}"
    for values in (renamed.input, renamed.output):
        values[:] = [names.get(value, f"{prefix}{value}") if value else "" for value in values]
    for inner in (attribute.g for attribute in renamed.attribute if attribute.HasField("g")):
        nodes = [_copy_with_renamed_values(inner_node, names, prefix) for inner_node in inner.node]
        del inner.node[:]
        inner.node.extend(nodes)
        for named_value in (*inner.input, *inner.output, *inner.initializer, *inner.value_info):
            named_value.name = f"{prefix}{named_value.name}"
    return renamed


def _to_float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def _load_block_graphs(
    block: str, blocks: Mapping[str, Block], files: Mapping[str, Path]
) -> tuple[tuple[onnx.ModelProto, ...], ...]:
    stages = _find_block(block, blocks).stages
    if not files.keys() >= {name for stage in stages for name in stage}:
        raise _missing_block_error(block)
    return tuple(tuple(load_graph(block, files[name]) for name in stage) for stage in stages)


def _find_block(name: str, blocks: Mapping[str, Block]) -> Block:
    if name not in blocks:
        raise _missing_block_error(name)
    return blocks[name]


def _missing_block_error(name: str) -> ModelError:
    return ModelError(f"the bundle has no block {name!r}: use the bundle from which this network was stitched")


def load_graph(block: str, path: Path) -> onnx.ModelProto:
    """Load a block's graph with its weights, or raise ModelError if `graph_check` refuses it."""
    try:
        graph_check.check_file(path)
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                _inline_external_data(tensor, path.parent)
    except Exception as error:  # protobuf and the file system raise their own exceptions
        raise ModelError(f"block {block!r} in {path} is unusable ({error}): prepare the bundle again") from None
    opsets = [opset.version for opset in model.opset_import]
    if opsets != [OPSET] or len(model.graph.input) != 1 or len(model.graph.output) != 1:
        raise ModelError(f"block {block!r} in {path} was not made by `fedquilt prepare`: prepare the bundle again")
    return model


def _inline_external_data(tensor: onnx.TensorProto, folder: Path) -> None:
    # onnx itself refuses hard-linked files.
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / entries["location"]).open("rb") as data:
        data.seek(int(entries.get("offset", "0")))
        tensor.raw_data = data.read(int(entries.get("length", "-1")))
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT


# -- folding -----------------------------------------------------------------------------------------


def fold_projection(graph: onnx.GraphProto, weights: np.ndarray, bias: np.ndarray) -> onnx.GraphProto | None:
    """Return the graph with a projection, weights (q, p) and bias (q,), folded into its first layer.

    The graph takes maps (n, q, ...), the result maps (n, p, ...). Return None if folding is inexact or costs more.
    """
    convolution = _find_only_reading_convolution(graph)
    if convolution is None:
        return None
    kernel = numpy_helper.to_array(_find_tensor(graph, convolution.input[1]))  # (o, q, k, k) or (o, q, k)
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in convolution.attribute}
    if any(attributes.get("pads", ())) or attributes.get("group", 1) != 1 or attributes.get("auto_pad"):
        return None
    (q, p), area = weights.shape, int(np.prod(attributes.get("strides", (1, 1))))
    if kernel.size * p // q >= q * p * area + kernel.size:  # multiplications for each output position
        return None
    merged = onnx.GraphProto()
    merged.CopyFrom(graph)
    node = next(node for node in merged.node if node.output[0] == convolution.output[0])
    offset = kernel.sum(axis=tuple(range(2, kernel.ndim))) @ bias
    if len(node.input) > 2:
        offset = offset + numpy_helper.to_array(_find_tensor(graph, node.input[2]))
    arrays = {"weight": np.einsum("oq...,qp->op...", kernel, weights), "bias": offset}
    node.input[:] = [node.input[0], *(f"{node.output[0]}/folded_{name}" for name in arrays)]
    for name, array in zip(node.input[1:], arrays.values(), strict=True):
        merged.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))
    used_names = {name for folded_node in merged.node for name in folded_node.input}
    unused = [tensor for tensor in merged.initializer if tensor.name not in used_names]
    for tensor in unused:
        merged.initializer.remove(tensor)
    merged.input[0].type.tensor_type.shape.dim[1].dim_value = p
    return merged


def _find_only_reading_convolution(graph: onnx.GraphProto) -> onnx.NodeProto | None:
    readers = [node for node in graph.node if graph.input[0].name in node.input]
    constants = {tensor.name for tensor in graph.initializer}
    if len(readers) != 1 or readers[0].op_type != "Conv" or not {*readers[0].input[1:]} <= constants:
        return None
    return readers[0]


def _find_tensor(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)

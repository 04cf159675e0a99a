"""Division of a donor network into blocks, and their export as ONNX graphs.

The network is traced (torch.fx) into a list of operations, and a block is the operations between two cuts, so that the
blocks in order compute the network. Average pool and flatten belong to the terminating block. Every other block takes
maps to maps, and any block may follow any other (FedStitch, arXiv 2409.07202, section 4.1). For torchvision's alexnet,
densenet121, mobilenet_v2, resnet50 and vgg16 the rule of `fedquilt.models.stitching.onnx.cut_points` gives the paper's
6, 6, 20, 6 and 14 blocks.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fedquilt.core import ModelError
from fedquilt.core.errors import first_line
from fedquilt.models.networks import architectures, onnx_file, registry, traces
from fedquilt.models.stitching.onnx import cut_points as where
from fedquilt.models.stitching.onnx import memory, tiled_linear
from fedquilt.onnx import graph_check

IR_VERSION = 8
INLINE_BYTES = 16 * 1024  # a block with fewer bytes of weights is one file
SMALL_BYTES = 1024  # smaller tensors stay in the graph, where shape inference needs those that are shapes
ALIGNMENT = 64  # bytes, of tensors in the data file: a cache line
TILE_BYTES = 32_000_000  # a linear layer with more weights is cut into tiles of its rows
MEND = "replace that operation in the network"

Kind = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class DonorBlock:
    """Block of a donor network. Shapes are without the batch, and FLOPs are per example."""

    donor: str
    index: int
    kind: Kind
    module: nn.Module
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    flops: float

    @property
    def id(self) -> str:
        """Name of the block in paths and bundles, "donor.index"."""
        return f"{self.donor}.{self.index}"


@dataclass(frozen=True)
class BlockGraph:
    """ONNX graph from "x" to "y".

    Attributes:
        graph: Serialised model.
        data: External weights, named by their sha256 in the graph, or None if all weights are in the graph.
        weight_bytes: Size of all weights.
        activation_bytes: Peak memory of one example's values, input and output included, or 0 if unknown.
    """

    graph: bytes
    data: bytes | None
    weight_bytes: int
    activation_bytes: int


def split_donor(
    model: nn.Module, donor: str, shape: tuple[int, ...], *, cuts: Sequence[str] = (), architecture: str = ""
) -> list[DonorBlock]:
    """Split a classifier into blocks, in order. The first has kind "start", the last "end".

    Args:
        model: Classifier, which is switched to evaluation mode.
        donor: Name of the donor in the job, the prefix of its blocks' ids.
        shape: Shape of one example: (channels, size, size) of an image, (steps, channels) of a time series.
        cuts: Names of modules to cut after, in order, or () for `cut_points.cuts_by_rule`.
        architecture: Name of the network in torchvision, or "".

    Raises:
        ModelError: If the network cannot be traced or cut there.
    """
    model = model.eval()
    traced = _trace_with_shapes(model, donor, shape)
    *nodes, output = traced.graph.nodes
    result = output.args[0]
    if len(where.value_shape(result)) != 2:
        raise ModelError(f"donor {donor!r} is no classifier: it yields {where.value_shape(result)}, not (n, classes)")
    found = where.list_operations(model, traced)
    names = (
        where.cuts_after_modules(found, donor, cuts) if cuts else where.cuts_by_rule(model, found, donor, architecture)
    )
    place = {node.name: i for i, node in enumerate(nodes)}
    ends = [*(place[name] for name in names), place[result.name]]
    blocks, first = [], 0
    for index, end in enumerate(ends):
        kind: Kind = "start" if index == 0 else "end" if index == len(names) else "middle"
        last = (found[first].last, found[end].last and kind != "end")
        blocks.append(_build_block(traced, donor, index, kind, nodes[first : end + 1], last))
        first = end
    return blocks


def export_block(block: DonorBlock) -> tuple[tuple[BlockGraph, ...], ...]:
    """Export a block to ONNX with a free batch size, as stages of graphs, reproducibly.

    Most blocks are one stage of one graph. A linear layer of more than TILE_BYTES becomes a stage of tiles, if the
    graph can be cut around the layer. Each graph's metadata has "activation_bytes" and "weight_bytes" for the engine.

    Raises:
        ModelError: If ONNX or the devices (`fedquilt.onnx.graph_check`) do not support an operation.
    """
    made = tuple(
        tuple(_build_block_graph(model) for model in stage)
        for stage in tiled_linear.split_into_stages(_onnx_model(block), TILE_BYTES)
    )
    for graph in (graph for stage in made for graph in stage):
        try:
            graph_check.check_bytes(graph.graph, lambda name, data=graph.data: len(data or b""))  # type: ignore[misc]
        except ModelError as error:
            raise ModelError(f"block {block.id} would be run by no board: {error}; {MEND}") from None
    return made


def _onnx_model(block: DonorBlock) -> onnx.ModelProto:
    model = onnx_file.trace_to_onnx(block.module, block.in_shape, f"block {block.id}", MEND)
    _remove_identity_aliases(model.graph)
    return model


def _remove_identity_aliases(graph: onnx.GraphProto) -> None:
    # torch writes Identity nodes for equal tensors.
    tensors = {tensor.name for tensor in graph.initializer}
    aliases = [node for node in graph.node if node.op_type == "Identity" and node.input[0] in tensors]
    names = {node.output[0]: node.input[0] for node in aliases}
    for alias in aliases:
        graph.node.remove(alias)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def _build_block_graph(model: onnx.ModelProto) -> BlockGraph:
    activation_bytes = memory.peak_activation_bytes(model)
    weight_bytes = sum(_tensor_bytes(tensor) for tensor in model.graph.initializer)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "fedquilt", ""
    facts = {"weight_bytes": str(weight_bytes)}
    if activation_bytes is not None:  # else engines run one example at a time
        facts["activation_bytes"] = str(activation_bytes)
    onnx.helper.set_model_props(model, facts)
    data = _move_weights_to_external_data(model) if weight_bytes >= INLINE_BYTES else None
    return BlockGraph(model.SerializeToString(deterministic=True), data, weight_bytes, activation_bytes or 0)


# -- tracing --------------------------------------------------------------------------------------


def _trace_with_shapes(model: nn.Module, donor: str, shape: tuple[int, ...]) -> fx.GraphModule:
    traced = traces.trace_network(model, f"donor {donor!r}", "take another donor").eval()
    try:
        with torch.no_grad():
            ShapeProp(traced).propagate(torch.zeros(2, *shape))
    except Exception as error:
        size = " x ".join(map(str, shape))
        if len(shape) == 3:
            what, mend = "images", "change `size` or `channels` of [input]"
        else:
            what, mend = "time series", "change `steps` or `channels` of its network"
        raise ModelError(f"donor {donor!r} does not take {what} of {size}: {first_line(error)}; {mend}") from None
    traced.graph.eliminate_dead_code()
    _replace_indivisible_pools(traced)
    return traced


def _replace_indivisible_pools(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not (isinstance(module, nn.AdaptiveAvgPool2d) or node.target is F.adaptive_avg_pool2d):
            continue
        source = node.args[0]
        before, after = where.value_shape(source)[2:], where.value_shape(node)[2:]
        if any(b % a for b, a in zip(before, after, strict=True)):
            name = f"{node.name}_as_product"
            traced.add_submodule(name, architectures.ProductPool(before, after))
            node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}
    traced.recompile()


def _build_block(
    traced: fx.GraphModule, donor: str, index: int, kind: Kind, nodes: list[fx.Node], last: tuple[bool, bool]
) -> DonorBlock:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copies = {nodes[0]: graph.call_method("transpose", (x, 1, 2)) if last[0] else x}
    used = {source for node in nodes[1:] for source in node.all_input_nodes}
    constants = [node for node in traced.graph.nodes if node.op == "get_attr" and node in used - {*nodes}]
    for node in [*constants, *nodes[1:]]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    y = copies[nodes[-1]]
    graph.output(graph.call_method("transpose", (y, 1, 2)) if last[1] else y)
    module = fx.GraphModule(traced, graph).eval()
    in_shape, out_shape = (
        where.value_shape(node)[1:][:: -1 if turned else 1]
        for node, turned in zip((nodes[0], nodes[-1]), last, strict=True)
    )
    try:
        flops = registry.measure_cost(module, in_shape).flops
    except Exception as error:  # whatever a user's forward() raises on one example, after the two of the trace
        raise ModelError(
            f"donor {donor!r}: block {donor}.{index} does not run on 1 example: {first_line(error)}; "
            "its forward() may not state a batch size: write x.shape[0] or -1 there"
        ) from None
    return DonorBlock(donor, index, kind, module, in_shape, out_shape, flops)


# -- weights --------------------------------------------------------------------------------------


def _move_weights_to_external_data(model: onnx.ModelProto) -> bytes:
    data = io.BytesIO()
    moved = []
    for tensor in model.graph.initializer:
        if _tensor_bytes(tensor) < SMALL_BYTES:
            continue
        data.write(bytes(-data.tell() % ALIGNMENT))
        moved.append((tensor, data.tell(), data.write(tensor.raw_data)))
        tensor.ClearField("raw_data")
    payload = data.getvalue()
    location = hashlib.sha256(payload).hexdigest()
    for tensor, offset, length in moved:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    return payload


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize

"""Division of a donor network into blocks, and their export as ONNX graphs.

The network is traced (torch.fx) into a list of operations, and a block is the operations between two cuts, so that the
blocks in order compute the network. Average pool and flatten belong to the terminating block. Every other block takes
maps to maps, and any block may follow any other (FedStitch, arXiv 2409.07202, section 4.1). For torchvision's alexnet,
densenet121, mobilenet_v2, resnet50 and vgg16 the rule of this module gives the paper's
6, 6, 20, 6 and 14 blocks.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import onnx
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fedquilt.core import ModelError
from fedquilt.core.errors import first_line
from fedquilt.models.networks import architectures, onnx_file, registry, traces
from fedquilt.models.networks.architectures import Attention
from fedquilt.models.stitching.onnx import memory, tiled_linear
from fedquilt.onnx import graph_check

IR_VERSION = 8
INLINE_BYTES = 16 * 1024  # a block with fewer bytes of weights is one file
SMALL_BYTES = 1024  # smaller tensors stay in the graph, because shape inference needs shape tensors
ALIGNMENT = 64  # alignment of tensors in the data file: a cache line
TILE_BYTES = 32_000_000  # a linear layer with more weights is cut into tiles of its rows
EXPORT_FIX = "replace that operation in the network"

Kind = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class DonorBlock:
    donor: str
    index: int
    kind: Kind
    module: nn.Module
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    flops: float

    @property
    def id(self) -> str:
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
        cuts: Names of modules to cut after, in order, or () for `cuts_by_rule`.
        architecture: Name of the network in torchvision, or "".
    """
    model = model.eval()
    traced = _trace_with_shapes(model, donor, shape)
    *nodes, output = traced.graph.nodes
    result = output.args[0]
    if len(value_shape(result)) != 2:
        raise ModelError(
            f"donor {donor!r} is not a classifier: its output has the shape {value_shape(result)}, not (n, classes)"
        )
    operations = list_operations(model, traced)
    names = (
        cuts_after_modules(operations, donor, cuts) if cuts else cuts_by_rule(model, operations, donor, architecture)
    )
    position = {node.name: i for i, node in enumerate(nodes)}
    ends = [*(position[name] for name in names), position[result.name]]
    blocks, first = [], 0
    for index, end in enumerate(ends):
        kind: Kind = "start" if index == 0 else "end" if index == len(names) else "middle"
        is_transposed = (operations[first].channels_last, operations[end].channels_last and kind != "end")
        blocks.append(_build_block(traced, donor, index, kind, nodes[first : end + 1], is_transposed))
        first = end
    return blocks


def export_block(block: DonorBlock) -> tuple[tuple[BlockGraph, ...], ...]:
    """Export a block to ONNX with a free batch size, as stages of graphs, reproducibly.

    Most blocks are one stage of one graph. A linear layer of more than TILE_BYTES becomes a stage of tiles, if the
    graph can be cut around the layer. Each graph's metadata has "activation_bytes" and "weight_bytes" for the engine.
    """
    stages = tuple(
        tuple(_build_block_graph(model) for model in stage)
        for stage in tiled_linear.split_into_stages(_onnx_model(block), TILE_BYTES)
    )
    for graph in (graph for stage in stages for graph in stage):
        try:
            graph_check.check_bytes(graph.graph, lambda name, data=graph.data: len(data or b""))  # type: ignore[misc]
        except ModelError as error:
            raise ModelError(f"block {block.id} cannot run on devices ({error}): {EXPORT_FIX}") from None
    return stages


def _onnx_model(block: DonorBlock) -> onnx.ModelProto:
    model = onnx_file.trace_to_onnx(block.module, block.in_shape, f"block {block.id}", EXPORT_FIX)
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
    properties = {"weight_bytes": str(weight_bytes)}
    if activation_bytes is not None:  # else engines run one example at a time
        properties["activation_bytes"] = str(activation_bytes)
    onnx.helper.set_model_props(model, properties)
    data = _move_weights_to_external_data(model) if weight_bytes >= INLINE_BYTES else None
    return BlockGraph(model.SerializeToString(deterministic=True), data, weight_bytes, activation_bytes or 0)


# -- tracing --------------------------------------------------------------------------------------


def _trace_with_shapes(model: nn.Module, donor: str, shape: tuple[int, ...]) -> fx.GraphModule:
    traced = traces.trace_network(model, f"donor {donor!r}", "use another donor").eval()
    try:
        with torch.no_grad():
            ShapeProp(traced).propagate(torch.zeros(2, *shape))
    except Exception as error:
        size = " x ".join(map(str, shape))
        if len(shape) == 3:
            subject, fix = "images", "change `size` or `channels` of [input]"
        else:
            subject, fix = "time series", "change `steps` or `channels` of its network"
        raise ModelError(f"donor {donor!r} cannot read {subject} of {size} ({first_line(error)}): {fix}") from None
    traced.graph.eliminate_dead_code()
    _replace_indivisible_pools(traced)
    return traced


def _replace_indivisible_pools(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not (isinstance(module, nn.AdaptiveAvgPool2d) or node.target is F.adaptive_avg_pool2d):
            continue
        source = node.args[0]
        in_size, out_size = value_shape(source)[2:], value_shape(node)[2:]
        if any(b % a for b, a in zip(in_size, out_size, strict=True)):
            name = f"{node.name}_as_product"
            traced.add_submodule(name, architectures.ProductPool(in_size, out_size))
            node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}
    traced.recompile()


def _build_block(
    traced: fx.GraphModule, donor: str, index: int, kind: Kind, nodes: list[fx.Node], is_transposed: tuple[bool, bool]
) -> DonorBlock:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copies = {nodes[0]: graph.call_method("transpose", (x, 1, 2)) if is_transposed[0] else x}
    sources = {source for node in nodes[1:] for source in node.all_input_nodes}
    constants = [node for node in traced.graph.nodes if node.op == "get_attr" and node in sources - {*nodes}]
    for node in [*constants, *nodes[1:]]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    y = copies[nodes[-1]]
    graph.output(graph.call_method("transpose", (y, 1, 2)) if is_transposed[1] else y)
    module = fx.GraphModule(traced, graph).eval()
    in_shape, out_shape = (
        value_shape(node)[1:][:: -1 if transpose else 1]
        for node, transpose in zip((nodes[0], nodes[-1]), is_transposed, strict=True)
    )
    try:
        flops = registry.measure_cost(module, in_shape).flops
    except Exception as error:  # a user's forward() may fail with one example although the trace's two examples ran
        raise ModelError(
            f"donor {donor!r}: block {donor}.{index} does not run on one example ({first_line(error)}): "
            "write x.shape[0] or -1 in forward() instead of a fixed batch size"
        ) from None
    return DonorBlock(donor, index, kind, module, in_shape, out_shape, flops)


# -- weights --------------------------------------------------------------------------------------


def _move_weights_to_external_data(model: onnx.ModelProto) -> bytes:
    data = io.BytesIO()
    external_tensors = []
    for tensor in model.graph.initializer:
        if _tensor_bytes(tensor) < SMALL_BYTES:
            continue
        data.write(bytes(-data.tell() % ALIGNMENT))
        external_tensors.append((tensor, data.tell(), data.write(tensor.raw_data)))
        tensor.ClearField("raw_data")
    payload = data.getvalue()
    location = hashlib.sha256(payload).hexdigest()
    for tensor, offset, length in external_tensors:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    return payload


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


# -- cuts --------------------------------------------------------------------------------------------


MAPS = "square maps (n, c, h, h), or maps (n, c, l) along time or tokens"
CHANNELS_FIRST, CHANNELS_LAST = 1, 2  # axis of the channels of values with three axes
POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AvgPool1d, nn.AvgPool2d, architectures.ProductPool)
POOLING = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.avg_pool1d, F.avg_pool2d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
ATTENTION = (nn.MultiheadAttention, Attention)

# Last modules of parts that consist of several modules: a dense block and the transition after the block.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "densenet": ("features.pool0", "features.transition1", "features.transition2", "features.transition3"),
}


@dataclass(frozen=True)
class Operation:
    name: str  # name of its value in the trace
    part: str  # child of the trunk or of the network that contains the operation, or ""
    owner: str  # innermost module that contains the operation
    can_cut: bool  # a cut after the operation is possible: its value is maps, and no other value is used later
    has_weights: bool
    is_pooling: bool
    channels_last: bool = False  # the value is (n, l, channels), which blocks pass on transposed


def list_operations(model: nn.Module, traced: fx.GraphModule) -> list[Operation]:
    """Return the operations of a traced network with known shapes, in order, input first."""
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    position = {node: i for i, node in enumerate(nodes)}
    last_uses = {node: max((position.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    trunk = find_trunk(model)
    operations, alive, channels = [], set[fx.Node](), _infer_channel_axes(traced)
    for i, node in enumerate(nodes):
        alive = {earlier for earlier in alive if last_uses[earlier] > i}
        if node.op != "get_attr":  # a constant is copied to every block that uses it
            alive.add(node)
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        shape = value_shape(node)
        operations.append(
            Operation(
                name=node.name,
                part=_part_name(owner_module(node), trunk),
                owner=owner_module(node),
                can_cut=alive == {node} and (_is_square(shape) or (len(shape) == 3 and node in channels)),
                has_weights=module is not None and any(True for _ in module.parameters()),
                is_pooling=_is_pooling(node, module),
                channels_last=len(shape) == 3 and channels.get(node) == CHANNELS_LAST,
            )
        )
    return operations


def cuts_after_modules(operations: Sequence[Operation], donor: str, cuts: Sequence[str]) -> list[str]:
    """Return the last operation of each module in `cuts`, or raise ModelError if a cut is impossible."""
    ends: list[int] = []
    for cut in cuts:
        indices = [i for i, op in enumerate(operations) if op.owner == cut or op.owner.startswith(cut + ".")]
        if not indices:
            tops = sorted({op.owner.split(".")[0] for op in operations} - {""})
            raise ModelError(f"donor {donor!r} runs no module {cut!r}: name {', '.join(tops)}, or a module inside")
        if not operations[indices[-1]].can_cut:
            raise ModelError(
                f"donor {donor!r} cannot be cut after {cut!r}: later modules read other values too, or the output is "
                f"not {MAPS}: cut after the module that joins the branches, before the flatten"
            )
        if ends and indices[-1] <= ends[-1]:
            raise ModelError(f"donor {donor!r}: cut {cut!r} runs before the previous cut: sort the cuts as they run")
        ends.append(indices[-1])
    return [operations[i].name for i in ends]


def cuts_by_rule(model: nn.Module, operations: Sequence[Operation], donor: str, architecture: str = "") -> list[str]:
    """Return the last operation of each part of a network, up to the last operation before the head."""
    head = _find_index_before_head(operations, donor)
    parts = next((names for family, names in _PARTS.items() if architecture.startswith(family)), ())
    ends = cuts_after_modules(operations, donor, parts) if parts else _cuts_before_convolutions(model, operations)
    before_head = {op.name for op in operations[:head]}
    return [*(end for end in ends if end in before_head), operations[head].name]


def find_trunk(model: nn.Module) -> str:
    """Return the path of the innermost Sequential with 90 % of the attention modules, or "" for the model."""
    name, module = "", model
    kinds = ATTENTION if _count_modules(model, ATTENTION) else CONVOLUTIONS
    while True:
        total = _count_modules(module, kinds)
        descendants = module.named_children() if kinds is CONVOLUTIONS else [*module.named_modules()][1:]
        inner = (
            (child_name, child)
            for child_name, child in descendants
            if isinstance(child, nn.Sequential) and len(child) > 1 and _count_modules(child, kinds) >= 0.9 * total > 0
        )
        next_level = next(inner, None)
        if next_level is None:
            return name
        name, module = f"{name}.{next_level[0]}".lstrip("."), next_level[1]


def value_shape(node: object) -> tuple[int, ...]:
    """Return the shape of a node's value, batch first, or () unless the value is one tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return () if meta is None or not hasattr(meta, "shape") else tuple(meta.shape)


def owner_module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": None}
    return str([*stack][-1])


def _part_name(owner: str, trunk: str) -> str:
    is_inside = not trunk or owner == trunk or owner.startswith(trunk + ".")
    depth = (trunk.count(".") + 2 if trunk else 1) if is_inside else 1
    return ".".join(owner.split(".")[:depth])


def _cuts_before_convolutions(model: nn.Module, operations: Sequence[Operation]) -> list[str]:
    ends: list[str] = []
    is_after_first = False  # whether a convolution came before
    trunk = find_trunk(model)
    for previous, op in pairwise(operations):
        if not op.part or op.part == previous.part or trunk.startswith(f"{op.part}."):
            continue
        if _count_modules(model.get_submodule(op.part), CONVOLUTIONS + ATTENTION):
            if is_after_first and previous.can_cut:
                ends.append(previous.name)
            is_after_first = True
    return ends


def _find_index_before_head(operations: Sequence[Operation], donor: str) -> int:
    # The last operation before the terminating block.
    last = max((i for i, op in enumerate(operations) if op.has_weights), default=0)
    first = last  # all layers of the part with the last weights belong to the classifier
    while first > 0 and operations[first - 1].part == operations[last].part != "":
        first -= 1
    start = max((i for i in range(first) if operations[i].can_cut), default=0)
    for i in range(start, 0, -1):  # a pool before the classifier belongs to the classifier
        if operations[i].has_weights:
            break
        if operations[i].is_pooling and operations[i - 1].can_cut:
            start = i - 1
    if not any(op.has_weights for op in operations[: start + 1]):
        raise ModelError(
            f"donor {donor!r} cannot be split: before {operations[last].part or 'its classifier'!r} no module outputs "
            f"only {MAPS}: use a convolutional network, or set `cuts`"
        )
    return start


def _count_modules(module: nn.Module, kinds: tuple[type, ...]) -> int:
    return sum(isinstance(inner, kinds) for inner in module.modules())


def _infer_channel_axes(traced: fx.GraphModule) -> dict[fx.Node, int]:
    axes: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        axis = _infer_channel_axis(node, module, axes)
        if axis is not None:
            axes[node] = axis
    return axes


def _infer_channel_axis(node: fx.Node, module: nn.Module | None, axes: Mapping[fx.Node, int]) -> int | None:
    shape = value_shape(node)
    source = next((candidate for candidate in node.all_input_nodes if candidate in axes), None)
    axis = None if source is None else axes[source]
    if isinstance(module, CONVOLUTIONS):
        return CHANNELS_FIRST
    if isinstance(module, nn.Linear | nn.LayerNorm) and len(shape) == 3:
        return axis or CHANNELS_LAST
    if source is None or _is_transposition(node):
        return CHANNELS_FIRST + CHANNELS_LAST - axis if axis and len(shape) == 3 and _swaps_last_axes(node) else None
    source_shape = value_shape(source)  # empty for several values, such as the output of attention
    keeps_axis = (
        not shape
        or not source_shape
        or len(shape) == len(source_shape)
        or (len(shape), len(source_shape), shape[1]) == (3, 4, source_shape[1])
    )
    return axis if keeps_axis else None


def _swaps_last_axes(node: fx.Node) -> bool:
    axes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    positions = [axis % 3 for axis in axes if isinstance(axis, int)]
    return positions in ([0, 2, 1], [1, 2], [2, 1])


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[2] == shape[3]


def _is_transposition(node: fx.Node) -> bool:
    return node.target in ("transpose", "permute", torch.transpose, torch.permute)


def _is_pooling(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, POOLS):
        return True
    if node.op == "call_function" and node.target in POOLING:
        return True
    return node.target in ("mean", torch.mean)

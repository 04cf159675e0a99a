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
SMALL_BYTES = 1024  # smaller tensors stay in the graph, where shape inference needs those that are shapes
ALIGNMENT = 64  # bytes, of tensors in the data file: a cache line
TILE_BYTES = 32_000_000  # a linear layer with more weights is cut into tiles of its rows
MEND = "replace that operation in the network"

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
        raise ModelError(f"donor {donor!r} is no classifier: it yields {value_shape(result)}, not (n, classes)")
    found = list_operations(model, traced)
    names = cuts_after_modules(found, donor, cuts) if cuts else cuts_by_rule(model, found, donor, architecture)
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
        before, after = value_shape(source)[2:], value_shape(node)[2:]
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
        value_shape(node)[1:][:: -1 if turned else 1] for node, turned in zip((nodes[0], nodes[-1]), last, strict=True)
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


# -- where to cut ------------------------------------------------------------------------------------


MAPS = "square maps (n, c, h, h), or of maps (n, c, l) along time or of a transformer's tokens"
FIRST, LAST = 1, 2  # axis of the channels of values with three axes
POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AvgPool1d, nn.AvgPool2d, architectures.ProductPool)
POOLING = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.avg_pool1d, F.avg_pool2d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
ATTENTION = (nn.MultiheadAttention, Attention)

# last modules of parts that consist of several modules: a dense block and the transition after it
_PARTS: Mapping[str, tuple[str, ...]] = {
    "densenet": ("features.pool0", "features.transition1", "features.transition2", "features.transition3"),
}


@dataclass(frozen=True)
class Operation:
    name: str  # name of its value in the trace
    part: str  # part of the network that it belongs to, a child of the trunk or of the network; "": neither
    owner: str  # innermost module that it belongs to
    whole: bool  # a cut is allowed after it: its value is maps, and the only one used later
    weighs: bool  # it has weights
    pools: bool  # it averages over the map
    last: bool = False  # its value is (n, l, channels): a block hands it on transposed


def list_operations(model: nn.Module, traced: fx.GraphModule) -> list[Operation]:
    """Return the operations of a traced network with known shapes, in order, input first."""
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    place = {node: i for i, node in enumerate(nodes)}
    until = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    trunk = find_trunk(model)
    found, alive, channels = [], set[fx.Node](), _infer_channel_axes(traced)
    for i, node in enumerate(nodes):
        alive = {other for other in alive if until[other] > i}
        if node.op != "get_attr":  # a constant is copied to every block that uses it
            alive.add(node)
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        shape = value_shape(node)
        found.append(
            Operation(
                name=node.name,
                part=_part_name(owner_module(node), trunk),
                owner=owner_module(node),
                whole=alive == {node} and (_is_square(shape) or (len(shape) == 3 and node in channels)),
                weighs=module is not None and any(True for _ in module.parameters()),
                pools=_is_pooling(node, module),
                last=len(shape) == 3 and channels.get(node) == LAST,
            )
        )
    return found


def cuts_after_modules(found: Sequence[Operation], donor: str, cuts: Sequence[str]) -> list[str]:
    """Return the names of the last operations of the modules to cut after."""
    ends: list[int] = []
    for cut in cuts:
        inside = [i for i, op in enumerate(found) if op.owner == cut or op.owner.startswith(cut + ".")]
        if not inside:
            tops = sorted({op.owner.split(".")[0] for op in found} - {""})
            raise ModelError(f"donor {donor!r} runs no module {cut!r}: name one of {', '.join(tops)} or of their parts")
        if not found[inside[-1]].whole:
            raise ModelError(
                f"donor {donor!r} cannot be cut after {cut!r}: more than one value goes on from there, or it is no "
                f"stack of {MAPS}; cut after the module that joins the branches, before the flatten"
            )
        if ends and inside[-1] <= ends[-1]:
            raise ModelError(f"donor {donor!r}: cut {cut!r} does not come after the one before it: put them in order")
        ends.append(inside[-1])
    return [found[i].name for i in ends]


def cuts_by_rule(model: nn.Module, found: Sequence[Operation], donor: str, architecture: str = "") -> list[str]:
    """Return the cuts before every part with a convolution or attention, and before the classifier."""
    head = _find_cut_before_head(found, donor)
    parts = next((names for family, names in _PARTS.items() if architecture.startswith(family)), ())
    ends = cuts_after_modules(found, donor, parts) if parts else _cuts_before_convolutions(model, found)
    before_head = {op.name for op in found[:head]}
    return [*(end for end in ends if end in before_head), found[head].name]


def find_trunk(model: nn.Module) -> str:
    """Return the name of the innermost Sequential with 90 % of the attention modules, or else convolutions.

    The name is "" for the whole model.
    """
    name, module = "", model
    counted = ATTENTION if _count_modules(model, ATTENTION) else CONVOLUTIONS
    while True:
        total = _count_modules(module, counted)
        below = module.named_children() if counted is CONVOLUTIONS else [*module.named_modules()][1:]
        inner = (
            (child_name, child)
            for child_name, child in below
            if isinstance(child, nn.Sequential) and len(child) > 1 and _count_modules(child, counted) >= 0.9 * total > 0
        )
        found = next(inner, None)
        if found is None:
            return name
        name, module = f"{name}.{found[0]}".lstrip("."), found[1]


def value_shape(node: object) -> tuple[int, ...]:
    """Return the shape of a node's value, batch first, or () unless the value is one tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return () if meta is None or not hasattr(meta, "shape") else tuple(meta.shape)


def owner_module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": None}
    return str([*stack][-1])


def _part_name(owner: str, trunk: str) -> str:
    inside = not trunk or owner == trunk or owner.startswith(trunk + ".")
    depth = (trunk.count(".") + 2 if trunk else 1) if inside else 1
    return ".".join(owner.split(".")[:depth])


def _cuts_before_convolutions(model: nn.Module, found: Sequence[Operation]) -> list[str]:
    ends: list[str] = []
    seen = False  # whether a convolution came before
    trunk = find_trunk(model)
    for before, op in pairwise(found):
        if not op.part or op.part == before.part or trunk.startswith(f"{op.part}."):
            continue
        if _count_modules(model.get_submodule(op.part), CONVOLUTIONS + ATTENTION):
            if seen and before.whole:
                ends.append(before.name)
            seen = True
    return ends


def _find_cut_before_head(found: Sequence[Operation], donor: str) -> int:
    # The last operation before the terminating block.
    last = max((i for i, op in enumerate(found) if op.weighs), default=0)
    first = last  # all layers of the part with the last weights belong to the classifier
    while first > 0 and found[first - 1].part == found[last].part != "":
        first -= 1
    start = max((i for i in range(first) if found[i].whole), default=0)
    for i in range(start, 0, -1):  # a pool before the classifier belongs to it
        if found[i].weighs:
            break
        if found[i].pools and found[i - 1].whole:
            start = i - 1
    if not any(op.weighs for op in found[: start + 1]):
        raise ModelError(
            f"donor {donor!r} cannot be split: before {found[last].part or 'its classifier'!r} there is no place where "
            f"a single stack of {MAPS} goes on; take a convolutional network, or name `cuts`"
        )
    return start


def _count_modules(module: nn.Module, kinds: tuple[type, ...]) -> int:
    return sum(isinstance(inner, kinds) for inner in module.modules())


def _infer_channel_axes(traced: fx.GraphModule) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        axis = _infer_channel_axis(node, module, found)
        if axis is not None:
            found[node] = axis
    return found


def _infer_channel_axis(node: fx.Node, module: nn.Module | None, found: Mapping[fx.Node, int]) -> int | None:
    shape = value_shape(node)
    before = next((each for each in node.all_input_nodes if each in found), None)
    axis = None if before is None else found[before]
    if isinstance(module, CONVOLUTIONS):
        return FIRST
    if isinstance(module, nn.Linear | nn.LayerNorm) and len(shape) == 3:
        return axis or LAST
    if before is None or _is_transposition(node):
        return FIRST + LAST - axis if axis and len(shape) == 3 and _swaps_last_axes(node) else None
    was = value_shape(before)  # empty for several values, such as the output of attention
    kept = not shape or not was or len(shape) == len(was) or (len(shape), len(was), shape[1]) == (3, 4, was[1])
    return axis if kept else None


def _swaps_last_axes(node: fx.Node) -> bool:
    axes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    places = [axis % 3 for axis in axes if isinstance(axis, int)]
    return places in ([0, 2, 1], [1, 2], [2, 1])


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

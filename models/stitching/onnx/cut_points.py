"""Places where a traced network can be cut, and the rule that selects among them.

A cut is allowed after an operation if no other value is used later and the operation's value is a stack of maps: square
maps (n, c, h, h) for images, or (n, c, l) for time series and the tokens of a transformer. Maps that are not square for
a square image are channels-last. The shape of values with three axes does not show the channel axis: convolutions put
channels first, linear layers and layer normalisation work on the last axis, transpositions swap axes, and all other
operations keep them. A block transposes its output if channels are last. Requires torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedquilt.core import ModelError
from fedquilt.models.networks import architectures
from fedquilt.models.networks.architectures import Attention

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
    """Return the names of the last operations of the modules to cut after.

    Raises:
        ModelError: If a module is unknown or out of order, or if the network cannot be cut there.
    """
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
    """Return the cuts before every part with a convolution or attention, and before the classifier.

    Raises:
        ModelError: If the network has no such places.
    """
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
    """Return the name of the innermost module of an operation, or "" for the network itself."""
    stack = node.meta.get("nn_module_stack") or {"": None}
    return str([*stack][-1])


def _part_name(owner: str, trunk: str) -> str:
    """Return the child of the trunk, or else of the network, that contains a module."""
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

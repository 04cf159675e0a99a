"""Gates, pools and trained operations in a traced network. Requires torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedquilt.core import ModelError
from fedquilt.models.networks import symbolic_trace

BINARY = (nn.GELU, nn.SiLU, nn.Hardswish, nn.ELU, nn.CELU, nn.SELU, nn.Mish)
BINARY_CALLS = (F.gelu, F.silu, F.hardswish, F.elu, F.celu, F.selu, F.mish)


RELU_CALLS = (F.relu, torch.relu, torch.relu_, F.relu_)


def is_trained(trained: Sequence[str], name: str) -> bool:
    """Return whether a tensor is listed in `trained`, or belongs to a module listed there."""
    return any(name == part or name.startswith(part + ".") for part in trained)


@dataclass(frozen=True)
class GateFunction:
    """Piecewise linear gate: its slope when off, and its cap when on."""

    slope: float = 0.0  # of what is off
    cap: float | None = None  # of what is on; None: none


def gate_function(traced: fx.GraphModule, node: fx.Node) -> GateFunction | None:
    """Return the gate that replaces an operation, or None if the operation is no gate."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if isinstance(module, nn.ReLU6):
            return GateFunction(cap=6.0)
        if isinstance(module, nn.LeakyReLU):
            return GateFunction(slope=float(module.negative_slope))
        return GateFunction() if isinstance(module, (nn.ReLU, *BINARY)) else None
    if node.op == "call_method":
        return GateFunction() if node.target in ("relu", "relu_") else None
    if node.target is F.relu6:
        return GateFunction(cap=6.0)
    if node.target is F.leaky_relu:
        return GateFunction(
            slope=float(node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01))
        )
    return GateFunction() if node.op == "call_function" and node.target in (*RELU_CALLS, *BINARY_CALLS) else None


def is_max_pool(traced: fx.GraphModule, node: fx.Node) -> bool:
    return bool(max_pool_settings(traced, node))


def max_pool_settings(traced: fx.GraphModule, node: fx.Node) -> dict[str, Any]:
    """Return the keywords of F.max_pool2d, or {} if the operation is no max pool."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if not isinstance(module, nn.MaxPool2d):
            return {}
        fields = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return {field: getattr(module, field) for field in fields}
    if node.op == "call_function" and node.target in (F.max_pool2d, torch.max_pool2d):
        given = dict(zip(("kernel_size", "stride", "padding", "dilation", "ceil_mode"), node.args[1:], strict=False))
        return {**given, **{key: value for key, value in node.kwargs.items() if key != "return_indices"}}
    return {}


def second_of_pair(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return both[1]


def make_out_of_place(node: fx.Node) -> fx.Node:
    if node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    if node.op == "call_method" and node.target == "relu_":
        node.target = "relu"
    if node.op == "call_function" and node.target in (torch.relu_, F.relu_):
        node.target = torch.relu
    return node


def nodes_depending_on_trained(traced: fx.GraphModule, trained: Sequence[str]) -> dict[fx.Node, None]:
    late: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        if any(source in late for source in node.all_input_nodes) or uses_tensors(traced, node, trained):
            late[node] = None
    return late


def nodes_feeding_weights(traced: fx.GraphModule) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in reversed(traced.graph.nodes):
        if node in found or uses_tensors(traced, node, None):
            found.update(node.all_input_nodes)
    return found


def uses_tensors(traced: fx.GraphModule, node: fx.Node, trained: Sequence[str] | None) -> bool:
    """Return whether an operation uses a trained tensor or, with None, any tensor."""
    if node.op == "get_attr":
        names = [str(node.target)]
    elif node.op == "call_module":
        names = [f"{node.target}.{name}" for name in traced.get_submodule(str(node.target)).state_dict()]
    else:
        names = []
    return any(trained is None or is_trained(trained, name) for name in names)


def trace_network(model: nn.Module, name: str) -> fx.GraphModule:
    """Trace a network with torch.fx, in evaluation mode.

    Raises:
        ModelError: If the forward pass branches on values or has several outputs.
    """
    model.eval()  # in training mode some give more than scores
    traced = symbolic_trace.trace_network(
        model, f"network {name!r}", "take another method than FedSQ, which takes it apart"
    )
    traced.graph.eliminate_dead_code()
    end = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    if not isinstance(end, fx.Node):
        raise ModelError(f"network {name!r} gives more than scores: FedSQ requires one score per class")
    return traced

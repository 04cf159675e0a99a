"""Gates, pools and trained operations in a traced network. Requires torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedquilt.core import ModelError
from fedquilt.models.networks import registry, traces
from fedquilt.models.partial import output_cache

SMOOTH_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Hardswish, nn.ELU, nn.CELU, nn.SELU, nn.Mish)
SMOOTH_CALLS = (F.gelu, F.silu, F.hardswish, F.elu, F.celu, F.selu, F.mish)


RELU_CALLS = (F.relu, torch.relu, torch.relu_, F.relu_)


def is_trained(trained: Sequence[str], name: str) -> bool:
    return any(name == part or name.startswith(part + ".") for part in trained)


@dataclass(frozen=True)
class GateFunction:
    """Gate of an activation: the slope of values that it blocks, and the limit of values that it passes."""

    slope: float = 0.0  # factor of values whose gate is off
    cap: float | None = None  # limit of values whose gate is on, or None without a limit


def gate_function(traced: fx.GraphModule, node: fx.Node) -> GateFunction | None:
    """Return the gate of an activation, or None for other operations. Smooth activations get ReLU's."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if isinstance(module, nn.ReLU6):
            return GateFunction(cap=6.0)
        if isinstance(module, nn.LeakyReLU):
            return GateFunction(slope=float(module.negative_slope))
        return GateFunction() if isinstance(module, (nn.ReLU, *SMOOTH_ACTIVATIONS)) else None
    if node.op == "call_method":
        return GateFunction() if node.target in ("relu", "relu_") else None
    if node.target is F.relu6:
        return GateFunction(cap=6.0)
    if node.target is F.leaky_relu:
        return GateFunction(
            slope=float(node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01))
        )
    return GateFunction() if node.op == "call_function" and node.target in (*RELU_CALLS, *SMOOTH_CALLS) else None


def max_pool_settings(traced: fx.GraphModule, node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments of `F.max_pool2d` for a max pool, or {} for another operation."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        if not isinstance(module, nn.MaxPool2d):
            return {}
        fields = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        return {field: getattr(module, field) for field in fields}
    if node.op == "call_function" and node.target in (F.max_pool2d, torch.max_pool2d):
        settings = dict(zip(("kernel_size", "stride", "padding", "dilation", "ceil_mode"), node.args[1:], strict=False))
        return {**settings, **{key: value for key, value in node.kwargs.items() if key != "return_indices"}}
    return {}


def second_of_pair(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[1]


def make_out_of_place(node: fx.Node) -> fx.Node:
    """Change the node to the operation that does not write into its input, and return the node."""
    if node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    if node.op == "call_method" and node.target == "relu_":
        node.target = "relu"
    if node.op == "call_function" and node.target in (torch.relu_, F.relu_):
        node.target = torch.relu
    return node


def nodes_depending_on_trained(traced: fx.GraphModule, trained: Sequence[str]) -> dict[fx.Node, None]:
    """Return, in order, the operations that use a trained tensor or depend on such an operation."""
    dependent_nodes: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        if any(source in dependent_nodes for source in node.all_input_nodes) or uses_tensors(traced, node, trained):
            dependent_nodes[node] = None
    return dependent_nodes


def nodes_feeding_weights(traced: fx.GraphModule) -> set[fx.Node]:
    """Return all operations whose results reach an operation that uses a tensor of the network."""
    feeding_nodes: set[fx.Node] = set()
    for node in reversed(traced.graph.nodes):
        if node in feeding_nodes or uses_tensors(traced, node, None):
            feeding_nodes.update(node.all_input_nodes)
    return feeding_nodes


def uses_tensors(traced: fx.GraphModule, node: fx.Node, trained: Sequence[str] | None) -> bool:
    """Return whether an operation uses a tensor of `trained`, or any tensor if `trained` is None."""
    if node.op == "get_attr":
        names = [str(node.target)]
    elif node.op == "call_module":
        names = [f"{node.target}.{name}" for name in traced.get_submodule(str(node.target)).state_dict()]
    else:
        names = []
    return any(trained is None or is_trained(trained, name) for name in names)


def trace_network(model: nn.Module, name: str) -> fx.GraphModule:
    """Trace a network in evaluation mode. Raise ModelError if that fails or its output is not one tensor."""
    model.eval()  # in training mode some networks return more than scores
    traced = traces.trace_network(model, f"network {name!r}", "use another method than FedSQ")
    traced.graph.eliminate_dead_code()
    end = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    if not isinstance(end, fx.Node):
        raise ModelError(f"network {name!r} returns more than scores: return one score per class, or do not use FedSQ")
    return traced


Gates = Literal["frozen", "own"]
Norm = Literal["frozen_stats", "train"]
Pool = Literal["own", "sk"]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def gate_value(z: torch.Tensor, on: torch.Tensor, slope: float = 0.0) -> torch.Tensor:
    """Return z where the gate is on, and slope * z elsewhere."""
    return torch.where(on, z, slope * z) if slope else z * on  # a product takes a third of `where`'s time


def gate_with_cap(z: torch.Tensor, on: torch.Tensor, full: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `cap` where `full`, z where only the gate is on, and 0 elsewhere."""
    return torch.where(full, cap, z * on)


def pool_at_indices(z: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the values of z (n, c, h, w) at a max pool's `indices` (n, c, h', w').

    An index is a position in the flattened map of h * w values. `DualCopy` takes the indices from the frozen network.
    """
    return z.flatten(2).gather(2, indices.flatten(2).long()).view(indices.shape)


class DualCopy:
    """Division of a network into frozen and trained operations (FedSQ, arXiv 2604.02990).

    Args:
        network: Table of the network (`fedquilt.models.networks.registry`).
        trained: Names of trained modules or tensors, the paper's sigma. All others are frozen.
        gates: "frozen" for gates of the structural copy (the frozen network), "own" for the network's own gates.
        bn: Whether batch norm in the trained part keeps the pre-trained statistics or updates them.
        pool: Whether max pooling uses its own largest values or the structural copy's indices.
    """

    def __init__(
        self,
        network: Mapping[str, Any],
        trained: Sequence[str],
        *,
        gates: Gates = "frozen",
        bn: Norm = "frozen_stats",
        pool: Pool = "own",
    ) -> None:
        with torch.device("meta"):  # shapes suffice
            model = registry.build_network({key: value for key, value in network.items() if key != "input"})
        self._name, self._keep_statistics = str(network.get("name")), bn == "frozen_stats"
        self._traced = trace_network(model, self._name)
        self._trained_nodes = nodes_depending_on_trained(self._traced, trained)
        if not self._trained_nodes:
            raise ModelError(
                f"network {self._name!r} uses no tensor of {', '.join(trained) or 'nothing'}: name other modules"
            )
        has_frozen_gates = gates == "frozen"
        inner = nodes_feeding_weights(self._traced)
        self._gates = {
            node: gate
            for node in self._trained_nodes
            if has_frozen_gates and node in inner and (gate := gate_function(self._traced, node))
        }
        has_frozen_pools = has_frozen_gates and pool == "sk"
        self._pools = [
            node for node in self._trained_nodes if has_frozen_pools and max_pool_settings(self._traced, node)
        ]
        self._entries = self._trained_part_inputs()
        self._tail = _build_pruned_module(model, self._build_trained_graph())
        self._frozen_part = _build_pruned_module(model, self._build_frozen_graph(scores=False))
        self._frozen_part_with_scores = _build_pruned_module(model, self._build_frozen_graph(scores=True))
        self.names = tuple(self._tail.state_dict())
        """Tensors of the quantitative copy: the first trained tensor and all later ones."""
        self.trained = tuple(name for name, _ in self._tail.named_parameters() if is_trained(trained, name))
        """Tensors of the quantitative copy that gradients update."""
        self.frozen_names = tuple(self._frozen_part.state_dict())
        """Tensors that the structural copy needs for gates and features."""
        self.all_names = tuple(self._frozen_part_with_scores.state_dict())
        """Tensors that the structural copy needs for gates, features and scores."""

    def build_copy_pair(self, model: nn.Module) -> nn.Module:
        return CopyPair(
            NetworkPart(self._frozen_part, copy.deepcopy(model)), NetworkPart(self._tail, model), self._keep_statistics
        )

    def build_tail(self, model: nn.Module, layout: output_cache.RowLayout) -> nn.Module:
        return TrainedTail(layout, NetworkPart(self._tail, model), self._keep_statistics)

    def build_observer(self, model: nn.Module, sink: Callable[[output_cache.BatchOutputs], None]) -> nn.Module:
        """Return the frozen network. Each run passes the features and gates of a batch to `sink`."""
        counts = len(self._entries), len(self._pools)
        return GateObserver(NetworkPart(self._frozen_part_with_scores, model), counts, sink)

    def _trained_part_inputs(self) -> list[fx.Node]:
        sources = {source for node in self._trained_nodes for source in node.all_input_nodes}
        return [
            node
            for node in self._traced.graph.nodes
            if node in sources and node not in self._trained_nodes and node.op != "get_attr"
        ]

    def _build_frozen_graph(self, *, scores: bool) -> fx.Graph:
        """Return the graph that outputs the trained part's inputs, pool indices, gates and, if set, scores."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        indices: list[fx.Node] = []
        for node in self._traced.graph.nodes:
            if node.op == "output":
                continue
            copies[node] = make_out_of_place(graph.node_copy(node, copies.__getitem__))
            if node in self._pools:
                pooled = graph.call_function(
                    F.max_pool2d,
                    (copies[node.args[0]],),
                    {**max_pool_settings(self._traced, node), "return_indices": True},
                )
                indices.append(graph.call_function(second_of_pair, (pooled,)))
        masks = []
        for node, gate in self._gates.items():
            z = copies[node.all_input_nodes[0]]
            masks.append(graph.call_function(torch.gt, (z, 0.0)))
            if gate.cap is not None:
                masks.append(graph.call_function(torch.ge, (z, gate.cap)))
        outputs = [*(copies[node] for node in self._entries), *indices, *masks]
        end = next(node for node in self._traced.graph.nodes if node.op == "output").args[0]
        graph.output((*outputs, copies[end]) if scores else tuple(outputs))
        return graph

    def _build_trained_graph(self) -> fx.Graph:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(self._entries):
            copies[node] = graph.placeholder(f"value_{number}")
        index_inputs = {node: graph.placeholder(f"index_{number}") for number, node in enumerate(self._pools)}
        masks = {
            node: [graph.placeholder(f"mask_{number}_{bit}") for bit in range(1 + (gate.cap is not None))]
            for number, (node, gate) in enumerate(self._gates.items())
        }
        for node in self._traced.graph.nodes:
            if node.op == "output":
                graph.output(copies[node.args[0]])
            elif node in index_inputs:
                copies[node] = graph.call_function(pool_at_indices, (copies[node.args[0]], index_inputs[node]))
            elif node in masks:
                z, gate = copies[node.all_input_nodes[0]], self._gates[node]
                copies[node] = (
                    graph.call_function(gate_value, (z, *masks[node], gate.slope))
                    if gate.cap is None
                    else graph.call_function(gate_with_cap, (z, *masks[node], gate.cap))
                )
            elif node in self._trained_nodes or (
                node.op == "get_attr" and not self._trained_nodes.keys().isdisjoint(node.users)
            ):
                copies[node] = make_out_of_place(graph.node_copy(node, copies.__getitem__))
        return graph


def cached_dual_copy(network: Mapping[str, Any], trained: Sequence[str], **options: str) -> DualCopy:
    return _build_cached(json.dumps([network, list(trained), options], sort_keys=True))


@lru_cache(maxsize=8)
def _build_cached(settings: str) -> DualCopy:
    network, trained, options = json.loads(settings)
    return DualCopy(network, trained, **options)


class NetworkPart(nn.Module):  # type: ignore[misc]
    """Part of a network's operations as a module that uses the network's own modules.

    Used instead of new GraphModules, whose source torch keeps until the process ends.
    """

    def __init__(self, operations: fx.GraphModule, model: nn.Module) -> None:
        super().__init__()
        self._forward = type(operations).forward
        for node in operations.graph.nodes:
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                if getattr(module, "inplace", False):
                    module.inplace = False  # a gate reads the input
                self._attach_at_path(str(node.target), module)
            elif node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                self._attach_at_path(str(node.target), getattr(model.get_submodule(owner), name))

    def forward(self, *values: torch.Tensor) -> Any:
        return self._forward(self, *values)

    def _attach_at_path(self, path: str, value: Any) -> None:
        *parents, name = path.split(".")
        owner: nn.Module = self
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(name, value)
        else:
            setattr(owner, name, value)


class _TrainedCopy(nn.Module):  # type: ignore[misc]
    def __init__(self, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__()
        self.qk, self._keep = qk, keep_statistics

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.qk.modules():
            if self._keep and isinstance(module, NORMS) and module.track_running_stats:
                module.eval()
        return self


class CopyPair(_TrainedCopy):
    def __init__(self, frozen: nn.Module, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__(qk, keep_statistics)
        self.frozen = frozen.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen_outputs = self.frozen(x)
        return self.qk(*frozen_outputs)


class TrainedTail(_TrainedCopy):
    def __init__(self, layout: output_cache.RowLayout, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__(qk, keep_statistics)
        self._layout = layout

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        frozen_outputs = output_cache.unpack_rows(rows, self._layout)
        if any(weight.ndim == 4 and weight.stride(3) > 1 for weight in self.qk.parameters()):
            # a gate with another layout than its values is applied element by element
            frozen_outputs = [
                value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value
                for value in frozen_outputs
            ]
        return self.qk(*frozen_outputs)


class GateObserver(nn.Module):  # type: ignore[misc]
    def __init__(
        self, frozen: nn.Module, counts: tuple[int, int], sink: Callable[[output_cache.BatchOutputs], None]
    ) -> None:
        super().__init__()
        self.frozen, self._counts, self._sink = frozen, counts, sink

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *frozen_outputs, scores = self.frozen(x)
        if not self.training:
            values, pools = self._counts
            self._sink(
                output_cache.BatchOutputs(
                    frozen_outputs[:values], frozen_outputs[values : values + pools], frozen_outputs[values + pools :]
                )
            )
        return scores


def _build_pruned_module(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    pruned = fx.GraphModule(model, graph)
    pruned.graph.eliminate_dead_code()
    pruned.delete_all_unused_submodules()
    pruned.recompile()
    return pruned

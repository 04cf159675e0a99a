"""Network in two copies: a frozen one decides which units are on, the other one's values are trained. Imports torch.

DualCopy, as FedSQ has it (arXiv 2604.02990, Definition 2 and section III-B): for every pointwise
nonlinearity l behind the first trained tensor, alpha_l = 1[z_l > 0] is taken from the frozen structural
copy (SK), and the trained quantitative copy (QK) has h_l = alpha_l * z_l in place of the nonlinearity.
Everything before the first trained tensor is the same in both copies and runs once.

ReLU6 and leaky ReLU are piecewise linear as ReLU is, with another border or slope: these are kept, so
that two equal copies are the network itself. GELU, SiLU, Hardswish, ELU and Mish are replaced by the
binary gate, as in the paper: the copy is then another function than the network from the start.
Sigmoid, tanh, softmax and PReLU are no gates and stay, and so does a nonlinearity behind the
last layer with weights: it is part of the head, which for new classes has no pre-trained values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedquilt.core import ModelError
from fedquilt.models.networks import registry
from fedquilt.models.partial import gate_cache
from fedquilt.models.partial.dual_trace import (
    before_weights,
    covers,
    depending,
    gate_of,
    pool_settings,
    pools,
    quiet,
    second,
    trace,
)

Gates = Literal["frozen", "own"]
Norm = Literal["frozen_stats", "train"]
Pool = Literal["own", "sk"]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def gated(z: torch.Tensor, on: torch.Tensor, slope: float = 0.0) -> torch.Tensor:
    """Gated value alpha * z; slope * z where it is off. An infinite z that is off gives NaN, without a slope."""
    return torch.where(on, z, slope * z) if slope else z * on  # a product takes a third of `where`'s time


def capped(z: torch.Tensor, on: torch.Tensor, full: torch.Tensor, cap: float) -> torch.Tensor:
    """Gated value alpha * z, or `cap` where the structural copy has reached it."""
    return torch.where(full, cap, z * on)


def chosen(z: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Max pooling at the structural copy's places. `indices` (n, c, h, w): places in each flattened map."""
    return z.flatten(2).gather(2, indices.flatten(2).long()).view(indices.shape)


class DualCopy:
    """Division of a network for a schedule of trained modules. Holds operations, no weights.

    Args:
        network: a table (`fedquilt.models.networks.registry`).
        trained: names of modules or tensors that are trained; the others are frozen (the paper's sigma).
        gates: "own" keeps the network's own nonlinearities: FedAvg on the same trained part.
        bn: whether batch norm behind the first trained tensor keeps the pre-trained statistics, or has its own.
        pool: whether max pooling uses its own largest values, or the structural copy's places.

    Raises:
        ModelError: the network cannot be traced, or nothing of it is trained.
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
        with torch.device("meta"):  # the shape of the network alone
            model = registry.build({key: value for key, value in network.items() if key != "input"})
        self._name, self._keep_statistics = str(network.get("name")), bn == "frozen_stats"
        self._traced = trace(model, self._name)
        self._late = depending(self._traced, trained)
        if not self._late:
            raise ModelError(
                f"network {self._name!r} uses no tensor of {', '.join(trained) or 'nothing'}: none is trained"
            )
        frozen = gates == "frozen"
        inner = before_weights(self._traced)
        self._gates = {
            node: found for node in self._late if frozen and node in inner and (found := gate_of(self._traced, node))
        }
        self._pools = [node for node in self._late if frozen and pool == "sk" and pools(self._traced, node)]
        self._entries = self._boundary()
        tail, frozen, whole = (
            _module(model, graph)
            for graph in (self._build_late_graph(), self._looking(scores=False), self._looking(scores=True))
        )
        self._tail, self._look, self._look_scores = tail, frozen, whole
        self.names = tuple(tail.state_dict())
        """Tensors behind the first trained one: the quantitative copy's."""
        self.trained = tuple(name for name, _ in tail.named_parameters() if covers(trained, name))
        """Those of them that gradients update."""
        self.frozen_names = tuple(frozen.state_dict())
        """Tensors that the structural copy needs for gates and features."""
        self.all_names = tuple(whole.state_dict())
        """And for scores."""

    def pair(self, model: nn.Module) -> nn.Module:
        """Both copies: examples in, scores out. Holds "frozen.NAME" of `frozen_names` and "qk.NAME" of `names`."""
        return Pair(Part(self._look, copy.deepcopy(model)), Part(self._tail, model), self._keep_statistics)

    def tail(self, model: nn.Module, layout: gate_cache.Layout) -> nn.Module:
        """Quantitative copy alone: rows computed earlier in, scores out. Holds "qk.NAME"."""
        return Tail(layout, Part(self._tail, model), self._keep_statistics)

    def looker(self, model: nn.Module, sink: Callable[[gate_cache.Seen], None]) -> nn.Module:
        """Frozen network: scores out, and the tail's inputs to `sink`. Holds "frozen.NAME" of `all_names`."""
        counts = len(self._entries), len(self._pools)
        return Looker(Part(self._look_scores, model), counts, sink)

    def _boundary(self) -> list[fx.Node]:
        """Values of the frozen part that the trained one reads, in the order they arise."""
        used = {source for node in self._late for source in node.all_input_nodes}
        return [
            node
            for node in self._traced.graph.nodes
            if node in used and node not in self._late and node.op != "get_attr"
        ]

    def _looking(self, *, scores: bool) -> fx.Graph:
        """Examples -> values at the boundary, indices of pools, masks, and scores."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        indices: list[fx.Node] = []
        for node in self._traced.graph.nodes:
            if node.op == "output":
                continue
            copies[node] = quiet(graph.node_copy(node, copies.__getitem__))
            if node in self._pools:
                both = graph.call_function(
                    F.max_pool2d,
                    (copies[node.args[0]],),
                    {**pool_settings(self._traced, node), "return_indices": True},
                )
                indices.append(graph.call_function(second, (both,)))
        masks = []
        for node, gate in self._gates.items():
            z = copies[node.all_input_nodes[0]]
            masks.append(graph.call_function(torch.gt, (z, 0.0)))
            if gate.cap is not None:
                masks.append(graph.call_function(torch.ge, (z, gate.cap)))
        found = [*(copies[node] for node in self._entries), *indices, *masks]
        end = next(node for node in self._traced.graph.nodes if node.op == "output").args[0]
        graph.output((*found, copies[end]) if scores else tuple(found))
        return graph

    def _build_late_graph(self) -> fx.Graph:
        """Return the graph from values at the boundary, pool indices and masks to the scores."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(self._entries):
            copies[node] = graph.placeholder(f"value_{number}")
        places = {node: graph.placeholder(f"index_{number}") for number, node in enumerate(self._pools)}
        masks = {
            node: [graph.placeholder(f"mask_{number}_{bit}") for bit in range(1 + (gate.cap is not None))]
            for number, (node, gate) in enumerate(self._gates.items())
        }
        for node in self._traced.graph.nodes:
            if node.op == "output":
                graph.output(copies[node.args[0]])
            elif node in places:
                copies[node] = graph.call_function(chosen, (copies[node.args[0]], places[node]))
            elif node in masks:
                z, gate = copies[node.all_input_nodes[0]], self._gates[node]
                copies[node] = (
                    graph.call_function(gated, (z, *masks[node], gate.slope))
                    if gate.cap is None
                    else graph.call_function(capped, (z, *masks[node], gate.cap))
                )
            elif node in self._late or (node.op == "get_attr" and not self._late.keys().isdisjoint(node.users)):
                copies[node] = quiet(graph.node_copy(node, copies.__getitem__))
        return graph


def planned(network: Mapping[str, Any], trained: Sequence[str], **options: str) -> DualCopy:
    """Make a `DualCopy`, cached for later tasks of this process."""
    return _planned(json.dumps([network, list(trained), options], sort_keys=True))


@lru_cache(maxsize=8)
def _planned(settings: str) -> DualCopy:
    network, trained, options = json.loads(settings)
    return DualCopy(network, trained, **options)


class Part(nn.Module):  # type: ignore[misc]
    """Operations of a network on its own modules, under their own names.

    A new GraphModule would compile them again, and torch keeps the source of every one: a process that is
    kept for many tasks would grow.
    """

    def __init__(self, operations: fx.GraphModule, model: nn.Module) -> None:
        super().__init__()
        self._forward = type(operations).forward
        for node in operations.graph.nodes:
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                if getattr(module, "inplace", False):
                    module.inplace = False  # a gate reads the input
                self._place(str(node.target), module)
            elif node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                self._place(str(node.target), getattr(model.get_submodule(owner), name))

    def forward(self, *values: torch.Tensor) -> Any:
        """Run the operations on the inputs, in the order of the graph."""
        return self._forward(self, *values)

    def _place(self, path: str, value: Any) -> None:
        *parents, name = path.split(".")
        at: nn.Module = self
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            at.register_buffer(name, value)
        else:
            setattr(at, name, value)


class _Trained(nn.Module):  # type: ignore[misc]
    """Batch norm may keep its statistics, and a frozen copy is never in training mode."""

    def __init__(self, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__()
        self.qk, self._keep = qk, keep_statistics

    def train(self, mode: bool = True) -> nn.Module:
        """Set training mode; batch norm that keeps its statistics stays in evaluation mode."""
        super().train(mode)
        for module in self.qk.modules():
            if self._keep and isinstance(module, NORMS) and module.track_running_stats:
                module.eval()
        return self


class Pair(_Trained):
    """SK and QK on the same examples."""

    def __init__(self, frozen: nn.Module, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__(qk, keep_statistics)
        self.frozen = frozen.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        """Set training mode of QK; SK stays in evaluation mode."""
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (n, classes) of examples (n, ...)."""
        with torch.no_grad():
            seen = self.frozen(x)
        return self.qk(*seen)


class Tail(_Trained):
    """QK on cached outputs of SK for the same examples."""

    def __init__(self, layout: gate_cache.Layout, qk: nn.Module, keep_statistics: bool) -> None:
        super().__init__(qk, keep_statistics)
        self._layout = layout

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores (n, classes) of cached rows (n, row_bytes)."""
        seen = gate_cache.unpack(rows, self._layout)
        if any(weight.ndim == 4 and weight.stride(3) > 1 for weight in self.qk.parameters()):
            # a gate whose layout is not that of what it gates is applied number by number
            seen = [each.contiguous(memory_format=torch.channels_last) if each.ndim == 4 else each for each in seen]
        return self.qk(*seen)


class Looker(nn.Module):  # type: ignore[misc]
    """SK, whose features and gates are passed to the sink. In training mode (a trial run) nothing is."""

    def __init__(self, frozen: nn.Module, counts: tuple[int, int], sink: Callable[[gate_cache.Seen], None]) -> None:
        super().__init__()
        self.frozen, self._counts, self._sink = frozen, counts, sink

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of examples; in evaluation mode features and gates go to the sink."""
        *seen, scores = self.frozen(x)
        if not self.training:
            values, pools = self._counts
            self._sink(gate_cache.Seen(seen[:values], seen[values : values + pools], seen[values + pools :]))
        return scores


def _module(model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Graph over the model's own modules, without modules and operations it does not need."""
    made = fx.GraphModule(model, graph)
    made.graph.eliminate_dead_code()
    made.delete_all_unused_submodules()
    made.recompile()
    return made


# -- taking apart ---------------------------------------------------------------------------------

"""Dependencies between a network's neurons, traced by torch.fx: the plan of its masks.

Neurons are followed from layer to layer. Neurons that enter an unsupported operation are pinned, which means never
masked, and so are scores. Runs in `fedquilt prepare` and requires torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedquilt.models.networks import traces
from fedquilt.models.partial.masks import MaskPlan, TensorGroups

# functions that keep neurons separate and map 0 to 0
_CONV = nn.modules.conv._ConvNd
_NORM = nn.modules.batchnorm._BatchNorm
_APART = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Identity, nn.Flatten,
    nn.Dropout, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_APART_FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish, torch.relu, torch.tanh, F.dropout, F.max_pool2d,
    F.avg_pool2d, F.adaptive_avg_pool2d, torch.flatten,
)  # fmt: skip
_TIE = (operator.add, operator.iadd, torch.add, operator.mul, torch.mul)

Value = tuple[str, ...] | None
"""The groups along a value's channels; None: those of no group."""


def trace_mask_plan(model: nn.Module) -> MaskPlan:
    graph = traces.trace_network(model, "the network", "take a method that trains it whole").graph
    return _DependencyReader(
        dict(model.named_modules()), traces.state_without_aliases(model), traces.names_of_tensors(model)
    ).build_mask_plan(graph)


@dataclass
class _MaskedLayer:
    out: tuple[str, ...]
    into: tuple[str, ...] = ()


@dataclass
class _DependencyReader:
    modules: Mapping[str, nn.Module]
    held: Mapping[str, torch.Tensor]
    names: Sequence[Sequence[str]]  # of each tensor
    widths: dict[str, int] = field(default_factory=dict)  # by the layer that first makes the group
    same: dict[str, str] = field(default_factory=dict)  # a group -> one that it is tied to
    pinned: dict[str, str] = field(default_factory=dict)  # a group -> what reads it and is not understood
    node: str = ""  # the operation that is read
    layers: dict[str, _MaskedLayer] = field(default_factory=dict)

    def build_mask_plan(self, graph: fx.Graph) -> MaskPlan:
        values: dict[fx.Node, Value] = {}
        for node in graph.nodes:
            self.node = _node_name(node)
            heard = [values[each] for each in node.all_input_nodes]
            values[node] = self._trace_node_neurons(node, heard, values)
        self.node = "a module that shares the tensor"
        for same in self.names:
            for alias in same[1:]:
                self._tie_sharing_modules(same[0], alias)
        free = [name for name in self.widths if self._group_of(name) == name and name not in self._pinned_groups()]
        beside: dict[str, int] = {}
        follows = {}
        for name, value in self.held.items():
            path = name.rpartition(".")[0]
            if path not in self.layers or not value.ndim:
                continue
            layer = self.layers[path]
            out, into = (
                self._groups_unless_all_pinned(layer.out, free),
                self._groups_unless_all_pinned(layer.into if self._is_weight(path, name) else (), free),
            )
            if out or into:
                beside |= {each: self.widths[each] for each in (*out, *into) if each not in free}
                across = sum(self.widths[each] for each in into)
                repeat = int(value.shape[1]) // across if across else 1
                follows[name] = TensorGroups(tuple(value.shape), out, into, repeat)
        whole = {name: why for name, why in self.pinned.items() if why != "output"}
        return MaskPlan({name: self.widths[name] for name in free}, beside, follows, whole)

    def _trace_node_neurons(self, node: fx.Node, heard: Sequence[Value], values: Mapping[fx.Node, Value]) -> Value:
        """Return the layers whose neurons a node's output holds in order, or None after pinning them."""
        if node.op == "call_module" and len(heard) == 1:
            return self._trace_module_neurons(str(node.target), heard[0])
        if node.op == "call_function" and node.target in _APART_FUNCTIONS and len(heard) == 1:
            return heard[0]
        if node.op == "call_method" and node.target in ("flatten", "relu", "contiguous") and len(heard) == 1:
            return heard[0]
        if _is_reduction(node) and len(heard) == 1 and self._keeps_channels(node, heard[0]):
            return heard[0]
        if (
            node.op == "call_function"
            and node.target in (operator.mul, torch.mul)
            and (scaled := self._scaled_operand(node))
        ):
            return values[scaled]
        if node.op == "call_function" and node.target in _TIE and len(node.args) == len(heard) == 2:
            return self._tie_or_pin_neurons(*heard)
        if (
            node.op == "call_function"
            and node.target is torch.cat
            and None not in heard
            and _concatenates_channels(node)
        ):
            return tuple(name for each in node.args[0] for name in values[each] or ())
        for value in heard:
            self._pin_neurons(value)
        return None

    def _trace_module_neurons(self, path: str, heard: Value) -> Value:
        module = self.modules[path]
        if isinstance(module, _APART):
            return heard
        if path in self.layers:  # called twice: what one call leaves out the other may need
            self._pin_neurons((*self.layers[path].out, *(heard or ())))
            return None
        if isinstance(module, _NORM) and heard is not None and self._total_width(heard) == module.num_features:
            self.layers[path] = _MaskedLayer(heard)
            return heard
        plain = isinstance(module, nn.Linear) or (isinstance(module, _CONV) and not module.transposed)
        if plain and any(f"{path}.weight" in same for same in self.names):  # else it is made of other tensors
            return self._trace_layer_neurons(path, module, heard)
        self._pin_neurons(heard)
        return None

    def _trace_layer_neurons(self, path: str, module: Any, heard: Value) -> Value:
        weight, apart = module.weight, getattr(module, "groups", 1)
        width = self._total_width(heard or ())
        if heard and apart > 1 and apart == len(weight) == width:  # depthwise
            self.layers[path] = _MaskedLayer(heard)
            return heard
        fits = bool(heard) and apart == 1 and weight.shape[1] % width == 0
        if not fits or (weight.ndim > 2 and weight.shape[1] != width):
            self._pin_neurons(heard)
            heard = None
        self.widths[path] = len(weight)
        self.layers[path] = _MaskedLayer((path,), heard or ())
        return (path,)

    def _tie_or_pin_neurons(self, first: Value, second: Value) -> Value:
        """Tie the neurons of two values in order and return the first value, or pin both and return None."""
        if first is None or second is None or [*map(self._group_width, first)] != [*map(self._group_width, second)]:
            self._pin_neurons(first)
            self._pin_neurons(second)
            return None
        for one, other in zip(first, second, strict=True):
            a, b = sorted((self._group_of(one), self._group_of(other)), key=list(self.widths).index)
            if a != b:
                self.same[b] = a
        return first

    def _tie_sharing_modules(self, name: str, alias: str) -> None:
        """Tie the neurons of two modules that share a tensor, so that both leave out the same."""
        one, other = (self.layers.get(each.rpartition(".")[0]) for each in (name, alias))
        if one is None or other is None:
            for each in (one, other):
                self._pin_neurons((*each.out, *each.into) if each else None)
            return
        self._tie_or_pin_neurons(one.out, other.out)
        if self._is_weight(name.rpartition(".")[0], name):
            self._tie_or_pin_neurons(one.into or None, other.into or None)

    def _is_weight(self, path: str, name: str) -> bool:
        return getattr(self.modules[path], "weight", None) is self.held[name]

    def _scaled_operand(self, product: fx.Node) -> fx.Node | None:
        one = [isinstance(each, int | float) or self._is_scalar_tensor(each) for each in product.args]
        return (
            next((each for each, number in zip(product.args, one, strict=True) if not number), None)
            if any(one)
            else None
        )

    def _is_scalar_tensor(self, value: Any) -> bool:
        held = self.held.get(str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else None
        return held is not None and not held.ndim

    def _keeps_channels(self, node: fx.Node, heard: Value) -> bool:
        """Return whether a mean or maximum runs only over axes behind the channels."""
        axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        axes = (axes,) if isinstance(axes, int) else axes
        if not heard or not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
            return False
        modules = [self.modules[name] for name in heard]
        inner = min(each.weight.ndim - 2 if isinstance(each, _CONV) else 0 for each in modules)
        return all(axis > 1 or -inner <= axis < 0 for axis in axes)

    def _group_of(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def _pinned_groups(self) -> set[str]:
        return {self._group_of(name) for name in self.pinned}

    def _pin_neurons(self, value: Value) -> None:
        for name in value or ():
            self.pinned.setdefault(name, self.node)

    def _group_width(self, name: str) -> int:
        return self.widths[name]

    def _total_width(self, names: Sequence[str]) -> int:
        return sum(map(self._group_width, names))

    def _groups_unless_all_pinned(self, names: Sequence[str], free: Sequence[str]) -> tuple[str, ...]:
        found = tuple(map(self._group_of, names))
        return found if any(name in free for name in found) else ()


def _node_name(node: fx.Node) -> str:
    if node.op in ("call_module", "call_method", "get_attr"):
        return f"{node.target}"
    return "output" if node.op == "output" else getattr(node.target, "__name__", str(node.target))


def _is_reduction(node: fx.Node) -> bool:
    method = node.op == "call_method" and node.target in ("mean", "amax")
    return method or (node.op == "call_function" and node.target in (torch.mean, torch.amax))


def _concatenates_channels(node: fx.Node) -> bool:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) == 1

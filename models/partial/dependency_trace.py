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

_CONV = nn.modules.conv._ConvNd
_NORM = nn.modules.batchnorm._BatchNorm
# Channelwise operations keep neurons separate and map 0 to 0.
_CHANNELWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh, nn.Identity, nn.Flatten,
    nn.Dropout, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_CHANNELWISE_FUNCTIONS = (
    F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish, torch.relu, torch.tanh, F.dropout, F.max_pool2d,
    F.avg_pool2d, F.adaptive_avg_pool2d, torch.flatten,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = (operator.add, operator.iadd, torch.add, operator.mul, torch.mul)

Value = tuple[str, ...] | None
"""Groups along a value's channels, or None if the channels belong to no group."""


def trace_mask_plan(model: nn.Module) -> MaskPlan:
    graph = traces.trace_network(model, "the network", "use a method that trains the whole network").graph
    return _DependencyReader(
        dict(model.named_modules()), traces.state_without_aliases(model), traces.names_of_tensors(model)
    ).build_mask_plan(graph)


@dataclass
class _MaskedLayer:
    output_groups: tuple[str, ...]
    input_groups: tuple[str, ...] = ()


@dataclass
class _DependencyReader:
    modules: Mapping[str, nn.Module]
    tensors: Mapping[str, torch.Tensor]
    names: Sequence[Sequence[str]]  # names of each tensor
    widths: dict[str, int] = field(default_factory=dict)  # group -> neurons; a group is named by its first layer
    tied_to: dict[str, str] = field(default_factory=dict)  # group -> earlier group with the same mask
    pinned: dict[str, str] = field(default_factory=dict)  # group -> unsupported operation that reads the group
    node: str = ""  # name of the current operation
    layers: dict[str, _MaskedLayer] = field(default_factory=dict)

    def build_mask_plan(self, graph: fx.Graph) -> MaskPlan:
        values: dict[fx.Node, Value] = {}
        for node in graph.nodes:
            self.node = _node_name(node)
            inputs = [values[source] for source in node.all_input_nodes]
            values[node] = self._trace_node_neurons(node, inputs, values)
        self.node = "a module that shares the tensor"
        for names in self.names:
            for alias in names[1:]:
                self._tie_sharing_modules(names[0], alias)
        free = [name for name in self.widths if self._group_of(name) == name and name not in self._pinned_groups()]
        pinned_widths: dict[str, int] = {}
        follows = {}
        for name, value in self.tensors.items():
            path = name.rpartition(".")[0]
            if path not in self.layers or not value.ndim:
                continue
            layer = self.layers[path]
            output_groups, input_groups = (
                self._groups_unless_all_pinned(layer.output_groups, free),
                self._groups_unless_all_pinned(layer.input_groups if self._is_weight(path, name) else (), free),
            )
            if output_groups or input_groups:
                groups = (*output_groups, *input_groups)
                pinned_widths |= {group: self.widths[group] for group in groups if group not in free}
                across = sum(self.widths[group] for group in input_groups)
                repeat = int(value.shape[1]) // across if across else 1
                follows[name] = TensorGroups(tuple(value.shape), output_groups, input_groups, repeat)
        unmaskable = {name: reader for name, reader in self.pinned.items() if reader != "output"}
        return MaskPlan({name: self.widths[name] for name in free}, pinned_widths, follows, unmaskable)

    def _trace_node_neurons(self, node: fx.Node, inputs: Sequence[Value], values: Mapping[fx.Node, Value]) -> Value:
        """Return the layers whose neurons a node outputs, or pin its inputs and return None if unknown."""
        if node.op == "call_module" and len(inputs) == 1:
            return self._trace_module_neurons(str(node.target), inputs[0])
        if node.op == "call_function" and node.target in _CHANNELWISE_FUNCTIONS and len(inputs) == 1:
            return inputs[0]
        if node.op == "call_method" and node.target in ("flatten", "relu", "contiguous") and len(inputs) == 1:
            return inputs[0]
        if _is_reduction(node) and len(inputs) == 1 and self._keeps_channels(node, inputs[0]):
            return inputs[0]
        if (
            node.op == "call_function"
            and node.target in (operator.mul, torch.mul)
            and (scaled := self._scaled_operand(node))
        ):
            return values[scaled]
        if node.op == "call_function" and node.target in _ELEMENTWISE_FUNCTIONS and len(node.args) == len(inputs) == 2:
            return self._tie_or_pin_neurons(*inputs)
        if (
            node.op == "call_function"
            and node.target is torch.cat
            and None not in inputs
            and _concatenates_channels(node)
        ):
            return tuple(name for source in node.args[0] for name in values[source] or ())
        for value in inputs:
            self._pin_neurons(value)
        return None

    def _trace_module_neurons(self, path: str, inputs: Value) -> Value:
        module = self.modules[path]
        if isinstance(module, _CHANNELWISE_MODULES):
            return inputs
        if path in self.layers:  # another call of the same layer may need the masked neurons
            self._pin_neurons((*self.layers[path].output_groups, *(inputs or ())))
            return None
        if isinstance(module, _NORM) and inputs is not None and self._total_width(inputs) == module.num_features:
            self.layers[path] = _MaskedLayer(inputs)
            return inputs
        plain = isinstance(module, nn.Linear) or (isinstance(module, _CONV) and not module.transposed)
        if plain and any(f"{path}.weight" in names for names in self.names):  # otherwise computed from other tensors
            return self._trace_layer_neurons(path, module, inputs)
        self._pin_neurons(inputs)
        return None

    def _trace_layer_neurons(self, path: str, module: Any, inputs: Value) -> Value:
        weight, groups = module.weight, getattr(module, "groups", 1)
        width = self._total_width(inputs or ())
        if inputs and groups > 1 and groups == len(weight) == width:  # depthwise
            self.layers[path] = _MaskedLayer(inputs)
            return inputs
        is_supported = bool(inputs) and groups == 1 and weight.shape[1] % width == 0
        if not is_supported or (weight.ndim > 2 and weight.shape[1] != width):
            self._pin_neurons(inputs)
            inputs = None
        self.widths[path] = len(weight)
        self.layers[path] = _MaskedLayer((path,), inputs or ())
        return (path,)

    def _tie_or_pin_neurons(self, first: Value, second: Value) -> Value:
        if first is None or second is None or [*map(self._group_width, first)] != [*map(self._group_width, second)]:
            self._pin_neurons(first)
            self._pin_neurons(second)
            return None
        for first_group, second_group in zip(first, second, strict=True):
            a, b = sorted((self._group_of(first_group), self._group_of(second_group)), key=list(self.widths).index)
            if a != b:
                self.tied_to[b] = a
        return first

    def _tie_sharing_modules(self, name: str, alias: str) -> None:
        first, second = (self.layers.get(tensor.rpartition(".")[0]) for tensor in (name, alias))
        if first is None or second is None:
            for layer in (first, second):
                self._pin_neurons((*layer.output_groups, *layer.input_groups) if layer else None)
            return
        self._tie_or_pin_neurons(first.output_groups, second.output_groups)
        if self._is_weight(name.rpartition(".")[0], name):
            self._tie_or_pin_neurons(first.input_groups or None, second.input_groups or None)

    def _is_weight(self, path: str, name: str) -> bool:
        return getattr(self.modules[path], "weight", None) is self.tensors[name]

    def _scaled_operand(self, product: fx.Node) -> fx.Node | None:
        are_scalars = [isinstance(operand, int | float) or self._is_scalar_tensor(operand) for operand in product.args]
        return (
            next((operand for operand, number in zip(product.args, are_scalars, strict=True) if not number), None)
            if any(are_scalars)
            else None
        )

    def _is_scalar_tensor(self, value: Any) -> bool:
        tensor = self.tensors.get(str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else None
        return tensor is not None and not tensor.ndim

    def _keeps_channels(self, node: fx.Node, inputs: Value) -> bool:
        """Return whether a mean or maximum reduces only axes after the channels."""
        axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        axes = (axes,) if isinstance(axes, int) else axes
        if not inputs or not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
            return False
        modules = [self.modules[name] for name in inputs]
        inner = min(module.weight.ndim - 2 if isinstance(module, _CONV) else 0 for module in modules)
        return all(axis > 1 or -inner <= axis < 0 for axis in axes)

    def _group_of(self, name: str) -> str:
        while name in self.tied_to:
            name = self.tied_to[name]
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
        groups = tuple(map(self._group_of, names))
        return groups if any(name in free for name in groups) else ()


def _node_name(node: fx.Node) -> str:
    if node.op in ("call_module", "call_method", "get_attr"):
        return f"{node.target}"
    return "output" if node.op == "output" else getattr(node.target, "__name__", str(node.target))


def _is_reduction(node: fx.Node) -> bool:
    method = node.op == "call_method" and node.target in ("mean", "amax")
    return method or (node.op == "call_function" and node.target in (torch.mean, torch.amax))


def _concatenates_channels(node: fx.Node) -> bool:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) == 1

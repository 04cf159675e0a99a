"""Linear layers with low-rank adapters. Requires torch.

`fedquilt.models.partial.lora` describes the computation and the names of the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fedquilt.core import ModelError
from fedquilt.models.networks import traces
from fedquilt.models.networks.architectures import Attention
from fedquilt.models.partial.lora import GATE, OWN_SUFFIXES, SHARED_SUFFIXES, AdapterSite


class LoraLinear(nn.Module):  # type: ignore[misc]
    """Linear layer with a shared adapter and, with `with_own_branch`, a branch scaled by the block's gate."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, *, with_own_branch: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.gated: tuple[nn.Module, ...] = ()  # the block with the gate; in a tuple, it is no part of this layer
        outputs, inputs = linear.weight.shape
        for a, b in (SHARED_SUFFIXES, OWN_SUFFIXES) if with_own_branch else (SHARED_SUFFIXES,):
            self.register_parameter(a, nn.Parameter(torch.zeros(inputs, rank)))
            self.register_parameter(b, nn.Parameter(torch.zeros(rank, outputs)))

    def with_bias_of(self, linear: nn.Linear) -> LoraLinear:
        """Return a layer that shares this layer's tensors, but has the bias of `linear`."""
        layer_copy = copy.copy(self)
        layer_copy._parameters = {**self._parameters, "bias": linear.bias}
        return layer_copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b + s x A B, plus the own branch m s x A_p B_p if the block has a gate."""
        y = F.linear(x, self.weight, self.bias) + self.scale * (x @ self.lora_a @ self.lora_b)
        if self.gated:
            m = torch.sigmoid(self.gated[0].gate)
            y = y + m * self.scale * (x @ self.own_a @ self.own_b)
        return y


def insert_adapters(
    module: nn.Module, sites: Sequence[AdapterSite], rank: int, scale: float, *, with_own_branch: bool = False
) -> nn.Module:
    """Insert zero adapters into the layers of `sites` and return the network, changed in place.

    Attention modules are replaced by `Attention`, because torch's own skips the call of one of its layers.
    """
    for name, submodule in list(module.named_modules()):
        if isinstance(submodule, nn.MultiheadAttention):
            try:
                _replace_module(module, submodule, Attention.from_torch(submodule))
            except ValueError as error:
                raise ModelError(f"{name}: {error}") from None
    for site in sites:
        adapted_layers = []
        for layer in site.layers:
            try:
                linear = module.get_submodule(layer)
            except AttributeError:
                linear = None
            if not isinstance(linear, nn.Linear):
                raise ModelError(f"{layer!r} is not a linear layer of this network: run `fedquilt prepare` again")
            adapted_layers += _replace_layers_sharing_weight(
                module, layer, LoraLinear(linear, rank, scale, with_own_branch=with_own_branch)
            )
        if with_own_branch:
            _add_gate(module.get_submodule(site.block), adapted_layers)
    return module


def _add_gate(block: nn.Module, adapted_layers: Iterable[LoraLinear]) -> None:
    block.register_parameter(GATE, nn.Parameter(torch.zeros(())))
    for layer in adapted_layers:
        layer.gated = (block,)


def _replace_layers_sharing_weight(module: nn.Module, layer: str, adapted: LoraLinear) -> list[LoraLinear]:
    replacements = {id(module.get_submodule(layer)): adapted}
    for path, sharing_layer in traces.modules_sharing_weight(module, layer):
        if not isinstance(sharing_layer, nn.Linear):
            raise ModelError(
                f"the tensor '{layer}.weight' is also '{path}.weight' of a layer that is not linear, so that no "
                "adapter can be merged: give each layer its own tensor, or use another method"
            )
        if id(sharing_layer) not in replacements:
            replacements[id(sharing_layer)] = adapted.with_bias_of(sharing_layer)
        _set_module(module, path, replacements[id(sharing_layer)])
    return list(replacements.values())


def _replace_module(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for path in [path for path, submodule in module.named_modules(remove_duplicate=False) if submodule is old]:
        _set_module(module, path, new)


def _set_module(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)

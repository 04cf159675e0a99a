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
from fedquilt.models.partial.lora import GATE, OWN, SHARED, AdapterSite


class LoraLinear(nn.Module):  # type: ignore[misc]
    """Linear layer with a shared adapter and, with `own`, a branch scaled by the block's gate."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, *, own: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.gated: tuple[nn.Module, ...] = ()  # the block with the gate; in a tuple, it is no part of this layer
        out, into = linear.weight.shape
        for a, b in (SHARED, OWN) if own else (SHARED,):
            self.register_parameter(a, nn.Parameter(torch.zeros(into, rank)))
            self.register_parameter(b, nn.Parameter(torch.zeros(rank, out)))

    def with_bias_of(self, linear: nn.Linear) -> LoraLinear:
        """Return a layer that shares all tensors of this one except the bias."""
        other = copy.copy(self)
        other._parameters = {**self._parameters, "bias": linear.bias}
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b + s x A B and, if the block has a gate, the branch m s x A_p B_p on top."""
        y = F.linear(x, self.weight, self.bias) + self.scale * (x @ self.lora_a @ self.lora_b)
        if self.gated:
            m = torch.sigmoid(self.gated[0].gate)
            y = y + m * self.scale * (x @ self.own_a @ self.own_b)
        return y


def insert_adapters(
    module: nn.Module, places: Sequence[AdapterSite], rank: int, scale: float, *, own: bool = False
) -> nn.Module:
    """Replace attention and the layers of `places` by layers with zero adapters, in place, and return the network."""
    for name, each in list(module.named_modules()):
        if isinstance(each, nn.MultiheadAttention):
            try:
                _replace_module(module, each, Attention.from_torch(each))
            except ValueError as error:
                raise ModelError(f"{name}: {error}") from None
    for spot in places:
        made = []
        for layer in spot.layers:
            try:
                linear = module.get_submodule(layer)
            except AttributeError:
                linear = None
            if not isinstance(linear, nn.Linear):
                raise ModelError(f"{layer!r} is no linear layer of this network: LoRA has nothing to adapt there")
            made += _replace_layers_sharing_weight(module, layer, LoraLinear(linear, rank, scale, own=own))
        if own:
            _add_gate(module.get_submodule(spot.block), made)
    return module


def _add_gate(block: nn.Module, adapted: Iterable[LoraLinear]) -> None:
    block.register_parameter(GATE, nn.Parameter(torch.zeros(())))
    for each in adapted:
        each.gated = (block,)


def _replace_layers_sharing_weight(module: nn.Module, layer: str, made: LoraLinear) -> list[LoraLinear]:
    """Replace a layer by `made`, and other layers with its weight by copies with their own bias."""
    placed = {id(module.get_submodule(layer)): made}
    for path, each in traces.modules_sharing_weight(module, layer):
        if not isinstance(each, nn.Linear):
            raise ModelError(
                f"the tensor '{layer}.weight' is '{path}.weight' as well, and that is no linear layer's: an adapter "
                "beside one of them cannot be merged into both, so give each its own or take another method"
            )
        if id(each) not in placed:
            placed[id(each)] = made.with_bias_of(each)
        _set_module(module, path, placed[id(each)])
    return list(placed.values())


def _replace_module(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for path in [path for path, each in module.named_modules(remove_duplicate=False) if each is old]:
        _set_module(module, path, new)


def _set_module(module: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, new)

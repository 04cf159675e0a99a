"""Low-rank adapters in linear layers (LoRA): placement, initial values and merging.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv 2106.09685), section 4.1, here with
A (in, r) and B (r, out), so that an adapted layer gives

    y = x W^T + b + s x A B,   s = alpha / r,

and with a branch of a device's own, FedSDG's Eq. 4 on outputs, y + m s x A_p B_p with m = sigmoid(gate).
Tensors are named after their layer: `<layer>.lora_a`, `.lora_b`, `.own_a`, `.own_b`, and `<block>.gate`.
The layers themselves, in torch, are in `fedquilt.models.partial.adapter_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.formats.tensor_register import ATTENTION, TensorRegister

SHARED = ("lora_a", "lora_b")
OWN = ("own_a", "own_b")
GATE = "gate"
OWN_STD = 0.01  # of B_p at first: with 0 the gate would have no gradient


class AdapterSite(NamedTuple):
    """Block, by its path in the network, and the linear layers in the block that are adapted."""

    block: str
    layers: tuple[str, ...]


def find_adapted_layers(register: TensorRegister) -> tuple[AdapterSite, ...]:
    """Return the layers to adapt, by block.

    In a transformer, these are each block's attention output projection and last linear layer (FedSDG, section 3.4). In
    a network without attention, every linear layer except the last is a block.
    """
    head = register.find_classifier()
    attentions = {entry.module for entry in register.tensors if entry.type == ATTENTION}
    flat = register.linear_paths()
    found = []
    for attention in register.sort_by_call_order(attentions):
        block = attention.rpartition(".")[0]
        others = [each for each in flat if each.startswith(f"{block}.") and not each.startswith(f"{attention}.")]
        if not block or not others or f"{attention}.out_proj" not in flat:
            raise ModelError(f"no output projection or no linear layer beside the attention {attention!r}")
        found.append(AdapterSite(block, (f"{attention}.out_proj", register.sort_by_call_order(others)[-1])))
    if not attentions:
        found = [AdapterSite(each, (each,)) for each in register.sort_by_call_order(flat) if each != head]
    if not found:
        raise ModelError(f"LoRA adapts linear layers, and this network has none before {head!r}: take a transformer")
    for layer in (layer for spot in found for layer in spot.layers):
        register.require_plain_weight(layer)
    return tuple(found)


def split_by_layer(places: Sequence[AdapterSite]) -> tuple[AdapterSite, ...]:
    return tuple(AdapterSite(layer, (layer,)) for spot in places for layer in spot.layers)


def sites_from_json(places: Sequence[Sequence[object]]) -> tuple[AdapterSite, ...]:
    return tuple(AdapterSite(str(block), tuple(map(str, names))) for block, names in places)  # type: ignore[call-overload]


def initial_shared_adapters(
    model: Tensors, places: Sequence[AdapterSite], rank: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the first shared adapters: A from N(0, 1/r), and B = 0."""
    return _draw_adapter_branch(model, places, rank, rng, SHARED, 0.0)


def initial_own_branch(
    model: Tensors, places: Sequence[AdapterSite], rank: int, rng: np.random.Generator, gate: float
) -> dict[str, np.ndarray]:
    """Return a device's first branch: A_p from N(0, 1/r), B_p from N(0, OWN_STD^2), and gate logits."""
    gates = {f"{spot.block}.{GATE}": np.array(gate, np.float32) for spot in places}
    return {**_draw_adapter_branch(model, places, rank, rng, OWN, OWN_STD), **gates}


def gate_openness(held: Tensors, places: Sequence[AdapterSite]) -> list[float]:
    """Return m = sigmoid(a) of every block's gate, 0..1 (FedSDG, Eq. 3)."""
    return [float(1 / (1 + np.exp(-held[f"{spot.block}.{GATE}"].astype(np.float64)))) for spot in places]


def merge_shared(
    model: Tensors, adapters: Tensors, places: Sequence[AdapterSite], scale: float
) -> dict[str, np.ndarray]:
    return _merge_adapter_products(model, adapters, places, SHARED, [scale] * len(places))


def merge_own_branch(
    model: Tensors, own: Tensors, places: Sequence[AdapterSite], scale: float
) -> dict[str, np.ndarray]:
    """Merge a device's branch into the weights: W + m s (A_p B_p)^T for every adapted layer."""
    return _merge_adapter_products(model, own, places, OWN, [scale * m for m in gate_openness(own, places)])


def _merge_adapter_products(
    model: Tensors, adapters: Tensors, places: Sequence[AdapterSite], leaves: tuple[str, str], scales: Sequence[float]
) -> dict[str, np.ndarray]:
    found = dict(model)
    for spot, scale in zip(places, scales, strict=True):
        for layer in spot.layers:
            a, b = (adapters[f"{layer}.{leaf}"].astype(np.float64) for leaf in leaves)
            weight = model[f"{layer}.weight"]
            found[f"{layer}.weight"] = (weight + scale * (a @ b).T).astype(weight.dtype)
    return found


def _draw_adapter_branch(
    model: Tensors,
    places: Sequence[AdapterSite],
    rank: int,
    rng: np.random.Generator,
    leaves: tuple[str, str],
    std: float,
) -> dict[str, np.ndarray]:
    found: Mapping[str, np.ndarray] = {}
    for spot in places:
        for layer in spot.layers:
            wide, narrow = model[f"{layer}.weight"].shape  # (out, in)
            a = rng.normal(0.0, rank**-0.5, (narrow, rank))
            b = rng.normal(0.0, std, (rank, wide)) if std else np.zeros((rank, wide))
            pair = {f"{layer}.{leaves[0]}": a.astype(np.float32), f"{layer}.{leaves[1]}": b.astype(np.float32)}
            found = {**found, **pair}
    return dict(found)

"""Low-rank adapters in linear layers (LoRA): placement, initial values and merging.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv 2106.09685), section 4.1, here with
A (in, r) and B (r, out), so that an adapted layer gives

    y = x W^T + b + s x A B,   s = alpha / r,

and with a device's own branch, y + m s x A_p B_p with m = sigmoid(gate) (FedSDG's Eq. 4 on outputs).
Tensors are named after their layer: `<layer>.lora_a`, `.lora_b`, `.own_a`, `.own_b`, and `<block>.gate`.
The torch layers are in `fedquilt.models.partial.adapter_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedquilt.core import ModelError, Tensors
from fedquilt.formats.tensor_register import ATTENTION, TensorRegister

SHARED_SUFFIXES = ("lora_a", "lora_b")
OWN_SUFFIXES = ("own_a", "own_b")
GATE = "gate"
OWN_STD = 0.01  # initial standard deviation of B_p: with 0 the gate would have no gradient


class AdapterSite(NamedTuple):
    """Path of a block in the network, and the adapted linear layers in the block."""

    block: str
    layers: tuple[str, ...]


def find_adapted_layers(register: TensorRegister) -> tuple[AdapterSite, ...]:
    """Return the layers to adapt, by block.

    In a transformer, these are each block's attention output projection and last linear layer (FedSDG, section 3.4). In
    a network without attention, every linear layer except the last is a block.
    """
    head = register.find_classifier()
    attentions = {entry.module for entry in register.tensors if entry.type == ATTENTION}
    linear_paths = register.linear_paths()
    sites = []
    for attention in register.sort_by_call_order(attentions):
        block = attention.rpartition(".")[0]
        block_layers = [
            path for path in linear_paths if path.startswith(f"{block}.") and not path.startswith(f"{attention}.")
        ]
        if not block or not block_layers or f"{attention}.out_proj" not in linear_paths:
            raise ModelError(
                f"the block of attention {attention!r} lacks an output projection or another linear layer: use another "
                "network"
            )
        sites.append(AdapterSite(block, (f"{attention}.out_proj", register.sort_by_call_order(block_layers)[-1])))
    if not attentions:
        sites = [AdapterSite(path, (path,)) for path in register.sort_by_call_order(linear_paths) if path != head]
    if not sites:
        raise ModelError(f"LoRA finds no linear layer before the classifier {head!r}: use a transformer")
    for layer in (layer for site in sites for layer in site.layers):
        register.require_plain_weight(layer)
    return tuple(sites)


def split_by_layer(sites: Sequence[AdapterSite]) -> tuple[AdapterSite, ...]:
    return tuple(AdapterSite(layer, (layer,)) for site in sites for layer in site.layers)


def sites_from_json(rows: Sequence[Sequence[object]]) -> tuple[AdapterSite, ...]:
    return tuple(AdapterSite(str(block), tuple(map(str, names))) for block, names in rows)  # type: ignore[call-overload]


def initial_shared_adapters(
    model: Tensors, sites: Sequence[AdapterSite], rank: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the first shared adapters: A from N(0, 1/r), and B = 0."""
    return _draw_adapter_branch(model, sites, rank, rng, SHARED_SUFFIXES, 0.0)


def initial_own_branch(
    model: Tensors, sites: Sequence[AdapterSite], rank: int, rng: np.random.Generator, gate: float
) -> dict[str, np.ndarray]:
    """Return a device's first branch: A_p from N(0, 1/r), B_p from N(0, OWN_STD^2), and gate logits."""
    gates = {f"{site.block}.{GATE}": np.array(gate, np.float32) for site in sites}
    return {**_draw_adapter_branch(model, sites, rank, rng, OWN_SUFFIXES, OWN_STD), **gates}


def gate_openness(branch: Tensors, sites: Sequence[AdapterSite]) -> list[float]:
    """Return m = sigmoid(a) of each site's gate, from 0 to 1 (FedSDG, Eq. 3)."""
    return [float(1 / (1 + np.exp(-branch[f"{site.block}.{GATE}"].astype(np.float64)))) for site in sites]


def merge_shared(
    model: Tensors, adapters: Tensors, sites: Sequence[AdapterSite], scale: float
) -> dict[str, np.ndarray]:
    return _merge_adapter_products(model, adapters, sites, SHARED_SUFFIXES, [scale] * len(sites))


def merge_own_branch(
    model: Tensors, branch: Tensors, sites: Sequence[AdapterSite], scale: float
) -> dict[str, np.ndarray]:
    """Merge a device's branch into the weights: W + m s (A_p B_p)^T for every adapted layer."""
    return _merge_adapter_products(
        model, branch, sites, OWN_SUFFIXES, [scale * m for m in gate_openness(branch, sites)]
    )


def _merge_adapter_products(
    model: Tensors, adapters: Tensors, sites: Sequence[AdapterSite], suffixes: tuple[str, str], scales: Sequence[float]
) -> dict[str, np.ndarray]:
    merged = dict(model)
    for site, scale in zip(sites, scales, strict=True):
        for layer in site.layers:
            a, b = (adapters[f"{layer}.{suffix}"].astype(np.float64) for suffix in suffixes)
            weight = model[f"{layer}.weight"]
            merged[f"{layer}.weight"] = (weight + scale * (a @ b).T).astype(weight.dtype)
    return merged


def _draw_adapter_branch(
    model: Tensors,
    sites: Sequence[AdapterSite],
    rank: int,
    rng: np.random.Generator,
    suffixes: tuple[str, str],
    std: float,
) -> dict[str, np.ndarray]:
    branch: Mapping[str, np.ndarray] = {}
    for site in sites:
        for layer in site.layers:
            outputs, inputs = model[f"{layer}.weight"].shape  # (out, in)
            a = rng.normal(0.0, rank**-0.5, (inputs, rank))
            b = rng.normal(0.0, std, (rank, outputs)) if std else np.zeros((rank, outputs))
            pair = {f"{layer}.{suffixes[0]}": a.astype(np.float32), f"{layer}.{suffixes[1]}": b.astype(np.float32)}
            branch = {**branch, **pair}
    return dict(branch)

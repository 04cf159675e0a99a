"""Reconstruction of an example from its gradient by iDLG. Imports torch.

Papers: Zhao et al., iDLG: Improved Deep Leakage from Gradients (arXiv 2001.02610), Algorithm 1; Zhu et al.,
Deep Leakage from Gradients (arXiv 1906.08935) for the network, its weights and L-BFGS. In float64, with a
line search (strong Wolfe), which the papers do not have: it fails less often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedquilt.arrays import tensors
from fedquilt.core import Tensors
from fedquilt.models.networks import register_trace, registry

STARTS = 2  # number of starts, of which the best counts, because the attacker sees the loss


def use_one_thread() -> None:
    # several threads are slower on such a small network
    torch.set_num_threads(1)


def classifier_path(network: Mapping[str, Any]) -> str | None:
    """Return the path of a network's classifier, or None without one."""
    return register_trace.trace_register(
        registry.build_network(network), registry.input_shape(network)
    ).find_classifier()


def draw_weights(network: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Draw the network's tensors from U(-0.5, 0.5)."""
    rng = tensors.seeded_rng("audit weights", seed)
    held = registry.build_network(network).state_dict()
    return {name: rng.uniform(-0.5, 0.5, tuple(value.shape)).astype(np.float32) for name, value in sorted(held.items())}


def infer_label(gradient: Tensors, head: str | None) -> int | None:
    """Infer the label of a single example from the head's bias gradient, or None without a head."""
    bias = gradient.get(f"{head}.bias")
    return None if bias is None else int(bias.argmin())


def reconstruct_example(
    network: Mapping[str, Any],
    start: Tensors,
    gradient: Tensors,
    label: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    steps: int,
) -> np.ndarray:
    """Reconstruct x' in 0..1 that minimises the gradient distance |grad' - grad|^2 (Eq. 13)."""
    model = registry.build_network(network).double()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(torch.tensor(start[name]))
    known = dict(model.named_parameters())
    moved = [known[name] for name in gradient]
    wanted = [torch.tensor(np.asarray(array, np.float64)) for array in gradient.values()]
    whole = sum(float(each.square().sum()) for each in wanted) or 1.0
    y = torch.tensor([label])
    best, least = np.zeros(shape), np.inf
    for _ in range(STARTS):
        x = torch.tensor(rng.normal(0.0, 1.0, (1, *shape)), requires_grad=True)
        search = torch.optim.LBFGS(
            [x],
            max_iter=steps,
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-14,
            tolerance_change=1e-14,
        )

        def closure(x: torch.Tensor = x, search: torch.optim.LBFGS = search) -> torch.Tensor:
            search.zero_grad()
            found = torch.autograd.grad(F.cross_entropy(model(x), y), moved, create_graph=True)
            away = sum(((a - b).square().sum() for a, b in zip(found, wanted, strict=True)), torch.zeros(())) / whole
            away.backward(inputs=[x])
            return away

        search.step(closure)
        left = float(closure().detach())
        if left < least:
            best, least = x.detach().numpy()[0].copy(), left
    return np.clip(best, 0, 1).astype(np.float32)

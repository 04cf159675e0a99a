"""Client side of GENE-FL (arXiv 2504.14628): choice of layers, and penalties. Requires numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedquilt.core import Hooks, Tensors


def choose_learngene_layers(
    parts: Mapping[str, tuple[str, ...]], model: Tensors, before: Tensors, *, count: int, order: str, norm: str
) -> list[str]:
    """Return the `count` layers whose weights turned least, or most for "highest", in this order (Eq. 9)."""
    sizes = {layer: sum(model[name].size for name in names) for layer, names in parts.items()}
    total = sum(sizes.values())

    def score(layer: str) -> float:
        now, then = (
            np.concatenate([some[name].ravel() for name in parts[layer]]).astype(np.float64) for some in (model, before)
        )
        lengths = float(np.linalg.norm(now) * np.linalg.norm(then))
        turned = 1.0 - float(now @ then) / lengths if lengths else 0.0
        share = sizes[layer] / total
        return turned * share if norm == "mul" else turned / math.sqrt(share) if norm == "div_sqrt" else turned

    places = {layer: place for place, layer in enumerate(parts)}
    sign = -1.0 if order == "highest" else 1.0
    return sorted(parts, key=lambda layer: (sign * score(layer), places[layer]))[:count]


def scale_fisher(fisher: np.ndarray) -> np.ndarray:
    """Scale Fisher values to 0..1 (Eq. 6). If all are equal, all become 0."""
    low, high = float(fisher.min()), float(fisher.max())
    return (fisher - low) / (high - low) if high > low else np.zeros_like(fisher)


def layer_strengths(kind: str, parts: Mapping[str, tuple[str, ...]], model: Tensors) -> dict[str, float]:
    """Return the strength a_l of each tensor (Eq. 4) from the size of its layer, or 1 for other kinds."""
    sizes = {layer: sum(model[name].size for name in names) for layer, names in parts.items()}
    largest = max(sizes.values())
    if kind == "size":
        each = {layer: size / largest for layer, size in sizes.items()}
    else:
        each = {layer: 1 / math.sqrt(size) if kind == "sqrt" else 1.0 for layer, size in sizes.items()}
    return {name: each[layer] for layer, names in parts.items() for name in names}


def squared_distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a.astype(np.float64) - b).sum())


def penalty_hooks(
    smooth: float, elastic: float, before: Tensors, received: Tensors, elastics: Tensors, strengths: Mapping[str, float]
) -> Hooks:
    """Return hooks that add the gradients of both penalties (Eq. 4 and 8), or empty hooks without a penalty.

    Both penalties combine to one: 2 s (theta - Theta) + 2 e (theta - el) = p (theta - aim).

    Args:
        smooth: Weight lambda1.
        elastic: Weight lambda2.
        before: All trained tensors of theta~.
        received: Tensors Theta of the cluster.
        elastics: Tensors el of the elastic learnGene, for the penalised tensors.
        strengths: Strength a_l of each penalised tensor.
    """
    first = {name: 2 * smooth * value for name, value in strengths.items()}
    second = 2 * elastic
    pulls = {name: value + second for name, value in first.items() if value + second > 0}
    if not pulls:
        return Hooks()
    aims = {
        name: (first[name] * received[name] + second * elastics[name]) / pulls[name] if name in pulls else array
        for name, array in before.items()
    }
    return Hooks(
        correct_gradient=lambda gradient, value, at: gradient + at["pull"] * (value - at["aim"]),
        anchors={
            "pull": {name: np.full(array.shape, pulls.get(name, 0.0), np.float32) for name, array in before.items()},
            "aim": {name: np.asarray(array, np.float32) for name, array in aims.items()},
        },
    )

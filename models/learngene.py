"""Client side of GENE-FL (arXiv 2504.14628): choice of layers, and penalties. Requires numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedquilt.core import Hooks, Tensors


def choose_learngene_layers(
    parts: Mapping[str, tuple[str, ...]],
    model: Tensors,
    old_model: Tensors,
    *,
    count: int,
    selection: Literal["lowest", "highest"],
    norm: Literal["mul", "div_sqrt", "none"],
) -> list[str]:
    """Return the `count` layers with the lowest or highest scores (GENE-FL, Eq. 9), in that order.

    The score is the cosine distance of a layer's weights from those in `old_model`. The `norm` "mul" multiplies it by
    the layer's share of all weights, and "div_sqrt" divides it by the root of this share.
    """
    sizes = {layer: sum(model[name].size for name in names) for layer, names in parts.items()}
    total = sum(sizes.values())

    def score(layer: str) -> float:
        new_weights, old_weights = (
            np.concatenate([tensors[name].ravel() for name in parts[layer]]).astype(np.float64)
            for tensors in (model, old_model)
        )
        lengths = float(np.linalg.norm(new_weights) * np.linalg.norm(old_weights))
        distance = 1.0 - float(new_weights @ old_weights) / lengths if lengths else 0.0
        share = sizes[layer] / total
        if norm == "mul":
            return distance * share
        return distance / math.sqrt(share) if norm == "div_sqrt" else distance

    positions = {layer: position for position, layer in enumerate(parts)}
    sign = -1.0 if selection == "highest" else 1.0
    return sorted(parts, key=lambda layer: (sign * score(layer), positions[layer]))[:count]


def scale_fisher(fisher: np.ndarray) -> np.ndarray:
    """Scale Fisher values linearly to 0..1 (GENE-FL, Eq. 6). Equal values become 0."""
    low, high = float(fisher.min()), float(fisher.max())
    return (fisher - low) / (high - low) if high > low else np.zeros_like(fisher)


def layer_strengths(kind: str, parts: Mapping[str, tuple[str, ...]], model: Tensors) -> dict[str, float]:
    """Return the strength a_l of each tensor's penalty (GENE-FL, Eq. 4).

    With kind "size" it is the layer's size relative to the largest layer, with "sqrt" 1 / sqrt(size), otherwise 1.
    """
    sizes = {layer: sum(model[name].size for name in names) for layer, names in parts.items()}
    largest = max(sizes.values())
    if kind == "size":
        strength_by_layer = {layer: size / largest for layer, size in sizes.items()}
    else:
        strength_by_layer = {layer: 1 / math.sqrt(size) if kind == "sqrt" else 1.0 for layer, size in sizes.items()}
    return {name: strength_by_layer[layer] for layer, names in parts.items() for name in names}


def squared_distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(a.astype(np.float64) - b).sum())


def penalty_hooks(
    smooth_weight: float,
    elastic_weight: float,
    trained: Tensors,
    received: Tensors,
    elastic_tensors: Tensors,
    strengths: Mapping[str, float],
) -> Hooks:
    """Return hooks that add the gradients of both penalties (GENE-FL, Eq. 4 and 8).

    Without a penalty, the hooks are empty. Otherwise each penalised tensor is pulled to a mean of `received` and
    `elastic_tensors`.

    Args:
        smooth_weight: Weight lambda1 of the penalty that pulls to `received`.
        elastic_weight: Weight lambda2 of the penalty that pulls to `elastic_tensors`.
        trained: All trained tensors.
        received: Tensors of the cluster, Theta in the paper.
        elastic_tensors: Tensors of the elastic learnGene, by name of the penalised tensor.
        strengths: Strength a_l of each penalised tensor.
    """
    smooth_pulls = {name: 2 * smooth_weight * value for name, value in strengths.items()}
    elastic_pull = 2 * elastic_weight
    pulls = {name: value + elastic_pull for name, value in smooth_pulls.items() if value + elastic_pull > 0}
    if not pulls:
        return Hooks()
    aims = {
        name: (smooth_pulls[name] * received[name] + elastic_pull * elastic_tensors[name]) / pulls[name]
        if name in pulls
        else array
        for name, array in trained.items()
    }
    return Hooks(
        correct_gradient=lambda gradient, value, anchors: gradient + anchors["pull"] * (value - anchors["aim"]),
        anchors={
            "pull": {name: np.full(array.shape, pulls.get(name, 0.0), np.float32) for name, array in trained.items()},
            "aim": {name: np.asarray(array, np.float32) for name, array in aims.items()},
        },
    )

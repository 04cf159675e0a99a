"""GENE-FL client arithmetic (arXiv 2504.14628): layer selection and elastic penalty. numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedquilt.core import Hooks, Tensors


def choose(
    parts: Mapping[str, tuple[str, ...]], model: Tensors, before: Tensors, count: int, order: str, norm: str
) -> list[str]:
    """Choose the learnGene (Eq. 9): `count` layers by how far they have turned, in float64 as 1 - cos is about 1e-5."""
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


def scaled(fisher: np.ndarray) -> np.ndarray:
    """Scaled Fisher values F^: 0 for the least of a tensor, 1 for the largest; all 0 if all are equal (Eq. 6)."""
    low, high = float(fisher.min()), float(fisher.max())
    return (fisher - low) / (high - low) if high > low else np.zeros_like(fisher)


def strengths(kind: str, parts: Mapping[str, tuple[str, ...]], model: Tensors) -> dict[str, float]:
    """Strength a_l of each tensor's layer (Eq. 4): N_l / max N for "size", 1 / sqrt(N_l) for "sqrt", else 1."""
    sizes = {layer: sum(model[name].size for name in names) for layer, names in parts.items()}
    largest = max(sizes.values())
    if kind == "size":
        each = {layer: size / largest for layer, size in sizes.items()}
    else:
        each = {layer: 1 / math.sqrt(size) if kind == "sqrt" else 1.0 for layer, size in sizes.items()}
    return {name: each[layer] for layer, names in parts.items() for name in names}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Squared distance |a - b|^2, in float64."""
    return float(np.square(a.astype(np.float64) - b).sum())


def pull(
    smooth: float,
    elastic: float,
    before: Tensors,
    received: Tensors,
    elastics: Tensors,
    strengths: Mapping[str, float],
) -> Hooks:
    """Hooks that add the gradient of both penalties, Eq. 4 and 8.

    The two form one pull towards one aim: 2 s (theta - Theta) + 2 e (theta - el) = p (theta - aim).

    Args:
        smooth: lambda1.
        elastic: lambda2.
        before: theta~, all tensors that are trained.
        received: Theta, the cluster's.
        elastics: el, for the penalised tensors.
        strengths: a_l, for each penalised tensor.
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
        correct=lambda gradient, value, at: gradient + at["pull"] * (value - at["aim"]),
        anchors={
            "pull": {name: np.full(array.shape, pulls.get(name, 0.0), np.float32) for name, array in before.items()},
            "aim": {name: np.asarray(array, np.float32) for name, array in aims.items()},
        },
    )

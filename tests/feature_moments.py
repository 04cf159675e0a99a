"""Features of classes, and the moments that a device sends of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.class_moments import ClassMoments, DeviceMoments, ExactMomentSums

CLASSES = 4


def data(n: int = 300, d: int = 12, seed: int = 0, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Correlated features around a mean far from 0, which differ by class, and the classes."""
    draws = np.random.default_rng(seed)
    y = draws.integers(0, classes, n)
    mixing = draws.normal(size=(d, d)) / np.sqrt(d)
    z = draws.normal(size=(n, d)) @ mixing + draws.normal(size=(classes, d))[y] + 1000 * draws.uniform(size=d)
    return z, y


def merged(parts: Sequence[DeviceMoments], before: ClassMoments | None = None) -> ClassMoments:
    """The sums of these devices, and of earlier ones."""
    sent = {f"d{number}": class_moments.pack_moments(part, exact=True) for number, part in enumerate(parts)}
    return ExactMomentSums(parts=sent, devices=dict.fromkeys(sent, 1)).total_sums(before)


# -- what is refused ------------------------------------------------------------------------------


def sent() -> dict[str, np.ndarray]:
    return class_moments.pack_moments(class_moments.compute_moments(*data(40), CLASSES))

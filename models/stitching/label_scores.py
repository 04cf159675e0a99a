"""How much a block's output says of the labels of the images that it was run on: scores of its pooled maps. numpy only.

Likeness to the donor's own output (`fedquilt.models.stitching.cka`) is 1 for every donor left as it is, at any depth:
it cannot tell a block that helps a classifier from one that does not. Both scores here can, from the same few images.
"""

from __future__ import annotations

import numpy as np

from fedquilt.models.stitching import cka
from fedquilt.models.stitching.cka import Score

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the ridge, as multiples of the features' mean squared length


def alignment(features: np.ndarray, y: np.ndarray) -> Score:
    """Unbiased CKA of features (n, d) and one-hot labels (n,): about 0 where they are independent, at most 1.

    Labels or features that do not vary score 0 and are flagged.
    """
    return cka.cka(cka.gram(features), cka.gram(_one_hot(y)))


def explained(features: np.ndarray, y: np.ndarray) -> Score:
    """The share of the one-hot labels' variance that a ridge on the features explains, as it would on other images.

    1 - GCV / GCV of the mean alone, at the best of STRENGTHS, where GCV is the generalised cross-validation error
    rss / (n - df)^2 (Golub, Heath and Wahba, 1979), from the Gram matrix of the standardised features.
    In [-1, 1], about 0 where they are independent. Labels or features that do not vary score 0 and are flagged.
    """
    x = features.astype(np.float64)
    x -= x.mean(axis=0)
    spread = x.std(axis=0)
    alive = spread > np.abs(features).max(initial=0.0) * np.finfo(np.float32).eps
    labels = _one_hot(y)
    labels -= labels.mean(axis=0)
    n, total = len(labels), float(np.vdot(labels, labels))
    if n < cka.MIN_IMAGES or not alive.any() or total == 0:
        return Score(0.0, False)
    x = x[:, alive] / spread[alive]
    values, vectors = np.linalg.eigh(x @ x.T)
    values = np.maximum(values, 0.0)
    power = ((vectors.T @ labels) ** 2).sum(axis=1)  # of the labels along each direction
    errors = []
    for strength in STRENGTHS:
        left = (lam := strength * float(values.sum()) / n) / (values + lam)
        errors.append(float(left**2 @ power) / (n - (1 - left).sum() - 1) ** 2)
    return Score(float(np.clip(1 - min(errors) / (total / (n - 1) ** 2), -1.0, 1.0)), True)


def _one_hot(y: np.ndarray) -> np.ndarray:
    return np.asarray(np.equal(y[:, None], np.unique(y)[None, :]), np.float64)

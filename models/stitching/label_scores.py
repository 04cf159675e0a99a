"""Scores of a block's pooled output by what it says of the images' labels. numpy only.

Likeness to the donor's own output (`fedquilt.models.stitching.cka`) is 1 for every unmodified donor, at any depth, and
does not tell blocks that help a classifier from others. Both scores here do, from the same few images.
"""

from __future__ import annotations

import numpy as np

from fedquilt.models.stitching import cka
from fedquilt.models.stitching.cka import Score

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the ridge, as multiples of the features' mean squared length


def alignment(features: np.ndarray, y: np.ndarray) -> Score:
    """Unbiased CKA of features (n, d) and labels y (n,) as one-hot vectors: about 0 if independent, 1 at most.

    Labels or features that do not vary score 0 and are flagged.
    """
    return cka.cka(cka.gram(features), cka.gram(_one_hot(y)))


def explained(features: np.ndarray, y: np.ndarray) -> Score:
    """Estimated share of the one-hot labels' variance that a ridge on the features explains on other images.

    The score is 1 - GCV / GCV of the mean alone, at the best of STRENGTHS, where GCV is the generalised
    cross-validation error rss / (n - df)^2 (Golub, Heath and Wahba, 1979), computed from the Gram matrix of the
    standardised features. It lies in [-1, 1] and is about 0 if features and labels are independent. Labels or features
    that do not vary score 0 and are flagged.
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
    power = ((vectors.T @ labels) ** 2).sum(axis=1)  # of the labels along each eigenvector
    errors = []
    for strength in STRENGTHS:
        left = (lam := strength * float(values.sum()) / n) / (values + lam)
        errors.append(float(left**2 @ power) / (n - (1 - left).sum() - 1) ** 2)
    return Score(float(np.clip(1 - min(errors) / (total / (n - 1) ** 2), -1.0, 1.0)), True)


def _one_hot(y: np.ndarray) -> np.ndarray:
    return np.asarray(np.equal(y[:, None], np.unique(y)[None, :]), np.float64)

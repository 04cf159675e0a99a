"""Scores of a block's pooled output by the labels of the images.

Similarity to the donor's own output (`fedquilt.models.stitching.algebra.cka`) is 1 for every unmodified donor at any
depth, and does not separate blocks that help a classifier from others. Both scores here do, with the same few images.
"""

from __future__ import annotations

import numpy as np

from fedquilt.models.stitching.algebra import cka
from fedquilt.models.stitching.algebra.cka import CkaScore

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the ridge, as multiples of the features' mean squared length


def label_alignment(features: np.ndarray, y: np.ndarray) -> CkaScore:
    """Return the unbiased CKA of features (n, d) and one-hot labels y (n,), about 0 if independent.

    Labels or features without variation score 0 and are flagged.
    """
    return cka.cka(cka.gram_matrix(features), cka.gram_matrix(_one_hot(y)))


def explained_variance(features: np.ndarray, y: np.ndarray) -> CkaScore:
    """Estimate the share of the labels' variance that a ridge on the features explains.

    The score is 1 - GCV / GCV of the mean alone, at the best of STRENGTHS, where GCV is the generalised
    cross-validation error rss / (n - df)^2 (Golub, Heath and Wahba, 1979), computed from the Gram matrix of the
    standardised features. The score is in [-1, 1] and about 0 if features and labels are independent. Labels or
    features without variation score 0 and are flagged.
    """
    x = features.astype(np.float64)
    x -= x.mean(axis=0)
    spread = x.std(axis=0)
    alive = spread > np.abs(features).max(initial=0.0) * np.finfo(np.float32).eps
    labels = _one_hot(y)
    labels -= labels.mean(axis=0)
    n, total = len(labels), float(np.vdot(labels, labels))
    if n < cka.MIN_IMAGES or not alive.any() or total == 0:
        return CkaScore(0.0, False)
    x = x[:, alive] / spread[alive]
    values, vectors = np.linalg.eigh(x @ x.T)
    values = np.maximum(values, 0.0)
    power = ((vectors.T @ labels) ** 2).sum(axis=1)  # of the labels along each eigenvector
    errors = []
    for strength in STRENGTHS:
        left = (lam := strength * float(values.sum()) / n) / (values + lam)
        errors.append(float(left**2 @ power) / (n - (1 - left).sum() - 1) ** 2)
    return CkaScore(float(np.clip(1 - min(errors) / (total / (n - 1) ** 2), -1.0, 1.0)), True)


def _one_hot(y: np.ndarray) -> np.ndarray:
    return np.asarray(np.equal(y[:, None], np.unique(y)[None, :]), np.float64)

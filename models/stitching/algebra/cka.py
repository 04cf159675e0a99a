"""Linear centred kernel alignment (CKA): similarity of two sets of activations on the same images.

Source: Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019, with which FedStitch (arXiv
2409.07202) scores blocks. Eq. 2 of FedStitch is misprinted: HSIC(X, Y) is ||Yc' Xc||_F^2 with centred columns, which
equals <Kc, Lc> on the centred Gram matrices. So n images take n x n numbers for any width of the layer. Features are
centred before the product, because centring the Gram matrix of float32 features with a large offset loses the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Estimator: TypeAlias = Literal["unbiased", "biased"]

CHUNK = 4096  # features centred and multiplied at a time
MIN_IMAGES = 4  # the unbiased estimator divides by n - 3


class CkaScore(NamedTuple):
    """Score of two sets of activations, from -1 to 1."""

    value: float
    sound: bool  # False without variation in one of the two sets, for which the value is 0


def gram_matrix(features: np.ndarray) -> np.ndarray:
    x = features.reshape(len(features), -1)
    return gram_from_columns(lambda first, last: x[:, first:last].copy(), *x.shape)


def gram_from_columns(columns: Callable[[int, int], np.ndarray], n: int, features: int) -> np.ndarray:
    """Return the Gram matrix (n, n), float64, of column-centred features read in chunks.

    `columns(first, last)` returns a new array (n, last - first), which is centred in place.
    """
    total = np.zeros((n, n))
    for start in range(0, features, CHUNK):
        chunk = columns(start, min(start + CHUNK, features))
        chunk -= chunk[0].copy()  # exactly zero where a feature is constant
        chunk -= chunk.mean(axis=0)
        total += chunk @ chunk.T
    return total


def hsic(k: np.ndarray, l: np.ndarray, estimator: Estimator = "unbiased") -> float:  # noqa: E741
    """Return the HSIC of two Gram matrices (n, n), up to a factor that depends on n only.

    "biased" is <HKH, HLH>. "unbiased" (Song et al., 2012) is the inner product of the U-centred matrices (Szekely and
    Rizzo, 2014), so that HSIC(K, K) is never negative and |CKA| never exceeds 1. It needs MIN_IMAGES images.
    """
    centre = _u_centre if estimator == "unbiased" else _centre
    return float(np.vdot(centre(k), centre(l)))


def cka(k: np.ndarray, l: np.ndarray, estimator: Estimator = "unbiased") -> CkaScore:  # noqa: E741
    """Return the CKA of two Gram matrices of the same images, 1 for equal matrices.

    For independent noise the biased estimator gives 0.5 to 1 if features outnumber images, and the unbiased estimator
    about 0. Raise ValueError for different shapes, or fewer than MIN_IMAGES images.
    """
    if k.shape != l.shape:
        raise ValueError(f"Gram matrices have shapes {k.shape} and {l.shape}: compute both on the same images")
    if len(k) < MIN_IMAGES:
        raise ValueError(f"{len(k)} images: CKA needs at least {MIN_IMAGES}")
    kk, ll = hsic(k, k, estimator), hsic(l, l, estimator)
    if _is_rounding_error(kk, k) or _is_rounding_error(ll, l):
        return CkaScore(0.0, False)
    value = hsic(k, l, estimator) / (np.sqrt(kk) * np.sqrt(ll)) if kk != ll else hsic(k, l, estimator) / kk
    return CkaScore(float(np.clip(value, -1.0, 1.0)), True)


def _centre(k: np.ndarray) -> np.ndarray:
    k = k.astype(np.float64)
    means = k.mean(axis=0)
    return k - means - means[:, None] + means.mean()


def _u_centre(k: np.ndarray) -> np.ndarray:
    n = len(k)
    k = k.astype(np.float64)
    np.fill_diagonal(k, 0.0)
    sums = k.sum(axis=0)
    centred = k - (sums + sums[:, None]) / (n - 2) + sums.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(centred, 0.0)
    return centred


def _is_rounding_error(norm: float, k: np.ndarray) -> bool:
    eps = np.finfo(k.dtype).eps
    return norm <= float(eps * len(k)) ** 2 * float(np.vdot(k, k).real)

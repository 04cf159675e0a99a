"""Fingerprints of similar data: subspaces of examples, and clusters of them. numpy.

Paper: GENE-FL (arXiv 2504.14628), Eq. 11 and 12; the subspace is PACFL's (Vahidian et al., arXiv 2209.10526).

Privacy: u_1, the first singular vector of pictures that are not centred, is close to their mean
picture. `mean_likeness` measures how close; to keep that private, send no fingerprint.

K-means is this file's own: a coordinator may run on a small board, and scikit-learn would add some
100 MB for a sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedquilt import tensors
from fedquilt.core import Tensors, UpdateError

RESTARTS, STEPS = 10, 100


def subspace(x: np.ndarray, directions: int) -> np.ndarray:
    """Subspace U_p of X = U S V^T, (d, directions) float32; column i of X (d, n) is example i, unscaled.

    The largest entry of each column is positive. Examples of smaller rank leave columns of zeros.

    Args:
        x: (n, ...); unsigned integers count as fractions of their largest.
        directions: number of singular vectors.
    """
    flat = x.reshape(len(x), -1).astype(np.float64)
    if x.dtype.kind == "u":
        flat /= np.iinfo(x.dtype).max
    left, values, _ = np.linalg.svd(flat.T, full_matrices=False)
    rank = int((values > 1e-9 * values.max(initial=0.0)).sum())
    kept = left[:, : min(rank, directions)]
    kept = kept * np.where(kept[np.abs(kept).argmax(axis=0), np.arange(kept.shape[1])] < 0, -1.0, 1.0)
    found = np.zeros((flat.shape[1], directions), np.float32)
    found[:, : kept.shape[1]] = kept
    return found


def mean_likeness(x: np.ndarray, fingerprint: np.ndarray) -> float:
    """Cosine of a fingerprint's first column and the examples' mean, 0..1: how much u_1 reveals of the mean picture."""
    mean = x.reshape(len(x), -1).astype(np.float64).mean(axis=0)
    size = float(np.linalg.norm(mean))
    return float(abs(mean @ fingerprint[:, 0].astype(np.float64)) / size) if size else 0.0


def nearest(point: np.ndarray, centres: np.ndarray) -> int:
    """Cluster of a point (Eq. 12): argmin_k ||v - c_k||_2, of centres (k, ...). The first of equals."""
    return int(((centres - point) ** 2).reshape(len(centres), -1).sum(axis=1).argmin())


def join(point: np.ndarray, centres: list[np.ndarray], members: list[int]) -> int:
    """Put a point into the nearest cluster; returns its number.

    Both lists are changed: the cluster gains a member, and its centre moves to the mean of all its members.
    """
    k = nearest(point, np.stack(centres))
    centres[k] = (centres[k] * members[k] + point) / (members[k] + 1)
    members[k] += 1
    return k


def received(told: Tensors, device: str, directions: int, known: Sequence[np.ndarray]) -> np.ndarray:
    """The fingerprint (d, directions) that a device has sent as its only tensor, "u".

    Args:
        told: what it has sent.
        device: its name, for the error.
        directions: number of singular vectors that it was asked for.
        known: fingerprints or centres (d, directions) of others.

    Raises:
        UpdateError: shape, type or numbers are not those of a fingerprint, whose columns have length 1 or 0.
    """
    if told.keys() != {"u"} or told["u"].ndim != 2 or told["u"].shape[1] != directions or told["u"].dtype != np.float32:
        raise UpdateError(f"{device} did not send a fingerprint of {directions} vectors")
    tensors.require_finite(told)
    found = told["u"]
    if known and known[0].shape != found.shape:
        raise UpdateError(
            f"{device}'s examples have {len(found)} values each, the others' {len(known[0])}: give all devices "
            "examples of one size"
        )
    lengths = np.linalg.norm(found.astype(np.float64), axis=0)
    if (np.minimum(lengths, np.abs(lengths - 1)) > 1e-3).any():
        raise UpdateError(f"{device} sent vectors that are not of length 1")
    return found


def cluster(points: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """K-means of points (n, ...): cluster of each point (n,), and the centres (k, ...), the means of members.

    k-means++ (Arthur and Vassilvitskii 2007), the best of RESTARTS. Fewer different points than `count`
    give fewer clusters; none is empty. Clusters are numbered by their first member.
    """
    flat = points.reshape(len(points), -1).astype(np.float64)
    count = min(count, len(np.unique(flat, axis=0)))
    best: tuple[float, np.ndarray] | None = None
    for _ in range(RESTARTS):
        owner = _lloyd(flat, _spread(flat, count, rng))
        cost = sum(float(((flat[owner == k] - flat[owner == k].mean(axis=0)) ** 2).sum()) for k in np.unique(owner))
        if best is None or cost < best[0] - 1e-12:
            best = cost, owner
    assert best is not None
    _, first, owner = np.unique(best[1], return_index=True, return_inverse=True)
    owner = np.argsort(np.argsort(first))[owner]
    centres = np.stack([flat[owner == k].mean(axis=0) for k in range(len(first))])
    return owner, centres.reshape(len(first), *points.shape[1:])


def _spread(flat: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """First centres: each drawn in proportion to its squared distance from the earlier ones."""
    chosen = [int(rng.integers(len(flat)))]
    while len(chosen) < count:
        away = _squares(flat, flat[chosen]).min(axis=1)
        ends = np.cumsum(away)
        chosen.append(int(np.searchsorted(ends, rng.random() * ends[-1], side="right").clip(0, len(flat) - 1)))
    return flat[chosen]


def _lloyd(flat: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Alternate members and means until nothing moves; a cluster that loses all its members is dropped."""
    owner = np.zeros(len(flat), int)
    for step in range(STEPS):
        moved = _squares(flat, centres).argmin(axis=1)
        if step and (moved == owner).all():
            break
        owner = moved
        centres = np.stack([flat[owner == k].mean(axis=0) for k in np.unique(owner)])
        owner = np.unique(owner, return_inverse=True)[1]
    return owner


def _squares(flat: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared distances (n, k); one centre at a time, as n x k x d values would be many."""
    return np.stack([((flat - centre) ** 2).sum(axis=1) for centre in centres], axis=1)

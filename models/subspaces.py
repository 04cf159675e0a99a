"""Fingerprints of examples as subspaces, and clusters of fingerprints.

Paper: GENE-FL (arXiv 2504.14628), Eq. 11 and 12, with the subspaces of PACFL (Vahidian et al., arXiv 2209.10526).

Privacy: u_1, the first singular vector of images that are not centred, is close to their mean image. `mean_similarity`
measures how close. To keep the mean image private, send no fingerprint.

K-means is implemented here, because a coordinator may run on a small board and scikit-learn would add about 100 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import Tensors, UpdateError

RESTARTS, STEPS = 10, 100


def compute_subspace(x: np.ndarray, directions: int) -> np.ndarray:
    """Return the first left singular vectors of the examples (GENE-FL, Eq. 11), (d, directions) float32.

    Column i of X (d, n) is example i, not centred. The largest entry of each vector is positive. Examples of smaller
    rank leave columns of zeros.
    """
    flat = x.reshape(len(x), -1).astype(np.float64)
    if x.dtype.kind == "u":
        flat /= np.iinfo(x.dtype).max
    left, values, _ = np.linalg.svd(flat.T, full_matrices=False)
    rank = int((values > 1e-9 * values.max(initial=0.0)).sum())
    vectors = left[:, : min(rank, directions)]
    vectors = vectors * np.where(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])] < 0, -1.0, 1.0)
    fingerprint = np.zeros((flat.shape[1], directions), np.float32)
    fingerprint[:, : vectors.shape[1]] = vectors
    return fingerprint


def mean_similarity(x: np.ndarray, fingerprint: np.ndarray) -> float:
    """Return |cos| of the mean example and the fingerprint's first vector, or 0 if the mean is 0."""
    mean = x.reshape(len(x), -1).astype(np.float64).mean(axis=0)
    size = float(np.linalg.norm(mean))
    return float(abs(mean @ fingerprint[:, 0].astype(np.float64)) / size) if size else 0.0


def nearest_cluster(point: np.ndarray, centres: np.ndarray) -> int:
    return int(((centres - point) ** 2).reshape(len(centres), -1).sum(axis=1).argmin())


def assign_to_nearest(point: np.ndarray, centres: list[np.ndarray], members: list[int]) -> int:
    """Assign a point to the nearest cluster and return the cluster's index.

    Both lists are changed: the cluster gains a member, and its centre moves to the mean of all its members.
    """
    k = nearest_cluster(point, np.stack(centres))
    centres[k] = (centres[k] * members[k] + point) / (members[k] + 1)
    members[k] += 1
    return k


def validate_fingerprint(
    tensors_by_name: Tensors, device: str, directions: int, other_fingerprints: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the fingerprint (d, directions) that a device sent as its only tensor, "u".

    Raise UpdateError unless its vectors have length 1 or 0, and as many values as other devices' vectors.
    """
    if (
        tensors_by_name.keys() != {"u"}
        or tensors_by_name["u"].ndim != 2
        or tensors_by_name["u"].shape[1] != directions
        or tensors_by_name["u"].dtype != np.float32
    ):
        raise UpdateError(f"the update of {device} is not a fingerprint of {directions} vectors")
    tensors.require_finite(tensors_by_name)
    fingerprint = tensors_by_name["u"]
    if other_fingerprints and other_fingerprints[0].shape != fingerprint.shape:
        raise UpdateError(
            f"{device} has examples of {len(fingerprint)} values, other devices of {len(other_fingerprints[0])}: "
            "give all devices examples of one size"
        )
    lengths = np.linalg.norm(fingerprint.astype(np.float64), axis=0)
    if (np.minimum(lengths, np.abs(lengths - 1)) > 1e-3).any():
        raise UpdateError(f"the fingerprint of {device} has vectors that are not of length 1")
    return fingerprint


def cluster_points(points: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the K-means cluster of each point, (n,), and the centres (k, ...).

    The centres are initialised by k-means++ (Arthur and Vassilvitskii 2007), and the best of RESTARTS runs is returned.
    Fewer distinct points than `count` give fewer clusters. No cluster is empty. Clusters are numbered by their first
    member.
    """
    flat = points.reshape(len(points), -1).astype(np.float64)
    count = min(count, len(np.unique(flat, axis=0)))
    best: tuple[float, np.ndarray] | None = None
    for _ in range(RESTARTS):
        owner = _run_kmeans(flat, _draw_spread_centres(flat, count, rng))
        cost = sum(float(((flat[owner == k] - flat[owner == k].mean(axis=0)) ** 2).sum()) for k in np.unique(owner))
        if best is None or cost < best[0] - 1e-12:
            best = cost, owner
    assert best is not None
    _, first, owner = np.unique(best[1], return_index=True, return_inverse=True)
    owner = np.argsort(np.argsort(first))[owner]
    centres = np.stack([flat[owner == k].mean(axis=0) for k in range(len(first))])
    return owner, centres.reshape(len(first), *points.shape[1:])


def _draw_spread_centres(flat: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    # k-means++: each centre is drawn in proportion to its squared distance from earlier ones.
    chosen = [int(rng.integers(len(flat)))]
    while len(chosen) < count:
        distances = _squared_distances(flat, flat[chosen]).min(axis=1)
        ends = np.cumsum(distances)
        chosen.append(int(np.searchsorted(ends, rng.random() * ends[-1], side="right").clip(0, len(flat) - 1)))
    return flat[chosen]


def _run_kmeans(flat: np.ndarray, centres: np.ndarray) -> np.ndarray:
    # A cluster that loses all its members is dropped.
    owner = np.zeros(len(flat), int)
    for step in range(STEPS):
        new_owner = _squared_distances(flat, centres).argmin(axis=1)
        if step and (new_owner == owner).all():
            break
        owner = new_owner
        centres = np.stack([flat[owner == k].mean(axis=0) for k in np.unique(owner)])
        owner = np.unique(owner, return_inverse=True)[1]
    return owner


def _squared_distances(flat: np.ndarray, centres: np.ndarray) -> np.ndarray:
    # One centre at a time, to avoid n x k x d values in memory.
    return np.stack([((flat - centre) ** 2).sum(axis=1) for centre in centres], axis=1)

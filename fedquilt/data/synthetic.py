"""Synthetic-32K and Synthetic-3.2K of FedPeWS (arXiv 2410.03042, section 5.1).

Sixteen Gaussian clusters in the plane: four centres with four offsets each. Classes 0 and 1 alternate along the offsets
of the two upper centres, classes 2 and 3 along those of the lower ones. The paper gives neither centres nor
covariances, so they are taken from its first author's public code. With `groups = [[0, 1], [2, 3]]` each of two devices
has a hard task. The paper splits by "even and odd classes" and so must number classes otherwise: with our numbers, each
device would have one upper and one lower class, a trivial task.

Only sums, products, square roots and normal draws of PCG64 are used, and means are exact sums, so that every machine
generates equal data. A device generates the whole set (2 MB) and selects its share, because the features are
standardised by the statistics of the whole training set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import DataError
from fedquilt.data.readers import ExampleReader
from fedquilt.data.spec import DataSpec


class Centre(NamedTuple):
    """Centre of a cluster, and the matrix A that scales rows of standard normal numbers (covariance A'A)."""

    x: float
    y: float
    a: tuple[tuple[float, float], tuple[float, float]]


ROUND = ((0.25, 0.15), (0.15, 0.25))
CENTRES = (
    Centre(-4.0, 4.0, ((0.05, 0.0), (0.0, 0.45))),
    Centre(4.0, 4.0, ROUND),
    Centre(-4.0, -4.0, ROUND),
    Centre(4.0, -4.0, ((0.25, 0.0), (0.0, 0.05))),
)
OFFSETS = ((0.0, 0.0), (1.0, -1.0), (2.0, -2.0), (3.0, -3.0))
TRAIN_POINTS = {"fedpews-32k": 2000, "fedpews-3.2k": 200}  # points of each cluster
TEST_POINTS = 400  # points of each cluster in the test split


def open_synthetic(spec: DataSpec) -> ExampleReader:
    sizes = {"train": TRAIN_POINTS[spec.dataset], "test": TEST_POINTS}
    if spec.split not in sizes:
        raise DataError(f"{spec.dataset} has no split {spec.split!r}: choose 'train' or 'test'")
    y = np.repeat([_class_of_cluster(*cluster) for cluster in _list_clusters()], sizes[spec.split])

    def take(rows: np.ndarray) -> np.ndarray:
        train_points = _expand_features(draw_points(spec.dataset, "train", spec.seed))
        points = (
            train_points if spec.split == "train" else _expand_features(draw_points(spec.dataset, "test", spec.seed))
        )
        mean = np.array([math.fsum(column) for column in train_points.T]) / len(train_points)
        spread = np.sqrt(np.array([math.fsum(column) for column in ((train_points - mean) ** 2).T]) / len(train_points))
        return ((points[rows] - mean) / spread).astype(np.float32)

    return ExampleReader(y.astype(np.int64), take, (5,), np.dtype(np.float32))


def draw_points(name: str, split: str, seed: int) -> np.ndarray:
    """Return random points of all clusters in the plane, (n, 2) float64, ordered by centre, then offset."""
    count = TRAIN_POINTS[name] if split == "train" else TEST_POINTS
    points = []
    for centre, offset in _list_clusters():
        z = tensors.seeded_rng(name, seed, split, centre, offset).standard_normal((count, 2))
        cluster_centre, ((a, b), (c, d)), (shift_x, shift_y) = CENTRES[centre], CENTRES[centre].a, OFFSETS[offset]
        # Not a matrix product, whose last bit depends on the processor.
        x = z[:, 0] * a + z[:, 1] * c + (cluster_centre.x + shift_x)
        y = z[:, 0] * b + z[:, 1] * d + (cluster_centre.y + shift_y)
        points.append(np.stack([x, y], axis=1))
    return np.concatenate(points)


def _list_clusters() -> list[tuple[int, int]]:
    return [(centre, offset) for centre in range(len(CENTRES)) for offset in range(len(OFFSETS))]


def _class_of_cluster(centre: int, offset: int) -> int:
    return 2 * (centre >= 2) + offset % 2


def _expand_features(plane: np.ndarray) -> np.ndarray:
    x, y = plane.T
    return np.stack([x, y, x * x, y * y, x * y], axis=1)

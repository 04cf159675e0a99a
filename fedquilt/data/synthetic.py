"""Synthetic-32K and Synthetic-3.2K of FedPeWS (arXiv 2410.03042, section 5.1): drawn, not read.

Sixteen Gaussian clusters in the plane, four centres with four offsets each, of which two classes
interleave at each of two sides. The paper gives neither centres nor covariances: they are those of
its first author's public code; the sizes follow from the names. Classes are numbered so that
`groups = [[0, 1], [2, 3]]` gives each of two devices a task that is hard by itself; the paper's
"even and odd classes" must have meant this, as by our numbers each of the two would be trivial.

Everything comes from sums, products, square roots and PCG64's normals, so every machine draws the same; means
are exact sums. Drawing all takes some milliseconds and 2 MB, so a device draws the whole and
keeps its share: the features are standardised by the statistics of the whole training set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedquilt import tensors
from fedquilt.core import DataError
from fedquilt.data.readers import Reader
from fedquilt.data.spec import DataSpec


class Centre(NamedTuple):
    """Centre, and the matrix A by which standard normal rows are multiplied: covariance A'A."""

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
TRAIN = {"fedpews-32k": 2000, "fedpews-3.2k": 200}  # points of each cluster
TEST = 400  # likewise, of either


def open_(spec: DataSpec) -> Reader:
    """Draw the training set (32,000 or 3,200 points) or the test set (6,400), by cluster: x (n, 5) float32, y 0..3.

    Raises:
        DataError: another split than train and test.
    """
    sizes = {"train": TRAIN[spec.synthetic], "test": TEST}
    if spec.split not in sizes:
        raise DataError(f"{spec.synthetic} has the splits train and test, not {spec.split!r}")
    y = np.repeat([_class(*place) for place in _clusters()], sizes[spec.split])

    def take(rows: np.ndarray) -> np.ndarray:
        trained = _lifted(points(spec.synthetic, "train", spec.seed))
        wanted = trained if spec.split == "train" else _lifted(points(spec.synthetic, "test", spec.seed))
        mean = np.array([math.fsum(column) for column in trained.T]) / len(trained)
        spread = np.sqrt(np.array([math.fsum(column) for column in ((trained - mean) ** 2).T]) / len(trained))
        return ((wanted[rows] - mean) / spread).astype(np.float32)

    return Reader(y.astype(np.int64), take, (5,), np.dtype(np.float32))


def points(name: str, split: str, seed: int) -> np.ndarray:
    """Points in the plane, (n, 2) float64, cluster after cluster: centre by centre, offset by offset."""
    count = TRAIN[name] if split == "train" else TEST
    drawn = []
    for centre, offset in _clusters():
        z = tensors.rng(name, seed, split, centre, offset).standard_normal((count, 2))
        at, ((a, b), (c, d)), (right, up) = CENTRES[centre], CENTRES[centre].a, OFFSETS[offset]
        # written out: a matrix product's last bit depends on the processor
        x = z[:, 0] * a + z[:, 1] * c + (at.x + right)
        y = z[:, 0] * b + z[:, 1] * d + (at.y + up)
        drawn.append(np.stack([x, y], axis=1))
    return np.concatenate(drawn)


def _clusters() -> list[tuple[int, int]]:
    return [(centre, offset) for centre in range(len(CENTRES)) for offset in range(len(OFFSETS))]


def _class(centre: int, offset: int) -> int:
    return 2 * (centre >= 2) + offset % 2


def _lifted(plane: np.ndarray) -> np.ndarray:
    """Features (n, 5) of points (n, 2): x, y, x^2, y^2, xy."""
    x, y = plane.T
    return np.stack([x, y, x * x, y * y, x * y], axis=1)

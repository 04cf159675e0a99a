"""Reference scoring without FedStitch's optimisations, as a baseline for `fedquilt lab bench stitch`.

For each candidate everything runs again from the images: the path, the candidate's donor, the junction's fit and the
Gram matrices. Runtime, images, positions and estimator are those of `fedquilt.models.stitching.device.scoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedquilt.core import Tensors
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import cka, least_squares
from fedquilt.models.stitching.stitched_network import Block

Run = Callable[[Block, np.ndarray], np.ndarray]


def score_output(
    path: Sequence[Block],
    between: Sequence[Tensors | None],
    own: Sequence[Block],
    run: Run,
    scored: np.ndarray,
    fitted: np.ndarray,
    positions: np.ndarray,
    ridge: float,
) -> float:
    """Return the CKA of a candidate's outputs behind the path and in its donor.

    Args:
        path: Blocks selected so far.
        between: Junction before each block, or None.
        own: Blocks of the donor up to the candidate.
        run: Function that runs a block's graph.
        scored: Images (n, channels, size, size) to score.
        fitted: The same number of images for the fit of the junction.
        positions: Positions of the candidate's input maps on `fitted`, of n * h * w.
        ridge: Strength of the junction's ridge penalty.
    """
    candidate = own[-1]
    here = stitched_network.run_path(path, between, run, np.concatenate([scored, fitted]))
    there = stitched_network.run_path(own[:-1], [None] * (len(own) - 1), run, np.concatenate([scored, fitted]))
    n = len(scored)
    junction = None
    if not stitched_network.is_continuation(path[-1], candidate):
        x = inputs.resize_maps(here[n:], *candidate.in_shape[1:])
        rows = [maps.transpose(0, 2, 3, 1).reshape(-1, maps.shape[1])[positions] for maps in (x, there[n:])]
        weights, bias = least_squares.RidgeFit(rows[0], ridge).solve_weights(rows[1])
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
    output = run(candidate, stitched_network.apply_junction(here[:n], junction, candidate))
    return cka.cka(cka.gram_matrix(output), cka.gram_matrix(run(candidate, there[:n]))).value

"""The same scores without any of FedStitch's economies: what `fedquilt bench stitch` measures against.

For each candidate everything is run again from the images: the path, the candidate's own donor up to
it and through it, the junction's fit, and the Gram matrices. The runtime, the images, the positions
that junctions are fitted on and the estimator are those of `fedquilt.models.stitching.scoring`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedquilt.core import Tensors
from fedquilt.data import images
from fedquilt.models.stitching import cka, least_squares, stitched
from fedquilt.models.stitching.stitched import Block

Run = Callable[[Block, np.ndarray], np.ndarray]


def output_score(
    path: Sequence[Block],
    between: Sequence[Tensors | None],
    own: Sequence[Block],
    run: Run,
    scored: np.ndarray,
    fitted: np.ndarray,
    positions: np.ndarray,
    ridge: float,
) -> float:
    """CKA of the candidate's outputs behind the path and in its donor, the junction fitted on other images.

    Args:
        path: blocks chosen so far.
        between: junction before each of them; None: none.
        own: the donor's blocks, up to the candidate.
        run: runs a block's graph.
        scored: images (n, channels, size, size) that are scored.
        fitted: as many images, for the junction.
        positions: of the candidate's input maps on `fitted`, counted over n * h * w.
        ridge: strength of the junction's ridge penalty.
    """
    candidate = own[-1]
    here = stitched.forward(path, between, run, np.concatenate([scored, fitted]))
    there = stitched.forward(own[:-1], [None] * (len(own) - 1), run, np.concatenate([scored, fitted]))
    n = len(scored)
    junction = None
    if not stitched.continues(path[-1], candidate):
        x = images.resize(here[n:], *candidate.in_shape[1:])
        rows = [maps.transpose(0, 2, 3, 1).reshape(-1, maps.shape[1])[positions] for maps in (x, there[n:])]
        weights, bias = least_squares.Fit(rows[0], ridge).weights(rows[1])
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
    output = run(candidate, stitched.join(here[:n], junction, candidate))
    return cka.cka(cka.gram(output), cka.gram(run(candidate, there[:n]))).value

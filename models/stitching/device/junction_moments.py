"""Moments for the junctions of a stitching job, computed by a device (FedStitch, section 3).

FedStitch (arXiv 2409.07202), section 3, on the device: forward passes only. The moments of several devices add up
(`fedquilt.models.stitching.algebra.least_squares`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import ClientContext, ClientResult, DataError, Tensors
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import least_squares
from fedquilt.models.stitching.device import block_runner, scoring
from fedquilt.models.stitching.device.activations import ActivationSource
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.device.scoring import StitchingRequest

WAVE = 128  # images that run through a path together


@dataclass(frozen=True)
class FitRequest(StitchingRequest):
    path: tuple[str, ...]
    winners: tuple[str, ...]
    samples: int
    ridge: float
    bias: bool


def compute_junction_moments(ask: FitRequest, site: ClientContext) -> ClientResult:
    """Compute the moments from which the winners' junctions are solved.

    Returns:
        Result with bundles "moments.<i>", the tensors of `least_squares.RegressionMoments` for the i-th winner.

    Raises:
        DataError: If there are no examples.
    """
    path = [ask.blocks[name] for name in ask.path]
    between = stitched_network.load_junctions(path, site.load)
    winners = [ask.blocks[name] for name in ask.winners]
    local, chains = scoring.load_private_state(site), list(scoring.donor_chains(ask.blocks, winners))
    chosen = scoring.example_order(local)[: ask.samples]
    flops = sum(block.flops for block in path) + sum(block.flops for chain, _ in chains for block in chain[:-1])
    sums_bytes = least_squares.moments_bytes(path[-1].out_shape[0])
    run = BlockRunner(site, ask.blocks.values(), len(chosen) * flops, matrices_bytes=sums_bytes)
    found: dict[str, Tensors] = {}
    for chain, wanted in chains:  # one donor at a time: a winner's sums of 2048 channels are 34 MB
        sums: dict[str, least_squares.RegressionMoments] = {}
        for rows in example_batches(site, chosen):
            shown = block_runner.PreparedExamples(site.train.x[rows], ask.input)
            x = run.run_path(path, between, shown, block_runner.OutputCache(run, rows, len(path)))
            y: ActivationSource = shown
            for block in chain:
                if block.id in wanted:
                    run.reserve_memory(sums_bytes)
                    for start, part in block_runner.iterate_pieces(block_runner.resize_maps(x, *block.in_shape[1:])):
                        aim = y.read_examples(start, start + len(part))
                        sums[block.id] = least_squares.add_maps(sums.get(block.id), part, aim, ask.bias)
                if block is not chain[-1]:
                    y = run.run_block(block, y)
        while sums:
            name, each = sums.popitem()
            found[name] = least_squares.pack_moments(each, exact=ask.ridge == 0)
            del each
    return _client_result(ask, [found[name] for name in ask.winners], len(chosen), local)


def _client_result(ask: StitchingRequest, found: Sequence[Tensors], examples: int, local: Tensors) -> ClientResult:
    bundles = {f"moments.{i}": each for i, each in enumerate(found)}
    return ClientResult(bundles, float(examples), {"turn": float(ask.turn)}, local)


def example_batches(site: ClientContext, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of a device's examples, WAVE at a time.

    Raises:
        DataError: If there are no examples.
    """
    if not len(rows):
        raise DataError(f"{site.device} has no examples")
    for start in range(0, len(rows), WAVE):
        yield rows[start : start + WAVE]


def require_labels(y: np.ndarray, labels: int, device: str) -> None:
    """Raise an error if a label is outside the job's labels.

    Raises:
        DataError: If a label is out of range.
    """
    if len(y) and (y.min() < 0 or y.max() >= labels):
        raise DataError(f"{device} has labels from {y.min()} to {y.max()}; the job's labels are 0 to {labels - 1}")

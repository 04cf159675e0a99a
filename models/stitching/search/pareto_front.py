"""Costs of inference, and the Pareto front of accuracy and cost.

Costs are those of one example. They follow from the blocks, so that no device measures them. Milliseconds follow from a
board's profile (`fedquilt.costs.cost_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fedquilt import profiles
from fedquilt.core import WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.stitched_network import DonorPool

Path = tuple[str, ...]


@dataclass(frozen=True)
class InferenceCost:
    """FLOPs (a multiply-add is 2) and memory traffic of one example, and bytes of all weights."""

    flops: float
    read_bytes: float
    weight_bytes: float


def inference_cost(stock: DonorPool, paths: Sequence[Path], labels: int) -> InferenceCost:
    """Return the cost of parallel paths under a head with `labels` labels, or without a head for 0.

    Common prefixes of paths run once. Traffic counts weights, and the inputs and outputs of blocks.
    """
    flops = weights = maps = 0.0
    for ids in stitched_network.path_prefixes(paths):
        block = stock.blocks[ids[-1]]
        flops += block.flops
        maps += 4.0 * (prod(block.in_shape) + prod(block.out_shape))
        before = stock.blocks[ids[-2]] if len(ids) > 1 else None
        if before is not None and not stitched_network.is_continuation(before, block):
            size = before.out_shape[0] * block.in_shape[0]
            flops += 2.0 * size * min(prod(before.out_shape[1:]), prod(block.in_shape[1:]))
            weights += 4.0 * (size + block.in_shape[0])
    weights += sum(stock.blocks[name].weight_bytes for name in {name for path in paths for name in path})
    if labels:
        width = sum(stock.blocks[path[-1]].out_shape[0] for path in paths)
        flops += 2.0 * width * labels
        weights += 4.0 * labels * (width + 1)
    return InferenceCost(flops, maps + weights, weights)


def inference_ms(flops: float, read_bytes: float, board: str) -> float | None:
    """Return the milliseconds of one example on a board, or None if the board's speed is unknown.

    Raises:
        JobError: If there is no such profile.
    """
    points = profiles.load_board_profile(board).operating_points()
    seconds = (
        cost_model.work_seconds(WorkEstimate(flops=flops, read_bytes=read_bytes, tasks=0.0), points[0])
        if points
        else None
    )
    return None if seconds is None else 1e3 * seconds


def pareto_front(gain: Sequence[float | None], prices: Sequence[Sequence[float]]) -> list[bool]:
    """Return whether each candidate is on the Pareto front of gain and prices.

    Args:
        gain: Gain of each candidate, more is better, or None for candidates that are never on the front.
        prices: Prices of each candidate, less is better, the same number for all.
    """

    def dominates(one: int, other: int) -> bool:
        ours, theirs = (-(gain[one] or 0.0), *prices[one]), (-(gain[other] or 0.0), *prices[other])
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))

    known = [i for i, each in enumerate(gain) if each is not None]
    return [i in known and not any(dominates(j, i) for j in known) for i in range(len(gain))]

"""Costs of inference, budgets, and the Pareto front of accuracy and cost.

Costs are those of one example. They follow from the blocks, so that no device measures them. Milliseconds and joules
follow from a board's profile (`fedquilt.costs.cost_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fedquilt import profiles
from fedquilt.core import JobError, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.search.state import SearchParams
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


def board_cost(flops: float, read_bytes: float, board: str) -> tuple[float | None, float | None]:
    """Return the milliseconds and joules of one example on a board, None where its speed or power is unknown.

    Raises:
        JobError: If there is no such profile.
    """
    points = profiles.load_board_profile(board).operating_points()
    work = WorkEstimate(flops=flops, read_bytes=read_bytes, tasks=0.0)
    seconds = cost_model.work_seconds(work, points[0]) if points else None
    return (None, None) if seconds is None else (1e3 * seconds, cost_model.work_joules(seconds, points[0]))


# -- budgets --------------------------------------------------------------------------------------


def measure_cost(params: SearchParams, cost: InferenceCost) -> dict[str, float | None]:
    """Return the amounts that budgets limit, those of time and energy only if the job names a board."""
    ms, joules = board_cost(cost.flops, cost.read_bytes, params.board) if params.board else (None, None)
    return {"mflop": cost.flops / 1e6, "ms": ms, "mb": cost.weight_bytes / 1e6, "joules": joules}


def is_within_budget(params: SearchParams, cost: InferenceCost) -> bool:
    amounts = measure_cost(params, cost)
    return all((amounts[name] or 0.0) <= limit for name, limit in budgets(params).items())


def budgets(params: SearchParams) -> dict[str, float]:
    limits = {name: getattr(params, f"budget_{name}") for name in ("mflop", "ms", "mb", "joules")}
    return {name: limit for name, limit in limits.items() if limit is not None}


def ordering_cost(params: SearchParams, cost: InferenceCost) -> float:
    """Return the amount that the first budget limits, or MFLOP without a budget."""
    return measure_cost(params, cost)[next(iter(budgets(params)), "mflop")] or 0.0


def require_usable_budgets(params: SearchParams) -> None:
    """Raise an error if a budget needs a board, or a board whose speed or power is known.

    Raises:
        JobError: If so, or if there is no such profile.
    """
    if not params.board and (named := budgets(params).keys() & {"ms", "joules"}):
        raise JobError(f"[params] budget_{min(named)} has no board: name a profile, as in board = 'jetson-tx2'")
    amounts = measure_cost(params, InferenceCost(1.0, 1.0, 1.0))
    for name in budgets(params):
        if amounts[name] is None:
            what = "speed" if name == "ms" else "speed and power"
            raise JobError(f"[params] budget_{name}: the {what} of {params.board!r} is unknown: name another board")


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

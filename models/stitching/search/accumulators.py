"""Accumulators of a stitching job's updates, for each phase of the job.

Moments of features (gather) and counts of correct predictions (validate) add up in any order and grouping, so that a
site sends one sum for its devices. Ballots (score) are counted by device. Sums for junctions (fit) are merged in
the order of devices. Requires numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import ExactSum
from fedquilt.core import DeviceUpdate, UpdateError
from fedquilt.models.stitching import vote
from fedquilt.models.stitching.algebra import class_moments, least_squares
from fedquilt.models.stitching.algebra.class_moments import ExactMomentSums
from fedquilt.models.stitching.algebra.least_squares import RegressionMoments
from fedquilt.models.stitching.device.moments import MARGINS
from fedquilt.models.stitching.search import candidates, cascades, steps
from fedquilt.models.stitching.search.state import SearchState
from fedquilt.models.stitching.vote import Ballot


@dataclass(frozen=True)
class VoteSums:
    ballots: Mapping[str, Ballot] = field(default_factory=dict)  # device -> ballot


@dataclass(frozen=True)
class JunctionSums:
    moments: tuple[RegressionMoments, ...] = ()  # merged moments of each junction
    devices: tuple[str, ...] = ()  # devices in the moments, sorted


@dataclass(frozen=True)
class CorrectCounts:
    sums: Mapping[str, ExactSum] = field(default_factory=dict)  # as `moments.count_correct`
    devices: Mapping[str, int] = field(default_factory=dict)  # device -> 1


Accumulator: TypeAlias = (
    VoteSums | JunctionSums | ExactMomentSums | CorrectCounts
)  # accumulator of a round, by its phase
ACCUMULATOR_TYPES: Final[Mapping[str, type[Accumulator]]] = {
    "score": VoteSums,
    "fit": JunctionSums,
    "gather": ExactMomentSums,
    "validate": CorrectCounts,
}
MERGEABLE_TYPES: Final = (ExactMomentSums, CorrectCounts)  # other accumulators are kept per device


# -- folding --------------------------------------------------------------------------------------


def accumulator_type(state: SearchState) -> type[Accumulator] | None:
    """Return the type of a site's sum in this phase, or None if the site forwards single updates."""
    kind = ACCUMULATOR_TYPES.get(state.phase)
    return kind if kind in MERGEABLE_TYPES else None


def validate_site_sums(state: SearchState, total: Accumulator, weight: float) -> None:
    """Raise UpdateError unless a site's sums are possible and count `weight` examples."""
    if isinstance(total, ExactMomentSums):
        return class_moments.validate_site_moments(
            total, len(state.stock.labels), sum(candidates.tap_widths(state)), weight
        )
    assert isinstance(total, CorrectCounts)
    if set(total.devices.values()) != {1}:
        raise UpdateError("counts: the site names no device, or counts a device twice")
    shapes = _count_shapes(state)
    exact_sums.require_valid_sums(total.sums, {name: np.zeros(shape) for name, shape in shapes.items()}, weight)
    counts = {name: array.astype(np.int64) for name, array in exact_sums.rounded_values(total.sums).items()}
    if any((total_sum.rounded_value() != counts[name]).any() for name, total_sum in total.sums.items()):
        raise UpdateError("counts: numbers of examples are not integers")
    return _validate_counts(counts, weight)


def validate_update(state: SearchState, update: DeviceUpdate) -> None:
    _read_update(state, update)


def _read_update(state: SearchState, update: DeviceUpdate) -> Any:
    """Validate and unpack an update. Return None if sums of this phase include the device already."""
    turn = update.metrics.get("turn")
    if turn != state.turn:
        raise UpdateError(f"the update is from step {turn} of the search, but step {state.turn} is running")
    match state.phase:
        case "score":
            return _read_ballot(state, update)
        case "fit":
            return _read_junction_moments(state, update)
        case "gather" | "validate" if update.device in state.heard:
            return None
        case "gather":
            class_moments.validate_update_moments(update, len(state.stock.labels), sum(candidates.tap_widths(state)))
            return update
        case "validate":
            return _read_valid_counts(update, state)


def fold_update(state: SearchState, sums: Accumulator | None, update: DeviceUpdate) -> Accumulator:
    unpacked = _read_update(state, update)
    sums = ACCUMULATOR_TYPES[state.phase]() if sums is None else sums
    match sums:
        case _ if unpacked is None:
            return sums
        case VoteSums():
            return VoteSums({**sums.ballots, update.device: unpacked})
        case JunctionSums():
            pairs = zip(sums.moments, unpacked, strict=True) if sums.moments else ((value,) for value in unpacked)
            merged = tuple(least_squares.merge_moments(pair) for pair in pairs)
            return JunctionSums(merged, tuple(sorted({*sums.devices, update.device})))
        case ExactMomentSums():
            return sums.add_update(update)
    counts = {name: value.astype(np.float64) for name, value in unpacked.items()}
    return CorrectCounts(exact_sums.add_arrays(sums.sums, counts), {**sums.devices, update.device: 1})


def _read_ballot(state: SearchState, update: DeviceUpdate) -> Ballot:
    return vote.read_ballot(
        update.bundles.get("scores", {}),
        state.pool,
        state.params.k,
        steps.exploration_rate(state),
        steps.choice_seed(state, update.device),
        state.params.spread,
    )


def _read_junction_moments(state: SearchState, update: DeviceUpdate) -> list[RegressionMoments]:
    moments = []
    for i, (p, q, positions) in enumerate(junction_shapes(state)):
        moments.append(least_squares.read_sent_moments(update.bundles.get(f"moments.{i}", {}), p, q))
        least_squares.require_weight(moments[-1].n, update.weight, positions)
    return moments


def junction_shapes(state: SearchState) -> list[tuple[int, int, int]]:
    """Return (input channels, output channels, positions in one map) of each junction to fit."""
    blocks = state.stock.blocks
    assert state.current is not None
    channels = blocks[state.current.path[-1]].out_shape[0]
    shapes = [blocks[name].in_shape for name in steps.winners_needing_junction(state)]
    return [(channels, shape[0], prod(shape[1:])) for shape in shapes]


def _count_shapes(state: SearchState) -> dict[str, tuple[int, ...]]:
    nets, bins = len(state.candidates), (len(cascades.early_candidates(state)), len(MARGINS) + 1)
    return {"examples": (1,), "right": (nets, nets), "by_margin": (*bins, nets, nets), "in_bin": bins}


def _read_valid_counts(update: DeviceUpdate, state: SearchState) -> dict[str, np.ndarray]:
    sent_counts = update.bundles.get("counts", {})
    shapes, kind = _count_shapes(state), np.dtype(np.int64)
    if missing := sorted(shapes.keys() - sent_counts.keys()):
        raise UpdateError(f"counts: {', '.join(missing)} missing: update the agent")
    counts = {name: sent_counts[name] for name in shapes}
    try:
        tensors.require_addable(counts, {name: tensors.TensorSpec(shape, kind) for name, shape in shapes.items()})
    except UpdateError as error:
        raise UpdateError(f"counts: {error}") from None
    _validate_counts(counts, update.weight)
    return counts


def _validate_counts(counts: Mapping[str, np.ndarray], weight: float) -> None:
    right, by_margin, in_bin, examples = (counts[name] for name in ("right", "by_margin", "in_bin", "examples"))
    _require_counts_of_examples(right, examples[0], "counts")
    _require_counts_of_examples(by_margin, in_bin[..., None, None], "counts by margin")
    if (in_bin.sum(axis=1) != examples[0]).any() or (by_margin.sum(axis=1) != right).any():
        raise UpdateError("counts: the bins of margins do not add up to all examples")
    if examples[0] != weight:  # the weight is the only count that the coordinator can verify
        raise UpdateError(f"counts: counted on {examples[0]} examples, but the update's weight is {weight:g}")


def _require_counts_of_examples(right: np.ndarray, examples: Any, subject: str) -> None:
    if (right < 0).any() or np.any(examples < 0):
        raise UpdateError(f"{subject}: negative numbers of correct predictions")
    if (right > examples).any():
        raise UpdateError(f"{subject}: more correct predictions than examples")
    correct = right.diagonal(axis1=-2, axis2=-1)
    row, column = correct[..., :, None], correct[..., None, :]
    is_consistent = (right <= np.minimum(row, column)) & (right >= row + column - examples)
    if not is_consistent.all() or (right != right.swapaxes(-2, -1)).any():
        raise UpdateError(f"{subject}: correct predictions of pairs of candidates contradict those of each candidate")

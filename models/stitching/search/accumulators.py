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
    ballots: Mapping[str, Ballot] = field(default_factory=dict)  # device -> its votes


@dataclass(frozen=True)
class JunctionSums:
    moments: tuple[RegressionMoments, ...] = ()  # the sums for each junction
    devices: tuple[str, ...] = ()  # whose they are, sorted


@dataclass(frozen=True)
class CorrectCounts:
    sums: Mapping[str, ExactSum] = field(default_factory=dict)  # as `moments.count_correct`
    devices: Mapping[str, int] = field(default_factory=dict)  # device -> 1


Sum: TypeAlias = (
    VoteSums | JunctionSums | ExactMomentSums | CorrectCounts
)  # what a FedStitch round has added up, by its phase
SUMS: Final[Mapping[str, type[Sum]]] = {
    "score": VoteSums,
    "fit": JunctionSums,
    "gather": ExactMomentSums,
    "validate": CorrectCounts,
}
MERGED: Final = (ExactMomentSums, CorrectCounts)  # other accumulators are kept per device


# -- folding --------------------------------------------------------------------------------------


def accumulator_type(state: SearchState) -> type[Sum] | None:
    kind = SUMS.get(state.phase)
    return kind if kind in MERGED else None


def validate_site_sums(state: SearchState, total: Sum, weight: float) -> None:
    if isinstance(total, ExactMomentSums):
        return class_moments.validate_site_moments(
            total, len(state.stock.labels), sum(candidates.tap_widths(state)), weight
        )
    assert isinstance(total, CorrectCounts)
    if set(total.devices.values()) != {1}:
        raise UpdateError("counts: of no devices, or of one twice")
    shapes = _count_shapes(state)
    exact_sums.require_valid_sums(total.sums, {name: np.zeros(shape) for name, shape in shapes.items()}, weight)
    found = {name: array.astype(np.int64) for name, array in exact_sums.rounded_values(total.sums).items()}
    if any((each.rounded_value() != found[name]).any() for name, each in total.sums.items()):
        raise UpdateError("counts: of parts of an example")
    return _validate_counts(found, weight)


def validate_update(state: SearchState, update: DeviceUpdate) -> None:
    _read_update(state, update)


def _read_update(state: SearchState, update: DeviceUpdate) -> Any:
    """Validate and unpack an update, or return None if the device took part in this phase before."""
    turn = update.metrics.get("turn")
    if turn != state.turn:
        raise UpdateError(f"answers turn {turn} of the search, which is at {state.turn}")
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


def fold_update(state: SearchState, so_far: Sum | None, update: DeviceUpdate) -> Sum:
    """Add a device's update to the accumulator of the round, after validation."""
    new = _read_update(state, update)
    so_far = SUMS[state.phase]() if so_far is None else so_far
    match so_far:
        case _ if new is None:
            return so_far
        case VoteSums():
            return VoteSums({**so_far.ballots, update.device: new})
        case JunctionSums():
            pairs = zip(so_far.moments, new, strict=True) if so_far.moments else ((each,) for each in new)
            gathered = tuple(least_squares.merge_moments(pair) for pair in pairs)
            return JunctionSums(gathered, tuple(sorted({*so_far.devices, update.device})))
        case ExactMomentSums():
            return so_far.add_update(update)
    counts = {name: each.astype(np.float64) for name, each in new.items()}
    return CorrectCounts(exact_sums.add_arrays(so_far.sums, counts), {**so_far.devices, update.device: 1})


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
    found = []
    for i, (p, q, positions) in enumerate(junction_shapes(state)):
        found.append(least_squares.read_sent_moments(update.bundles.get(f"moments.{i}", {}), p, q))
        least_squares.require_weight(found[-1].n, update.weight, positions)
    return found


def junction_shapes(state: SearchState) -> list[tuple[int, int, int]]:
    blocks = state.stock.blocks
    assert state.current is not None
    channels = blocks[state.current.path[-1]].out_shape[0]
    shapes = [blocks[name].in_shape for name in steps.winners_needing_junction(state)]
    return [(channels, shape[0], prod(shape[1:])) for shape in shapes]


def _count_shapes(state: SearchState) -> dict[str, tuple[int, ...]]:
    nets, bins = len(state.candidates), (len(cascades.early_candidates(state)), len(MARGINS) + 1)
    return {"examples": (1,), "right": (nets, nets), "by_margin": (*bins, nets, nets), "in_bin": bins}


def _read_valid_counts(update: DeviceUpdate, state: SearchState) -> dict[str, np.ndarray]:
    given = update.bundles.get("counts", {})
    shapes, kind = _count_shapes(state), np.dtype(np.int64)
    if missing := sorted(shapes.keys() - given.keys()):
        raise UpdateError(f"counts: no usable {', '.join(missing)}")
    counts = {name: given[name] for name in shapes}
    try:
        tensors.require_addable(counts, {name: tensors.TensorSpec(shape, kind) for name, shape in shapes.items()})
    except UpdateError as error:
        raise UpdateError(f"counts: {error}") from None
    _validate_counts(counts, update.weight)
    return counts


def _validate_counts(counts: Mapping[str, np.ndarray], weight: float) -> None:
    right, by_margin, in_bin, said = (counts[name] for name in ("right", "by_margin", "in_bin", "examples"))
    _require_counts_of_examples(right, said[0], "counts")
    _require_counts_of_examples(by_margin, in_bin[..., None, None], "counts by margin")
    if (in_bin.sum(axis=1) != said[0]).any() or (by_margin.sum(axis=1) != right).any():
        raise UpdateError("counts: bins of margins that do not add up to all examples")
    if said[0] != weight:  # the weight is the only count that the coordinator can verify
        raise UpdateError(f"counts: of {said[0]} examples, in an update that weighs {weight:g}")


def _require_counts_of_examples(right: np.ndarray, examples: Any, what: str) -> None:
    """Raise UpdateError unless `examples` can be answered such that `right` (..., candidates, candidates) are counted.

    Accuracies and standard errors of cascades are computed from parts of these counts.
    """
    if (right < 0).any() or np.any(examples < 0):
        raise UpdateError(f"{what}: negative numbers of right answers")
    if (right > examples).any():
        raise UpdateError(f"{what}: more right answers than examples")
    own = right.diagonal(axis1=-2, axis2=-1)
    one, other = own[..., :, None], own[..., None, :]
    fits = (right <= np.minimum(one, other)) & (right >= one + other - examples)
    if not fits.all() or (right != right.swapaxes(-2, -1)).any():
        raise UpdateError(f"{what}: right answers of two candidates that do not fit those of each")

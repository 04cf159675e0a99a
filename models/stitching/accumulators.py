"""Folding of a stitching job's answers: what a round's accumulator is in each phase of the job. numpy only.

Moments of features (gather) and counts of right answers (validate) add up in any order and grouping, so that a site
sends one sum of its boards'. Ballots (score) and sums for junctions (fit) are folded in the order of devices: the first
are counted by device, and the second are kept apart, as a junction is judged on devices that it was not solved from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeAlias

import numpy as np

from fedquilt import exact, tensors
from fedquilt.core import Contribution, UpdateError, adds_up, checked_by
from fedquilt.exact import Total
from fedquilt.models.stitching import candidates, least_squares, moment_sums, search, vote
from fedquilt.models.stitching.least_squares import Gathered
from fedquilt.models.stitching.moment_sums import Gathering
from fedquilt.models.stitching.search_state import State
from fedquilt.models.stitching.vote import Ballot

GROUPS_BYTES = 256 << 20  # sums of single devices held for residuals; beyond it, devices' sums are merged in groups
GROUPS_MOST = 256  # likewise: a junction is solved without each group in turn, and more would tell no more


@dataclass(frozen=True)
class Votes:
    """A round's accumulator while scoring."""

    ballots: Mapping[str, Ballot] = field(default_factory=dict)  # device -> its votes


@dataclass(frozen=True)
class Fits:
    """A round's accumulator while fitting."""

    moments: tuple[Gathered, ...] = ()  # the sums for each junction
    devices: tuple[str, ...] = ()  # whose they are, sorted


@dataclass(frozen=True)
class Counts:
    """A round's accumulator while validating."""

    sums: Mapping[str, Total] = field(default_factory=dict)  # "examples" (1,), "right" (candidates,)
    devices: Mapping[str, int] = field(default_factory=dict)  # device -> 1


Sum: TypeAlias = Votes | Fits | Gathering | Counts  # what a FedStitch round has added up, by its phase
SUMS: Final[Mapping[str, type[Sum]]] = {"score": Votes, "fit": Fits, "gather": Gathering, "validate": Counts}
MERGED: Final = (Gathering, Counts)  # the others keep devices apart


# -- folding --------------------------------------------------------------------------------------


def added_up(state: State) -> type[Sum] | None:
    """Type of the accumulators of a phase in which moments or counts are summed; None: devices are kept apart."""
    kind = SUMS.get(state.phase)
    return kind if kind in MERGED else None


def sound(state: State, total: Sum, weight: float) -> None:
    """Check what a site has summed of its boards' moments or counts before it is merged.

    Raises:
        UpdateError: it is not of so many examples, or of so many devices, or of what was asked for.
    """
    if isinstance(total, Gathering):
        return moment_sums.require(total, len(state.stock.labels), sum(candidates.layout(state).widths), weight)
    assert isinstance(total, Counts)
    if set(total.devices.values()) != {1}:
        raise UpdateError("counts: of no devices, or of one twice")
    sizes = {"examples": 1, "right": len(state.candidates)}
    exact.require(total.sums, {name: np.zeros(size) for name, size in sizes.items()}, weight)
    found = {name: array.astype(np.int64) for name, array in exact.values(total.sums).items()}
    if any((each.value() != found[name]).any() for name, each in total.sums.items()):
        raise UpdateError("counts: of parts of an example")
    return _require_counts(found, weight)


def require(state: State, update: Contribution) -> None:
    """Check an update before it is added to the sums.

    Raises:
        UpdateError: the answer belongs to another step of the search, or is not what was asked for.
    """
    turn = update.metrics.get("turn")
    if turn != state.turn:
        raise UpdateError(f"answers turn {turn} of the search, which is at {state.turn}")
    match state.phase:
        case "score":
            _ballot(state, update)
        case "fit":
            _fits(state, update)
        case "gather" if update.device not in state.heard:
            moment_sums.checked(update, len(state.stock.labels), sum(candidates.layout(state).widths))
        case "validate" if update.device not in state.heard:
            _counts(update, len(state.candidates))


@adds_up(added_up, sound)
@checked_by(require)
def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Add one device's answer to the round's accumulator; None: the first of the round; errors as of `require`.

    Moments and counts of a device that was heard count already.
    """
    require(state, update)
    so_far = SUMS[state.phase]() if so_far is None else so_far
    match so_far:
        case Votes():
            return Votes({**so_far.ballots, update.device: _ballot(state, update)})
        case Fits():
            new = _fits(state, update)
            groups = min(GROUPS_BYTES // sum(each.nbytes for each in new), GROUPS_MOST)
            pairs = zip(so_far.moments or (None,) * len(new), new, strict=True)
            gathered = tuple(least_squares.gather(*pair, groups) for pair in pairs)
            return Fits(gathered, tuple(sorted({*so_far.devices, update.device})))
        case Gathering():
            return so_far if update.device in state.heard else so_far.plus(update)
    if update.device in state.heard:
        return so_far
    counts = {name: each.astype(np.float64) for name, each in _counts(update, len(state.candidates)).items()}
    return Counts(exact.plus(so_far.sums, counts), {**so_far.devices, update.device: 1})


def _ballot(state: State, update: Contribution) -> Ballot:
    return vote.ballot(
        update.bundles.get("scores", {}),
        state.pool,
        state.params.k,
        search.epsilon(state),
        search.coin(state, update.device),
        state.params.spread,
    )


def _fits(state: State, update: Contribution) -> list[least_squares.Moments]:
    """A device's sums for each junction."""
    found = []
    for i, (p, q, positions) in enumerate(shapes(state)):
        found.append(least_squares.from_tensors(update.bundles.get(f"moments.{i}", {}), p, q))
        least_squares.require_weight(found[-1], positions, update.weight)
    return found


def shapes(state: State) -> list[tuple[int, int, int]]:
    """Channels in and out of each junction that the devices' sums are for, and positions of an example there."""
    blocks = state.stock.blocks
    assert state.current is not None
    channels = blocks[state.current.path[-1]].out_shape[0]
    shapes = [blocks[name].in_shape for name in search.projected(state)]
    return [(channels, shape[0], prod(shape[1:])) for shape in shapes]


def _counts(update: Contribution, nets: int) -> dict[str, np.ndarray]:
    given = update.bundles.get("counts", {})
    sizes, kind = {"examples": 1, "right": nets}, np.dtype(np.int64)
    if missing := sorted(sizes.keys() - given.keys()):
        raise UpdateError(f"counts: no usable {', '.join(missing)}")
    counts = {name: given[name] for name in sizes}
    try:
        tensors.require_same(counts, {name: tensors.Shaped((size,), kind) for name, size in sizes.items()})
    except UpdateError as error:
        raise UpdateError(f"counts: {error}") from None
    _require_counts(counts, update.weight)
    return counts


def _require_counts(counts: Mapping[str, np.ndarray], weight: float) -> None:
    if (counts["right"] < 0).any():
        raise UpdateError("counts: negative numbers of right answers")
    if (counts["right"] > counts["examples"][0]).any():
        raise UpdateError("counts: more right answers than examples")
    if (said := counts["examples"][0]) != weight:  # only the weight is held against what a board says it has
        raise UpdateError(f"counts: of {said} examples, in an update that weighs {weight:g}")

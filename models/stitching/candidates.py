"""Candidates for the result after the search: the taps to gather, and the networks solved from them.

A tap is the end of a path: a donor's own beginning at any depth, or a finished network before its terminating block.
Devices send the sums of all taps once, and every candidate is solved from sub-matrices of these sums, so that another
candidate costs the devices nothing (`fedquilt.models.stitching.joint_head`). Kinds of candidates:

- joined: sets of taps with the least criterion of generalised cross-validation, among all taps, among each donor's, and
  among those without stitching;
- donor: each unmodified donor at its best depth and at its last one, with a new head;
- stitched: each finished network alone, with a new head.

Candidates are compared on held-out examples, so that the result is worse than the best donor by validation noise only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from fedquilt.core import derive_seed
from fedquilt.models.stitching import class_moments, joint_head, names, stitched
from fedquilt.models.stitching.class_moments import Sums
from fedquilt.models.stitching.joint_head import Joined, Layout, Standard, Strength
from fedquilt.models.stitching.search_state import Candidate, Finalist, Params, State, Stored
from fedquilt.models.stitching.stitched import Stock

Path = tuple[str, ...]

SHALLOW = 0.5  # share of a donor's depth; shallower taps are left out first
APART = 3.0  # factor between two strengths beyond which taps are chosen again
KEPT = 2  # finished networks whose taps are left out last, after the donors' deep ones


# -- which taps -----------------------------------------------------------------------------------


def begun(state: State) -> State:
    """The state after the search: gathering taps, validating aligned networks, or "done" if there are neither."""
    if state.params.head == "aligned":
        found = tuple(aligned(finalist) for finalist in state.finalists)
        return replace(state, phase="validate" if found else "done", candidates=found)
    taps, notes = chosen_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def chosen_taps(state: State) -> tuple[tuple[Path, ...], list[str]]:
    """The taps to gather, with notes on those left out: `Params.features` wide at most, but with each donor's last."""
    params, stock = state.params, state.stock
    bodies = list(dict.fromkeys(finalist.path[:-1] for finalist in state.finalists))
    if not params.join:
        return tuple(bodies), []
    own = [path for donor in sorted(stock.donors) for path in native_taps(stock, donor)]
    made = [body for body in bodies if body not in own]
    last = [path for path in own if depth(stock, path) == 1]
    down = sorted((path for path in own if path not in last), key=lambda path: (depth(stock, path), path))
    shallow = [path for path in down if depth(stock, path) < SHALLOW]
    first = [*shallow, *made[KEPT:][::-1], *down[len(shallow) :], *made[:KEPT][::-1]]  # in the order of leaving out
    gone: list[Path] = []
    while first and sum(width(stock, params, path) for path in (*last, *first)) > params.features:
        gone.append(first.pop(0))
    notes = []
    if gone:
        notes.append(
            f"not gathered, as all taps together would have more than {params.features} features: "
            + ", ".join(map(names.tap, gone))
        )
    return tuple(path for path in (*own, *made) if path not in gone), notes


def native_taps(stock: Stock, donor: str) -> list[Path]:
    """A donor's own beginnings that end in maps, and the one that ends at the last block before its classifier."""
    blocks = stock.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(stock.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def depth(stock: Stock, path: Path) -> float:
    """Depth of a path's last block in its donor: 1 is the last block before the classifier."""
    last = stock.blocks[path[-1]]
    return (last.index + 1) / (len(stock.donors[last.donor].blocks) - 1)


def width(stock: Stock, params: Params, path: Path) -> int:
    """Number of features that a device sends of a tap."""
    channels = stock.blocks[path[-1]].out_shape[0]
    return min(channels, params.random_features or channels)


def layout(state: State) -> Layout:
    """Where each gathered tap's features lie among all."""
    return Layout(tuple(width(state.stock, state.params, path) for path in state.taps))


def is_native(stock: Stock, path: Path) -> bool:
    """Whether a path is the beginning of one donor, unchanged."""
    return stitched.is_native([stock.blocks[name] for name in path])


def projection_seed(state: State) -> int:
    """Seed of the random projection of wide taps, the same on every device."""
    return derive_seed("features", state.seed)


def aligned(finalist: Finalist) -> Candidate:
    """A finished network with its last donor's classifier, as a candidate."""
    return Candidate("aligned", (finalist.path,), score=finalist.score, residual=_worst(finalist.residuals))


# -- what is gathered -----------------------------------------------------------------------------


def stored(sums: Sums, exact: bool = False) -> Stored:
    """Sums as a state keeps them, which is written after each round: second moments as float32, unless `exact`.

    They are about the mean, so nothing large cancels, and the rounding is far below the weakest ridge that is tried.
    """
    half = class_moments.halved(sums.scatter)
    return Stored(sums.counts, sums.totals, half if exact else half.astype(np.float32))


def restored(kept: Stored | None) -> Sums | None:
    """Unpack the sums of a state as float64; None where nothing was gathered."""
    if kept is None:
        return None
    scatter = class_moments.whole(kept.half, kept.totals.shape[1])
    return Sums(kept.counts, kept.totals, scatter.astype(np.float64, copy=False))


# -- solving --------------------------------------------------------------------------------------


def solved(state: State, sums: Sums) -> tuple[Candidate, ...]:
    """Solve the heads of all candidates; the one with the least criterion comes first."""
    made = _Solver(joint_head.standardised(sums), layout(state))
    wanted: list[tuple[int, ...]] = [(tap,) for tap in _alone(state, made)]
    if state.params.join:
        wanted = [*_joint(state, made), *wanted]
    found = {frozenset(taps): _candidate(state, made, taps) for taps in wanted}
    return tuple(sorted(found.values(), key=lambda each: (criterion_of(each), len(each.paths), each.paths)))


class _Solver:
    """Cached ridge strengths of sets of taps."""

    def __init__(self, given: Standard, places: Layout) -> None:
        self.given, self.places = given, places
        self._known: dict[tuple[int, ...], Strength] = {}
        self._met: dict[tuple[int, ...], Strength] = {}  # sets that the choice of taps went through

    def strength(self, *taps: int) -> Strength:
        """The best of all that are tried; of several taps the best that lies downhill from where they were joined.

        Taps that nothing has joined begin with the strongest that one of them has alone.
        """
        ordered = tuple(sorted(taps))
        if ordered not in self._known:
            given = self.given.of(self.places.columns(ordered))
            if len(ordered) == 1:
                self._known[ordered] = joint_head.strength(given)
            else:
                ridge = max(self.strength(tap).ridge for tap in ordered)
                start = self._met.get(ordered) or joint_head.strength_at(given, ridge)
                self._known[ordered] = joint_head.strength_from(given, start)
        return self._known[ordered]

    def joined(self, among: Iterable[int]) -> tuple[int, ...]:
        """Choose the set of taps with the least criterion, in the order in which they are added.

        Taps are chosen with the best strength of the best single tap, and again with the set's own strength if the two
        differ by more than the factor APART; the better set is returned.
        """
        near = sorted(among, key=lambda tap: (self.strength(tap).criterion, tap))[: joint_head.FROM]
        ridge = self.strength(near[0]).ridge
        found = self._forward(near, ridge)
        then = self.strength(*found.taps).ridge
        if not ridge / APART < then < ridge * APART:
            again = self._forward(near, then)
            found = min(found, again, key=lambda each: self.strength(*each.taps).criterion)
        return found.taps

    def _forward(self, near: Sequence[int], ridge: float) -> Joined:
        found = joint_head.forward(self.given, self.places, near[0], near, ridge)
        for count, criterion in enumerate(found.criteria, 1):
            self._met.setdefault(tuple(sorted(found.taps[:count])), Strength(ridge, criterion))
        return found


def _alone(state: State, made: _Solver) -> list[int]:
    """Taps that are candidates alone: each donor's best and last, and all stitched ones."""
    stock, taps = state.stock, state.taps
    if not state.params.join:
        return list(range(len(taps)))
    found = [tap for tap, path in enumerate(taps) if not is_native(stock, path) or depth(stock, path) == 1]
    for own in _by_donor(state).values():
        found.append(min(own, key=lambda tap: (made.strength(tap).criterion, tap)))
    return sorted(set(found))


def _joint(state: State, made: _Solver) -> list[tuple[int, ...]]:
    """Sets of several taps: the best of all, its first half and first two, the best of each donor, and a control.

    The control tells what stitching adds: the best set without stitched taps if the best of all has some, else the best
    of all with the best stitched tap.
    """
    every, donors = range(len(state.taps)), _by_donor(state)
    own = sorted(tap for taps in donors.values() for tap in taps)
    best = made.joined(every)
    sets = [best, best[: (len(best) + 1) // 2], best[:2]]
    strange = sorted(set(every) - set(own), key=lambda tap: (made.strength(tap).criterion, tap))
    if set(best) & set(strange):
        sets.append(made.joined(own))
    elif strange:
        sets.append((*best, strange[0]))  # the control
    if len(donors) > 1:
        sets += [made.joined(taps) for taps in donors.values()]
    return [taps for taps in sets if len(taps) > 1]


def _by_donor(state: State) -> dict[str, list[int]]:
    """Donor -> its own taps, unmodified."""
    found: dict[str, list[int]] = {}
    for tap, path in enumerate(state.taps):
        if is_native(state.stock, path):
            found.setdefault(state.stock.blocks[path[-1]].donor, []).append(tap)
    return found


def _candidate(state: State, made: _Solver, taps: Sequence[int]) -> Candidate:
    """Solve the head of some taps."""
    chosen = made.strength(*taps)
    head = joint_head.discriminant(made.given.of(made.places.columns(taps)), chosen.ridge)
    paths = tuple(state.taps[tap] for tap in taps)
    parts, first = [], 0
    for path in paths:
        sent, channels = width(state.stock, state.params, path), state.stock.blocks[path[-1]].out_shape[0]
        part = head.weights[:, first : first + sent]
        if sent < channels:
            part = part @ stitched.random_features(channels, sent, projection_seed(state)).T
        parts.append(part)
        first += sent
    arrays = {"weights": np.hstack(parts).astype(np.float32), "bias": head.bias.astype(np.float32)}
    ends = [finalist for finalist in state.finalists if finalist.path[:-1] in paths]
    one = ends[0] if len(paths) == 1 and ends else None
    native = all(is_native(state.stock, path) for path in paths)
    return Candidate(
        "joined" if len(paths) > 1 else "donor" if native else "stitched",
        paths,
        arrays,
        chosen.ridge,
        chosen.criterion if isfinite(chosen.criterion) else None,
        score=one.score if one else None,
        residual=_worst([each for finalist in ends for each in finalist.residuals[:-1]]),  # a head replaces the last
    )


def _worst(residuals: Sequence[float | None]) -> float | None:
    return max((each for each in residuals if each is not None), default=None)


def criterion_of(candidate: Candidate) -> float:
    """Criterion of the taps of a candidate; infinite where it has none."""
    return float("inf") if candidate.criterion is None else candidate.criterion

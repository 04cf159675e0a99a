"""Candidates for the result of a search: taps to gather, and networks solved from their sums.

A tap is the end of a path: a prefix of a donor at any depth, or a finished network before its terminating block.
Devices send the sums of all taps once, and every candidate is solved from sub-matrices of these sums
(`fedquilt.models.stitching.algebra.joint_head`). Kinds of candidates:

- joined: sets of taps with the least criterion of generalised cross-validation, among all taps, among each donor's, and
  among those without stitching.
- donor: each unmodified donor at its best depth and at its last depth, with a new head.
- stitched: each finished network alone, with a new head.

Candidates are compared on held-out examples, so that the result is worse than the best donor by validation noise only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from fedquilt.core import derive_seed
from fedquilt.models.stitching import display_names, stitched_network
from fedquilt.models.stitching.algebra import joint_head, least_squares
from fedquilt.models.stitching.algebra.class_moments import ClassMoments
from fedquilt.models.stitching.algebra.joint_head import RidgePenalty, SelectedTaps, StandardisedSums, TapLayout
from fedquilt.models.stitching.search.state import Candidate, Finalist, PackedSums, SearchParams, SearchState
from fedquilt.models.stitching.stitched_network import DonorPool

Path = tuple[str, ...]

SHALLOW = 0.5  # share of a donor's depth; shallower taps are left out first
APART = 3.0  # factor between two strengths beyond which taps are chosen again
KEPT = 2  # finished networks whose taps are left out last, after the donors' deep ones


# -- which taps -----------------------------------------------------------------------------------


def end_search(state: SearchState) -> SearchState:
    """Return the state after the search, in phase "gather", "validate" or "done"."""
    if state.params.head == "aligned":
        found = tuple(aligned_candidate(finalist) for finalist in state.finalists)
        return replace(state, phase="validate" if found else "done", candidates=found)
    taps, notes = choose_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def choose_taps(state: SearchState) -> tuple[tuple[Path, ...], list[str]]:
    """Return the taps to gather, at most `SearchParams.features` wide in total, and log sentences."""
    params, stock = state.params, state.stock
    bodies = list(dict.fromkeys(finalist.path[:-1] for finalist in state.finalists))
    if not params.join:
        return tuple(bodies), []
    own = [path for donor in sorted(stock.donors) for path in native_taps(stock, donor)]
    made = [body for body in bodies if body not in own]
    last = [path for path in own if relative_depth(stock, path) == 1]
    down = sorted((path for path in own if path not in last), key=lambda path: (relative_depth(stock, path), path))
    shallow = [path for path in down if relative_depth(stock, path) < SHALLOW]
    first = [*shallow, *made[KEPT:][::-1], *down[len(shallow) :], *made[:KEPT][::-1]]  # in the order of leaving out
    gone: list[Path] = []
    while first and sum(tap_width(stock, params, path) for path in (*last, *first)) > params.features:
        gone.append(first.pop(0))
    notes = []
    if gone:
        notes.append(
            f"not gathered, as all taps together would have more than {params.features} features: "
            + ", ".join(map(display_names.tap_name, gone))
        )
    return tuple(path for path in (*own, *made) if path not in gone), notes


def native_taps(stock: DonorPool, donor: str) -> list[Path]:
    """Return a donor's prefixes that end in maps, and the prefix before its classifier."""
    blocks = stock.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(stock.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def relative_depth(stock: DonorPool, path: Path) -> float:
    """Return the depth of a path's last block in its donor, 1 for the last before the classifier."""
    last = stock.blocks[path[-1]]
    return (last.index + 1) / (len(stock.donors[last.donor].blocks) - 1)


def tap_width(stock: DonorPool, params: SearchParams, path: Path) -> int:
    channels = stock.blocks[path[-1]].out_shape[0]
    return min(channels, params.random_features or channels)


def tap_layout(state: SearchState) -> TapLayout:
    return TapLayout(tuple(tap_width(state.stock, state.params, path) for path in state.taps))


def is_native_path(stock: DonorPool, path: Path) -> bool:
    return stitched_network.is_native_path([stock.blocks[name] for name in path])


def projection_seed(state: SearchState) -> int:
    return derive_seed("features", state.seed)


def aligned_candidate(finalist: Finalist) -> Candidate:
    return Candidate("aligned", (finalist.path,), score=finalist.score, residual=_worst_residual(finalist.residuals))


# -- what is gathered -----------------------------------------------------------------------------


def pack_sums(sums: ClassMoments, exact: bool = False) -> PackedSums:
    """Pack sums for the state, with second moments as float32 unless `exact`.

    Second moments are about the mean, so that no large numbers cancel.
    """
    half = least_squares.pack_upper(sums.scatter, np.float64 if exact else np.float32)
    return PackedSums(sums.counts, sums.totals, half)


def unpack_sums(kept: PackedSums | None) -> ClassMoments | None:
    """Return packed sums with the whole float64 scatter matrix, or None for None."""
    if kept is None:
        return None
    return ClassMoments(kept.counts, kept.totals, least_squares.unpack_symmetric(kept.half, kept.totals.shape[1]))


# -- solving --------------------------------------------------------------------------------------


def solve_candidates(state: SearchState, sums: ClassMoments) -> tuple[Candidate, ...]:
    """Solve the heads of all candidates, in ascending order of criterion."""
    made = _RidgeSolver(joint_head.standardise_sums(sums), tap_layout(state))
    wanted: list[tuple[int, ...]] = [(tap,) for tap in _choose_single_taps(state, made)]
    if state.params.join:
        wanted = [*_choose_tap_sets(state, made), *wanted]
    found = {frozenset(taps): _solve_candidate(state, made, taps) for taps in wanted}
    return tuple(sorted(found.values(), key=lambda each: (candidate_criterion(each), len(each.paths), each.paths)))


class _RidgeSolver:
    """Cached ridge strengths of sets of taps."""

    def __init__(self, given: StandardisedSums, places: TapLayout) -> None:
        self.given, self.places = given, places
        self._known: dict[tuple[int, ...], RidgePenalty] = {}
        self._met: dict[tuple[int, ...], RidgePenalty] = {}  # sets that the choice of taps went through

    def find_best_penalty(self, *taps: int) -> RidgePenalty:
        ordered = tuple(sorted(taps))
        if ordered not in self._known:
            given = self.given.restrict_to(self.places.feature_columns(ordered))
            if len(ordered) == 1:
                self._known[ordered] = joint_head.best_penalty(given)
            else:
                ridge = max(self.find_best_penalty(tap).ridge for tap in ordered)
                start = self._met.get(ordered) or joint_head.evaluate_penalty(given, ridge)
                self._known[ordered] = joint_head.search_penalty(given, start)
        return self._known[ordered]

    def select_taps(self, among: Iterable[int]) -> tuple[int, ...]:
        """Return the better of two greedy selections, the second with the first's own ridge if that differs much."""
        # Taps are selected with the best tap's penalty, and again if the set's own penalty is very different.
        near = sorted(among, key=lambda tap: (self.find_best_penalty(tap).criterion, tap))[: joint_head.FROM]
        ridge = self.find_best_penalty(near[0]).ridge
        found = self._select_taps_with_ridge(near, ridge)
        then = self.find_best_penalty(*found.taps).ridge
        if not ridge / APART < then < ridge * APART:
            again = self._select_taps_with_ridge(near, then)
            found = min(found, again, key=lambda each: self.find_best_penalty(*each.taps).criterion)
        return found.taps

    def _select_taps_with_ridge(self, near: Sequence[int], ridge: float) -> SelectedTaps:
        found = joint_head.select_taps(self.given, self.places, near[0], near, ridge)
        for count, criterion in enumerate(found.criteria, 1):
            self._met.setdefault(tuple(sorted(found.taps[:count])), RidgePenalty(ridge, criterion))
        return found


def _choose_single_taps(state: SearchState, made: _RidgeSolver) -> list[int]:
    stock, taps = state.stock, state.taps
    if not state.params.join:
        return list(range(len(taps)))
    found = [
        tap for tap, path in enumerate(taps) if not is_native_path(stock, path) or relative_depth(stock, path) == 1
    ]
    for own in _native_taps_by_donor(state).values():
        found.append(min(own, key=lambda tap: (made.find_best_penalty(tap).criterion, tap)))
    return sorted(set(found))


def _choose_tap_sets(state: SearchState, made: _RidgeSolver) -> list[tuple[int, ...]]:
    # The last set is a control: it differs from the best set by its stitched taps.
    every, donors = range(len(state.taps)), _native_taps_by_donor(state)
    own = sorted(tap for taps in donors.values() for tap in taps)
    best = made.select_taps(every)
    sets = [best, best[: (len(best) + 1) // 2], best[:2]]
    strange = sorted(set(every) - set(own), key=lambda tap: (made.find_best_penalty(tap).criterion, tap))
    if set(best) & set(strange):
        sets.append(made.select_taps(own))
    elif strange:
        sets.append((*best, strange[0]))  # the control
    if len(donors) > 1:
        sets += [made.select_taps(taps) for taps in donors.values()]
    return [taps for taps in sets if len(taps) > 1]


def _native_taps_by_donor(state: SearchState) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for tap, path in enumerate(state.taps):
        if is_native_path(state.stock, path):
            found.setdefault(state.stock.blocks[path[-1]].donor, []).append(tap)
    return found


def _solve_candidate(state: SearchState, made: _RidgeSolver, taps: Sequence[int]) -> Candidate:
    chosen = made.find_best_penalty(*taps)
    head = joint_head.fit_discriminant(made.given.restrict_to(made.places.feature_columns(taps)), chosen.ridge)
    paths = tuple(state.taps[tap] for tap in taps)
    parts, first = [], 0
    for path in paths:
        sent, channels = tap_width(state.stock, state.params, path), state.stock.blocks[path[-1]].out_shape[0]
        part = head.weights[:, first : first + sent]
        if sent < channels:
            part = part @ stitched_network.random_projection(channels, sent, projection_seed(state)).T
        parts.append(part)
        first += sent
    arrays = {"weights": np.hstack(parts).astype(np.float32), "bias": head.bias.astype(np.float32)}
    ends = [finalist for finalist in state.finalists if finalist.path[:-1] in paths]
    one = ends[0] if len(paths) == 1 and ends else None
    native = all(is_native_path(state.stock, path) for path in paths)
    return Candidate(
        "joined" if len(paths) > 1 else "donor" if native else "stitched",
        paths,
        arrays,
        chosen.ridge,
        chosen.criterion if isfinite(chosen.criterion) else None,
        score=one.score if one else None,
        residual=_worst_residual(
            [each for finalist in ends for each in finalist.residuals[:-1]]
        ),  # a head replaces the last
    )


def _worst_residual(residuals: Sequence[float | None]) -> float | None:
    return max((each for each in residuals if each is not None), default=None)


def candidate_criterion(candidate: Candidate) -> float:
    """Return a candidate's criterion, or infinity if there is none."""
    return float("inf") if candidate.criterion is None else candidate.criterion

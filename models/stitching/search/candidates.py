"""Candidates for the result of a search: taps to gather, and networks solved from their sums.

A tap is the end of a path: a prefix of a donor at any depth, or a finished network before its terminating block.
Devices send the sums of all taps once, and every candidate is solved from sub-matrices of these sums
(`fedquilt.models.stitching.algebra.joint_head`). Kinds of candidates:

- joined: all taps of some donors, each up to some depth, with the least criterion of generalised cross-validation at
  their cost, and the best sets with and without stitching.
- donor: each unmodified donor at its best depth and at its last depth, with a new head.
- stitched: each finished network alone, with a new head.

Candidates exceed none of the job's budgets. They are compared on held-out examples, so that the result is worse than
the best donor by validation noise only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from fedquilt.core import JobError, derive_seed
from fedquilt.models.stitching import display_names, stitched_network
from fedquilt.models.stitching.algebra import joint_head, least_squares
from fedquilt.models.stitching.algebra.class_moments import ClassMoments
from fedquilt.models.stitching.algebra.joint_head import RidgePenalty, StandardisedSums, TapLayout
from fedquilt.models.stitching.search import pareto_front
from fedquilt.models.stitching.search.pareto_front import InferenceCost
from fedquilt.models.stitching.search.state import Candidate, Finalist, PackedSums, SearchSettings, SearchState
from fedquilt.models.stitching.stitched_network import DonorPool

Path = tuple[str, ...]

SHALLOW = 0.5  # share of a donor's depth; shallower taps are left out first
KEPT = 2  # finished networks whose taps are left out last, after the donors' deep ones, and are joined
WIDEST = 4096  # features that are joined at most: the time that solving takes grows with their cube
COARSE = joint_head.STRENGTHS[9:18:4]  # ridges of sets that are compared; wider sets need stronger ones
BASES = 6  # sets on the front that are extended, the best first
CHEAPER = 0.85  # cost of a set on the front as a share of the next better one's, at most
FRONT = 12  # sets of taps that are validated at most, without those that controls need


# -- which taps -----------------------------------------------------------------------------------


def end_search(state: SearchState) -> SearchState:
    """Return the state after the search, in phase "gather", "validate" or "done"."""
    if state.params.head == "aligned":
        found = aligned_candidates(state, state.finalists)
        return replace(state, phase="validate" if found else "done", candidates=found)
    taps, notes = choose_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def choose_taps(state: SearchState) -> tuple[tuple[Path, ...], list[str]]:
    """Return the taps to gather, at most `SearchParams.features` wide in total, and log sentences."""
    params, stock = state.params, state.stock
    bodies = [
        path for path in dict.fromkeys(finalist.path[:-1] for finalist in state.finalists) if _fits(state, [path])
    ]
    if not params.join:
        return tuple(bodies), []
    prefixes = [[path for path in native_taps(stock, donor) if _fits(state, [path])] for donor in sorted(stock.donors)]
    own = [path for paths in prefixes for path in paths]
    made = [body for body in bodies if body not in own]
    last = [paths[-1] for paths in prefixes if paths]
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


def require_networks_within_budget(state: SearchState) -> None:
    """Raise an error if the job's budget excludes every tap.

    Raises:
        JobError: If so.
    """
    limits, stock = pareto_front.budgets(state.params), state.stock
    taps = [path for donor in stock.donors for path in native_taps(stock, donor)]
    if any(_fits(state, [path]) for path in taps):
        return
    costs = [pareto_front.measure_cost(state.params, _inference_cost(state, [path])) for path in taps]
    least = {name: min(each[name] or 0.0 for each in costs) for name in limits}
    told = ", ".join(f"budget_{name} = {limit:g} (least {least[name]:.3g})" for name, limit in limits.items())
    raise JobError(f"[params] {told}: no donor has a block within the budget: raise it, or give a smaller donor")


def native_taps(stock: DonorPool, donor: str) -> list[Path]:
    """Return a donor's prefixes that end in maps, and the prefix before its classifier."""
    blocks = stock.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(stock.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def relative_depth(stock: DonorPool, path: Path) -> float:
    """Return the depth of a path's last block in its donor, 1 for the last before the classifier."""
    last = stock.blocks[path[-1]]
    return (last.index + 1) / (len(stock.donors[last.donor].blocks) - 1)


def tap_width(stock: DonorPool, params: SearchSettings, path: Path) -> int:
    channels = stock.blocks[path[-1]].out_shape[0]
    return min(channels, params.random_features or channels)


def tap_layout(state: SearchState) -> TapLayout:
    return TapLayout(tuple(tap_width(state.stock, state.params, path) for path in state.taps))


def is_native_path(stock: DonorPool, path: Path) -> bool:
    return stitched_network.is_native_path([stock.blocks[name] for name in path])


def projection_seed(state: SearchState) -> int:
    return derive_seed("features", state.seed)


def aligned_candidates(state: SearchState, ends: Iterable[Finalist]) -> tuple[Candidate, ...]:
    """Return finished networks with their terminating blocks as candidates, if they are within the budget."""
    found = [
        Candidate("aligned", (end.path,), score=end.score, residual=_worst_residual(end.residuals))
        for end in ends
        if _fits(state, [end.path], headed=False)
    ]
    return sort_by_cost(state, found)


def _fits(state: SearchState, paths: Sequence[Path], headed: bool = True) -> bool:
    return pareto_front.is_within_budget(state.params, _inference_cost(state, paths, headed))


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
    """Solve the heads of all candidates within the budget, and return them with the cheapest first."""
    search = _TruncationSearch(state, joint_head.standardise_sums(sums))
    wanted = [
        *(search.find_larger_sets() if state.params.join else ()),
        *map(search.solve_single_tap, _choose_single_taps(search)),
    ]
    found = {frozenset(each.taps): each for each in wanted}
    return sort_by_cost(state, (_solve_candidate(search, each) for each in found.values()))


def sort_by_cost(state: SearchState, found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(found, key=lambda each: (candidate_price(state, each), len(each.paths), each.paths)))


def candidate_price(state: SearchState, candidate: Candidate) -> float:
    return pareto_front.ordering_cost(state.params, candidate_cost(state, candidate))


def candidate_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    return _inference_cost(state, candidate.paths, bool(candidate.head))


def _inference_cost(state: SearchState, paths: Sequence[Path], headed: bool = True) -> InferenceCost:
    return pareto_front.inference_cost(state.stock, paths, len(state.stock.labels) if headed else 0)


@dataclass(frozen=True)
class _TapSet:
    taps: tuple[int, ...]
    cost: float
    penalty: RidgePenalty


class _TruncationSearch:
    """Search for the best sets of taps at each cost.

    Taps cost nothing beside the blocks before them. So a set consists of all taps of some donors, each up to some
    depth, and one factor gives the criteria of all depths of a donor (`joint_head.prefix_gcv_criteria`). A stitched
    path has one tap.
    """

    def __init__(self, state: SearchState, given: StandardisedSums) -> None:
        self.state, self.given, self.layout = state, given, tap_layout(state)
        self.native = _native_taps_by_donor(state)
        self._single: dict[int, _TapSet] = {}

    def solve_single_tap(self, tap: int) -> _TapSet:
        if tap not in self._single:
            best = joint_head.best_penalty(self.restrict_to((tap,)))
            self._single[tap] = _TapSet((tap,), self._ordering_cost((tap,)), best)
        return self._single[tap]

    def find_larger_sets(self) -> list[_TapSet]:
        """Return the sets on the front of criterion and cost, and the best sets with and without a stitched tap."""
        own = {tap for taps in self.native.values() for tap in taps}
        strange = sorted(set(range(len(self.state.taps))) - own, key=self.criterion_of_tap)[:KEPT]
        chains = [*map(tuple, self.native.values()), *((tap,) for tap in strange)]
        front, extended, found = [_TapSet((), 0.0, RidgePenalty(0.0, inf))], set[tuple[int, ...]](), list[_TapSet]()
        while todo := [each for each in front[:BASES] if each.taps not in extended]:
            for base in todo:
                extended.add(base.taps)
                for chain in chains:
                    if not set(chain) & set(base.taps):
                        found += self._extend(base, chain)
            front = thin_front(found)
        for stitched in (False, True):
            of_kind = [each for each in found if bool(set(each.taps) & set(strange)) == stitched]
            front += [min(of_kind, key=_by_criterion)] if of_kind else []
        return [
            self._refine_penalty(each) for each in {each.taps: each for each in front}.values() if len(each.taps) > 1
        ]

    def _extend(self, base: _TapSet, chain: tuple[int, ...]) -> list[_TapSet]:
        """Return the base with the first taps of a chain, for each number of taps within the limits."""
        sets = [(*base.taps, *chain[: count + 1]) for count in range(len(chain))]
        sets = [taps for taps in sets if self._is_allowed(taps)]
        if not sets:
            return []
        given, ends = self.restrict_to(sets[-1]), [len(self.layout.feature_columns(taps)) for taps in sets]
        ridges = [ridge for ridge in COARSE if ridge >= base.penalty.ridge][: 2 if base.taps else None]
        criteria = [joint_head.prefix_gcv_criteria(given, ridge, ends) for ridge in ridges]
        found = [
            min(map(RidgePenalty, ridges, each), key=lambda one: one.criterion) for each in zip(*criteria, strict=True)
        ]
        return [_TapSet(taps, self._ordering_cost(taps), one) for taps, one in zip(sets, found, strict=True)]

    def _refine_penalty(self, found: _TapSet) -> _TapSet:
        return replace(found, penalty=joint_head.search_penalty(self.restrict_to(found.taps), found.penalty))

    def _is_allowed(self, taps: Sequence[int]) -> bool:
        narrow = len(self.layout.feature_columns(taps)) <= WIDEST
        return narrow and _fits(self.state, [self.state.taps[tap] for tap in taps])

    def restrict_to(self, taps: Sequence[int]) -> StandardisedSums:
        return self.given.restrict_to(self.layout.feature_columns(taps))

    def _ordering_cost(self, taps: Sequence[int]) -> float:
        cost = _inference_cost(self.state, [self.state.taps[tap] for tap in taps])
        return pareto_front.ordering_cost(self.state.params, cost)

    def criterion_of_tap(self, tap: int) -> tuple[float, int]:
        return self.solve_single_tap(tap).penalty.criterion, tap


def thin_front(found: Iterable[_TapSet]) -> list[_TapSet]:
    """Return sets on the front of criterion and cost, the best first, spaced by CHEAPER."""
    front: list[_TapSet] = []
    for each in sorted(found, key=_by_criterion):
        if not front or each.cost <= CHEAPER * front[-1].cost:
            front.append(each)
    return front[:FRONT]


def _by_criterion(found: _TapSet) -> tuple[float, float, tuple[int, ...]]:
    return found.penalty.criterion, found.cost, found.taps


def _choose_single_taps(search: _TruncationSearch) -> list[int]:
    stock, taps = search.state.stock, search.state.taps
    if not search.state.params.join:
        return list(range(len(taps)))
    found = {tap for tap, path in enumerate(taps) if not is_native_path(stock, path)}
    for own in search.native.values():
        found |= {own[-1], min(own, key=search.criterion_of_tap)}
    return sorted(found)


def _native_taps_by_donor(state: SearchState) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for tap, path in enumerate(state.taps):
        if is_native_path(state.stock, path):
            found.setdefault(state.stock.blocks[path[-1]].donor, []).append(tap)
    return found


def _solve_candidate(search: _TruncationSearch, found: _TapSet) -> Candidate:
    state, chosen = search.state, found.penalty
    taps = sorted(found.taps)
    head = joint_head.fit_discriminant(search.restrict_to(taps), chosen.ridge)
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

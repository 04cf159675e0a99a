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
from math import inf, isfinite, prod

import numpy as np

from fedquilt import profiles
from fedquilt.core import JobError, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import joint_head, least_squares
from fedquilt.models.stitching.algebra.class_moments import ClassMoments
from fedquilt.models.stitching.algebra.joint_head import RidgePenalty, StandardisedSums
from fedquilt.models.stitching.search.state import (
    Candidate,
    PackedSums,
    ScoredPath,
    SearchParams,
    SearchState,
)
from fedquilt.models.stitching.stitched_network import DonorPool

Path = tuple[str, ...]

SHALLOW_DEPTH = 0.5  # taps below this share of a donor's depth are dropped first
STITCHED_TAPS = 2  # taps of the best finished networks are dropped last and may be joined
MAX_JOINED_FEATURES = 4096  # limit of joined features: the time of a solution grows with their cube
COARSE_RIDGES = joint_head.STRENGTHS[9:18:4]  # ridges for the comparison of sets; wider sets need stronger ridges
MAX_EXTENDED = 6  # number of the best sets on the front that are extended
FRONT_SPACING = 0.85  # maximum cost of a set on the front, as a share of the next better set's cost
LATE_FACTOR = 3.0  # maximum cost of a cascade's second network, as a multiple of a budget
MAX_LATE_SETS = 3  # number of the best sets beyond a budget that are validated for cascades
MAX_FRONT = 12  # maximum number of validated sets of taps, without controls


# -- taps -----------------------------------------------------------------------------------------


def end_search(state: SearchState) -> SearchState:
    """Return the state in the next phase: "validate", "gather" or, without finished networks, "done"."""
    if state.params.head == "aligned":
        finalists = aligned_candidates(state, state.finalists)
        return replace(state, phase="validate" if finalists else "done", candidates=finalists)
    taps, notes = choose_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def choose_taps(state: SearchState) -> tuple[tuple[Path, ...], list[str]]:
    """Return the taps to gather, at most `SearchParams.features` wide in total, and sentences for the log.

    Taps that exceed the budget are useful only in cascades. They are dropped first if all together are too wide.
    """
    params, donor_pool = state.params, state.stock
    bodies = list(dict.fromkeys(finalist.path[:-1] for finalist in state.finalists))
    bodies = [path for path in bodies if _paths_are_within_budget(state, [path], factor=LATE_FACTOR)]
    prefixes = [
        [path for path in native_taps(donor_pool, donor) if _paths_are_within_budget(state, [path], factor=LATE_FACTOR)]
        for donor in sorted(donor_pool.donors)
    ]
    native = [path for paths in prefixes for path in paths]
    stitched = [body for body in bodies if body not in native]
    within_budget = {path for path in (*native, *stitched) if _paths_are_within_budget(state, [path])}
    deepest_native = [
        max(paths, key=lambda path: (path in within_budget, len(path)))
        for paths in prefixes
        if within_budget & {*paths}
    ]
    down = sorted(
        (path for path in native if path not in deepest_native),
        key=lambda path: (relative_depth(donor_pool, path), path),
    )
    shallow = [path for path in down if relative_depth(donor_pool, path) < SHALLOW_DEPTH]
    deep = down[len(shallow) :]
    droppable = [*shallow, *stitched[STITCHED_TAPS:][::-1], *deep, *stitched[:STITCHED_TAPS][::-1]]
    droppable.sort(key=lambda path: path in within_budget)
    dropped: list[Path] = []
    while droppable and sum(tap_width(donor_pool, path) for path in (*deepest_native, *droppable)) > params.features:
        dropped.append(droppable.pop(0))
    notes = []
    if dropped:
        notes.append(
            f"taps not used, to keep `features` = {params.features}: "
            + ", ".join(map(stitched_network.tap_name, dropped))
        )
    return tuple(path for path in (*native, *stitched) if path not in dropped), notes


def require_networks_within_budget(state: SearchState) -> None:
    limits, donor_pool = budgets(state.params), state.stock
    taps = [path for donor in donor_pool.donors for path in native_taps(donor_pool, donor)]
    if any(_paths_are_within_budget(state, [path]) for path in taps):
        return
    costs = [measure_cost(state.params, _inference_cost(state, [path])) for path in taps]
    least_costs = {name: min(cost[name] or 0.0 for cost in costs) for name in limits}
    limits_text = ", ".join(
        f"budget_{name} = {limit:g} (cheapest tap: {least_costs[name]:.3g})" for name, limit in limits.items()
    )
    raise JobError(f"[params] {limits_text}: every donor exceeds the budget: raise the budget, or use a smaller donor")


def native_taps(donor_pool: DonorPool, donor: str) -> list[Path]:
    """Return a donor's prefixes that end in maps, and the prefix before its classifier."""
    blocks = donor_pool.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(donor_pool.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def relative_depth(donor_pool: DonorPool, path: Path) -> float:
    last = donor_pool.blocks[path[-1]]
    return (last.index + 1) / (len(donor_pool.donors[last.donor].blocks) - 1)


def tap_width(donor_pool: DonorPool, path: Path) -> int:
    return donor_pool.blocks[path[-1]].out_shape[0]


def tap_widths(state: SearchState) -> tuple[int, ...]:
    return tuple(tap_width(state.stock, path) for path in state.taps)


def is_native_path(donor_pool: DonorPool, path: Path) -> bool:
    return stitched_network.is_native_path([donor_pool.blocks[name] for name in path])


def aligned_candidates(state: SearchState, finalists: Iterable[ScoredPath]) -> tuple[Candidate, ...]:
    candidates = [
        Candidate("aligned", (finalist.path,), score=finalist.score)
        for finalist in finalists
        if _paths_are_within_budget(state, [finalist.path], headed=False)
    ]
    return sort_by_cost(state, candidates)


def _paths_are_within_budget(
    state: SearchState, paths: Sequence[Path], headed: bool = True, factor: float = 1.0
) -> bool:
    return is_within_budget(state.params, _inference_cost(state, paths, headed), factor)


# -- gathered sums --------------------------------------------------------------------------------


def pack_sums(sums: ClassMoments, exact: bool = False) -> PackedSums:
    """Pack sums for the state, with second moments as float32 unless `exact`.

    Second moments are about the mean, so that no large numbers cancel.
    """
    packed_scatter = least_squares.pack_upper(sums.scatter, np.float64 if exact else np.float32)
    return PackedSums(sums.counts, sums.totals, packed_scatter)


def unpack_sums(packed: PackedSums | None) -> ClassMoments | None:
    if packed is None:
        return None
    scatter = least_squares.unpack_symmetric(packed.half, packed.totals.shape[1])
    return ClassMoments(packed.counts, packed.totals, scatter)


# -- solving --------------------------------------------------------------------------------------


def solve_candidates(state: SearchState, sums: ClassMoments) -> tuple[Candidate, ...]:
    """Return candidates with solved heads, the cheapest first. A few exceed a budget, for use in cascades."""
    search = _TruncationSearch(state, joint_head.standardise_sums(sums))
    tap_sets = [*search.find_larger_sets(), *map(search.solve_single_tap, search.choose_single_taps())]
    if budgets(state.params):
        search.factor = LATE_FACTOR
        late_sets = [tap_set for tap_set in search.find_larger_sets() if not search.is_within_budget(tap_set.taps)]
        tap_sets += late_sets[:MAX_LATE_SETS]
    sets_by_taps = {frozenset(tap_set.taps): tap_set for tap_set in tap_sets}
    return sort_by_cost(state, (_fit_candidate_head(search, tap_set) for tap_set in sets_by_taps.values()))


def sort_by_cost(state: SearchState, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda candidate: sort_key(state, candidate)))


def sort_key(state: SearchState, candidate: Candidate) -> tuple[float, int, tuple[Path, ...]]:
    return candidate_price(state, candidate), len(candidate.paths), candidate.paths


def candidate_price(state: SearchState, candidate: Candidate) -> float:
    return ordering_cost(state.params, candidate_cost(state, candidate))


def candidate_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    """Return the cost of one example or, for a cascade, the mean cost over held-out examples."""
    late_cost = worst_cost(state, candidate)
    if candidate.early is None:
        return late_cost
    early_cost, share = _inference_cost(state, candidate.early.taps), candidate.early.share
    return InferenceCost(
        share * early_cost.flops + (1 - share) * late_cost.flops,
        share * early_cost.read_bytes + (1 - share) * late_cost.read_bytes,
        late_cost.weight_bytes,
    )


def worst_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    """Return the highest cost of an example. In a cascade it includes the head of the early network."""
    cost = _inference_cost(state, candidate.paths, bool(candidate.head))
    if candidate.early is None:
        return cost
    early_weights = candidate.early.head["weights"]
    head_bytes = 4.0 * (early_weights.size + len(early_weights))
    return InferenceCost(
        cost.flops + 2.0 * early_weights.size, cost.read_bytes + head_bytes, cost.weight_bytes + head_bytes
    )


def _inference_cost(state: SearchState, paths: Sequence[Path], headed: bool = True) -> InferenceCost:
    return inference_cost(state.stock, paths, len(state.stock.labels) if headed else 0)


@dataclass(frozen=True)
class _TapSet:
    taps: tuple[int, ...]
    cost: float
    penalty: RidgePenalty


class _TruncationSearch:
    """Search for the best sets of taps at each cost.

    A tap costs no more than the blocks before it. So a set consists of all taps of some donors, each up to some depth,
    and one Cholesky factor determines the criteria of all depths of a donor (`joint_head.prefix_gcv_criteria`). A
    stitched path has one tap.
    """

    def __init__(self, state: SearchState, sums: StandardisedSums) -> None:
        self.state, self.sums = state, sums
        self._starts = np.cumsum([0, *tap_widths(state)])
        self.native = _native_taps_by_donor(state)
        self.factor = 1.0  # multiple of the budgets that sets may cost
        self._single: dict[int, _TapSet] = {}

    def solve_single_tap(self, tap: int) -> _TapSet:
        if tap not in self._single:
            best = joint_head.best_penalty(self.restrict_to((tap,)))
            self._single[tap] = _TapSet((tap,), self._ordering_cost((tap,)), best)
        return self._single[tap]

    def find_larger_sets(self) -> list[_TapSet]:
        """Return the sets on the Pareto front of criterion and cost, and the best with and without stitching."""
        native_taps = {tap for taps in self.native.values() for tap in taps}
        stitched_taps = sorted(set(range(len(self.state.taps))) - native_taps, key=self.criterion_of_tap)
        stitched_taps = stitched_taps[:STITCHED_TAPS]
        chains = [*map(tuple, self.native.values()), *((tap,) for tap in stitched_taps)]
        front = [_TapSet((), 0.0, RidgePenalty(0.0, inf))]
        extended = set[tuple[int, ...]]()
        tap_sets = list[_TapSet]()
        while todo := [tap_set for tap_set in front[:MAX_EXTENDED] if tap_set.taps not in extended]:
            for base in todo:
                extended.add(base.taps)
                for chain in chains:
                    if not set(chain) & set(base.taps):
                        tap_sets += self._extend(base, chain)
            front = thin_front(tap_sets)
        for stitched in (False, True):
            of_kind = [tap_set for tap_set in tap_sets if bool(set(tap_set.taps) & set(stitched_taps)) == stitched]
            front += [min(of_kind, key=_by_criterion)] if of_kind else []
        distinct_sets = {tap_set.taps: tap_set for tap_set in front}.values()
        return [self._refine_penalty(tap_set) for tap_set in distinct_sets if len(tap_set.taps) > 1]

    def _extend(self, base: _TapSet, chain: tuple[int, ...]) -> list[_TapSet]:
        sets = [(*base.taps, *chain[: count + 1]) for count in range(len(chain))]
        sets = [taps for taps in sets if self._is_allowed(taps)]
        if not sets:
            return []
        sums, ends = self.restrict_to(sets[-1]), [len(self._columns(taps)) for taps in sets]
        ridges = [ridge for ridge in COARSE_RIDGES if ridge >= base.penalty.ridge][: 2 if base.taps else None]
        criteria = [joint_head.prefix_gcv_criteria(sums, ridge, ends) for ridge in ridges]
        penalties = [
            min(map(RidgePenalty, ridges, chain_criteria), key=lambda penalty: penalty.criterion)
            for chain_criteria in zip(*criteria, strict=True)
        ]
        return [_TapSet(taps, self._ordering_cost(taps), p) for taps, p in zip(sets, penalties, strict=True)]

    def _refine_penalty(self, tap_set: _TapSet) -> _TapSet:
        return replace(tap_set, penalty=joint_head.search_penalty(self.restrict_to(tap_set.taps), tap_set.penalty))

    def _is_allowed(self, taps: Sequence[int]) -> bool:
        return len(self._columns(taps)) <= MAX_JOINED_FEATURES and self.is_within_budget(taps, self.factor)

    def is_within_budget(self, taps: Sequence[int], factor: float = 1.0) -> bool:
        return _paths_are_within_budget(self.state, [self.state.taps[tap] for tap in taps], factor=factor)

    def restrict_to(self, taps: Sequence[int]) -> StandardisedSums:
        return self.sums.restrict_to(self._columns(taps))

    def _columns(self, taps: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.arange(self._starts[tap], self._starts[tap + 1]) for tap in taps])

    def _ordering_cost(self, taps: Sequence[int]) -> float:
        cost = _inference_cost(self.state, [self.state.taps[tap] for tap in taps])
        return ordering_cost(self.state.params, cost)

    def criterion_of_tap(self, tap: int) -> tuple[float, int]:
        return self.solve_single_tap(tap).penalty.criterion, tap

    def choose_single_taps(self) -> list[int]:
        """Return each donor's best and last tap within the budget, and the ends of stitched paths."""
        native = {tap for donor_taps in self.native.values() for tap in donor_taps}
        chosen = {tap for tap in range(len(self.state.taps)) if tap not in native and self.is_within_budget([tap])}
        for taps in self.native.values():
            if donor_taps := [tap for tap in taps if self.is_within_budget([tap])]:
                chosen |= {donor_taps[-1], min(donor_taps, key=self.criterion_of_tap)}
        return sorted(chosen)


def thin_front(tap_sets: Iterable[_TapSet]) -> list[_TapSet]:
    """Return the front of criterion and cost, best first, with costs at least FRONT_SPACING apart."""
    front: list[_TapSet] = []
    for tap_set in sorted(tap_sets, key=_by_criterion):
        if not front or tap_set.cost <= FRONT_SPACING * front[-1].cost:
            front.append(tap_set)
    return front[:MAX_FRONT]


def _by_criterion(tap_set: _TapSet) -> tuple[float, float, tuple[int, ...]]:
    return tap_set.penalty.criterion, tap_set.cost, tap_set.taps


def _native_taps_by_donor(state: SearchState) -> dict[str, list[int]]:
    taps_by_donor: dict[str, list[int]] = {}
    for tap, path in enumerate(state.taps):
        if is_native_path(state.stock, path):
            taps_by_donor.setdefault(state.stock.blocks[path[-1]].donor, []).append(tap)
    return taps_by_donor


def _fit_candidate_head(search: _TruncationSearch, tap_set: _TapSet) -> Candidate:
    state, penalty = search.state, tap_set.penalty
    taps = sorted(tap_set.taps)
    head = joint_head.fit_discriminant(search.restrict_to(taps), penalty.ridge)
    paths = tuple(state.taps[tap] for tap in taps)
    arrays = {"weights": head.weights.astype(np.float32), "bias": head.bias.astype(np.float32)}
    ends = [finalist for finalist in state.finalists if finalist.path[:-1] in paths]
    single_end = ends[0] if len(paths) == 1 and ends else None
    native = all(is_native_path(state.stock, path) for path in paths)
    return Candidate(
        "joined" if len(paths) > 1 else "donor" if native else "stitched",
        paths,
        arrays,
        penalty.ridge,
        penalty.criterion if isfinite(penalty.criterion) else None,
        score=single_end.score if single_end else None,
    )


# -- costs and budgets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferenceCost:
    flops: float
    read_bytes: float
    weight_bytes: float


def inference_cost(donor_pool: DonorPool, paths: Sequence[Path], labels: int) -> InferenceCost:
    """Return the cost of parallel paths under a head with `labels` labels, or without a head for 0.

    Common prefixes of paths run once. Traffic counts weights, and the inputs and outputs of blocks.
    """
    flops = weights = maps = 0.0
    for ids in stitched_network.path_prefixes(paths):
        block = donor_pool.blocks[ids[-1]]
        flops += block.flops
        maps += 4.0 * (prod(block.in_shape) + prod(block.out_shape))
        previous = donor_pool.blocks[ids[-2]] if len(ids) > 1 else None
        if previous is not None and not stitched_network.is_continuation(previous, block):
            size = previous.out_shape[0] * block.in_shape[0]
            flops += 2.0 * size * min(prod(previous.out_shape[1:]), prod(block.in_shape[1:]))
            weights += 4.0 * (size + block.in_shape[0])
    weights += sum(donor_pool.blocks[name].weight_bytes for name in {name for path in paths for name in path})
    if labels:
        width = sum(donor_pool.blocks[path[-1]].out_shape[0] for path in paths)
        flops += 2.0 * width * labels
        weights += 4.0 * labels * (width + 1)
    return InferenceCost(flops, maps + weights, weights)


def board_cost(flops: float, read_bytes: float, board: str) -> tuple[float | None, float | None]:
    """Return the milliseconds and joules of one example on a board, None if the speed or power is unknown."""
    points = profiles.load_board_profile(board).operating_points()
    work = WorkEstimate(flops=flops, read_bytes=read_bytes, task_share=0.0)
    seconds = cost_model.work_seconds(work, points[0]) if points else None
    return (None, None) if seconds is None else (1e3 * seconds, cost_model.work_joules(seconds, points[0]))


def measure_cost(params: SearchParams, cost: InferenceCost) -> dict[str, float | None]:
    """Return "mflop" and "mb" of one example, and "ms" and "joules", None for an unknown board."""
    ms, joules = board_cost(cost.flops, cost.read_bytes, params.board) if params.board else (None, None)
    return {"mflop": cost.flops / 1e6, "ms": ms, "mb": cost.weight_bytes / 1e6, "joules": joules}


def is_within_budget(params: SearchParams, cost: InferenceCost, factor: float = 1.0) -> bool:
    """Return whether no amount exceeds its limit times `factor`. The limit of "mb" is never multiplied."""
    amounts = measure_cost(params, cost)
    limits = {name: limit * (1.0 if name == "mb" else factor) for name, limit in budgets(params).items()}
    return all((amounts[name] or 0.0) <= limit for name, limit in limits.items())


def budgets(params: SearchParams) -> dict[str, float]:
    limits = {name: getattr(params, f"budget_{name}") for name in ("mflop", "ms", "mb", "joules")}
    return {name: limit for name, limit in limits.items() if limit is not None}


def ordering_cost(params: SearchParams, cost: InferenceCost) -> float:
    """Return the amount that the first budget limits, in the budget's unit, or MFLOP without a budget."""
    return measure_cost(params, cost)[next(iter(budgets(params)), "mflop")] or 0.0


def require_usable_budgets(params: SearchParams) -> None:
    """Raise JobError if a budget needs a board that is not named, or whose speed or power is unknown."""
    if not params.board and (needing_board := budgets(params).keys() & {"ms", "joules"}):
        raise JobError(f"[params] budget_{min(needing_board)} has no board: name a profile, as in board = 'jetson-tx2'")
    amounts = measure_cost(params, InferenceCost(1.0, 1.0, 1.0))
    for name in budgets(params):
        if amounts[name] is None:
            unknown = "speed" if name == "ms" else "speed and power"
            raise JobError(f"[params] budget_{name}: the {unknown} of {params.board!r} is unknown: name another board")

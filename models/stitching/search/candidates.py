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

SHALLOW = 0.5  # share of a donor's depth; shallower taps are left out first
KEPT = 2  # finished networks whose taps are left out last, after the donors' deep ones, and are joined
WIDEST = 4096  # features that are joined at most: the time that solving takes grows with their cube
COARSE = joint_head.STRENGTHS[9:18:4]  # ridges of sets that are compared; wider sets need stronger ones
BASES = 6  # sets on the front that are extended, the best first
CHEAPER = 0.85  # cost of a set on the front as a share of the next better one's, at most
LATE = 3.0  # most cost of a cascade's second network, as a multiple of a budget
LATES = 3  # sets of taps beyond a budget that are validated for cascades, the best
FRONT = 12  # sets of taps that are validated at most, without those that controls need


# -- which taps -----------------------------------------------------------------------------------


def end_search(state: SearchState) -> SearchState:
    if state.params.head == "aligned":
        found = aligned_candidates(state, state.finalists)
        return replace(state, phase="validate" if found else "done", candidates=found)
    taps, notes = choose_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def choose_taps(state: SearchState) -> tuple[tuple[Path, ...], list[str]]:
    """Return the taps to gather, at most `SearchParams.features` wide in total, and log sentences.

    Taps beyond a budget, of which only cascades are made, are left out first.
    """
    params, stock = state.params, state.stock
    bodies = [
        path
        for path in dict.fromkeys(finalist.path[:-1] for finalist in state.finalists)
        if _fits(state, [path], factor=LATE)
    ]
    prefixes = [
        [path for path in native_taps(stock, donor) if _fits(state, [path], factor=LATE)]
        for donor in sorted(stock.donors)
    ]
    own = [path for paths in prefixes for path in paths]
    made = [body for body in bodies if body not in own]
    within = {path for path in (*own, *made) if _fits(state, [path])}
    last = [max(paths, key=lambda path: (path in within, len(path))) for paths in prefixes if within & {*paths}]
    down = sorted((path for path in own if path not in last), key=lambda path: (relative_depth(stock, path), path))
    shallow = [path for path in down if relative_depth(stock, path) < SHALLOW]
    first = [*shallow, *made[KEPT:][::-1], *down[len(shallow) :], *made[:KEPT][::-1]]  # in the order of leaving out
    first.sort(key=lambda path: path in within)
    gone: list[Path] = []
    while first and sum(tap_width(stock, path) for path in (*last, *first)) > params.features:
        gone.append(first.pop(0))
    notes = []
    if gone:
        notes.append(
            f"not gathered, as all taps together would have more than {params.features} features: "
            + ", ".join(map(stitched_network.tap_name, gone))
        )
    return tuple(path for path in (*own, *made) if path not in gone), notes


def require_networks_within_budget(state: SearchState) -> None:
    limits, stock = budgets(state.params), state.stock
    taps = [path for donor in stock.donors for path in native_taps(stock, donor)]
    if any(_fits(state, [path]) for path in taps):
        return
    costs = [measure_cost(state.params, _inference_cost(state, [path])) for path in taps]
    least = {name: min(each[name] or 0.0 for each in costs) for name in limits}
    told = ", ".join(f"budget_{name} = {limit:g} (least {least[name]:.3g})" for name, limit in limits.items())
    raise JobError(f"[params] {told}: no donor has a block within the budget: raise it, or give a smaller donor")


def native_taps(stock: DonorPool, donor: str) -> list[Path]:
    """Return a donor's prefixes that end in maps, and the prefix before its classifier."""
    blocks = stock.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(stock.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def relative_depth(stock: DonorPool, path: Path) -> float:
    last = stock.blocks[path[-1]]
    return (last.index + 1) / (len(stock.donors[last.donor].blocks) - 1)


def tap_width(stock: DonorPool, path: Path) -> int:
    return stock.blocks[path[-1]].out_shape[0]


def tap_widths(state: SearchState) -> tuple[int, ...]:
    return tuple(tap_width(state.stock, path) for path in state.taps)


def is_native_path(stock: DonorPool, path: Path) -> bool:
    return stitched_network.is_native_path([stock.blocks[name] for name in path])


def aligned_candidates(state: SearchState, ends: Iterable[ScoredPath]) -> tuple[Candidate, ...]:
    found = [
        Candidate("aligned", (end.path,), score=end.score) for end in ends if _fits(state, [end.path], headed=False)
    ]
    return sort_by_cost(state, found)


def _fits(state: SearchState, paths: Sequence[Path], headed: bool = True, factor: float = 1.0) -> bool:
    return is_within_budget(state.params, _inference_cost(state, paths, headed), factor)


# -- what is gathered -----------------------------------------------------------------------------


def pack_sums(sums: ClassMoments, exact: bool = False) -> PackedSums:
    """Pack sums for the state, with second moments as float32 unless `exact`.

    Second moments are about the mean, so that no large numbers cancel.
    """
    half = least_squares.pack_upper(sums.scatter, np.float64 if exact else np.float32)
    return PackedSums(sums.counts, sums.totals, half)


def unpack_sums(kept: PackedSums | None) -> ClassMoments | None:
    if kept is None:
        return None
    return ClassMoments(kept.counts, kept.totals, least_squares.unpack_symmetric(kept.half, kept.totals.shape[1]))


# -- solving --------------------------------------------------------------------------------------


def solve_candidates(state: SearchState, sums: ClassMoments) -> tuple[Candidate, ...]:
    search = _TruncationSearch(state, joint_head.standardise_sums(sums))
    wanted = [*search.find_larger_sets(), *map(search.solve_single_tap, search.choose_single_taps())]
    if budgets(state.params):
        search.factor = LATE
        wanted += [each for each in search.find_larger_sets() if not search.is_within_budget(each.taps)][:LATES]
    found = {frozenset(each.taps): each for each in wanted}
    return sort_by_cost(state, (_solve_candidate(search, each) for each in found.values()))


def sort_by_cost(state: SearchState, found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(found, key=lambda each: sort_key(state, each)))


def sort_key(state: SearchState, candidate: Candidate) -> tuple[float, int, tuple[Path, ...]]:
    return candidate_price(state, candidate), len(candidate.paths), candidate.paths


def candidate_price(state: SearchState, candidate: Candidate) -> float:
    return ordering_cost(state.params, candidate_cost(state, candidate))


def candidate_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    """Return the cost of an example, for a cascade the mean over held-out examples."""
    worst = worst_cost(state, candidate)
    if candidate.early is None:
        return worst
    first, share = _inference_cost(state, candidate.early.taps), candidate.early.share
    return InferenceCost(
        share * first.flops + (1 - share) * worst.flops,
        share * first.read_bytes + (1 - share) * worst.read_bytes,
        worst.weight_bytes,
    )


def worst_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    """Return the cost of an example that leaves a cascade last, or of any other candidate."""
    whole = _inference_cost(state, candidate.paths, bool(candidate.head))
    if candidate.early is None:
        return whole
    first = candidate.early.head["weights"]
    head_bytes = 4.0 * (first.size + len(first))
    return InferenceCost(whole.flops + 2.0 * first.size, whole.read_bytes + head_bytes, whole.weight_bytes + head_bytes)


def _inference_cost(state: SearchState, paths: Sequence[Path], headed: bool = True) -> InferenceCost:
    return inference_cost(state.stock, paths, len(state.stock.labels) if headed else 0)


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
        self.state, self.given = state, given
        self._starts = np.cumsum([0, *tap_widths(state)])
        self.native = _native_taps_by_donor(state)
        self.factor = 1.0  # of the budgets
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
        given, ends = self.restrict_to(sets[-1]), [len(self._columns(taps)) for taps in sets]
        ridges = [ridge for ridge in COARSE if ridge >= base.penalty.ridge][: 2 if base.taps else None]
        criteria = [joint_head.prefix_gcv_criteria(given, ridge, ends) for ridge in ridges]
        found = [
            min(map(RidgePenalty, ridges, each), key=lambda one: one.criterion) for each in zip(*criteria, strict=True)
        ]
        return [_TapSet(taps, self._ordering_cost(taps), one) for taps, one in zip(sets, found, strict=True)]

    def _refine_penalty(self, found: _TapSet) -> _TapSet:
        return replace(found, penalty=joint_head.search_penalty(self.restrict_to(found.taps), found.penalty))

    def _is_allowed(self, taps: Sequence[int]) -> bool:
        return len(self._columns(taps)) <= WIDEST and self.is_within_budget(taps, self.factor)

    def is_within_budget(self, taps: Sequence[int], factor: float = 1.0) -> bool:
        return _fits(self.state, [self.state.taps[tap] for tap in taps], factor=factor)

    def restrict_to(self, taps: Sequence[int]) -> StandardisedSums:
        return self.given.restrict_to(self._columns(taps))

    def _columns(self, taps: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.arange(self._starts[tap], self._starts[tap + 1]) for tap in taps])

    def _ordering_cost(self, taps: Sequence[int]) -> float:
        cost = _inference_cost(self.state, [self.state.taps[tap] for tap in taps])
        return ordering_cost(self.state.params, cost)

    def criterion_of_tap(self, tap: int) -> tuple[float, int]:
        return self.solve_single_tap(tap).penalty.criterion, tap

    def choose_single_taps(self) -> list[int]:
        """Return each donor's best and last tap within the budget, and the ends of stitched paths."""
        native = {tap for own in self.native.values() for tap in own}
        found = {tap for tap in range(len(self.state.taps)) if tap not in native and self.is_within_budget([tap])}
        for taps in self.native.values():
            if own := [tap for tap in taps if self.is_within_budget([tap])]:
                found |= {own[-1], min(own, key=self.criterion_of_tap)}
        return sorted(found)


def thin_front(found: Iterable[_TapSet]) -> list[_TapSet]:
    """Return sets on the front of criterion and cost, the best first, spaced by CHEAPER."""
    front: list[_TapSet] = []
    for each in sorted(found, key=_by_criterion):
        if not front or each.cost <= CHEAPER * front[-1].cost:
            front.append(each)
    return front[:FRONT]


def _by_criterion(found: _TapSet) -> tuple[float, float, tuple[int, ...]]:
    return found.penalty.criterion, found.cost, found.taps


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
    arrays = {"weights": head.weights.astype(np.float32), "bias": head.bias.astype(np.float32)}
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
    )


# -- costs and budgets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferenceCost:
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
    """Return the milliseconds and joules of one example on a board, None where its speed or power is unknown."""
    points = profiles.load_board_profile(board).operating_points()
    work = WorkEstimate(flops=flops, read_bytes=read_bytes, task_share=0.0)
    seconds = cost_model.work_seconds(work, points[0]) if points else None
    return (None, None) if seconds is None else (1e3 * seconds, cost_model.work_joules(seconds, points[0]))


def measure_cost(params: SearchParams, cost: InferenceCost) -> dict[str, float | None]:
    ms, joules = board_cost(cost.flops, cost.read_bytes, params.board) if params.board else (None, None)
    return {"mflop": cost.flops / 1e6, "ms": ms, "mb": cost.weight_bytes / 1e6, "joules": joules}


def is_within_budget(params: SearchParams, cost: InferenceCost, factor: float = 1.0) -> bool:
    """Return whether no amount exceeds its limit, times `factor` for all that a cascade spends on some examples."""
    amounts = measure_cost(params, cost)
    limits = {name: limit * (1.0 if name == "mb" else factor) for name, limit in budgets(params).items()}
    return all((amounts[name] or 0.0) <= limit for name, limit in limits.items())


def budgets(params: SearchParams) -> dict[str, float]:
    limits = {name: getattr(params, f"budget_{name}") for name in ("mflop", "ms", "mb", "joules")}
    return {name: limit for name, limit in limits.items() if limit is not None}


def ordering_cost(params: SearchParams, cost: InferenceCost) -> float:
    """Return the amount that the first budget limits, or MFLOP without a budget."""
    return measure_cost(params, cost)[next(iter(budgets(params)), "mflop")] or 0.0


def require_usable_budgets(params: SearchParams) -> None:
    """Raise JobError if a budget needs a board, or a board whose speed or power is known."""
    if not params.board and (named := budgets(params).keys() & {"ms", "joules"}):
        raise JobError(f"[params] budget_{min(named)} has no board: name a profile, as in board = 'jetson-tx2'")
    amounts = measure_cost(params, InferenceCost(1.0, 1.0, 1.0))
    for name in budgets(params):
        if amounts[name] is None:
            what = "speed" if name == "ms" else "speed and power"
            raise JobError(f"[params] budget_{name}: the {what} of {params.board!r} is unknown: name another board")

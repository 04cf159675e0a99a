"""Cascades of a cheap candidate and a larger one that contains its blocks.

An example leaves early if the margin between the two best scores of the cheap candidate reaches a threshold. Devices
count the right answers of all pairs of candidates for each bin of an early candidate's margin. These sums are small and
exact, and determine for each threshold between two bins the shares of early and of right answers. Test data is unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.device.moments import MARGINS
from fedquilt.models.stitching.search import candidates
from fedquilt.models.stitching.search.candidates import CHEAPER
from fedquilt.models.stitching.search.state import Candidate, SearchState
from fedquilt.models.stitching.stitched_network import EarlyExit

FIRST = 0.65  # most cost of an early candidate, as a share of the larger one's
EARLY_MOST = 4  # early candidates, the best
CASCADES = 6  # that become candidates, the best


@dataclass(frozen=True)
class _Cascade:
    place: int  # of the early candidate among those whose margins are counted
    early: int
    late: int
    edge: int  # of MARGINS: examples in later bins leave early

    def answering_candidates(self) -> np.ndarray:
        """Return the candidate that answers in each bin."""
        return np.where(np.arange(len(MARGINS) + 1) > self.edge, self.early, self.late)


def early_candidates(state: SearchState) -> tuple[int, ...]:
    """Return the candidates whose margins are counted: the best at their costs within the budget."""
    found, best = [], inf
    earlier = {early for early, _ in _cascade_pairs(state)}
    for i, each in enumerate(state.candidates):
        criterion = inf if each.criterion is None else each.criterion
        if criterion < best:
            best = criterion
            found += [i] if i in earlier else []
    return tuple(found[-EARLY_MOST:])


def _cascade_pairs(state: SearchState) -> list[tuple[int, int]]:
    heads = [i for i, each in enumerate(state.candidates) if each.head]
    parts = {i: set(stitched_network.path_prefixes(state.candidates[i].paths)) for i in heads}
    prices = {i: candidates.candidate_price(state, state.candidates[i]) for i in heads}
    first = [i for i in heads if _is_within_budget(state, state.candidates[i])]
    return [(i, j) for i in first for j in heads if parts[i] < parts[j] and prices[i] <= FIRST * prices[j]]


def _is_within_budget(state: SearchState, candidate: Candidate) -> bool:
    """Return whether the mean cost is within the budget, and the cost at worst within a multiple of it."""
    mean, worst = candidates.candidate_cost(state, candidate), candidates.worst_cost(state, candidate)
    within = candidates.is_within_budget
    return within(state.params, mean) and within(state.params, worst, candidates.LATE)


def finish_candidates(state: SearchState) -> SearchState:
    """Add the best cascades, remove candidates beyond the budget, and sort the rest by cost."""
    chosen = _choose_cascades(state) if state.examples else []
    made = [_to_candidate(state, each) for each in chosen]
    every, right = [*state.candidates, *made], _extend_right_answers(state, chosen)
    kept = [i for i, each in enumerate(every) if _is_within_budget(state, each)]
    kept.sort(key=lambda i: candidates.sort_key(state, every[i]))
    return replace(
        state,
        candidates=tuple(every[i] for i in kept),
        right=right[np.ix_(kept, kept)] if right.size else right,
        by_margin=state.by_margin[:0],
        in_bin=state.in_bin[:0],
    )


def _choose_cascades(state: SearchState) -> list[_Cascade]:
    """Return cascades that are more accurate than anything cheaper, the best first, spaced by CHEAPER."""
    places = {early: place for place, early in enumerate(early_candidates(state))}
    pairs = [(places[early], early, late) for early, late in _cascade_pairs(state) if early in places]
    tried = [_Cascade(*pair, edge) for pair in pairs for edge in range(len(MARGINS))]
    found = []
    for each in tried:
        candidate = _to_candidate(state, each)
        if candidate.early and 0 < candidate.early.share < 1 and _is_within_budget(state, candidate):
            found.append((_right_with_cascade(state, each, each), candidates.candidate_price(state, candidate), each))
    plain = [
        (int(state.right[i, i]), candidates.candidate_price(state, each)) for i, each in enumerate(state.candidates)
    ]
    chosen: list[_Cascade] = []
    last = inf
    for right, price, each in sorted(found, key=lambda one: (-one[0], one[1])):
        beaten = any(own >= right and cost <= price for own, cost in plain)
        if price <= CHEAPER * last and not beaten:
            chosen.append(each)
            last = price
    return chosen[:CASCADES]


def _to_candidate(state: SearchState, cascade: _Cascade) -> Candidate:
    first, counted = state.candidates[cascade.early], state.in_bin[cascade.place]
    share = float(counted[cascade.edge + 1 :].sum() / counted.sum())
    exit = EarlyExit(first.paths, first.head, MARGINS[cascade.edge], share)
    return replace(state.candidates[cascade.late], kind="cascade", criterion=None, early=exit)


def _extend_right_answers(state: SearchState, chosen: Sequence[_Cascade]) -> np.ndarray:
    """Return the numbers of examples that both of two candidates answer rightly, with the cascades as the last."""
    if not state.right.size:
        return state.right
    nets = len(state.candidates)
    found = np.pad(state.right, (0, len(chosen)))
    for i, one in enumerate(chosen, nets):
        found[i, :nets] = found[:nets, i] = _right_with_candidates(state, one)
        for j, other in enumerate(chosen, nets):
            found[i, j] = _right_with_cascade(state, one, other)
    return found


def _right_with_candidates(state: SearchState, cascade: _Cascade) -> np.ndarray:
    bins = np.arange(len(MARGINS) + 1)
    return np.asarray(state.by_margin[cascade.place, bins, cascade.answering_candidates()].sum(axis=0))


def _right_with_cascade(state: SearchState, one: _Cascade, other: _Cascade) -> int:
    """Return how many examples two cascades answer rightly.

    Where their early candidates differ this is estimated, as if they were independent given the larger late answer.
    """
    if one.place == other.place:
        bins = np.arange(len(MARGINS) + 1)
        return int(state.by_margin[one.place, bins, one.answering_candidates(), other.answering_candidates()].sum())
    late = max(one.late, other.late)
    right = int(state.right[late, late])
    both = [float(_right_with_candidates(state, each)[late]) for each in (one, other)]
    own = [_right_with_cascade(state, each, each) for each in (one, other)]
    rest = [total - known for total, known in zip(own, both, strict=True)]
    found = both[0] * both[1] / max(right, 1) + rest[0] * rest[1] / max(state.examples - right, 1)
    return min(round(found), *own)

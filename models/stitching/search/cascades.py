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
from fedquilt.models.stitching.search.candidates import FRONT_SPACING
from fedquilt.models.stitching.search.state import Candidate, SearchState
from fedquilt.models.stitching.stitched_network import EarlyExit

MAX_EARLY_SHARE = 0.65  # maximum cost of an early candidate, as a share of the larger candidate's cost
MAX_EARLY = 4  # number of early candidates
MAX_CASCADES = 6  # number of cascades that become candidates


@dataclass(frozen=True)
class _Cascade:
    row: int  # index of the early candidate among candidates whose margins are counted
    early: int
    late: int
    edge: int  # index in MARGINS: examples in later bins leave early

    def answering_candidates(self) -> np.ndarray:
        """Return the index of the candidate that predicts in each bin of margins, (bins,)."""
        return np.where(np.arange(len(MARGINS) + 1) > self.edge, self.early, self.late)


def early_candidates(state: SearchState) -> tuple[int, ...]:
    """Return the indices of candidates whose margins are counted, at most MAX_EARLY.

    Each can start a cascade, and has a better criterion than all cheaper candidates.
    """
    indices, best = [], inf
    early_indices = {early for early, _ in _cascade_pairs(state)}
    for i, candidate in enumerate(state.candidates):
        criterion = inf if candidate.criterion is None else candidate.criterion
        if criterion < best:
            best = criterion
            indices += [i] if i in early_indices else []
    return tuple(indices[-MAX_EARLY:])


def _cascade_pairs(state: SearchState) -> list[tuple[int, int]]:
    heads = [i for i, candidate in enumerate(state.candidates) if candidate.head]
    parts = {i: set(stitched_network.path_prefixes(state.candidates[i].paths)) for i in heads}
    prices = {i: candidates.candidate_price(state, state.candidates[i]) for i in heads}
    early_indices = [i for i in heads if _is_within_budget(state, state.candidates[i])]
    return [
        (i, j) for i in early_indices for j in heads if parts[i] < parts[j] and prices[i] <= MAX_EARLY_SHARE * prices[j]
    ]


def _is_within_budget(state: SearchState, candidate: Candidate) -> bool:
    mean, worst = candidates.candidate_cost(state, candidate), candidates.worst_cost(state, candidate)
    is_within = candidates.is_within_budget
    return is_within(state.params, mean) and is_within(state.params, worst, candidates.LATE_FACTOR)


def finish_candidates(state: SearchState) -> SearchState:
    """Add the best cascades, remove candidates that exceed the budget, and sort the rest by cost."""
    cascades = _choose_cascades(state) if state.examples else []
    candidates_and_cascades = [*state.candidates, *(_to_candidate(state, cascade) for cascade in cascades)]
    correct = _extend_right_answers(state, cascades)
    kept_indices = [i for i, candidate in enumerate(candidates_and_cascades) if _is_within_budget(state, candidate)]
    kept_indices.sort(key=lambda i: candidates.sort_key(state, candidates_and_cascades[i]))
    return replace(
        state,
        candidates=tuple(candidates_and_cascades[i] for i in kept_indices),
        right=correct[np.ix_(kept_indices, kept_indices)] if correct.size else correct,
        by_margin=state.by_margin[:0],
        in_bin=state.in_bin[:0],
    )


def _choose_cascades(state: SearchState) -> list[_Cascade]:
    """Return cascades more accurate than all cheaper candidates, best first, spaced by FRONT_SPACING."""
    rows = {early: row for row, early in enumerate(early_candidates(state))}
    pairs = [(rows[early], early, late) for early, late in _cascade_pairs(state) if early in rows]
    cascades = [_Cascade(*pair, edge) for pair in pairs for edge in range(len(MARGINS))]
    usable = []
    for cascade in cascades:
        candidate = _to_candidate(state, cascade)
        if candidate.early and 0 < candidate.early.share < 1 and _is_within_budget(state, candidate):
            usable.append(
                (_right_with_cascade(state, cascade, cascade), candidates.candidate_price(state, candidate), cascade)
            )
    plain_candidates = [
        (int(state.right[i, i]), candidates.candidate_price(state, candidate))
        for i, candidate in enumerate(state.candidates)
    ]
    selected: list[_Cascade] = []
    last_price = inf
    for correct, price, cascade in sorted(usable, key=lambda row: (-row[0], row[1])):
        is_beaten = any(plain >= correct and plain_price <= price for plain, plain_price in plain_candidates)
        if price <= FRONT_SPACING * last_price and not is_beaten:
            selected.append(cascade)
            last_price = price
    return selected[:MAX_CASCADES]


def _to_candidate(state: SearchState, cascade: _Cascade) -> Candidate:
    early_candidate, bin_counts = state.candidates[cascade.early], state.in_bin[cascade.row]
    share = float(bin_counts[cascade.edge + 1 :].sum() / bin_counts.sum())
    exit = EarlyExit(early_candidate.paths, early_candidate.head, MARGINS[cascade.edge], share)
    return replace(state.candidates[cascade.late], kind="cascade", criterion=None, early=exit)


def _extend_right_answers(state: SearchState, cascades: Sequence[_Cascade]) -> np.ndarray:
    if not state.right.size:
        return state.right
    nets = len(state.candidates)
    correct = np.pad(state.right, (0, len(cascades)))
    for i, cascade in enumerate(cascades, nets):
        correct[i, :nets] = correct[:nets, i] = _right_with_candidates(state, cascade)
        for j, other_cascade in enumerate(cascades, nets):
            correct[i, j] = _right_with_cascade(state, cascade, other_cascade)
    return correct


def _right_with_candidates(state: SearchState, cascade: _Cascade) -> np.ndarray:
    bins = np.arange(len(MARGINS) + 1)
    return np.asarray(state.by_margin[cascade.row, bins, cascade.answering_candidates()].sum(axis=0))


def _right_with_cascade(state: SearchState, first: _Cascade, second: _Cascade) -> int:
    """Return the number of examples that both cascades predict correctly.

    If their early candidates differ, the number is an estimate that treats the cascades as independent given the
    prediction of the larger late candidate.
    """
    if first.row == second.row:
        bins = np.arange(len(MARGINS) + 1)
        return int(state.by_margin[first.row, bins, first.answering_candidates(), second.answering_candidates()].sum())
    late = max(first.late, second.late)
    late_correct = int(state.right[late, late])
    correct_in_both = [float(_right_with_candidates(state, cascade)[late]) for cascade in (first, second)]
    totals = [_right_with_cascade(state, cascade, cascade) for cascade in (first, second)]
    a, b = correct_in_both
    c, d = (total - correct for total, correct in zip(totals, correct_in_both, strict=True))
    estimate = a * b / max(late_correct, 1) + c * d / max(state.examples - late_correct, 1)
    return min(round(estimate), *totals)

"""Comparison of candidates: accuracy, costs, the choice, and gains from joining and stitching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, sqrt
from typing import Any

from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import joint_head
from fedquilt.models.stitching.search import candidates
from fedquilt.models.stitching.search.state import Candidate, SearchState

NORMAL_95 = 1.96  # standard errors of a 95 % interval


def count_correct(state: SearchState, index: int) -> int:
    return int(state.right[index, index]) if state.examples else 0


def heldout_accuracy(state: SearchState, index: int) -> float | None:
    return count_correct(state, index) / state.examples if state.examples else None


def accuracy_interval(correct: int, examples: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of an accuracy, or (0, 1) without examples."""
    if not examples:
        return 0.0, 1.0
    share, correction = correct / examples, NORMAL_95**2 / examples
    half_width = NORMAL_95 * sqrt(share * (1 - share) / examples + correction / (4 * examples))
    return max((share + correction / 2 - half_width) / (1 + correction), 0.0), min(
        (share + correction / 2 + half_width) / (1 + correction), 1.0
    )


def paired_error(state: SearchState, first: int, second: int) -> float:
    """Return the standard error of the difference of two candidates' numbers of correct predictions."""
    right = state.right
    exclusive = float(right[first, first] - right[first, second]), float(right[second, second] - right[first, second])
    return sqrt(sum(exclusive) - (exclusive[0] - exclusive[1]) ** 2 / state.examples)


def choose_candidate(state: SearchState, allowed: Iterable[int] | None = None) -> int | None:
    """Return the index of the cheapest candidate that is not clearly worse than the best, or None.

    Clearly worse means by more than `paired_error`. Without held-out examples the cross-validation criterion decides.
    """
    indices = list(range(len(state.candidates)) if allowed is None else allowed)
    if not indices:
        return None
    if not state.examples:
        return min(indices, key=lambda i: _sort_key_without_examples(state.candidates[i]))
    best = max(indices, key=lambda i: (count_correct(state, i), -i))
    missing_correct = {i: count_correct(state, best) - count_correct(state, i) for i in indices}
    return next(i for i in sorted(indices) if missing_correct[i] <= paired_error(state, i, best))


def _sort_key_without_examples(candidate: Candidate) -> tuple[float, float]:
    return inf if candidate.criterion is None else candidate.criterion, -(candidate.score or 0.0)


def candidates_on_front(state: SearchState) -> list[bool]:
    costs = [candidates.candidate_cost(state, candidate) for candidate in state.candidates]
    prices = [(cost.flops, cost.read_bytes, cost.weight_bytes) for cost in costs]
    return pareto_front([heldout_accuracy(state, i) for i in range(len(costs))], prices)


def pareto_front(gain: Sequence[float | None], prices: Sequence[Sequence[float]]) -> list[bool]:
    """Return for each candidate whether it is on the Pareto front of high gain and low prices.

    A candidate with gain None is not on the front.
    """

    def dominates(first: int, second: int) -> bool:
        first_costs, second_costs = (-(gain[first] or 0.0), *prices[first]), (-(gain[second] or 0.0), *prices[second])
        return first_costs != second_costs and all(a <= b for a, b in zip(first_costs, second_costs, strict=True))

    known_indices = [i for i, value in enumerate(gain) if value is not None]
    return [i in known_indices and not any(dominates(j, i) for j in known_indices) for i in range(len(gain))]


def accuracy_gains(state: SearchState) -> dict[str, float | None]:
    """Return the gains in held-out accuracy, as shares, of "joined" taps and "stitched" paths.

    A gain is the difference between the best candidates with and without, or None if one of the two is missing.
    """
    pairs = _best_candidates_to_compare(state).items()
    return {name: None if None in pair or not state.examples else _gain(state, *pair) for name, pair in pairs}


def _gain(state: SearchState, first: Any, second: Any) -> float:
    return (count_correct(state, first) - count_correct(state, second)) / state.examples


def _best_candidates_to_compare(state: SearchState) -> dict[str, tuple[int | None, int | None]]:
    comparable = [i for i, each in enumerate(state.candidates) if each.kind not in ("aligned", "cascade")]

    def best_of(predicate: Callable[[Candidate], bool], expected: bool) -> int | None:
        matching = [i for i in comparable if predicate(state.candidates[i]) == expected]
        return max(matching, key=lambda i: (count_correct(state, i), -i), default=None)

    def is_stitched(candidate: Candidate) -> bool:
        return not all(candidates.is_native_path(state.stock, path) for path in candidate.paths)

    kinds: dict[str, Callable[[Candidate], bool]] = {
        "joined": lambda each: each.kind == "joined",
        "stitched": is_stitched,
    }
    return {name: (best_of(is_kind, True), best_of(is_kind, False)) for name, is_kind in kinds.items()}


def describe_validation(state: SearchState) -> list[str]:
    rows = list(enumerate(state.candidates, 1))
    front = candidates_on_front(state)
    lines = [
        f"{number}: {candidate_name(candidate)}: {_format_accuracy(state, number - 1)}{_format_costs(state, candidate)}"
        f"{', on the front' if front[number - 1] else ''}"
        for number, candidate in rows
    ]
    chosen = choose_candidate(state)
    if chosen is None:
        return ["no candidate"]
    lines.append(f"chosen: {candidate_name(state.candidates[chosen])}")
    if not state.examples:
        return lines
    for kind, (with_kind, without_kind) in _best_candidates_to_compare(state).items():
        activity = "joining taps" if kind == "joined" else "stitching"
        if with_kind is None or without_kind is None:
            lines.append(f"{activity}: no candidates to compare")
            continue
        points = 100 * _gain(state, with_kind, without_kind)
        noise = 100 * paired_error(state, with_kind, without_kind) / state.examples
        verdict = f"adds {points:.1f} points" if points > 0 else f"does not pay: {points:.1f} points"
        basis = f"on {state.examples} held-out examples (standard error {noise:.1f})"
        names = (candidate_name(state.candidates[candidate]) for candidate in (with_kind, without_kind))
        lines.append(f"{activity} {verdict} {basis}: {' compared with '.join(names)}")
    return lines


def to_network(state: SearchState, candidate: Candidate) -> stitched_network.StitchedNetwork:
    """Convert a candidate to a network, in which classes without examples score -inf."""
    if not candidate.head:
        donor = state.stock.donors[state.stock.blocks[candidate.paths[0][-1]].donor]
        return stitched_network.StitchedNetwork(candidate.paths, state.junctions, align=donor.align)
    early = candidate.early and replace(candidate.early, head=joint_head.export_head(candidate.early.head))
    head = joint_head.export_head(candidate.head)
    return stitched_network.StitchedNetwork(candidate.paths, state.junctions, head=head, early=early)


def _format_costs(state: SearchState, candidate: Candidate) -> str:
    amounts = candidates.measure_cost(state.params, candidates.candidate_cost(state, candidate))
    units = {"mflop": "MFLOP", "ms": "ms", "mb": "MB", "joules": "J"}
    text = "".join(f", {amount:.3g} {units[name]}" for name, amount in amounts.items() if amount is not None)
    text += f" on {state.params.board}" if state.params.board else ""
    if candidate.early is None:
        return text
    worst = candidates.worst_cost(state, candidate).flops / 1e6
    return f"{text}, {worst:.3g} MFLOP at worst, {100 * candidate.early.share:.0f} % leave early"


def summarise_candidates(state: SearchState) -> list[dict[str, Any]]:
    front, chosen = candidates_on_front(state), choose_candidate(state)
    return [{**_summarise_candidate(state, i), "front": best, "chosen": i == chosen} for i, best in enumerate(front)]


def _summarise_candidate(state: SearchState, index: int) -> dict[str, Any]:
    candidate, share = state.candidates[index], heldout_accuracy(state, index)
    cost, early = candidates.candidate_cost(state, candidate), candidate.early
    return {
        "kind": candidate.kind,
        "taps": [list(path) for path in candidate.paths],
        "accuracy": share,
        "interval": accuracy_interval(count_correct(state, index), state.examples),
        "examples": state.examples,
        "criterion": candidate.criterion,
        "ridge": candidate.ridge,
        "score": candidate.score,
        "flops": cost.flops,
        "read_bytes": cost.read_bytes,
        "weight_bytes": cost.weight_bytes,
        "worst_flops": candidates.worst_cost(state, candidate).flops,
        "early": None if early is None else {"taps": [list(path) for path in early.taps], "share": early.share},
    }


def candidate_name(candidate: Candidate) -> str:
    early = candidate.early.taps if candidate.early else ()
    return stitched_network.network_name(candidate.paths, bool(candidate.head), early)


def _format_accuracy(state: SearchState, index: int) -> str:
    share = heldout_accuracy(state, index)
    if share is None:
        return "not validated"
    low, high = accuracy_interval(count_correct(state, index), state.examples)
    return f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}] on {state.examples} held-out"

"""Comparison of candidates: accuracy, costs, and gains from joining and stitching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

from fedquilt.models.stitching import display_names, stitched_network
from fedquilt.models.stitching.algebra import joint_head
from fedquilt.models.stitching.search import pareto_front
from fedquilt.models.stitching.search.candidates import candidate_criterion, is_native_path
from fedquilt.models.stitching.search.pareto_front import InferenceCost
from fedquilt.models.stitching.search.state import Candidate, SearchState


def heldout_accuracy(state: SearchState, candidate: Candidate) -> float | None:
    """Return the share of correct predictions on held-out examples, or None if there are none."""
    return candidate.right / state.examples if state.examples else None


def ranking_key(state: SearchState, candidate: Candidate) -> tuple[float, ...]:
    """Return a sort key, larger is better: correct predictions less the price, then fewer blocks.

    Without held-out examples the criterion of generalised cross-validation decides, then the score.
    """
    size, criterion = len(stitched_network.path_prefixes(candidate.paths)), candidate_criterion(candidate)
    by_examples = (
        (candidate.right - compute_cost_penalty(state, candidate) * state.examples / 100, -size)
        if state.examples
        else ()
    )
    return (*by_examples, -criterion, candidate.score or 0.0, -size)


def candidate_cost(state: SearchState, candidate: Candidate) -> InferenceCost:
    return pareto_front.inference_cost(state.stock, candidate.paths, len(state.stock.labels) if candidate.head else 0)


def compute_cost_penalty(state: SearchState, candidate: Candidate) -> float:
    """Return the penalty for a candidate's FLOPs, weight bytes and latency, in percentage points of accuracy."""
    params, own = state.params, candidate_cost(state, candidate)
    points = params.price_mflop * own.flops / 1e6 + params.price_mb * own.weight_bytes / 1e6
    if params.price_ms:
        points += params.price_ms * (pareto_front.inference_ms(own.flops, own.read_bytes, params.board) or 0.0)
    return points


def candidates_on_front(state: SearchState) -> list[bool]:
    costs = [candidate_cost(state, each) for each in state.candidates]
    prices = [(own.flops, own.read_bytes, own.weight_bytes) for own in costs]
    return pareto_front.pareto_front([heldout_accuracy(state, each) for each in state.candidates], prices)


def best_candidate(state: SearchState, among: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate with the highest `ranking_key`, or None if there are none."""
    return max(among, key=lambda each: ranking_key(state, each), default=None)


def accuracy_gains(state: SearchState) -> dict[str, float | None]:
    """Return the gains in held-out accuracy by joining taps and by stitching, or None if unknown.

    "joined" compares the best set of several taps with the best single tap. "stitched" compares the best network with a
    stitched path with the best network without.
    """
    found: dict[str, float | None] = {}
    for name, (one, other) in _best_candidates_to_compare(state).items():
        both = [heldout_accuracy(state, each) if each else None for each in (one, other)]
        found[name] = None if both[0] is None or both[1] is None else both[0] - both[1]
    return found


def _best_candidates_to_compare(state: SearchState) -> dict[str, tuple[Candidate | None, Candidate | None]]:
    known = [each for each in state.candidates if each.kind != "aligned"]

    def best_pair(does: Callable[[Candidate], bool]) -> tuple[Candidate | None, Candidate | None]:
        return best_candidate(state, [c for c in known if does(c)]), best_candidate(
            state, [c for c in known if not does(c)]
        )

    def is_stitched(candidate: Candidate) -> bool:
        return not all(is_native_path(state.stock, path) for path in candidate.paths)

    return {"joined": best_pair(lambda each: each.kind == "joined"), "stitched": best_pair(is_stitched)}


def describe_validation(state: SearchState) -> list[str]:
    """Return lines on accuracy and costs of each candidate, best first, and on the choice and its gain."""
    ordered = sorted(state.candidates, key=lambda each: ranking_key(state, each), reverse=True)
    lines = [f"{candidate_name(each)}: {_format_accuracy(state, each)}{_format_costs(state, each)}" for each in ordered]
    lines.append(f"chosen: {candidate_name(ordered[0])}")
    if not state.examples:
        return lines
    for what, (one, other) in _best_candidates_to_compare(state).items():
        doing = "joining taps" if what == "joined" else "stitching"
        if one is None or other is None:
            lines.append(f"{doing}: nothing to compare with")
            continue
        by = 100 * (one.right - other.right) / state.examples
        share = (one.right + other.right) / 2 / state.examples
        noise = 100 * sqrt(share * (1 - share) / state.examples)
        verdict = f"adds {by:.1f} points" if by > 0 else f"does not pay: {by:.1f} points"
        where = f"on {state.examples} held-out examples (an accuracy's standard error there: {noise:.1f})"
        lines.append(f"{doing} {verdict} {where}: {candidate_name(one)} beside {candidate_name(other)}")
    return lines


def to_network(state: SearchState, candidate: Candidate) -> stitched_network.StitchedNetwork:
    """Convert a candidate to a network, in which classes without examples score -inf."""
    if not candidate.head:
        donor = state.stock.donors[state.stock.blocks[candidate.paths[0][-1]].donor]
        return stitched_network.StitchedNetwork(candidate.paths, state.junctions, align=donor.align)
    return stitched_network.StitchedNetwork(
        candidate.paths, state.junctions, head=joint_head.export_head(candidate.head)
    )


def _format_costs(state: SearchState, candidate: Candidate) -> str:
    own, board = candidate_cost(state, candidate), state.params.board
    took = pareto_front.inference_ms(own.flops, own.read_bytes, board) if board else None
    there = "" if took is None else f", {took:.3g} ms on {board}"
    return f", {own.flops / 1e6:.3g} MFLOP, {own.weight_bytes / 1e6:.3g} MB{there}"


def summarise_all(state: SearchState) -> list[dict[str, Any]]:
    pairs = zip(state.candidates, candidates_on_front(state), strict=True)
    return [{**summarise_candidate(state, each), "front": best} for each, best in pairs]


def summarise_candidate(state: SearchState, candidate: Candidate) -> dict[str, Any]:
    own = candidate_cost(state, candidate)
    return {
        "kind": candidate.kind,
        "taps": [list(path) for path in candidate.paths],
        "accuracy": heldout_accuracy(state, candidate),
        "examples": state.examples,
        "criterion": candidate.criterion,
        "ridge": candidate.ridge,
        "score": candidate.score,
        "residual": candidate.residual,
        "flops": own.flops,
        "read_bytes": own.read_bytes,
        "weight_bytes": own.weight_bytes,
    }


def candidate_name(candidate: Candidate) -> str:
    return display_names.network_name(candidate.paths, bool(candidate.head))


def _format_accuracy(state: SearchState, candidate: Candidate) -> str:
    share = heldout_accuracy(state, candidate)
    return "not validated" if share is None else f"{100 * share:.1f} % on {state.examples} held-out"

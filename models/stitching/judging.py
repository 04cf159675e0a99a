"""Compare candidates of a stitching job: accuracy, costs, what joining and stitching add, and each of them in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

from fedquilt.models.stitching import front, joint_head, names, stitched
from fedquilt.models.stitching.candidates import criterion_of, is_native
from fedquilt.models.stitching.front import Cost
from fedquilt.models.stitching.search_state import Candidate, State


def accuracy(state: State, candidate: Candidate) -> float | None:
    """Share of right answers on held-out examples; None: nothing was held out."""
    return candidate.right / state.examples if state.examples else None


def merit(state: State, candidate: Candidate) -> tuple[float, ...]:
    """Sort key of a candidate, larger is better: right answers on held-out examples less its price, then fewer blocks.

    If nothing is held out, the criterion of generalised cross-validation decides, then the score.
    """
    size, criterion = len(stitched.prefixes(candidate.paths)), criterion_of(candidate)
    by_examples = (candidate.right - price(state, candidate) * state.examples / 100, -size) if state.examples else ()
    return (*by_examples, -criterion, candidate.score or 0.0, -size)


def cost(state: State, candidate: Candidate) -> Cost:
    """Cost of one example."""
    return front.cost(state.stock, candidate.paths, len(state.stock.labels) if candidate.head else 0)


def price(state: State, candidate: Candidate) -> float:
    """Price of a candidate's costs in points of accuracy, by the job's parameters."""
    params, own = state.params, cost(state, candidate)
    points = params.price_mflop * own.flops / 1e6 + params.price_mb * own.weight_bytes / 1e6
    if params.price_ms:
        points += params.price_ms * (front.milliseconds(own.flops, own.read_bytes, params.board) or 0.0)
    return points


def on_front(state: State) -> list[bool]:
    """Whether each candidate is on the front: none is at least as accurate and as cheap, and better in one of these."""
    costs = [cost(state, each) for each in state.candidates]
    prices = [(own.flops, own.read_bytes, own.weight_bytes) for own in costs]
    return front.undominated([accuracy(state, each) for each in state.candidates], prices)


def best(state: State, among: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the highest `merit`; None of none."""
    return max(among, key=lambda each: merit(state, each), default=None)


def gains(state: State) -> dict[str, float | None]:
    """Gain in accuracy on held-out examples by joining taps and by stitching, as shares; None: unknown.

    "joined" compares the best set of several taps with the best single tap, "stitched" the best network with a stitched
    path with the best one without.
    """
    found: dict[str, float | None] = {}
    for name, (one, other) in _sides(state).items():
        both = [accuracy(state, each) if each else None for each in (one, other)]
        found[name] = None if both[0] is None or both[1] is None else both[0] - both[1]
    return found


def _sides(state: State) -> dict[str, tuple[Candidate | None, Candidate | None]]:
    """The best candidate with and the best one without joining, and likewise with and without stitching."""
    known = [each for each in state.candidates if each.kind != "aligned"]

    def sides(does: Callable[[Candidate], bool]) -> tuple[Candidate | None, Candidate | None]:
        return best(state, [c for c in known if does(c)]), best(state, [c for c in known if not does(c)])

    def is_stitched(candidate: Candidate) -> bool:
        return not all(is_native(state.stock, path) for path in candidate.paths)

    return {"joined": sides(lambda each: each.kind == "joined"), "stitched": sides(is_stitched)}


def told(state: State) -> list[str]:
    """The validation in sentences: every candidate, the chosen one, and the gains of joining and stitching."""
    ordered = sorted(state.candidates, key=lambda each: merit(state, each), reverse=True)
    lines = [f"{name(each)}: {_percent(state, each)}{_costs(state, each)}" for each in ordered]
    lines.append(f"chosen: {name(ordered[0])}")
    if not state.examples:
        return lines
    for what, (one, other) in _sides(state).items():
        doing = "joining taps" if what == "joined" else "stitching"
        if one is None or other is None:
            lines.append(f"{doing}: nothing to compare with")
            continue
        by = 100 * (one.right - other.right) / state.examples
        share = (one.right + other.right) / 2 / state.examples
        noise = 100 * sqrt(share * (1 - share) / state.examples)
        verdict = f"adds {by:.1f} points" if by > 0 else f"does not pay: {by:.1f} points"
        where = f"on {state.examples} held-out examples (an accuracy's standard error there: {noise:.1f})"
        lines.append(f"{doing} {verdict} {where}: {name(one)} beside {name(other)}")
    return lines


def handed_out(state: State, candidate: Candidate) -> stitched.Network:
    """A candidate as a network of its own, in which classes without examples score -inf in any runtime."""
    if not candidate.head:
        donor = state.stock.donors[state.stock.blocks[candidate.paths[0][-1]].donor]
        return stitched.Network(candidate.paths, state.junctions, align=donor.align)
    return stitched.Network(candidate.paths, state.junctions, head=joint_head.handed_out(candidate.head))


def _costs(state: State, candidate: Candidate) -> str:
    own, board = cost(state, candidate), state.params.board
    took = front.milliseconds(own.flops, own.read_bytes, board) if board else None
    there = "" if took is None else f", {took:.3g} ms on {board}"
    return f", {own.flops / 1e6:.3g} MFLOP, {own.weight_bytes / 1e6:.3g} MB{there}"


def summaries(state: State) -> list[dict[str, Any]]:
    """The `summary` of each candidate, with `on_front` under "front"."""
    pairs = zip(state.candidates, on_front(state), strict=True)
    return [{**summary(state, each), "front": best} for each, best in pairs]


def summary(state: State, candidate: Candidate) -> dict[str, Any]:
    """One candidate's entry in the result; "flops", "read_bytes" and "weight_bytes" are costs of one example."""
    own = cost(state, candidate)
    return {
        "kind": candidate.kind,
        "taps": [list(path) for path in candidate.paths],
        "accuracy": accuracy(state, candidate),
        "examples": state.examples,
        "criterion": candidate.criterion,
        "ridge": candidate.ridge,
        "score": candidate.score,
        "residual": candidate.residual,
        "flops": own.flops,
        "read_bytes": own.read_bytes,
        "weight_bytes": own.weight_bytes,
    }


def name(candidate: Candidate) -> str:
    """A candidate's name (`names.network`)."""
    return names.network(candidate.paths, bool(candidate.head))


def _percent(state: State, candidate: Candidate) -> str:
    share = accuracy(state, candidate)
    return "not validated" if share is None else f"{100 * share:.1f} % on {state.examples} held-out"

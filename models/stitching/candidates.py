"""The networks that may be handed out once the search is over: which taps are gathered, and what is made of them.

A tap is the end of a path: of a donor's own beginning at any depth, or of a finished network before its terminating
block. Devices send sums of all taps once; every candidate is solved from sub-matrices of these, so that trying one
costs them nothing (`fedquilt.models.stitching.joint_head`). Candidates are
    joined    the sets of taps that generalised cross-validation likes best, of all donors, of each, and without what
              was stitched
    donor     each unmodified donor at its best depth and at its last one, with a new head
    stitched  each finished network alone, with a new head
and are compared on held-out examples. So the result falls behind the best donor by validation noise at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite, sqrt
from typing import Any

import numpy as np

from fedquilt.core import derive_seed
from fedquilt.models.stitching import class_moments, front, joint_head, stitched
from fedquilt.models.stitching.class_moments import Sums
from fedquilt.models.stitching.front import Cost
from fedquilt.models.stitching.joint_head import Joined, Layout, Standard, Strength
from fedquilt.models.stitching.search_state import Candidate, Finalist, Params, State, Stored, describe
from fedquilt.models.stitching.stitched import Stock

Path = tuple[str, ...]

SHALLOW = 0.5  # of a donor's depth: taps before it step down first
APART = 3.0  # strengths that differ by a larger factor may choose other taps
KEPT = 2  # finished networks that keep their tap as long as a donor's deep one can step down


# -- which taps -----------------------------------------------------------------------------------


def begun(state: State) -> State:
    """What follows the search: taps are gathered, or aligned networks validated; "done" where there is neither."""
    if state.params.head == "aligned":
        found = tuple(aligned(finalist) for finalist in state.finalists)
        return replace(state, phase="validate" if found else "done", candidates=found)
    taps, notes = chosen_taps(state)
    return replace(state, phase="gather" if taps else "done", taps=taps, log=(*state.log, *notes))


def chosen_taps(state: State) -> tuple[tuple[Path, ...], list[str]]:
    """The taps to gather, and why some are not; at most `Params.features` wide, but for each donor's last."""
    params, stock = state.params, state.stock
    bodies = list(dict.fromkeys(finalist.path[:-1] for finalist in state.finalists))
    if not params.join:
        return tuple(bodies), []
    own = [path for donor in sorted(stock.donors) for path in native_taps(stock, donor)]
    made = [body for body in bodies if body not in own]
    last = [path for path in own if depth(stock, path) == 1]
    down = sorted((path for path in own if path not in last), key=lambda path: (depth(stock, path), path))
    shallow = [path for path in down if depth(stock, path) < SHALLOW]
    first = [*shallow, *made[KEPT:][::-1], *down[len(shallow) :], *made[:KEPT][::-1]]  # the first goes first
    gone: list[Path] = []
    while first and sum(width(stock, params, path) for path in (*last, *first)) > params.features:
        gone.append(first.pop(0))
    notes = []
    if gone:
        notes.append(
            f"not gathered, as all taps together would have more than {params.features} features: "
            + ", ".join(named(stock, path) for path in gone)
        )
    return tuple(path for path in (*own, *made) if path not in gone), notes


def native_taps(stock: Stock, donor: str) -> list[Path]:
    """A donor's own beginnings, up to the last block before its classifier, that end in maps; the last one anyway."""
    blocks = stock.donors[donor].blocks[:-1]
    paths = [blocks[: i + 1] for i in range(len(blocks))]
    return [path for path in paths if len(stock.blocks[path[-1]].out_shape) > 1 or path == paths[-1]]


def depth(stock: Stock, path: Path) -> float:
    """How far through its donor a path's last block lies: 1 is the last before the classifier."""
    last = stock.blocks[path[-1]]
    return (last.index + 1) / (len(stock.donors[last.donor].blocks) - 1)


def width(stock: Stock, params: Params, path: Path) -> int:
    """Features of a tap as they are sent."""
    channels = stock.blocks[path[-1]].out_shape[0]
    return min(channels, params.random_features or channels)


def layout(state: State) -> Layout:
    return Layout(tuple(width(state.stock, state.params, path) for path in state.taps))


def is_native(stock: Stock, path: Path) -> bool:
    return stitched.is_native([stock.blocks[name] for name in path])


def projection_seed(state: State) -> int:
    return derive_seed("features", state.seed)


def aligned(finalist: Finalist) -> Candidate:
    """A finished network as it is, with its last donor's classifier."""
    return Candidate("aligned", (finalist.path,), score=finalist.score, residual=_worst(finalist.residuals))


# -- what is gathered -----------------------------------------------------------------------------


def stored(sums: Sums, exact: bool = False) -> Stored:
    """Sums as a state keeps them, which is written after each round: second moments as float32, unless `exact`.

    They are about the mean, so nothing large cancels, and the rounding is far below the weakest ridge that is tried.
    """
    half = class_moments.halved(sums.scatter)
    return Stored(sums.counts, sums.totals, half if exact else half.astype(np.float32))


def restored(kept: Stored | None) -> Sums | None:
    """Sums that a state keeps, as float64."""
    if kept is None:
        return None
    scatter = class_moments.whole(kept.half, kept.totals.shape[1])
    return Sums(kept.counts, kept.totals, scatter.astype(np.float64, copy=False))


# -- solving --------------------------------------------------------------------------------------


def solved(state: State, sums: Sums) -> tuple[Candidate, ...]:
    """All candidates with their heads, the one with the least criterion first."""
    made = _Solver(joint_head.standardised(sums), layout(state))
    wanted: list[tuple[int, ...]] = [(tap,) for tap in _alone(state, made)]
    if state.params.join:
        wanted = [*_joint(state, made), *wanted]
    found = {frozenset(taps): _candidate(state, made, taps) for taps in wanted}
    return tuple(sorted(found.values(), key=lambda each: (_criterion(each), len(each.paths), each.paths)))


class _Solver:
    """Strengths of sets of taps, each found once."""

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
        """The set of taps that the criterion likes best, in the order in which they join.

        They are chosen with the strength that the best of them has alone, and once more if several want another one.
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
    """Taps that are candidates by themselves: of each donor the best and the last, and what was stitched."""
    stock, taps = state.stock, state.taps
    if not state.params.join:
        return list(range(len(taps)))
    found = [tap for tap, path in enumerate(taps) if not is_native(stock, path) or depth(stock, path) == 1]
    for own in _by_donor(state).values():
        found.append(min(own, key=lambda tap: (made.strength(tap).criterion, tap)))
    return sorted(set(found))


def _joint(state: State, made: _Solver) -> list[tuple[int, ...]]:
    """Sets of several taps: the best of all, its beginnings, the best of each donor, and one to tell stitching's worth.

    That is the best set without stitched taps where the best of all has some, else the best of all and a stitched one.
    """
    every, donors = range(len(state.taps)), _by_donor(state)
    own = sorted(tap for taps in donors.values() for tap in taps)
    best = made.joined(every)
    sets = [best, best[: (len(best) + 1) // 2], best[:2]]
    strange = sorted(set(every) - set(own), key=lambda tap: (made.strength(tap).criterion, tap))
    if set(best) & set(strange):
        sets.append(made.joined(own))
    elif strange:
        sets.append((*best, strange[0]))  # so that what stitching would add to it can be told
    if len(donors) > 1:
        sets += [made.joined(taps) for taps in donors.values()]
    return [taps for taps in sets if len(taps) > 1]


def _by_donor(state: State) -> dict[str, list[int]]:
    """The unmodified taps of each donor."""
    found: dict[str, list[int]] = {}
    for tap, path in enumerate(state.taps):
        if is_native(state.stock, path):
            found.setdefault(state.stock.blocks[path[-1]].donor, []).append(tap)
    return found


def _candidate(state: State, made: _Solver, taps: Sequence[int]) -> Candidate:
    """The head of some taps."""
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


# -- choosing -------------------------------------------------------------------------------------


def accuracy(state: State, candidate: Candidate) -> float | None:
    """On held-out examples; None: nothing was held out."""
    return candidate.right / state.examples if state.examples else None


def merit(state: State, candidate: Candidate) -> tuple[float, ...]:
    """Compares candidates by right answers on held-out examples less their price, the fewer blocks first among equals.

    Where nothing is held out, by the criterion of generalised cross-validation, then by the score.
    """
    size, criterion = len(stitched.prefixes(candidate.paths)), _criterion(candidate)
    by_examples = (candidate.right - price(state, candidate) * state.examples / 100, -size) if state.examples else ()
    return (*by_examples, -criterion, candidate.score or 0.0, -size)


def cost(state: State, candidate: Candidate) -> Cost:
    """Of one example."""
    return front.cost(state.stock, candidate.paths, len(state.stock.labels) if candidate.head else 0)


def price(state: State, candidate: Candidate) -> float:
    """Points of accuracy that its costs are worth to the job."""
    params, own = state.params, cost(state, candidate)
    points = params.price_mflop * own.flops / 1e6 + params.price_mb * own.weight_bytes / 1e6
    if params.price_ms:
        points += params.price_ms * (front.milliseconds(own.flops, own.read_bytes, params.board) or 0.0)
    return points


def on_front(state: State) -> list[bool]:
    """Of each candidate: whether none is as accurate on held-out examples and as cheap, and better in one of them."""
    costs = [cost(state, each) for each in state.candidates]
    prices = [(own.flops, own.read_bytes, own.weight_bytes) for own in costs]
    return front.undominated([accuracy(state, each) for each in state.candidates], prices)


def _criterion(candidate: Candidate) -> float:
    return float("inf") if candidate.criterion is None else candidate.criterion


def best(state: State, among: Sequence[Candidate]) -> Candidate | None:
    return max(among, key=lambda each: merit(state, each), default=None)


def gains(state: State) -> dict[str, float | None]:
    """What joining taps and what stitching adds to the accuracy on held-out examples, as shares; None: not known.

    "joined" is the best set of several taps beside the best single tap; "stitched" the best network with a stitched
    path in it beside the best without one.
    """
    found: dict[str, float | None] = {}
    for name, (one, other) in _sides(state).items():
        both = [accuracy(state, each) if each else None for each in (one, other)]
        found[name] = None if both[0] is None or both[1] is None else both[0] - both[1]
    return found


def _sides(state: State) -> dict[str, tuple[Candidate | None, Candidate | None]]:
    """For joining and for stitching: the best candidate that does it, and the best that does not."""
    known = [each for each in state.candidates if each.kind != "aligned"]

    def sides(does: Callable[[Candidate], bool]) -> tuple[Candidate | None, Candidate | None]:
        return best(state, [c for c in known if does(c)]), best(state, [c for c in known if not does(c)])

    def is_stitched(candidate: Candidate) -> bool:
        return not all(is_native(state.stock, path) for path in candidate.paths)

    return {"joined": sides(lambda each: each.kind == "joined"), "stitched": sides(is_stitched)}


def told(state: State) -> list[str]:
    """The validation in sentences: every candidate, what was chosen, and what joining and stitching add."""
    ordered = sorted(state.candidates, key=lambda each: merit(state, each), reverse=True)
    lines = [f"{name(state, each)}: {_percent(state, each)}{_costs(state, each)}" for each in ordered]
    lines.append(f"chosen: {name(state, ordered[0])}")
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
        lines.append(f"{doing} {verdict} {where}: {name(state, one)} beside {name(state, other)}")
    return lines


def handed_out(state: State, candidate: Candidate) -> stitched.Network:
    """A candidate as a network by itself. Classes that nobody has score -inf in it, in any runtime."""
    if not candidate.head:
        donor = state.stock.donors[state.stock.blocks[candidate.paths[0][-1]].donor]
        return stitched.Network(candidate.paths, state.junctions, align=donor.align)
    weights, bias = candidate.head["weights"], candidate.head["bias"]
    present = np.flatnonzero(bias > np.float32(joint_head.NEVER)).tolist()
    head = stitched.full_head(weights[present], bias[present], present, len(state.stock.labels))
    return stitched.Network(candidate.paths, state.junctions, head=head)


def _costs(state: State, candidate: Candidate) -> str:
    own, board = cost(state, candidate), state.params.board
    took = front.milliseconds(own.flops, own.read_bytes, board) if board else None
    there = "" if took is None else f", {took:.3g} ms on {board}"
    return f", {own.flops / 1e6:.3g} MFLOP, {own.weight_bytes / 1e6:.3g} MB{there}"


def summaries(state: State) -> list[dict[str, Any]]:
    """What a result tells of each candidate; costs are of one example, "front" is `on_front`."""
    pairs = zip(state.candidates, on_front(state), strict=True)
    return [{**summary(state, each), "front": best} for each, best in pairs]


def summary(state: State, candidate: Candidate) -> dict[str, Any]:
    """What a result tells of a candidate by itself."""
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


def name(state: State, candidate: Candidate) -> str:
    if candidate.kind == "aligned":
        return describe(candidate.paths[0])
    return f"head on {' + '.join(named(state.stock, path) for path in candidate.paths)}"


def named(stock: Stock, path: Path) -> str:
    """A tap in words: an unmodified donor's by its last block."""
    return path[-1] if is_native(stock, path) else f"({describe(path)})"


def _percent(state: State, candidate: Candidate) -> str:
    share = accuracy(state, candidate)
    return "not validated" if share is None else f"{100 * share:.1f} % on {state.examples} held-out"

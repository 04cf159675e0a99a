"""The search over paths, on the coordinator: every step of it.

FedStitch (arXiv 2409.07202), section 3 and Algorithm 1: a frontier of partial networks, each with the
pool of blocks that it may still take. Pure functions of values; `fedquilt.methods.fedstitch` says where
they differ from the paper, and calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from fedquilt import tensors
from fedquilt.core import derive_seed
from fedquilt.models.stitching import candidates, stitched, vote
from fedquilt.models.stitching.search_state import Finalist, Net, Params, State, describe
from fedquilt.models.stitching.stitched import Stock
from fedquilt.models.stitching.vote import Ballot, Winner

STEP = 0.9  # what a path is expected to keep of its score over a tenth of a donor

# -- which block may follow -----------------------------------------------------------------------


def beginnings(stock: Stock) -> tuple[Net, ...]:
    """One net for each donor: its starting block, and every block but the starting ones to choose from."""
    pool = tuple(sorted(name for name, block in stock.blocks.items() if block.kind != "start"))
    starts = sorted(name for name, block in stock.blocks.items() if block.kind == "start")
    return tuple(Net((name,), pool, 1.0) for name in starts)


def offered(net: Net, stock: Stock, params: Params, ends_only: bool = False) -> tuple[str, ...]:
    """The blocks of a net's pool that may come next, sorted.

    No block twice; maps to maps, within the limit of upsampling; nothing but terminating blocks at the
    last place of the path; with aligned heads, only terminating blocks whose classes are aligned.
    """
    last = stock.blocks[net.path[-1]]
    ends_only = ends_only or len(net.path) >= params.depth - 1

    def fits(name: str) -> bool:
        block = stock.blocks[name]
        if block.kind == "end" and params.head == "aligned" and stock.donors[block.donor].align is None:
            return False
        if name in net.path or (ends_only and block.kind != "end"):
            return False
        if params.native_continuation == "exclude" and stitched.continues(last, block):
            return False
        return stitched.compatible(last, block, params.max_upsampling)

    return tuple(name for name in net.pool if fits(name))


def pick(state: State) -> Net:
    """The next net to expand: that which promises most (the longer one first), or any.

    What it promises is its score times STEP for each tenth of its last donor that is still to come: by the
    score alone short paths always go first, and little is ever finished; by blocks, donors cut into many.
    """
    if state.params.order == "best":

        def promise(net: Net) -> float:
            last = state.stock.blocks[net.path[-1]]
            whole = len(state.stock.donors[last.donor].blocks) - 1
            return net.score * STEP ** (10 * (whole - last.index) / whole)

        return min(state.frontier, key=lambda net: (-promise(net), -len(net.path), net.path))
    ordered = sorted(state.frontier, key=lambda net: net.path)
    return ordered[int(tensors.rng("frontier", state.seed, state.turn).integers(len(ordered)))]


# -- one expansion --------------------------------------------------------------------------------


def advance(state: State) -> State:
    """Expand the next partial network; with the budget spent or nothing left, go on to the finished ones.

    When the budget is spent and nothing is finished, partial networks are given terminating blocks only.
    """
    params = state.params
    spent = state.expansions >= params.expansions or len(state.finished) >= params.finished
    if not params.expansions and params.head == "ridge":
        state = replace(state, frontier=())  # nothing is searched for: donors alone are joined
    state = _taken_back(state, spent)
    while state.frontier and not (spent and state.finished):
        net = pick(state)
        state = replace(state, frontier=tuple(other for other in state.frontier if other != net))
        pool = offered(net, state.stock, params, ends_only=spent)
        if pool:
            return replace(state, phase="score", current=net, pool=pool, ballots={}, subround=0)
        state = _taken_back(state, spent)
    state = replace(state, current=None, pool=(), frontier=(), given_up=(), ballots={})
    chosen = tuple(distinct(state))[: params.finalists]
    state = replace(state, finalists=chosen, junctions=_used(state.junctions, chosen), subround=0)
    return candidates.begun(state)


def _taken_back(state: State, spent: bool) -> State:
    """Rather than ending without a network, take the best that was given up, finished ones first."""
    ended = [net for net in state.given_up if is_finished(state, net)]
    if state.finished or not state.given_up or (state.frontier and not (spent and ended)):
        return state
    best = min(ended or state.given_up, key=lambda net: (-net.score, len(net.path), net.path))
    log = (*state.log, f"taken back, as nothing else is left: {describe(best.path)}")
    if ended:
        return replace(state, finished=(best,), given_up=(), log=log)
    return replace(state, frontier=(best,), given_up=tuple(net for net in state.given_up if net != best), log=log)


def is_finished(state: State, net: Net) -> bool:
    """Whether its last block is a terminating one."""
    return state.stock.blocks[net.path[-1]].kind == "end"


def distinct(state: State) -> list[Finalist]:
    """The finished networks, best-scoring first; of those that a head makes equal, one."""
    found: dict[tuple[str, ...], Finalist] = {}
    for net in sorted(state.finished, key=lambda net: (-net.score, len(net.path), net.path)):
        same = net.path[:-1] if state.params.head == "ridge" else net.path  # a head makes the last block idle
        found.setdefault(same, Finalist(net.path, net.score, residuals=net.residuals))
    return list(found.values())


def epsilon(state: State) -> float:
    """How often a device explores in this expansion."""
    params = state.params
    return max(params.explore_floor, params.explore * params.explore_decay**state.expansions)


def coin(state: State, device: str) -> int:
    """The seed of a device's choice in this turn: both sides can draw from it."""
    return derive_seed("coin", state.seed, state.turn, device)


def add_ballots(state: State, ballots: Mapping[str, Ballot]) -> State:
    """One sub-round's votes; the vote closes after the last one, or once every device has voted.

    How many devices there are is not known; but when a sub-round brings no new one, the known ones are all.
    """
    net = state.current
    assert net is not None
    fresh = ballots.keys() - state.ballots.keys()
    voted = {**state.ballots, **ballots}
    known = vote.joined(state.weights, sorted(ballots))
    complete = not fresh or (state.saturated and voted.keys() == known.keys())
    state = replace(
        state, ballots=voted, weights=known, subround=state.subround + 1, saturated=state.saturated or not fresh
    )
    if not complete and state.subround < state.params.subrounds:
        note = f"{describe(net.path)}: {len(voted)} devices have scored {len(state.pool)} blocks"
        return replace(state, log=(note,))
    return close_vote(state)


def close_vote(state: State) -> State:
    """Judge the devices by each other, take the K winners, and drop what is too shallow for this path."""
    params, net = state.params, state.current
    assert net is not None
    rise = 1 + len(net.path) / params.depth
    ranks = vote.cross_ranks(state.ballots, state.pool, params.k) if params.weighted else {}
    weights = vote.reweigh(state.weights, ranks, params.theta, params.alpha * rise, min(params.beta * rise, 1.0))
    counted = weights if params.weighted else dict.fromkeys(weights, 1.0)
    winners = vote.tally(state.ballots, counted, state.pool, params.k)
    dropped: set[str] = set()
    if params.space_optimizer:
        blocks = [state.stock.blocks[name] for name in state.pool]
        dropped = vote.too_shallow(state.ballots, blocks, params.space_margin) - {winner.block for winner in winners}
    state = replace(
        state,
        expansions=state.expansions + 1,
        weights=weights,
        winners=tuple(winners),
        dropped=tuple(sorted(dropped)),
        log=tuple(_vote_notes(state, winners, dropped, ranks, counted)),
    )
    return replace(state, phase="fit") if projected(state) else grow(state, {})


def projected(state: State) -> tuple[str, ...]:
    """The winners that need a junction."""
    assert state.current is not None
    last = state.stock.blocks[state.current.path[-1]]
    names = (winner.block for winner in state.winners)
    return tuple(name for name in names if not stitched.continues(last, state.stock.blocks[name]))


def grow(
    state: State,
    fitted: Mapping[str, dict[str, np.ndarray]],
    residuals: Mapping[str, float | None] = MappingProxyType({}),
) -> State:
    """Stitch the winners to the current path: finished networks are put aside, the others join the frontier.

    `fitted` by the junction's name, `residuals` by the winner's. A child that scores too low is given up.
    """
    net = state.current
    assert net is not None
    kept = tuple(name for name in net.pool if name not in state.dropped)
    frontier, finished, given_up, notes = list(state.frontier), list(state.finished), list(state.given_up), []
    for winner in state.winners:
        left = residuals.get(winner.block)
        score = net.score * max(winner.score, 0.0) * _kept_share(state.params, left)
        pool = tuple(name for name in kept if name != winner.block)
        child = Net((*net.path, winner.block), pool, score, (*net.residuals, left))
        if score < state.params.stop_below:
            given_up.append(child)
            notes.append(f"given up {describe(child.path)}: score {score:.3f} is below {state.params.stop_below:g}")
        elif is_finished(state, child):
            finished.append(child)
            notes.append(f"finished {describe(child.path)}, score {score:.3f}")
        else:
            frontier.append(child)
    if finished:
        given_up = []
    junctions = _used({**state.junctions, **fitted}, [*frontier, *finished, *given_up])
    state = replace(state, frontier=tuple(frontier), finished=tuple(finished), given_up=tuple(given_up))
    return advance(replace(state, junctions=junctions, winners=(), dropped=(), log=(*state.log, *notes)))


def _kept_share(params: Params, residual: float | None) -> float:
    """What a junction's residual leaves of a path's score."""
    return max(1 - residual, 0.0) if params.residual == "weigh" and residual is not None else 1.0


def junctions_of(path: tuple[str, ...]) -> list[str]:
    """Names of the junctions that a path may have."""
    return [stitched.junction_name(path[: i + 1]) for i in range(1, len(path))]


def _used(
    junctions: Mapping[str, dict[str, np.ndarray]], nets: Collection[Net | Finalist]
) -> dict[str, dict[str, np.ndarray]]:
    wanted = {name for net in nets for name in junctions_of(net.path)}
    return {name: junction for name, junction in junctions.items() if name in wanted}


def _vote_notes(
    state: State, winners: list[Winner], dropped: set[str], ranks: Mapping[str, float], weights: Mapping[str, float]
) -> list[str]:
    assert state.current is not None
    total = sum(weights[device] for device in state.ballots)
    notes = [f"{describe(state.current.path)}: {len(state.ballots)} devices scored {len(state.pool)} blocks"]
    for winner in winners:
        notes.append(
            f"picked {winner.block}: score {winner.score:.3f}, {winner.voters} of {len(state.ballots)} devices, "
            f"{100 * winner.votes / total:.0f} % of the weight"
        )
    if ranks:
        best, worst = max(ranks, key=lambda d: (ranks[d], d)), min(ranks, key=lambda d: (ranks[d], d))
        notes.append(
            f"others agree most with {best} (rank {ranks[best]:.2f}, weight now {weights[best]:.3f}), "
            f"least with {worst} (rank {ranks[worst]:.2f}, weight now {weights[worst]:.3f})"
        )
    explorers = sorted(device for device, ballot in state.ballots.items() if ballot.explored)
    if explorers:
        notes.append(f"picked at random: {', '.join(explorers)}")
    if dropped:
        notes.append(f"dropped as too shallow: {', '.join(sorted(dropped))}")
    return notes

"""Steps of the search over paths, on the coordinator.

FedStitch (arXiv 2409.07202), section 3 and Algorithm 1: a frontier of partial networks, each with a pool of candidate
blocks. All functions are pure. `fedquilt.methods.fedstitch` calls them, and its docstring lists the deviations from the
paper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, derive_seed
from fedquilt.models.stitching import stitched_network, vote
from fedquilt.models.stitching.search import candidates
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings, SearchState
from fedquilt.models.stitching.stitched_network import Block, DonorPool
from fedquilt.models.stitching.vote import Ballot, Winner

SCORE_FACTOR = 0.9  # expected factor of a path's score over a tenth of a donor
WEIGHT_STEP = 0.1  # alpha and beta: reward and penalty of a device's weight, times 1 + depth / D_max
EXPLORATION = 0.3  # epsilon of the first expansion
EXPLORATION_DECAY = 0.9  # factor of epsilon per expansion
MIN_EXPLORATION = 0.05
MIN_FINALISTS = 10  # the log explains why there are fewer distinct finalists

# -- order of blocks ------------------------------------------------------------------------------


def starting_networks(donor_pool: DonorPool) -> tuple[ScoredPath, ...]:
    pool = tuple(sorted(name for name, block in donor_pool.blocks.items() if block.kind != "start"))
    starts = sorted(name for name, block in donor_pool.blocks.items() if block.kind == "start")
    return tuple(ScoredPath((name,), pool, 1.0) for name in starts)


def initial_state(params: SearchSettings, seed: int, donor_pool: DonorPool, files: dict[str, BlobRef]) -> SearchState:
    """Return the state before the first vote. With `completion`, whole donors are finished networks."""
    if params.depth is None:
        params = replace(params, depth=max(len(donor.blocks) for donor in donor_pool.donors.values()))
    state = SearchState(params, seed, donor_pool, dict(files), ())
    for net in starting_networks(donor_pool):
        state = _add_path_and_completions(state, net)
    return advance_search(state)


def max_depth(params: SearchSettings) -> int:
    assert params.depth is not None, "set in `initial_state`"
    return params.depth


def eligible_blocks(
    net: ScoredPath, donor_pool: DonorPool, params: SearchSettings, ends_only: bool = False
) -> tuple[str, ...]:
    """Return the blocks of the pool of `net` that may follow `net`, in the order of the pool.

    With `ends_only`, and at the last position of a path, only terminating blocks may follow. A path uses no block
    twice, and enlarges maps at most `max_upsampling` times. With aligned heads, a terminating block needs a donor
    whose classes are aligned with the labels. With `completion`, the rest of the block's donor must fit into the path.
    The path's own next block is left out then, because it needs no vote, and so are terminating blocks of a ridge head.
    """
    last_block, max_blocks = donor_pool.blocks[net.path[-1]], params.depth or len(donor_pool.blocks)
    ends_only = ends_only or len(net.path) >= max_blocks - 1

    def can_follow(name: str) -> bool:
        block = donor_pool.blocks[name]
        if block.kind == "end" and params.head == "aligned" and donor_pool.donors[block.donor].align is None:
            return False
        if name in net.path or (ends_only and block.kind != "end"):
            return False
        if params.completion and not ends_only:
            rest = donor_pool.donors[block.donor].blocks[block.index :]
            if (block.kind == "end" and params.head == "ridge") or stitched_network.is_continuation(last_block, block):
                return False
            if len(net.path) + len(rest) > max_blocks or not set(rest).isdisjoint(net.path):
                return False
        return stitched_network.can_connect(last_block, block, params.max_upsampling)

    return tuple(name for name in net.pool if can_follow(name))


def pick_network(state: SearchState, is_budget_spent: bool = False) -> ScoredPath:
    """Select the partial network to expand next.

    With `is_budget_spent` it is the longest network, with `order` "random" a random one, and otherwise the one with
    the highest promise. The promise is the score, multiplied by SCORE_FACTOR for each tenth of a donor that the path
    has yet to run: by score alone the shortest paths would always be first, and few paths would end. Each block counts
    as its share of its donor, and skipped blocks count as blocks to run. With `completion`, which ends paths without
    votes, the promise is the score. The donors' own prefixes all score 1: donors then alternate, and a donor's prefixes
    are ordered by bisection, the middle one first, then the quarters.
    """
    params, blocks, donors = state.params, state.stock.blocks, state.stock.donors
    if params.order == "random" and not is_budget_spent:
        ordered = sorted(state.frontier, key=lambda net: net.path)
        return ordered[int(tensors.seeded_rng("frontier", state.seed, state.turn).integers(len(ordered)))]

    def remaining_share(net: ScoredPath) -> float:
        blocks_run = (blocks[name] for name in net.path[1:])
        return max(1 - sum(1 / (len(donors[block.donor].blocks) - 1) for block in blocks_run), 0.0)

    def tie_rank(net: ScoredPath) -> tuple[float, ...]:
        last_block = blocks[net.path[-1]]
        return (
            _bisection_rank(last_block.index, len(donors[last_block.donor].blocks) - 1)
            if params.completion
            else (-len(net.path),)
        )

    def promise(net: ScoredPath) -> float:
        return net.score if params.completion else net.score * SCORE_FACTOR ** (10 * remaining_share(net))

    if is_budget_spent:
        return min(state.frontier, key=lambda net: (-len(net.path), -net.score, net.path))
    return min(state.frontier, key=lambda net: (-promise(net), *tie_rank(net), net.path))


def _bisection_rank(index: int, size: int) -> tuple[int, int]:
    """Return a sort key for bisection order: the step in which `index` is the middle, and the index."""
    assert 0 <= index < size
    low, high = 0, size
    step = 0
    while (middle := (low + high) // 2) != index:
        low, high = (low, middle) if index < middle else (middle + 1, high)
        step += 1
    return step, index


# -- one expansion --------------------------------------------------------------------------------


def advance_search(state: SearchState) -> SearchState:
    """Start the vote on the next partial network, or end the search if none is left.

    A spent budget also ends the search, unless no network is finished. Then only terminating blocks may follow.
    """
    params = state.params
    stitched_count = sum(not stitched_network.is_native_path(_path_blocks(state, net)) for net in state.finished)
    is_budget_spent = state.expansions >= params.expansions or stitched_count >= params.finished
    if not params.expansions and params.head == "ridge":
        state = replace(state, frontier=())  # without a search only donors are joined
    while state.frontier and not (is_budget_spent and state.finished):
        net = pick_network(state, is_budget_spent)
        state = replace(state, frontier=tuple(partial for partial in state.frontier if partial != net))
        pool = eligible_blocks(net, state.stock, params, ends_only=is_budget_spent)
        if pool:
            return replace(state, phase="score", current=net, pool=pool, ballots={}, subround=0)
    unexpanded = len(state.frontier)
    state = replace(state, current=None, pool=(), frontier=(), ballots={})
    chosen, notes = choose_finalists(state, unexpanded)
    junctions = _filter_used_junctions(state.junctions, chosen)
    state = replace(state, finalists=chosen, junctions=junctions, subround=0, log=(*state.log, *notes))
    return candidates.end_search(state)


def _path_blocks(state: SearchState, net: ScoredPath) -> list[Block]:
    return [state.stock.blocks[name] for name in net.path]


def is_finished(state: SearchState, net: ScoredPath) -> bool:
    return state.stock.blocks[net.path[-1]].kind == "end"


def distinct_finalists(state: SearchState) -> list[ScoredPath]:
    """Return the finished networks, best first, without duplicates.

    A ridge head replaces the last block, so that networks that differ only there are duplicates.
    """
    finalists: dict[tuple[str, ...], ScoredPath] = {}
    for net in sorted(state.finished, key=lambda net: (-net.score, len(net.path), net.path)):
        key = net.path[:-1] if state.params.head == "ridge" else net.path  # a head replaces the last block
        finalists.setdefault(key, net)
    return list(finalists.values())


def choose_finalists(state: SearchState, unexpanded: int) -> tuple[tuple[ScoredPath, ...], tuple[str, ...]]:
    """Return the finished networks to validate, and a log sentence if there are few or all have one donor.

    Sets of donors alternate, each with its best network first: by scores alone a donor with a skipped block would rank
    above every network stitched from several donors. `unexpanded` is the number of partial networks never expanded.
    """
    finalists, params = distinct_finalists(state), state.params
    sets = [{state.stock.blocks[name].donor for name in finalist.path[:-1]} for finalist in finalists]
    order = vote.alternate_kinds(range(len(finalists)), [" ".join(sorted(names)) for names in sets])
    chosen = tuple(finalists[j] for j in order)[: params.finalists]
    donors_used = set().union(*(sets[j] for j in order[: params.finalists]))
    are_few = len(chosen) < min(MIN_FINALISTS, params.finalists)
    have_one_donor = len(donors_used) < 2 and bool(chosen)
    if not are_few and not have_one_donor:
        return chosen, ()
    if unexpanded:
        reason = f"the budget was spent ({state.expansions} expansions, {len(state.finished)} networks finished): "
        reason += "raise `expansions` or `finished`"
    elif len(state.stock.donors) < 2:
        reason = "the only donor's blocks connect in no other way: add another donor"
    else:
        reason = "no other block can be connected: raise `max_upsampling` or `depth`, or use other donors"
    donors = f"of donor {' and '.join(sorted(donors_used))} alone"
    if not are_few:
        return chosen, (f"all validated networks are {donors}: {reason}",)
    text = f"only {len(chosen)} distinct networks are validated" + (f", {donors}" if have_one_donor else "")
    return chosen, (f"{text}: {reason}",)


def exploration_rate(state: SearchState) -> float:
    return max(MIN_EXPLORATION, EXPLORATION * EXPLORATION_DECAY**state.expansions)


def choice_seed(state: SearchState, device: str) -> int:
    return derive_seed("coin", state.seed, state.turn, device)


def add_ballots(state: SearchState, ballots: Mapping[str, Ballot]) -> SearchState:
    """Add a sub-round's ballots. Close the vote after the last one or, with `close_early`, all devices."""
    net = state.current
    assert net is not None
    new_devices = ballots.keys() - state.ballots.keys()
    voted = {**state.ballots, **ballots}
    weights = vote.add_devices(state.weights, sorted(ballots))
    complete = state.params.close_early and (not new_devices or (state.saturated and voted.keys() == weights.keys()))
    state = replace(
        state, ballots=voted, weights=weights, subround=state.subround + 1, saturated=state.saturated or not new_devices
    )
    if not complete and state.subround < state.params.subrounds:
        note = f"{stitched_network.path_name(net.path)}: {len(voted)} devices have scored {len(state.pool)} blocks"
        return replace(state, log=(note,))
    return close_vote(state)


def close_vote(state: SearchState) -> SearchState:
    """Choose the winners and start to fit their junctions. Without junctions, extend the path at once."""
    params, net = state.params, state.current
    assert net is not None
    weight_step = WEIGHT_STEP * (1 + len(net.path) / max_depth(params))
    ranks = vote.cross_ranks(state.ballots, state.pool, params.k, params.spread, params.judged)
    weights = vote.update_weights(state.weights, ranks, params.theta, weight_step, weight_step, params.normalise)
    winners = vote.tally_votes(state.ballots, weights, state.pool, params.k, params.spread)
    blocks = [state.stock.blocks[name] for name in state.pool]
    dropped = vote.shallow_blocks(state.ballots, blocks, params.space_margin) - {winner.block for winner in winners}
    state = replace(
        state,
        expansions=state.expansions + 1,
        weights=weights,
        winners=tuple(winners),
        dropped=tuple(sorted(dropped)),
        log=tuple(_describe_vote(state, winners, dropped, ranks, weights)),
    )
    return replace(state, phase="fit") if winners_needing_junction(state) else grow_paths(state, {})


def winners_needing_junction(state: SearchState) -> tuple[str, ...]:
    """Return the ids of winning blocks that do not continue the donor of the current path."""
    assert state.current is not None
    last = state.stock.blocks[state.current.path[-1]]
    voted = (winner.block for winner in state.winners)
    return tuple(name for name in voted if not stitched_network.is_continuation(last, state.stock.blocks[name]))


def grow_paths(state: SearchState, fitted: Mapping[str, dict[str, np.ndarray]]) -> SearchState:
    """Add the current path with each winner as a partial or finished network, and advance the search."""
    net, winners = state.current, state.winners
    assert net is not None
    remaining_pool = tuple(name for name in net.pool if name not in state.dropped)
    state = replace(state, winners=(), dropped=())
    notes: list[str] = []
    for winner in winners:
        score = net.score * max(winner.score, 0.0)
        pool = tuple(name for name in remaining_pool if name != winner.block)
        child = ScoredPath((*net.path, winner.block), pool, score)
        finished_count = len(state.finished)
        state = _add_path_and_completions(state, child)
        notes += [
            f"finished {stitched_network.path_name(finished.path)}, score {score:.3f}"
            for finished in state.finished[finished_count:]
        ]
    nets = [*state.frontier, *state.finished]
    return advance_search(
        replace(state, junctions=_filter_used_junctions({**state.junctions, **fitted}, nets), log=(*state.log, *notes))
    )


def _add_path_and_completions(state: SearchState, net: ScoredPath) -> SearchState:
    # Completions by the last block's donor need no junction and no vote, and keep the path's score.
    if is_finished(state, net):
        return replace(state, finished=(*state.finished, net))
    last, params = state.stock.blocks[net.path[-1]], state.params
    donor = state.stock.donors[last.donor]
    rest = donor.blocks[last.index + 1 :]
    if not params.completion or len(net.path) + len(rest) > max_depth(params):
        return replace(state, frontier=(*state.frontier, net))
    paths = [net]
    for name in rest:
        pool = tuple(candidate for candidate in paths[-1].pool if candidate != name)
        paths.append(ScoredPath((*paths[-1].path, name), pool, net.score))
    completed = paths.pop()
    if params.head == "ridge" or donor.align is not None:
        state = replace(state, finished=(*state.finished, completed))
    return replace(state, frontier=(*state.frontier, *paths))


def path_junction_names(path: tuple[str, ...]) -> list[str]:
    return [stitched_network.junction_name(path[: i + 1]) for i in range(1, len(path))]


def _filter_used_junctions(
    junctions: Mapping[str, dict[str, np.ndarray]], nets: Collection[ScoredPath]
) -> dict[str, dict[str, np.ndarray]]:
    used_names = {name for net in nets for name in path_junction_names(net.path)}
    return {name: junction for name, junction in junctions.items() if name in used_names}


def _describe_vote(
    state: SearchState,
    winners: list[Winner],
    dropped_blocks: set[str],
    device_ranks: Mapping[str, float],
    device_weights: Mapping[str, float],
) -> list[str]:
    assert state.current is not None
    total = sum(device_weights[device] for device in state.ballots)
    name = stitched_network.path_name(state.current.path)
    notes = [f"{name}: {len(state.ballots)} devices scored {len(state.pool)} blocks"]
    for winner in winners:
        notes.append(
            f"picked {winner.block}: score {winner.score:.3f}, {winner.voters} of {len(state.ballots)} devices, "
            f"{100 * winner.votes / total:.0f} % of the weight"
        )
    if device_ranks:
        ordered = sorted(device_ranks, key=lambda device: (device_ranks[device], device))
        best, worst = ordered[-1], ordered[0]
        notes.append(
            f"others agree most with {best} (rank {device_ranks[best]:.2f}, weight now {device_weights[best]:.3f}), "
            f"least with {worst} (rank {device_ranks[worst]:.2f}, weight now {device_weights[worst]:.3f})"
        )
    explorers = sorted(device for device, ballot in state.ballots.items() if ballot.explored)
    if explorers:
        notes.append(f"picked at random: {', '.join(explorers)}")
    if dropped_blocks:
        notes.append(f"dropped as too shallow: {', '.join(sorted(dropped_blocks))}")
    return notes

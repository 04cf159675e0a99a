"""Orders to a device in each phase of a stitching job, with their estimated costs.

A task names blocks, and only the files of these blocks and the junctions of its paths are sent with it. Blobs are
addressed by their content, so that naming a block again costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import msgspec

from fedquilt import footprint
from fedquilt.core import BlobRef, DeviceView, Order, Tensors, Work
from fedquilt.models.stitching import (
    candidates,
    class_moments,
    device_statistics,
    least_squares,
    scoring,
    search,
    stitched,
    taps,
)
from fedquilt.models.stitching.search_state import State
from fedquilt.models.stitching.stitched import Block, Stock

RUN_AT_ONCE: Final = 16  # images that an engine runs at once, where memory allows


def score_order(state: State, device: DeviceView) -> Order:
    """Ask one device to score the pool as the next block of the current path."""
    params, net = state.params, state.current
    assert net is not None
    completes = params.criterion != "cka" and search.completes(params)
    blocks = _family(state.stock, net.path, state.pool)
    run = {name: [name] for name in state.pool}  # candidate -> blocks that run to score its output
    if completes:  # the labels judge the output at the end of the donor
        run = {name: _rest(state.stock, name) for name in state.pool}
        blocks |= {name: state.stock.blocks[name] for names in run.values() for name in names}
    ask = scoring.ScoreAsk(
        **_common(state, blocks),
        path=net.path,
        pool=state.pool,
        score_at=params.score_at,
        criterion=params.criterion,
        completes=completes,
        estimator=params.estimator,
        maps=params.maps,
        samples=params.samples,
        screen=params.screen,
        early=params.early,
        early_margin=params.early_margin,
        positions=params.positions,
        ridge=params.ridge,
        bias=params.bias,
        native_factor=1 - params.native_penalty if params.native_continuation == "penalise" else 1.0,
        k=params.k,
        spread=params.spread,
        epsilon=search.epsilon(state),
        coin=search.coin(state, device.device),
    )
    shares = scoring.shares(params.score_at)  # of the images; one is scored
    runs: list[tuple[Block, float]] = [(blocks[name], 1.0) for name in net.path]
    if not device.rounds:  # later tasks find the donors' results in the cache
        family = _family(state.stock, (), state.pool).values()
        runs += [(block, 1.0) for block in family if block.id not in _only_compared(state)]
    if params.score_at != "input":
        tried = min(params.screen / len(state.pool), 1.0) if params.score_at == "hybrid" else 1.0
        runs += [(blocks[name], tried / shares) for names in run.values() for name in names]
    matrices = (
        0
        if params.score_at == "input"
        else least_squares.fit_bytes(blocks[net.path[-1]].out_shape[0], params.positions)
    )
    return _order(state, ask, [net.path], cost(runs, matrices, shares * params.samples))


def fit_order(state: State) -> Order:
    """Ask for the sums that the winners' junctions are solved from."""
    params, net = state.params, state.current
    assert net is not None
    wanted = search.projected(state)
    blocks = _family(state.stock, net.path, wanted)
    ask = device_statistics.FitAsk(
        **_common(state, blocks),
        path=net.path,
        winners=wanted,
        samples=params.fit_samples,
        ridge=params.ridge,
        bias=params.bias,
    )
    ran = [blocks[name] for name in net.path] + list(_family(state.stock, (), wanted).values())
    matrices = least_squares.moments_bytes(blocks[net.path[-1]].out_shape[0])
    return _order(state, ask, [net.path], cost([(each, 1.0) for each in ran], matrices, params.fit_samples))


def gather_order(state: State) -> Order:
    """Ask for the moments of a device's images at all taps."""
    params = state.params
    blocks = {name: state.stock.blocks[name] for path in state.taps for name in path}
    ask = taps.GatherAsk(
        **_common(state, blocks),
        paths=state.taps,
        widths=candidates.layout(state).widths,
        labels=len(state.stock.labels),
        samples=params.head_samples,
        projection_seed=candidates.projection_seed(state),
    )
    return _order(state, ask, state.taps, _gathering(ask))


def moments_order(ask: taps.GatherAsk, files: Mapping[str, BlobRef]) -> Order:
    """Ask for the moments of all of a device's images at taps of unmodified donors."""
    bundles = {name: files[name] for ids in stitched.prefixes(ask.paths) for name in ask.blocks[ids[-1]].files}
    return Order({"phase": "gather", **msgspec.to_builtins(ask)}, bundles, _gathering(ask))


def _gathering(ask: taps.GatherAsk) -> Work:
    """Work of the moments of as many of a device's images as are asked for and are there."""
    runs = [(ask.blocks[ids[-1]], 1.0) for ids in stitched.prefixes(ask.paths)]
    return cost(runs, moments_bytes(ask), ask.samples or 0)


def moments_bytes(ask: taps.GatherAsk) -> int:
    """Memory of the moments of the fewest images that every device sends."""
    rows = taps.LEAST_ROWS if ask.samples is None else min(ask.samples, taps.LEAST_ROWS)
    return class_moments.factor_bytes(rows, sum(ask.widths))


def count_order(state: State) -> Order:
    """Ask for each candidate's number of right answers on held-out examples."""
    paths = tuple(dict.fromkeys(path for candidate in state.candidates for path in candidate.paths))
    blocks = {name: state.stock.blocks[name] for path in paths for name in path}
    ask = taps.CountAsk(
        **_common(state, blocks),
        paths=paths,
        candidates=tuple(tuple(paths.index(path) for path in each.paths) for each in state.candidates),
        align=tuple(None if each.head else groups(state, each.paths[0]) for each in state.candidates),
        labels=len(state.stock.labels),
    )
    order = _order(state, ask, paths, cost([(blocks[ids[-1]], 1.0) for ids in stitched.prefixes(paths)], 0))
    heads = {f"head.{i}": each.head for i, each in enumerate(state.candidates) if each.head}
    return replace(order, bundles={**order.bundles, **heads}, held_out=True)


def _common(state: State, blocks: Mapping[str, Block]) -> dict[str, Any]:
    return {"turn": state.turn, "input": state.stock.input, "blocks": dict(blocks)}


def _order(state: State, ask: scoring.Ask, paths: Iterable[tuple[str, ...]], work: Work) -> Order:
    bundles: dict[str, Tensors | BlobRef] = {}
    idle = _only_compared(state) if state.phase == "score" else set()
    scored = state.pool if state.phase == "score" and state.params.score_at != "input" else ()
    for block in ask.blocks.values():
        if block.id not in idle:
            bundles |= {name: state.files[name] for name in block.files}
        if block.id in scored:
            bundles |= {name: state.files[name] for name in block.scored.files}
    for path in paths:
        bundles |= {name: state.junctions[name] for name in search.junctions_of(path) if name in state.junctions}
    return Order({"phase": state.phase, **msgspec.to_builtins(ask)}, bundles, work)


def _only_compared(state: State) -> set[str]:
    """Ids of blocks that no device runs: the deepest candidate of each donor, where only inputs are scored."""
    assert state.current is not None
    if state.params.score_at != "input":
        return set()
    deepest: dict[str, str] = {}
    for name in sorted(state.pool, key=lambda name: state.stock.blocks[name].index):
        deepest[state.stock.blocks[name].donor] = name
    return set(deepest.values()) - set(state.current.path)


def groups(state: State, path: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """The classes of each label in a path's terminating block; None: not aligned."""
    return state.stock.donors[state.stock.blocks[path[-1]].donor].align


def _rest(stock: Stock, name: str) -> list[str]:
    """A block and its donor's later blocks, without the terminating block."""
    block = stock.blocks[name]
    later = stock.donors[block.donor].blocks[block.index + 1 :]
    return [name, *(other for other in later if stock.blocks[other].kind != "end")]


def _family(stock: Stock, path: Iterable[str], candidates: Iterable[str]) -> dict[str, Block]:
    """The blocks that a device runs: the path's, the candidates, and those before the candidates in their donors."""
    names = set(path)
    for name in candidates:
        block = stock.blocks[name]
        names |= {stock.donors[block.donor].blocks[i] for i in range(block.index + 1)}
    return {name: stock.blocks[name] for name in sorted(names)}


def cost(runs: Iterable[tuple[Block, float]], matrices_bytes: int, examples: int = 0) -> Work:
    """Work of running blocks on a device's examples, with the matrices of a fit.

    A launch is one run of a graph, of RUN_AT_ONCE images; what happens within it is in its FLOPs and bytes. Traffic is
    the weights in each run, and for each image the maps that are alive at once, or what enters and leaves if that is
    more. The peak is the largest memory of one block for one image, weights included; an engine with more room runs
    more images at once, and keeps weights and maps.

    Args:
        runs: each block that runs, with the share of the task's examples that it runs on.
        matrices_bytes: memory of the fit.
        examples: of the device's own, that the task uses at most; 0: all.
    """
    flops = maps = launches = weights = peak = 0.0
    for block, share in runs:
        flops += share * block.flops
        maps += share * max(block.activation_bytes, 4.0 * (prod(block.in_shape) + prod(block.out_shape)))
        launches += share * sum(len(stage) for stage in block.stages)
        weights += share * block.weight_bytes
        peak = max(peak, footprint.scoring_bytes(block.resident_bytes, block.activation_bytes, 1))
    return Work(
        flops_per_example=flops,
        bytes_per_example=maps,
        launches_per_batch=launches,
        bytes_per_batch=weights,
        batch=RUN_AT_ONCE,
        examples=examples,
        peak_bytes=int(max(peak, matrices_bytes)),
        workload="score",
    )

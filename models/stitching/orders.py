"""What the coordinator asks of a device in each phase of a stitching job, and what that costs.

A task names blocks; only the files of those blocks go with it, and the junctions of the paths. Blobs
are known by their content, so naming a block again costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import msgspec

from fedquilt import footprint
from fedquilt.core import BlobRef, DeviceView, Order, Tensors, Work, derive_seed
from fedquilt.models.stitching import device_statistics, least_squares, scoring, search
from fedquilt.models.stitching.search_state import State
from fedquilt.models.stitching.stitched import Block, Stock


def score_order(state: State, device: DeviceView) -> Order:
    params, net = state.params, state.current
    assert net is not None
    completes = params.criterion != "cka" and search.completes(params)
    blocks = _family(state.stock, net.path, state.pool)
    run = {name: [name] for name in state.pool}  # for each candidate, what is run to score its output
    if completes:  # the labels judge what comes out at the end
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
    n, images = params.samples, params.samples * (1 if params.score_at == "input" else 2)
    runs: list[tuple[Block, float]] = [(blocks[name], images) for name in net.path]
    if not device.rounds:  # what the device then knows of the donors
        family = _family(state.stock, (), state.pool).values()
        runs += [(block, images) for block in family if block.id not in _only_compared(state)]
    if params.score_at != "input":
        tried = min(params.screen / len(state.pool), 1.0) if params.score_at == "hybrid" else 1.0
        runs += [(blocks[name], n * tried) for names in run.values() for name in names]
    matrices = (
        0
        if params.score_at == "input"
        else least_squares.fit_bytes(blocks[net.path[-1]].out_shape[0], params.positions)
    )
    return _order(state, ask, [net.path], _cost(runs, matrices, 2 * n))


def fit_order(state: State) -> Order:
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
    n = params.fit_samples
    ran = [blocks[name] for name in net.path] + list(_family(state.stock, (), wanted).values())
    matrices = least_squares.moments_bytes(blocks[net.path[-1]].out_shape[0])
    return _order(state, ask, [net.path], _cost([(b, n) for b in ran], matrices, n))


def finalists_order(state: State) -> Order:
    params, paths = state.params, [finalist.path for finalist in search.in_hand(state)]
    solving = state.phase in ("head", "refine")
    bodies = tuple(path[:-1] for path in paths)
    whole = state.phase == "validate" and any(groups(state, path) for path in paths)
    ask: device_statistics.HeadAsk | device_statistics.ValidateAsk
    if solving:
        blocks = {name: state.stock.blocks[name] for body in bodies for name in body}
        ask = device_statistics.HeadAsk(
            **_common(state, blocks),
            bodies=bodies,
            labels=len(state.stock.labels),
            samples=params.head_samples,
            random_features=params.random_features,
            projection_seed=projection_seed(state),
        )
        n = params.head_samples
    else:
        blocks = {name: state.stock.blocks[name] for path in paths for name in path}
        ask = device_statistics.ValidateAsk(
            **_common(state, blocks),
            nets=tuple(paths),
            align=tuple(groups(state, path) for path in paths),
            heads=params.head == "ridge",
            labels=len(state.stock.labels),
        )
        n = params.samples
    runs = [(blocks[name], n) for path in (paths if whole else bodies) for name in path]
    wide = params.random_features or max(blocks[body[-1]].out_shape[0] for body in bodies)
    matrices = least_squares.moments_bytes(wide) if solving else 0
    order = _order(state, ask, paths if whole else bodies, _cost(runs, matrices, n))
    if solving:
        return order
    heads = {f"head.{i}": finalist.head for i, finalist in enumerate(state.finalists) if finalist.head}
    return replace(order, bundles={**order.bundles, **heads})


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
    phase = "head" if state.phase == "refine" else state.phase  # the same to a device
    return Order({"phase": phase, **msgspec.to_builtins(ask)}, bundles, work)


def _only_compared(state: State) -> set[str]:
    """Blocks of the pool that no device runs: scored by input, what a donor's deepest candidate puts out is idle."""
    assert state.current is not None
    if state.params.score_at != "input":
        return set()
    deepest: dict[str, str] = {}
    for name in sorted(state.pool, key=lambda name: state.stock.blocks[name].index):
        deepest[state.stock.blocks[name].donor] = name
    return set(deepest.values()) - set(state.current.path)


def groups(state: State, path: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """Which classes of a path's terminating block are which label."""
    return state.stock.donors[state.stock.blocks[path[-1]].donor].align


def projection_seed(state: State) -> int:
    return derive_seed("features", state.seed)


def _rest(stock: Stock, name: str) -> list[str]:
    """A block, and what its donor goes on with up to the terminating block."""
    block = stock.blocks[name]
    later = stock.donors[block.donor].blocks[block.index + 1 :]
    return [name, *(other for other in later if stock.blocks[other].kind != "end")]


def _family(stock: Stock, path: Iterable[str], candidates: Iterable[str]) -> dict[str, Block]:
    """The path's blocks, the candidates, and what comes before those in their donors: what a device runs."""
    names = set(path)
    for name in candidates:
        block = stock.blocks[name]
        names |= {stock.donors[block.donor].blocks[i] for i in range(block.index + 1)}
    return {name: stock.blocks[name] for name in sorted(names)}


def _cost(runs: Iterable[tuple[Block, float]], matrices_bytes: int, examples: int) -> Work:
    """What it takes to run each block on so many images, beside the matrices of a fit.

    The peak is what the hungriest block holds for one image, weights included: with more room an engine takes
    more images at once, and keeps weights and maps.
    """
    flops = read = peak = 0.0
    for block, images in runs:
        flops += images * block.flops
        read += block.weight_bytes + 4.0 * images * (prod(block.in_shape) + prod(block.out_shape))
        peak = max(peak, footprint.scoring_bytes(block.resident_bytes, block.activation_bytes, 1))
    return Work(flops=flops, read_bytes=read, examples=examples, peak_bytes=int(max(peak, matrices_bytes)))

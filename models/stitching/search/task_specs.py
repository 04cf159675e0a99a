"""Task specs for each phase of a stitching job, with estimated costs.

A task names blocks, and only the files of these blocks and the junctions of its paths are sent with the task. Blobs are
addressed by their content, so that a device fetches each block once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import msgspec

from fedquilt.core import BlobRef, DeviceView, TaskSpec, Tensors, WorkEstimate
from fedquilt.costs import peak_memory
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, least_squares
from fedquilt.models.stitching.device import moments, scoring
from fedquilt.models.stitching.search import candidates, cascades, steps
from fedquilt.models.stitching.search.state import Candidate, SearchState
from fedquilt.models.stitching.stitched_network import Block, DonorPool

RUN_AT_ONCE: Final = 16  # images that an engine runs at once, where memory allows


def score_task_spec(state: SearchState, device: DeviceView) -> TaskSpec:
    params, net = state.params, state.current
    assert net is not None
    completes = params.criterion != "cka" and params.completion
    blocks = _collect_path_and_donor_blocks(state.stock, net.path, state.pool)
    run = {name: [name] for name in state.pool}  # candidate -> blocks that run to score its output
    if completes:  # the labels judge the output at the end of the donor
        run = {name: _remaining_blocks(state.stock, name) for name in state.pool}
        blocks |= {name: state.stock.blocks[name] for names in run.values() for name in names}
    ask = scoring.ScoreRequest(
        **_shared_fields(state, blocks),
        path=net.path,
        pool=state.pool,
        completes=completes,
        **{name: value for name, value in vars(params).items() if name in scoring.ScoreRequest.__dataclass_fields__},
        epsilon=steps.exploration_rate(state),
        coin=steps.choice_seed(state, device.device),
    )
    shares = scoring.share_count(params.score_at)  # of the images; one is scored
    runs: list[tuple[Block, float]] = [(blocks[name], 1.0) for name in net.path]
    if not device.rounds:  # later tasks find the donors' results in the cache
        family = _collect_path_and_donor_blocks(state.stock, (), state.pool).values()
        runs += [(block, 1.0) for block in family if block.id not in _blocks_not_run(state)]
    if params.score_at != "input":
        tried = min(params.screen / len(state.pool), 1.0) if params.score_at == "hybrid" else 1.0
        runs += [(blocks[name], tried / shares) for names in run.values() for name in names]
    matrices = (
        0
        if params.score_at == "input"
        else least_squares.fit_bytes(blocks[net.path[-1]].out_shape[0], params.positions)
    )
    return _task_spec(state, ask, [net.path], blocks_work(runs, matrices, shares * params.samples))


def fit_task_spec(state: SearchState) -> TaskSpec:
    params, net = state.params, state.current
    assert net is not None
    wanted = steps.winners_needing_junction(state)
    blocks = _collect_path_and_donor_blocks(state.stock, net.path, wanted)
    ask = moments.FitRequest(
        **_shared_fields(state, blocks),
        path=net.path,
        winners=wanted,
        samples=params.fit_samples,
        ridge=params.ridge,
        bias=params.bias,
    )
    ran = [blocks[name] for name in net.path] + list(_collect_path_and_donor_blocks(state.stock, (), wanted).values())
    matrices = least_squares.moments_bytes(blocks[net.path[-1]].out_shape[0])
    return _task_spec(state, ask, [net.path], blocks_work([(each, 1.0) for each in ran], matrices, params.fit_samples))


def gather_task_spec(state: SearchState) -> TaskSpec:
    params = state.params
    blocks = {name: state.stock.blocks[name] for path in state.taps for name in path}
    ask = moments.GatherRequest(
        **_shared_fields(state, blocks),
        paths=state.taps,
        widths=candidates.tap_widths(state),
        labels=len(state.stock.labels),
        samples=params.head_samples,
    )
    return _task_spec(state, ask, state.taps, _gather_work(ask))


def moments_task_spec(ask: moments.GatherRequest, files: Mapping[str, BlobRef]) -> TaskSpec:
    bundles = {
        name: files[name] for ids in stitched_network.path_prefixes(ask.paths) for name in ask.blocks[ids[-1]].files
    }
    return TaskSpec({"phase": "gather", **msgspec.to_builtins(ask)}, bundles, _gather_work(ask))


def _gather_work(ask: moments.GatherRequest) -> WorkEstimate:
    runs = [(ask.blocks[ids[-1]], 1.0) for ids in stitched_network.path_prefixes(ask.paths)]
    return blocks_work(runs, minimum_moments_bytes(ask), ask.samples or 0)


def minimum_moments_bytes(ask: moments.GatherRequest) -> int:
    rows = moments.LEAST_ROWS if ask.samples is None else min(ask.samples, moments.LEAST_ROWS)
    return class_moments.factor_bytes(rows, sum(ask.widths))


def validation_task_spec(state: SearchState, among: Sequence[Candidate]) -> TaskSpec | None:
    if not among:
        return None
    margin = None
    if exit := among[0].early:
        among, margin = (Candidate("joined", exit.taps, exit.head), replace(among[0], early=None)), exit.margin
    paths = tuple(dict.fromkeys(path for candidate in among for path in candidate.paths))
    blocks = {name: state.stock.blocks[name] for path in paths for name in path}
    ask = moments.CountRequest(
        **_shared_fields(state, blocks),
        paths=paths,
        candidates=tuple(tuple(paths.index(path) for path in each.paths) for each in among),
        align=tuple(None if each.head else label_classes(state, each.paths[0]) for each in among),
        labels=len(state.stock.labels),
        early=cascades.early_candidates(state) if state.phase == "validate" else (),
        margin=margin,
    )
    order = _task_spec(
        state, ask, paths, blocks_work([(blocks[ids[-1]], 1.0) for ids in stitched_network.path_prefixes(paths)], 0)
    )
    heads = {f"head.{i}": each.head for i, each in enumerate(among) if each.head}
    return replace(order, bundles={**order.bundles, **heads}, held_out=True, check=order.work)


def _shared_fields(state: SearchState, blocks: Mapping[str, Block]) -> dict[str, Any]:
    return {"turn": state.turn, "input": state.stock.input, "blocks": dict(blocks)}


def _task_spec(
    state: SearchState, ask: scoring.StitchingRequest, paths: Iterable[tuple[str, ...]], work: WorkEstimate
) -> TaskSpec:
    bundles: dict[str, Tensors | BlobRef] = {}
    idle = _blocks_not_run(state) if state.phase == "score" else set()
    scored = state.pool if state.phase == "score" and state.params.score_at != "input" else ()
    for block in ask.blocks.values():
        if block.id not in idle:
            bundles |= {name: state.files[name] for name in block.files}
        if block.id in scored:
            bundles |= {name: state.files[name] for name in block.scoring_variant.files}
    for path in paths:
        bundles |= {name: state.junctions[name] for name in steps.path_junction_names(path) if name in state.junctions}
    return TaskSpec({"phase": state.phase, **msgspec.to_builtins(ask)}, bundles, work)


def _blocks_not_run(state: SearchState) -> set[str]:
    # Where only inputs are scored, no device runs the deepest candidate of a donor.
    assert state.current is not None
    if state.params.score_at != "input":
        return set()
    deepest: dict[str, str] = {}
    for name in sorted(state.pool, key=lambda name: state.stock.blocks[name].index):
        deepest[state.stock.blocks[name].donor] = name
    return set(deepest.values()) - set(state.current.path)


def label_classes(state: SearchState, path: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    return state.stock.donors[state.stock.blocks[path[-1]].donor].align


def _remaining_blocks(stock: DonorPool, name: str) -> list[str]:
    block = stock.blocks[name]
    later = stock.donors[block.donor].blocks[block.index + 1 :]
    return [name, *(other for other in later if stock.blocks[other].kind != "end")]


def _collect_path_and_donor_blocks(
    stock: DonorPool, path: Iterable[str], candidates: Iterable[str]
) -> dict[str, Block]:
    """Return the blocks of the path, and each candidate with the blocks before it in its donor, by name."""
    names = set(path)
    for name in candidates:
        block = stock.blocks[name]
        names |= {stock.donors[block.donor].blocks[i] for i in range(block.index + 1)}
    return {name: stock.blocks[name] for name in sorted(names)}


def blocks_work(runs: Iterable[tuple[Block, float]], matrices_bytes: int, examples: int = 0) -> WorkEstimate:
    """Return the work of running blocks, each on a share of the task's `examples`, of which 0 means all.

    A launch is one run of a graph on RUN_AT_ONCE images. Traffic is the weights in each run, and for each image the
    maps that are alive at once, or the input and output if that is more. The peak is the largest memory of one block
    for one image, weights included. An engine with more memory runs more images at once, and keeps weights and maps.
    """
    flops = maps = launches = weights = peak = 0.0
    for block, share in runs:
        flops += share * block.flops
        maps += share * max(block.activation_bytes, 4.0 * (prod(block.in_shape) + prod(block.out_shape)))
        launches += share * sum(len(stage) for stage in block.stages)
        weights += share * block.weight_bytes
        peak = max(peak, peak_memory.inference_bytes(block.resident_bytes, block.activation_bytes, 1))
    return WorkEstimate(
        flops_per_example=flops,
        bytes_per_example=maps,
        launches_per_batch=launches,
        bytes_per_batch=weights,
        batch=RUN_AT_ONCE,
        max_examples=examples,
        peak_bytes=int(max(peak, matrices_bytes)),
        workload="score",
    )

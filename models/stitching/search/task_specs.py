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
    blocks = _collect_path_and_donor_blocks(state.stock, net.path, state.pool)
    request = scoring.ScoreRequest(
        **_shared_fields(state, blocks),
        path=net.path,
        pool=state.pool,
        **{name: value for name, value in vars(params).items() if name in scoring.ScoreRequest.__dataclass_fields__},
        epsilon=steps.exploration_rate(state),
        coin=steps.choice_seed(state, device.device),
    )
    image_sets = scoring.image_set_count(params.score_at)
    runs: list[tuple[Block, float]] = [(blocks[name], 1.0) for name in net.path]
    if not device.rounds:  # later tasks find the donors' results in the cache
        family = _collect_path_and_donor_blocks(state.stock, (), state.pool).values()
        runs += [(block, 1.0) for block in family if block.id not in _blocks_never_run(state)]
    if params.score_at != "input":
        scored_share = min(params.screen / len(state.pool), 1.0) if params.score_at == "hybrid" else 1.0
        runs += [(blocks[name], scored_share / image_sets) for name in state.pool]
    matrices = (
        0
        if params.score_at == "input"
        else least_squares.fit_bytes(blocks[net.path[-1]].out_shape[0], params.positions)
    )
    return _task_spec(state, request, [net.path], blocks_work(runs, matrices, image_sets * params.samples))


def fit_task_spec(state: SearchState) -> TaskSpec:
    params, net = state.params, state.current
    assert net is not None
    winners = steps.winners_needing_junction(state)
    blocks = _collect_path_and_donor_blocks(state.stock, net.path, winners)
    request = moments.FitRequest(
        **_shared_fields(state, blocks),
        path=net.path,
        winners=winners,
        samples=params.fit_samples,
        ridge=params.ridge,
        bias=params.bias,
    )
    blocks_run = [blocks[name] for name in net.path] + list(
        _collect_path_and_donor_blocks(state.stock, (), winners).values()
    )
    matrices = least_squares.moments_bytes(blocks[net.path[-1]].out_shape[0])
    return _task_spec(
        state, request, [net.path], blocks_work([(block, 1.0) for block in blocks_run], matrices, params.fit_samples)
    )


def gather_task_spec(state: SearchState) -> TaskSpec:
    params = state.params
    blocks = {name: state.stock.blocks[name] for path in state.taps for name in path}
    request = moments.GatherRequest(
        **_shared_fields(state, blocks),
        paths=state.taps,
        widths=candidates.tap_widths(state),
        labels=len(state.stock.labels),
        samples=params.head_samples,
    )
    return _task_spec(state, request, state.taps, _gather_work(request))


def moments_task_spec(request: moments.GatherRequest, files: Mapping[str, BlobRef]) -> TaskSpec:
    bundles = {
        name: files[name]
        for ids in stitched_network.path_prefixes(request.paths)
        for name in request.blocks[ids[-1]].files
    }
    return TaskSpec({"phase": "gather", **msgspec.to_builtins(request)}, bundles, _gather_work(request))


def _gather_work(request: moments.GatherRequest) -> WorkEstimate:
    runs = [(request.blocks[ids[-1]], 1.0) for ids in stitched_network.path_prefixes(request.paths)]
    return blocks_work(runs, minimum_moments_bytes(request), request.samples or 0)


def minimum_moments_bytes(request: moments.GatherRequest) -> int:
    """Return the memory in bytes that a device needs for the moments of the fewest permitted images."""
    rows = moments.MIN_ROWS if request.samples is None else min(request.samples, moments.MIN_ROWS)
    return class_moments.factor_bytes(rows, sum(request.widths))


def validation_task_spec(state: SearchState, candidates_to_count: Sequence[Candidate]) -> TaskSpec | None:
    """Return the task that counts the candidates' correct predictions, or None without candidates.

    A cascade must be the only candidate, and runs as two networks.
    """
    if not candidates_to_count:
        return None
    margin = None
    if exit := candidates_to_count[0].early:
        candidates_to_count, margin = (
            (Candidate("joined", exit.taps, exit.head), replace(candidates_to_count[0], early=None)),
            exit.margin,
        )
    paths = tuple(dict.fromkeys(path for candidate in candidates_to_count for path in candidate.paths))
    blocks = {name: state.stock.blocks[name] for path in paths for name in path}
    request = moments.CountRequest(
        **_shared_fields(state, blocks),
        paths=paths,
        candidates=tuple(
            tuple(paths.index(path) for path in counted_candidate.paths) for counted_candidate in candidates_to_count
        ),
        align=tuple(
            None if counted_candidate.head else label_classes(state, counted_candidate.paths[0])
            for counted_candidate in candidates_to_count
        ),
        labels=len(state.stock.labels),
        early=cascades.early_candidates(state) if state.phase == "validate" else (),
        margin=margin,
    )
    spec = _task_spec(
        state, request, paths, blocks_work([(blocks[ids[-1]], 1.0) for ids in stitched_network.path_prefixes(paths)], 0)
    )
    heads = {
        f"head.{i}": counted_candidate.head
        for i, counted_candidate in enumerate(candidates_to_count)
        if counted_candidate.head
    }
    return replace(spec, bundles={**spec.bundles, **heads}, held_out=True, check=spec.work)


def _shared_fields(state: SearchState, blocks: Mapping[str, Block]) -> dict[str, Any]:
    return {"turn": state.turn, "input": state.stock.input, "blocks": dict(blocks)}


def _task_spec(
    state: SearchState, request: scoring.StitchingRequest, paths: Iterable[tuple[str, ...]], work: WorkEstimate
) -> TaskSpec:
    bundles: dict[str, Tensors | BlobRef] = {}
    unused = _blocks_never_run(state) if state.phase == "score" else set()
    for block in request.blocks.values():
        if block.id not in unused:
            bundles |= {name: state.files[name] for name in block.files}
    for path in paths:
        bundles |= {name: state.junctions[name] for name in steps.path_junction_names(path) if name in state.junctions}
    return TaskSpec({"phase": state.phase, **msgspec.to_builtins(request)}, bundles, work)


def _blocks_never_run(state: SearchState) -> set[str]:
    # Where only inputs are scored, no device runs the deepest candidate of a donor.
    assert state.current is not None
    if state.params.score_at != "input":
        return set()
    deepest: dict[str, str] = {}
    for name in sorted(state.pool, key=lambda name: state.stock.blocks[name].index):
        deepest[state.stock.blocks[name].donor] = name
    return set(deepest.values()) - set(state.current.path)


def label_classes(state: SearchState, path: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """Return each label's classes in the donor of the last block, or None if the donor is not aligned."""
    return state.stock.donors[state.stock.blocks[path[-1]].donor].align


def _collect_path_and_donor_blocks(
    donor_pool: DonorPool, path: Iterable[str], candidates: Iterable[str]
) -> dict[str, Block]:
    names = set(path)
    for name in candidates:
        block = donor_pool.blocks[name]
        names |= {donor_pool.donors[block.donor].blocks[i] for i in range(block.index + 1)}
    return {name: donor_pool.blocks[name] for name in sorted(names)}


def blocks_work(runs: Iterable[tuple[Block, float]], matrices_bytes: int, examples: int = 0) -> WorkEstimate:
    """Return the work of running blocks, each on a share of the task's `examples`, where 0 means all.

    A launch is one run of a graph on RUN_AT_ONCE images. Traffic is the weights in each run and, for each image, the
    maps in memory at the same time or its input and output, whichever is larger. The peak is the memory of the largest
    block for one image, weights included. An engine with more memory runs more images at once.
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

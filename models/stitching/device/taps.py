"""Moments and correct predictions at the taps of networks, computed by a device.

FedStitch (arXiv 2409.07202), section 3, with forward passes only. Common beginnings of paths run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import ClientContext, ClientResult, EvaluationSums
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.device import block_runner, junction_moments, scoring
from fedquilt.models.stitching.device.activations import ActivationSource
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.device.scoring import StitchingRequest

LEAST_ROWS = 32  # fewest images for moments, however little memory there is
ROOM = 4  # matrices of moments get a quarter of the engine's room

Path = tuple[str, ...]


@dataclass(frozen=True)
class GatherRequest(StitchingRequest):
    paths: tuple[Path, ...]
    widths: tuple[int, ...]  # features of each; a tap of another width is projected onto random features
    labels: int
    samples: int | None  # number of images; None: all
    projection_seed: int
    relu: bool = False  # project every tap, and pass the result through a ReLU
    exact: bool = False  # send moments as float64


@dataclass(frozen=True)
class CountRequest(StitchingRequest):
    paths: tuple[Path, ...]
    candidates: tuple[tuple[int, ...], ...]  # indices of each candidate's paths
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]  # classes of each label; None: it has a head
    labels: int


def gather_moments(ask: GatherRequest, site: ClientContext) -> ClientResult:
    """Compute the moments of the device's own images, as many as requested or as memory allows.

    Returns:
        Result with bundle "moments", the tensors of a `class_moments.DeviceMoments`. Metric "short": 1 if memory
        allowed fewer images than requested.

    Raises:
        DataError: If there are no examples, or labels that the job lacks.
    """
    junction_moments.require_labels(site.train.y, ask.labels, site.device)
    local = scoring.load_private_state(site)
    wanted = scoring.example_order(local)[: ask.samples]
    chosen = wanted[: _affordable_rows(site, sum(ask.widths))]
    z = np.empty((len(chosen), sum(ask.widths)), np.float32)
    factor_bytes = class_moments.factor_bytes(*z.shape) - z.nbytes
    run = BlockRunner(
        site,
        ask.blocks.values(),
        len(chosen) * _paths_flops(ask),
        beside_bytes=z.nbytes,
        matrices_bytes=factor_bytes,
    )
    first = 0
    for rows in junction_moments.example_batches(site, chosen):
        last = first + len(rows)
        for tap, part in _run_and_pool_paths(
            run, ask, ask.paths, block_runner.PreparedExamples(site.train.x[rows], ask.input), site
        ):
            column = sum(ask.widths[:tap])
            if ask.widths[tap] != part.shape[1] or ask.relu:
                part = part @ stitched_network.random_projection(part.shape[1], ask.widths[tap], ask.projection_seed)
            if ask.relu:
                part = np.maximum(part, 0.0)
            z[first:last, column : column + ask.widths[tap]] = part
        first = last
    run.reserve_memory(factor_bytes)
    found = class_moments.pack_moments(class_moments.device_moments(z, site.train.y[chosen], ask.labels), ask.exact)
    metrics = {"turn": float(ask.turn), "short": float(len(chosen) < len(wanted))}
    return ClientResult({"moments": found}, float(len(chosen)), metrics, local)


def count_correct(ask: CountRequest, site: ClientContext) -> ClientResult:
    """Count the correct predictions of each candidate on the device's held-out examples.

    At most as many held-out examples are counted as the device has examples, because that number bounds its weight.

    Returns:
        Result with bundle "counts", int64: "examples" (1,), the number of examples counted, and "right" (candidates,
        candidates), the number that both of two candidates predict correctly.

    Raises:
        DataError: If there are labels that the job lacks.
    """
    junction_moments.require_labels(site.held.y, ask.labels, site.device)
    rows = np.arange(len(site.held))
    if len(rows) > max(len(site.train), 1):
        rows = np.sort(site.rng.permutation(rows)[: max(len(site.train), 1)])
    right = np.zeros((len(ask.candidates), len(ask.candidates)), np.int64)
    for scores, y in _score_candidates(ask, site, rows):
        correct = np.array([each.argmax(axis=1) == y for each in scores], np.int64)
        right += correct @ correct.T
    counts = {"examples": np.array([len(rows)], np.int64), "right": right}
    return ClientResult({"counts": counts}, float(len(rows)), {"turn": float(ask.turn)}, site.local)


def evaluate_candidate(ask: CountRequest, site: ClientContext) -> EvaluationSums:
    """Evaluate the only candidate of a request on the device's held-out examples.

    Raises:
        DataError: If there are labels that the job lacks.
    """
    junction_moments.require_labels(site.held.y, ask.labels, site.device)
    batches = ((scores, y) for (scores,), y in _score_candidates(ask, site, np.arange(len(site.held))))
    found: EvaluationSums = site.engine.evaluate_scores(batches, site.held.prior)
    return found


def _score_candidates(
    ask: CountRequest, site: ClientContext, rows: np.ndarray
) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Yield the class scores of each candidate, and the classes, for each batch of the held-out examples `rows`."""
    run = BlockRunner(site, ask.blocks.values(), len(rows) * _paths_flops(ask))
    for first in range(0, len(rows), junction_moments.WAVE):
        wave = rows[first : first + junction_moments.WAVE]
        x, y = site.held.x[wave], site.held.y[wave]
        ends = dict(_run_and_pool_paths(run, ask, ask.paths, block_runner.PreparedExamples(x, ask.input), site))
        found = []
        for i, (taps, groups) in enumerate(zip(ask.candidates, ask.align, strict=True)):
            z = np.concatenate([ends[tap] for tap in taps], axis=1)
            if groups is None:
                head = site.load(f"head.{i}")
                found.append(z @ head["weights"].T + head["bias"])
            else:
                found.append(stitched_network.align_logits(z, groups))
        yield found, y


def _affordable_rows(site: ClientContext, width: int) -> int:
    return max(int(site.engine.room_bytes / ROOM / class_moments.factor_bytes(1, width)), LEAST_ROWS)


def _paths_flops(ask: GatherRequest | CountRequest) -> float:
    return sum(ask.blocks[ids[-1]].flops for ids in stitched_network.path_prefixes(ask.paths))


def _average_pool_maps(run: BlockRunner, maps: ActivationSource) -> np.ndarray:
    found = np.empty(maps.shape[:2], np.float64)
    run.reserve_memory(found.nbytes + 2 * block_runner.PIECE_BYTES)  # one piece is freed once the next has been read
    for first, part in block_runner.iterate_pieces(maps):
        found[first : first + len(part)] = stitched_network.global_average_pool(part)
    return found


def _run_and_pool_paths(
    run: BlockRunner, ask: StitchingRequest, paths: Sequence[Path], shown: ActivationSource, site: ClientContext
) -> Iterator[tuple[int, np.ndarray]]:
    """Run the paths on shared prefixes, and yield each path's index and the pooled output of its last block."""
    # Shorter branches run first, so that the longest one runs without other maps in memory.
    numbers = {path: i for i, path in enumerate(paths)}
    order = stitched_network.path_prefixes(paths)
    following: dict[Path, list[Path]] = {}
    for ids in order:
        following.setdefault(ids[:-1], []).append(ids)
    size = {ids: sum(other[: len(ids)] == ids for other in order) for ids in order}
    waiting: list[tuple[Path, ActivationSource]] = [(ids, shown) for ids in following[()]]
    while waiting:
        ids, maps = waiting.pop()
        block = ask.blocks[ids[-1]]
        own = len(ids) == 1 or stitched_network.is_continuation(ask.blocks[ids[-2]], block)
        junction = None if own else site.load(stitched_network.junction_name(ids))
        made = run.run_block(block, block_runner.apply_junction_lazily(maps, junction, block))
        del maps
        if ids in numbers:
            yield numbers[ids], _average_pool_maps(run, made)
        waiting += [(after, made) for after in sorted(following.get(ids, ()), key=lambda each: -size[each])]
        del made

"""Moments and correct predictions at the taps of networks, computed by a device.

FedStitch (arXiv 2409.07202), section 3, with forward passes only. Common prefixes of paths run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import ClientContext, ClientResult, DataError, EvaluationSums, Tensors
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, least_squares
from fedquilt.models.stitching.device import block_runner, scoring
from fedquilt.models.stitching.device.activations import ActivationSource
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.device.scoring import StitchingRequest

WAVE_IMAGES = 128  # images that run through a path together
MIN_ROWS = 32  # minimum number of images for moments, even without memory for so many
ROOM_DIVISOR = 4  # matrices of moments get a quarter of the engine's memory

MARGINS = tuple(2.0 ** (step / 2) for step in range(-6, 11))  # lower edges of the bins of margins after the first

Path = tuple[str, ...]


@dataclass(frozen=True)
class FitRequest(StitchingRequest):
    path: tuple[str, ...]
    winners: tuple[str, ...]
    samples: int
    ridge: float
    bias: bool


def compute_junction_moments(request: FitRequest, site: ClientContext) -> ClientResult:
    """Return bundles "moments.<i>", from which the junction to the i-th winner is solved."""
    path = [request.blocks[name] for name in request.path]
    junctions = stitched_network.load_junctions(path, site.load)
    winners = [request.blocks[name] for name in request.winners]
    local, chains = scoring.load_private_state(site), list(scoring.donor_chains(request.blocks, winners))
    examples = scoring.example_order(local)[: request.samples]
    flops = sum(block.flops for block in path) + sum(block.flops for chain, _ in chains for block in chain[:-1])
    sums_bytes = least_squares.moments_bytes(path[-1].out_shape[0])
    run = BlockRunner(site, request.blocks.values(), len(examples) * flops, matrices_bytes=sums_bytes)
    moments: dict[str, Tensors] = {}
    for chain, winner_ids in chains:  # one donor at a time: a winner's sums of 2048 channels are 34 MB
        sums: dict[str, least_squares.RegressionMoments] = {}
        for rows in example_batches(site, examples):
            images = block_runner.prepare_examples_lazily(site.train.x[rows], request.input)
            x = run.run_path(path, junctions, images, rows)
            y: ActivationSource = images
            for block in chain:
                if block.id in winner_ids:
                    run.reserve_memory(sums_bytes)
                    for start, part in block_runner.iterate_pieces(
                        block_runner.resize_maps_lazily(x, *block.in_shape[1:])
                    ):
                        target = y.read_examples(start, start + len(part))
                        sums[block.id] = least_squares.add_maps(sums.get(block.id), part, target, request.bias)
                if block is not chain[-1]:
                    y = run.run_block(block, y)
        while sums:
            name, junction_sums = sums.popitem()
            moments[name] = least_squares.pack_moments(junction_sums, exact=request.ridge == 0)
            del junction_sums
    bundles = {f"moments.{i}": moments[name] for i, name in enumerate(request.winners)}
    return ClientResult(bundles, float(len(examples)), {"turn": float(request.turn)}, local)


def example_batches(site: ClientContext, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield `rows`, WAVE_IMAGES at a time. Raise DataError if there are none."""
    if not len(rows):
        raise DataError(f"{site.device} has no examples: stitching needs some on every device")
    for start in range(0, len(rows), WAVE_IMAGES):
        yield rows[start : start + WAVE_IMAGES]


def require_labels(y: np.ndarray, labels: int, device: str) -> None:
    if len(y) and (y.min() < 0 or y.max() >= labels):
        raise DataError(
            f"{device} has labels from {y.min()} to {y.max()}: the job has {labels} labels, from 0 to {labels - 1}"
        )


@dataclass(frozen=True)
class GatherRequest(StitchingRequest):
    paths: tuple[Path, ...]
    widths: tuple[int, ...]  # number of features of each path
    labels: int
    samples: int | None  # number of images, or None for all
    projection_seed: int | None = None  # seed of the random features with a ReLU, onto which every tap is projected
    exact: bool = False  # send moments as float64


@dataclass(frozen=True)
class CountRequest(StitchingRequest):
    paths: tuple[Path, ...]
    candidates: tuple[tuple[int, ...], ...]  # indices of each candidate's paths
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]  # classes of each label, or None for candidates with a head
    labels: int
    early: tuple[int, ...] = ()  # candidates whose margins are counted
    margin: float | None = None  # minimum margin with which an example leaves a cascade of two candidates


def gather_moments(request: GatherRequest, site: ClientContext) -> ClientResult:
    """Return the moments of the device's own images as bundle "moments".

    Metric "short" is 1 if memory allowed fewer images than requested, otherwise 0.
    """
    require_labels(site.train.y, request.labels, site.device)
    local = scoring.load_private_state(site)
    requested = scoring.example_order(local)[: request.samples]
    examples = requested[: _affordable_rows(site, sum(request.widths))]
    z = np.empty((len(examples), sum(request.widths)), np.float32)
    factor_bytes = class_moments.factor_bytes(*z.shape) - z.nbytes
    run = BlockRunner(
        site,
        request.blocks.values(),
        len(examples) * _paths_flops(request),
        task_bytes=z.nbytes,
        matrices_bytes=factor_bytes,
    )
    first = 0
    for rows in example_batches(site, examples):
        last = first + len(rows)
        images = block_runner.prepare_examples_lazily(site.train.x[rows], request.input)
        for tap, part in _run_and_pool_paths(run, request, request.paths, images, site):
            column = sum(request.widths[:tap])
            if request.projection_seed is not None:
                projection = stitched_network.random_projection(
                    part.shape[1], request.widths[tap], request.projection_seed
                )
                part = np.maximum(part @ projection, 0.0)
            z[first:last, column : column + request.widths[tap]] = part
        first = last
    run.reserve_memory(factor_bytes)
    packed = class_moments.pack_moments(
        class_moments.compute_moments(z, site.train.y[examples], request.labels), request.exact
    )
    metrics = {"turn": float(request.turn), "short": float(len(examples) < len(requested))}
    return ClientResult({"moments": packed}, float(len(examples)), metrics, local)


def count_correct(request: CountRequest, site: ClientContext) -> ClientResult:
    """Count the correct predictions of each candidate on the device's held-out examples.

    At most as many held-out examples as training examples are counted, which bounds the device's weight. Bundle
    "counts" has "right" (candidates, candidates), the number of examples that both of two candidates predict correctly,
    "by_margin", this number for each bin of an early candidate's margins, and "in_bin", the examples in each bin.
    """
    require_labels(site.held_out.y, request.labels, site.device)
    rows = np.arange(len(site.held_out))
    if len(rows) > max(len(site.train), 1):
        rows = np.sort(site.rng.permutation(rows)[: max(len(site.train), 1)])
    nets, bins = len(request.candidates), len(MARGINS) + 1
    right = np.zeros((nets, nets), np.int64)
    by_margin, in_bin = (np.zeros((len(request.early), bins, *sizes), np.int64) for sizes in ((nets, nets), ()))
    for scores, y in _score_candidates(request, site, rows):
        correct = np.array([candidate_scores.argmax(axis=1) == y for candidate_scores in scores], np.int64)
        right += correct @ correct.T
        for row, early in enumerate(request.early):
            example_bins = margin_bins(stitched_network.score_margins(scores[early]))
            in_bin[row] += np.bincount(example_bins, minlength=bins)
            for i in np.unique(example_bins):
                by_margin[row, i] += correct[:, example_bins == i] @ correct[:, example_bins == i].T
    counts = {"examples": np.array([len(rows)], np.int64), "right": right, "by_margin": by_margin, "in_bin": in_bin}
    return ClientResult({"counts": counts}, float(len(rows)), {"turn": float(request.turn)}, site.private_state)


def margin_bins(margins: np.ndarray) -> np.ndarray:
    return np.searchsorted(MARGINS, margins, side="right")


def evaluate_candidate(request: CountRequest, site: ClientContext) -> EvaluationSums:
    """Evaluate one candidate or, with a margin, a cascade of two, on all held-out examples of the device."""
    require_labels(site.held_out.y, request.labels, site.device)
    margin = -np.inf if request.margin is None else request.margin
    batches = (
        (stitched_network.choose_early_scores(scores[0], scores[-1], margin), y)
        for scores, y in _score_candidates(request, site, np.arange(len(site.held_out)))
    )
    sums: EvaluationSums = site.engine.evaluate_scores(batches, site.held_out.prior)
    return sums


def _score_candidates(
    request: CountRequest, site: ClientContext, rows: np.ndarray
) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    run = BlockRunner(site, request.blocks.values(), len(rows) * _paths_flops(request))
    for first in range(0, len(rows), WAVE_IMAGES):
        wave = rows[first : first + WAVE_IMAGES]
        x, y = site.held_out.x[wave], site.held_out.y[wave]
        images = block_runner.prepare_examples_lazily(x, request.input)
        ends = dict(_run_and_pool_paths(run, request, request.paths, images, site))
        scores = []
        for i, (taps, groups) in enumerate(zip(request.candidates, request.align, strict=True)):
            z = np.concatenate([ends[tap] for tap in taps], axis=1)
            if groups is None:
                head = site.load(f"head.{i}")
                scores.append(z @ head["weights"].T + head["bias"])
            else:
                scores.append(stitched_network.align_logits(z, groups))
        yield scores, y


def _affordable_rows(site: ClientContext, width: int) -> int:
    return max(int(site.engine.available_bytes / ROOM_DIVISOR / class_moments.factor_bytes(1, width)), MIN_ROWS)


def _paths_flops(request: GatherRequest | CountRequest) -> float:
    return sum(request.blocks[ids[-1]].flops for ids in stitched_network.path_prefixes(request.paths))


def _average_pool_maps(run: BlockRunner, maps: ActivationSource) -> np.ndarray:
    pooled = np.empty(maps.shape[:2], np.float64)
    run.reserve_memory(pooled.nbytes + 2 * block_runner.PIECE_BYTES)  # one piece is freed once the next has been read
    for first, part in block_runner.iterate_pieces(maps):
        pooled[first : first + len(part)] = stitched_network.global_average_pool(part)
    return pooled


def _run_and_pool_paths(
    run: BlockRunner, request: StitchingRequest, paths: Sequence[Path], images: ActivationSource, site: ClientContext
) -> Iterator[tuple[int, np.ndarray]]:
    """Run shared prefixes once, and yield each path's index and its last block's pooled output (n, c)."""
    # Shorter branches run first, so that the longest one runs without other maps in memory.
    numbers = {path: i for i, path in enumerate(paths)}
    prefixes = stitched_network.path_prefixes(paths)
    following: dict[Path, list[Path]] = {}
    for ids in prefixes:
        following.setdefault(ids[:-1], []).append(ids)
    subtree_size = {ids: sum(prefix[: len(ids)] == ids for prefix in prefixes) for ids in prefixes}
    pending: list[tuple[Path, ActivationSource]] = [(ids, images) for ids in following[()]]
    while pending:
        ids, maps = pending.pop()
        block = request.blocks[ids[-1]]
        is_continuation = len(ids) == 1 or stitched_network.is_continuation(request.blocks[ids[-2]], block)
        junction = None if is_continuation else site.load(stitched_network.junction_name(ids))
        output = run.run_block(block, block_runner.apply_junction_lazily(maps, junction, block))
        del maps
        if ids in numbers:
            yield numbers[ids], _average_pool_maps(run, output)
        pending += [
            (child, output) for child in sorted(following.get(ids, ()), key=lambda child_ids: -subtree_size[child_ids])
        ]
        del output

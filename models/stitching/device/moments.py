"""Moments and correct predictions at the taps of networks, computed by a device.

FedStitch (arXiv 2409.07202), section 3, with forward passes only. Common beginnings of paths run once.
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

WAVE = 128  # images that run through a path together
LEAST_ROWS = 32  # fewest images for moments, however little memory there is
ROOM = 4  # matrices of moments get a quarter of the engine's room

MARGINS = tuple(2.0 ** (step / 2) for step in range(-6, 11))  # lower edges of the bins of margins after the first

Path = tuple[str, ...]


@dataclass(frozen=True)
class FitRequest(StitchingRequest):
    path: tuple[str, ...]
    winners: tuple[str, ...]
    samples: int
    ridge: float
    bias: bool


def compute_junction_moments(ask: FitRequest, site: ClientContext) -> ClientResult:
    """Return bundles "moments.<i>", from which the junction to the i-th winner is solved."""
    path = [ask.blocks[name] for name in ask.path]
    between = stitched_network.load_junctions(path, site.load)
    winners = [ask.blocks[name] for name in ask.winners]
    local, chains = scoring.load_private_state(site), list(scoring.donor_chains(ask.blocks, winners))
    chosen = scoring.example_order(local)[: ask.samples]
    flops = sum(block.flops for block in path) + sum(block.flops for chain, _ in chains for block in chain[:-1])
    sums_bytes = least_squares.moments_bytes(path[-1].out_shape[0])
    run = BlockRunner(site, ask.blocks.values(), len(chosen) * flops, matrices_bytes=sums_bytes)
    found: dict[str, Tensors] = {}
    for chain, wanted in chains:  # one donor at a time: a winner's sums of 2048 channels are 34 MB
        sums: dict[str, least_squares.RegressionMoments] = {}
        for rows in example_batches(site, chosen):
            shown = block_runner.PreparedExamples(site.train.x[rows], ask.input)
            x = run.run_path(path, between, shown, rows)
            y: ActivationSource = shown
            for block in chain:
                if block.id in wanted:
                    run.reserve_memory(sums_bytes)
                    for start, part in block_runner.iterate_pieces(block_runner.resize_maps(x, *block.in_shape[1:])):
                        aim = y.read_examples(start, start + len(part))
                        sums[block.id] = least_squares.add_maps(sums.get(block.id), part, aim, ask.bias)
                if block is not chain[-1]:
                    y = run.run_block(block, y)
        while sums:
            name, each = sums.popitem()
            found[name] = least_squares.pack_moments(each, exact=ask.ridge == 0)
            del each
    bundles = {f"moments.{i}": found[name] for i, name in enumerate(ask.winners)}
    return ClientResult(bundles, float(len(chosen)), {"turn": float(ask.turn)}, local)


def example_batches(site: ClientContext, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices of a device's examples, WAVE at a time."""
    if not len(rows):
        raise DataError(f"{site.device} has no examples")
    for start in range(0, len(rows), WAVE):
        yield rows[start : start + WAVE]


def require_labels(y: np.ndarray, labels: int, device: str) -> None:
    if len(y) and (y.min() < 0 or y.max() >= labels):
        raise DataError(f"{device} has labels from {y.min()} to {y.max()}; the job's labels are 0 to {labels - 1}")


@dataclass(frozen=True)
class GatherRequest(StitchingRequest):
    paths: tuple[Path, ...]
    widths: tuple[int, ...]  # features of each
    labels: int
    samples: int | None  # number of images; None: all
    projection_seed: int | None = None  # of random features with a ReLU, onto which every tap is projected
    exact: bool = False  # send moments as float64


@dataclass(frozen=True)
class CountRequest(StitchingRequest):
    paths: tuple[Path, ...]
    candidates: tuple[tuple[int, ...], ...]  # indices of each candidate's paths
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]  # classes of each label; None: it has a head
    labels: int
    early: tuple[int, ...] = ()  # candidates whose margins are counted
    margin: float | None = None  # with which an example leaves a cascade of two candidates


def gather_moments(ask: GatherRequest, site: ClientContext) -> ClientResult:
    """Compute the moments of the device's own images, as many as requested or as memory allows.

    Metric "short" is 1 if memory allowed fewer images than requested.
    """
    require_labels(site.train.y, ask.labels, site.device)
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
    for rows in example_batches(site, chosen):
        last = first + len(rows)
        for tap, part in _run_and_pool_paths(
            run, ask, ask.paths, block_runner.PreparedExamples(site.train.x[rows], ask.input), site
        ):
            column = sum(ask.widths[:tap])
            if ask.projection_seed is not None:
                drawn = stitched_network.random_projection(part.shape[1], ask.widths[tap], ask.projection_seed)
                part = np.maximum(part @ drawn, 0.0)
            z[first:last, column : column + ask.widths[tap]] = part
        first = last
    run.reserve_memory(factor_bytes)
    found = class_moments.pack_moments(class_moments.device_moments(z, site.train.y[chosen], ask.labels), ask.exact)
    metrics = {"turn": float(ask.turn), "short": float(len(chosen) < len(wanted))}
    return ClientResult({"moments": found}, float(len(chosen)), metrics, local)


def count_correct(ask: CountRequest, site: ClientContext) -> ClientResult:
    """Count the correct predictions of each candidate on the device's held-out examples.

    At most as many held-out examples are counted as the device has examples, because that number bounds its weight.
    "right" (candidates, candidates) is the number that both of two candidates predict correctly, and "by_margin" the
    same for the examples in each bin of an early candidate's margins, which are "in_bin".
    """
    require_labels(site.held_out.y, ask.labels, site.device)
    rows = np.arange(len(site.held_out))
    if len(rows) > max(len(site.train), 1):
        rows = np.sort(site.rng.permutation(rows)[: max(len(site.train), 1)])
    nets, bins = len(ask.candidates), len(MARGINS) + 1
    right = np.zeros((nets, nets), np.int64)
    by_margin, in_bin = (np.zeros((len(ask.early), bins, *sizes), np.int64) for sizes in ((nets, nets), ()))
    for scores, y in _score_candidates(ask, site, rows):
        correct = np.array([each.argmax(axis=1) == y for each in scores], np.int64)
        right += correct @ correct.T
        for place, early in enumerate(ask.early):
            found = margin_bins(stitched_network.score_margins(scores[early]))
            in_bin[place] += np.bincount(found, minlength=bins)
            for each in np.unique(found):
                by_margin[place, each] += correct[:, found == each] @ correct[:, found == each].T
    counts = {"examples": np.array([len(rows)], np.int64), "right": right, "by_margin": by_margin, "in_bin": in_bin}
    return ClientResult({"counts": counts}, float(len(rows)), {"turn": float(ask.turn)}, site.private_state)


def margin_bins(margins: np.ndarray) -> np.ndarray:
    return np.searchsorted(MARGINS, margins, side="right")


def evaluate_candidate(ask: CountRequest, site: ClientContext) -> EvaluationSums:
    require_labels(site.held_out.y, ask.labels, site.device)
    margin = -np.inf if ask.margin is None else ask.margin
    batches = (
        (stitched_network.choose_early_scores(scores[0], scores[-1], margin), y)
        for scores, y in _score_candidates(ask, site, np.arange(len(site.held_out)))
    )
    found: EvaluationSums = site.engine.evaluate_scores(batches, site.held_out.prior)
    return found


def _score_candidates(
    ask: CountRequest, site: ClientContext, rows: np.ndarray
) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    run = BlockRunner(site, ask.blocks.values(), len(rows) * _paths_flops(ask))
    for first in range(0, len(rows), WAVE):
        wave = rows[first : first + WAVE]
        x, y = site.held_out.x[wave], site.held_out.y[wave]
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
    return max(int(site.engine.available_bytes / ROOM / class_moments.factor_bytes(1, width)), LEAST_ROWS)


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

"""Moments for heads and right answers of candidates, computed by a device at the taps of networks.

FedStitch (arXiv 2409.07202), section 3, on the device: forward passes only. Common beginnings of paths run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import Answer, Site
from fedquilt.models.stitching import block_runner, class_moments, device_statistics, scoring, stitched
from fedquilt.models.stitching.activations import Source
from fedquilt.models.stitching.block_runner import Flow
from fedquilt.models.stitching.scoring import Ask

LEAST_ROWS = 32  # fewest images for moments, however little memory there is
ROOM = 4  # matrices of moments get a quarter of the engine's room

Path = tuple[str, ...]


@dataclass(frozen=True)
class GatherAsk(Ask):
    """Compute the moments of the pooled ends of `paths`, side by side."""

    paths: tuple[Path, ...]
    widths: tuple[int, ...]  # features of each; a tap of another width is projected onto random features
    labels: int
    samples: int | None  # number of images; None: all
    projection_seed: int
    relu: bool = False  # project every tap, and pass the result through a ReLU
    exact: bool = False  # send moments as float64


@dataclass(frozen=True)
class CountAsk(Ask):
    """Count right answers of candidates, each on the pooled ends of some of `paths`, on held-out examples."""

    paths: tuple[Path, ...]
    candidates: tuple[tuple[int, ...], ...]  # indices of each candidate's paths
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]  # classes of each label; None: it has a head
    labels: int


def gather(ask: GatherAsk, site: Site) -> Answer:
    """Compute the moments of the device's own images, as many as asked for or as memory allows.

    Returns:
        Bundle "moments": the tensors of a `class_moments.Part`. Metric "short": 1 if memory allowed fewer images than
        were asked for and are there.

    Raises:
        DataError: there are no examples, or labels that the job does not have.
    """
    device_statistics.require_labels(site.train.y, ask.labels, site.device)
    local = scoring.drawn(site)
    wanted = scoring.order(local)[: ask.samples]
    chosen = wanted[: _rows(site, sum(ask.widths))]
    z = np.empty((len(chosen), sum(ask.widths)), np.float32)
    factor_bytes = class_moments.factor_bytes(*z.shape) - z.nbytes
    run = Flow(
        site,
        ask.blocks.values(),
        len(chosen) * _flops(ask),
        beside_bytes=z.nbytes,
        matrices_bytes=factor_bytes,
    )
    first = 0
    for rows in device_statistics.waves(site, chosen):
        last = first + len(rows)
        for tap, part in _pooled(run, ask, ask.paths, block_runner.Prepared(site.train.x[rows], ask.input), site):
            column = sum(ask.widths[:tap])
            if ask.widths[tap] != part.shape[1] or ask.relu:
                part = part @ stitched.random_features(part.shape[1], ask.widths[tap], ask.projection_seed)
            if ask.relu:
                part = np.maximum(part, 0.0)
            z[first:last, column : column + ask.widths[tap]] = part
        first = last
    run.reserve(factor_bytes)
    found = class_moments.to_tensors(class_moments.part(z, site.train.y[chosen], ask.labels), ask.exact)
    metrics = {"turn": float(ask.turn), "short": float(len(chosen) < len(wanted))}
    return Answer({"moments": found}, float(len(chosen)), metrics, local)


def count(ask: CountAsk, site: Site) -> Answer:
    """Count the right answers of each candidate on the device's held-out examples.

    No device counts as more examples than its own, which is what it is held to: of more held-out ones some are drawn.

    Returns:
        Bundle "counts": "examples" (1,), the number of examples counted, and "right" (candidates,), int64.

    Raises:
        DataError: there are labels that the job does not have.
    """
    device_statistics.require_labels(site.held.y, ask.labels, site.device)
    rows = np.arange(len(site.held))
    if len(rows) > max(len(site.train), 1):
        rows = np.sort(site.rng.permutation(rows)[: max(len(site.train), 1)])
    run = Flow(site, ask.blocks.values(), len(rows) * _flops(ask))
    right = np.zeros(len(ask.candidates), np.int64)
    for first in range(0, len(rows), device_statistics.WAVE):
        wave = rows[first : first + device_statistics.WAVE]
        x, y = site.held.x[wave], site.held.y[wave]
        ends = dict(_pooled(run, ask, ask.paths, block_runner.Prepared(x, ask.input), site))
        for i, (taps, groups) in enumerate(zip(ask.candidates, ask.align, strict=True)):
            z = np.concatenate([ends[tap] for tap in taps], axis=1)
            if groups is None:
                head = site.load(f"head.{i}")
                scores = z @ head["weights"].T + head["bias"]
            else:
                scores = stitched.align(z, groups)
            right[i] += int((scores.argmax(axis=1) == y).sum())
    counts = {"examples": np.array([len(rows)], np.int64), "right": right}
    return Answer({"counts": counts}, float(len(rows)), {"turn": float(ask.turn)}, site.local)


def _rows(site: Site, width: int) -> int:
    """Number of images whose features fit into the room for matrices, LEAST_ROWS at least."""
    return max(int(site.engine.room_bytes / ROOM / class_moments.factor_bytes(1, width)), LEAST_ROWS)


def _flops(ask: GatherAsk | CountAsk) -> float:
    """FLOPs of one image through all paths."""
    return sum(ask.blocks[ids[-1]].flops for ids in stitched.prefixes(ask.paths))


def _pooled_maps(run: Flow, maps: Source) -> np.ndarray:
    """Means of maps (n, channels, ...) over all positions: (n, channels), float64."""
    found = np.empty(maps.shape[:2], np.float64)
    run.reserve(found.nbytes + 2 * block_runner.PIECE_BYTES)  # one piece is freed once the next has been read
    for first, part in block_runner.pieces(maps):
        found[first : first + len(part)] = stitched.gap(part)
    return found


def _pooled(run: Flow, ask: Ask, paths: Sequence[Path], shown: Source, site: Site) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each path's index and its pooled end (n, channels), depth first.

    Common beginnings run once, and their maps are freed as soon as the last branch after them starts. Shorter branches
    run first, so that the longest one runs without other maps in memory.
    """
    numbers = {path: i for i, path in enumerate(paths)}
    order = stitched.prefixes(paths)
    following: dict[Path, list[Path]] = {}
    for ids in order:
        following.setdefault(ids[:-1], []).append(ids)
    size = {ids: sum(other[: len(ids)] == ids for other in order) for ids in order}
    waiting: list[tuple[Path, Source]] = [(ids, shown) for ids in following[()]]
    while waiting:
        ids, maps = waiting.pop()
        block = ask.blocks[ids[-1]]
        own = len(ids) == 1 or stitched.continues(ask.blocks[ids[-2]], block)
        junction = None if own else site.load(stitched.junction_name(ids))
        made = run.block(block, block_runner.joined(maps, junction, block))
        del maps
        if ids in numbers:
            yield numbers[ids], _pooled_maps(run, made)
        waiting += [(after, made) for after in sorted(following.get(ids, ()), key=lambda each: -size[each])]
        del made

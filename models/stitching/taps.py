"""What a device sums up and counts at the taps of networks: moments for heads, and right answers of candidates.

FedStitch (arXiv 2409.07202), section 3, on the device: forward passes only. Each function takes what was asked and a
Site, and returns an Answer. Whatever several paths begin with runs once for them all.
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

LEAST_ROWS = 32  # images that moments are of, however little memory there is
ROOM = 4  # one part in so many of the memory may be matrices of moments

Path = tuple[str, ...]


@dataclass(frozen=True)
class GatherAsk(Ask):
    """Moments of the pooled ends of `paths`, side by side."""

    paths: tuple[Path, ...]
    widths: tuple[int, ...]  # features of each; other than it has: projected onto so many random ones
    labels: int
    samples: int | None  # images; None: all
    projection_seed: int
    relu: bool = False  # what is projected goes through a ReLU
    exact: bool = False  # moments are sent as float64


@dataclass(frozen=True)
class CountAsk(Ask):
    """Right answers of candidates on held-out examples. Each has the pooled ends of some of `paths` side by side."""

    paths: tuple[Path, ...]
    candidates: tuple[tuple[int, ...], ...]  # which of the paths
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]  # which of its outputs are which label; None: it has a head
    labels: int


def gather(ask: GatherAsk, site: Site) -> Answer:
    """Bundle "moments": `class_moments.Part` of the device's own images, as many as were asked for or memory allows.

    The metric "short" is 1 where memory allowed fewer than were asked for and there are.

    Raises:
        DataError: no examples, or labels outside those of the job.
    """
    device_statistics.require_labels(site.train.y, ask.labels, site.device)
    local = scoring.drawn(site)
    wanted = scoring.order(local)[: ask.samples]
    chosen = wanted[: _rows(site, sum(ask.widths))]
    run = Flow(site, ask.blocks.values(), len(chosen) * _flops(ask))
    z = np.empty((len(chosen), sum(ask.widths)), np.float32)
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
    run.reserve(class_moments.factor_bytes(*z.shape))
    found = class_moments.to_tensors(class_moments.part(z, site.train.y[chosen], ask.labels), ask.exact)
    metrics = {"turn": float(ask.turn), "short": float(len(chosen) < len(wanted))}
    return Answer({"moments": found}, float(len(chosen)), metrics, local)


def count(ask: CountAsk, site: Site) -> Answer:
    """Bundle "counts": held-out "examples" (1,), and "right" (candidates,) answers of each candidate.

    Raises:
        DataError: labels outside those of the job.
    """
    device_statistics.require_labels(site.held.y, ask.labels, site.device)
    run = Flow(site, ask.blocks.values(), len(site.held) * _flops(ask))
    right = np.zeros(len(ask.candidates), np.int64)
    for first in range(0, len(site.held), device_statistics.WAVE):
        x, y = (each[first : first + device_statistics.WAVE] for each in (site.held.x, site.held.y))
        ends = dict(_pooled(run, ask, ask.paths, block_runner.Prepared(x, ask.input), site))
        for i, (taps, groups) in enumerate(zip(ask.candidates, ask.align, strict=True)):
            z = np.concatenate([ends[tap] for tap in taps], axis=1)
            if groups is None:
                head = site.load(f"head.{i}")
                scores = z @ head["weights"].T + head["bias"]
            else:
                scores = stitched.align(z, groups)
            right[i] += int((scores.argmax(axis=1) == y).sum())
    counts = {"examples": np.array([len(site.held)], np.int64), "right": right}
    return Answer({"counts": counts}, 1.0, {"turn": float(ask.turn)}, site.local)


def _rows(site: Site, width: int) -> int:
    """How many images' features fit into the room for matrices."""
    return max(int(site.engine.room_bytes / ROOM / class_moments.factor_bytes(1, width)), LEAST_ROWS)


def _flops(ask: GatherAsk | CountAsk) -> float:
    """Of one image through all paths."""
    return sum(ask.blocks[ids[-1]].flops for ids in stitched.prefixes(ask.paths))


def _pooled(run: Flow, ask: Ask, paths: Sequence[Path], shown: Source, site: Site) -> Iterator[tuple[int, np.ndarray]]:
    """Each path's number and its pooled end (n, channels), depth first.

    Every beginning runs once, and its maps go as soon as whatever follows it has begun; shorter branches go first, so
    that the last one runs with no other maps beside it.
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
            yield numbers[ids], np.concatenate([stitched.gap(part) for _, part in block_runner.pieces(made)])
        waiting += [(after, made) for after in sorted(following.get(ids, ()), key=lambda each: -size[each])]
        del made

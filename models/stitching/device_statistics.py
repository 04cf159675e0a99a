"""What a device sums up and counts for a stitching job: for junctions, for heads, and held-out examples.

FedStitch (arXiv 2409.07202), section 3, on the device: forward passes only. Each function takes what was
asked and a Site, and returns an Answer. The sums of several devices add (`fedquilt.models.stitching.least_squares`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt.core import Answer, DataError, Site, Tensors
from fedquilt.models.stitching import block_runner, least_squares, scoring, stitched
from fedquilt.models.stitching.activations import Source
from fedquilt.models.stitching.block_runner import Flow
from fedquilt.models.stitching.scoring import Ask

WAVE = 128  # images that go through a path together


@dataclass(frozen=True)
class FitAsk(Ask):
    """Sums for the junctions from `path` to each of `winners`."""

    path: tuple[str, ...]
    winners: tuple[str, ...]
    samples: int
    ridge: float
    bias: bool


@dataclass(frozen=True)
class HeadAsk(Ask):
    """Sums for a linear head on the pooled last maps of each of `bodies`."""

    bodies: tuple[tuple[str, ...], ...]
    labels: int
    samples: int
    random_features: int
    projection_seed: int


@dataclass(frozen=True)
class ValidateAsk(Ask):
    """Accuracy of each of `nets` on held-out examples, by its head and by its aligned logits."""

    nets: tuple[tuple[str, ...], ...]
    align: tuple[tuple[tuple[int, ...], ...] | None, ...]
    heads: bool
    labels: int


def fit(ask: FitAsk, site: Site) -> Answer:
    """Bundles "moments.<i>": for the i-th winner, the sums that its junction is solved from.

    Raises:
        DataError: no examples.
    """
    path = [ask.blocks[name] for name in ask.path]
    between = stitched.junctions(path, site.load)
    winners = [ask.blocks[name] for name in ask.winners]
    local, chains = scoring.drawn(site), list(scoring.chains(ask.blocks, winners))
    chosen = scoring.order(local)[: ask.samples]
    flops = sum(block.flops for block in path) + sum(block.flops for chain, _ in chains for block in chain[:-1])
    run = Flow(site, ask.blocks.values(), len(chosen) * flops)
    found: dict[str, Tensors] = {}
    for chain, wanted in chains:  # one donor's sums at a time: of 2048 channels each winner's are 34 MB
        sums: dict[str, least_squares.Moments] = {}
        for rows in _waves(site, chosen):
            shown = block_runner.Prepared(site.train.x[rows], ask.input)
            x = run.along(path, between, shown, block_runner.Kept(run, rows, len(path)))
            y: Source = shown
            for block in chain:
                if block.id in wanted:
                    run.reserve(least_squares.moments_bytes(x.shape[1]))
                    for start, part in block_runner.pieces(block_runner.resized(x, *block.in_shape[1:])):
                        aim = y.rows(start, start + len(part))
                        sums[block.id] = least_squares.add_maps(sums.get(block.id), part, aim, ask.bias)
                if block is not chain[-1]:
                    y = run.block(block, y)
        while sums:
            name, each = sums.popitem()
            found[name] = least_squares.to_tensors(each, exact=ask.ridge == 0)
            del each
    return _answer(ask, [found[name] for name in ask.winners], len(chosen), local)


def head(ask: HeadAsk, site: Site) -> Answer:
    """Bundles "moments.<i>": for the i-th body, the sums of its pooled features and one-hot labels.

    Raises:
        DataError: no examples, or labels outside those of the job.
    """
    _require_labels(site.train.y, ask.labels, site.device)
    bodies = [[ask.blocks[name] for name in body] for body in ask.bodies]
    between = [stitched.junctions(body, site.load) for body in bodies]
    local = scoring.drawn(site)
    chosen = scoring.order(local)[: ask.samples]
    run = Flow(site, ask.blocks.values(), len(chosen) * sum(block.flops for body in bodies for block in body))
    widths = [ask.random_features or body[-1].out_shape[0] for body in bodies]
    features = [run.shelf.make((len(chosen), width)) for width in widths]
    for rows in _waves(site, chosen):
        shown, shared = block_runner.Prepared(site.train.x[rows], ask.input), block_runner.Shared(bodies)
        for i, body in enumerate(bodies):
            maps = run.along(body, between[i], shown, shared)
            for _, part in block_runner.pieces(maps):
                z = stitched.gap(part)
                if ask.random_features:
                    z = z @ stitched.random_features(z.shape[1], ask.random_features, ask.projection_seed)
                features[i].put(z.astype(np.float32))
    y = np.eye(ask.labels)[site.train.y[chosen]]
    run.reserve(least_squares.moments_bytes(max(widths)))
    return _answer(ask, [_head_sums(each, y) for each in features], len(chosen), local)


def _head_sums(features: Source, y: np.ndarray) -> Tensors:
    sums = None
    for first, z in block_runner.pieces(features):
        sums = least_squares.add(sums, z, y[first : first + len(z)])
    assert sums is not None
    return least_squares.to_tensors(sums, exact=False)


def validate(ask: ValidateAsk, site: Site) -> Answer:
    """Bundle "counts": right answers of each net on the held-out examples, by either way of labelling."""
    _require_labels(site.held.y, ask.labels, site.device)
    nets = [[ask.blocks[name] for name in net] for net in ask.nets]
    between = [stitched.junctions(net[:-1], site.load) for net in nets]
    run = Flow(site, ask.blocks.values(), len(site.held) * sum(block.flops for net in nets for block in net))
    right = {"ridge": np.zeros(len(nets), np.int64), "aligned": np.zeros(len(nets), np.int64)}
    for first in range(0, len(site.held), WAVE):
        y = site.held.y[first : first + WAVE]
        shown = block_runner.Prepared(site.held.x[first : first + WAVE], ask.input)
        shared = block_runner.Shared(net[:-1] for net in nets)
        for i, net in enumerate(nets):
            maps = run.along(net[:-1], between[i], shown, shared)
            if ask.heads:
                head = site.load(f"head.{i}")
                z = np.concatenate([stitched.gap(part) for _, part in block_runner.pieces(maps)])
                right["ridge"][i] += _right(z @ head["weights"].T + head["bias"], y)
            groups = ask.align[i]
            if groups is not None:
                into_last = stitched.junctions(net, site.load)[-1]  # sent only where some last block is run
                logits = run.block(net[-1], block_runner.joined(maps, into_last, net[-1]))
                right["aligned"][i] += _right(stitched.align(logits.rows(0, len(y)), groups), y)
    counts = {"examples": np.array([len(site.held)], np.int64), **right}
    return Answer({"counts": counts}, float(len(site.held)), {"turn": float(ask.turn)}, site.local)


def _right(scores: np.ndarray, y: np.ndarray) -> int:
    return int((scores.argmax(axis=1) == y).sum())


def _answer(ask: Ask, found: Sequence[Tensors], examples: int, local: Tensors) -> Answer:
    bundles = {f"moments.{i}": each for i, each in enumerate(found)}
    return Answer(bundles, float(examples), {"turn": float(ask.turn)}, local)


def _waves(site: Site, rows: np.ndarray) -> Iterator[np.ndarray]:
    if not len(rows):
        raise DataError(f"{site.device} has no examples")
    for start in range(0, len(rows), WAVE):
        yield rows[start : start + WAVE]


def _require_labels(y: np.ndarray, labels: int, device: str) -> None:
    if len(y) and (y.min() < 0 or y.max() >= labels):
        raise DataError(f"{device} has labels from {y.min()} to {y.max()}; the job's labels are 0 to {labels - 1}")

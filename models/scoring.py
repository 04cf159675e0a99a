"""What a device does for a stitching job: score blocks, gather sums for junctions and heads, validate.

FedStitch (arXiv 2409.07202), section 3, on the device: forward passes only, through whatever engine
runs ONNX graphs. Each function takes what was asked and a Site, and returns an Answer; none sees more
than one donor's activations at a time.

The images that are scored on are drawn once for each device and job, so that the Gram matrix of every
donor block on them is computed once (16 KB each for 64 images) and kept in `Site.local`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedquilt.core import Answer, DataError, Site, Tensors
from fedquilt.models import cka, images, projection, stitch, vote
from fedquilt.models.stitch import Block

ScoreAt = Literal["input", "output", "hybrid"]
BATCH = 64  # images that go through a path together, where there are more


@dataclass(frozen=True)
class Ask:
    """What every task says: where the search stands, and the blocks it names."""

    turn: int
    input: images.Input
    blocks: dict[str, Block]


@dataclass(frozen=True)
class ScoreAsk(Ask):
    """Score every block of `pool` as the next one after `path`."""

    path: tuple[str, ...]
    pool: tuple[str, ...]
    score_at: ScoreAt
    estimator: cka.Estimator
    maps: cka.Maps
    samples: int
    screen: int
    ridge: float
    bias: bool
    native_factor: float  # what the score of the donor's own next block is multiplied by
    k: int
    epsilon: float
    coin: int


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


# -- score ----------------------------------------------------------------------------------------


def score(ask: ScoreAsk, site: Site) -> Answer:
    """Bundle "scores": the tensors of a `vote.Ballot`, in the order of the pool.

    Input score: the path's maps against those that the candidate's own donor feeds it; no junction
    and no run of the candidate. Output score: a junction is fitted on other images than are scored
    (on the same ones every wide block would interpolate and score 1), and the candidate's output is
    compared with its donor's. Hybrid: the input score screens, the best few get the output score.

    Raises:
        DataError: too few examples.
    """
    path, pool = [ask.blocks[name] for name in ask.path], [ask.blocks[name] for name in ask.pool]
    scorer = _Scorer(ask, site, path, pool)
    if ask.score_at == "output":
        seen = scorer.output_scores(pool)
        score = screen = np.array([seen[block.id].value for block in pool])
        level = np.zeros(len(pool), np.int64)
    else:
        seen = scorer.input_scores()
        screen = np.array([seen[block.id].value for block in pool])
        score, level = screen.copy(), np.zeros(len(pool), np.int64)
        if ask.score_at == "hybrid":
            best = vote.ranking(screen, level, ask.pool)[: ask.screen]
            fine = scorer.output_scores([pool[j] for j in best])
            for j in best:
                score[j], level[j] = fine[pool[j].id].value, 1
    picks, explored = vote.choose(score, level, ask.pool, ask.k, ask.epsilon, ask.coin)
    scores = {"screen": screen, "score": score, "level": level, "picks": np.array(picks, np.int64)}
    metrics = {
        "turn": float(ask.turn),
        "score": float(score[level == level.max()].max()),
        "explored": float(explored),
        "doubtful": float(sum(not each.sound for each in seen.values())),
    }
    return Answer({"scores": scores}, float(len(scorer.scored)), metrics, scorer.local)


class _Scorer:
    """The images of one score task, and what has been computed on them."""

    def __init__(self, ask: ScoreAsk, site: Site, path: Sequence[Block], pool: Sequence[Block]) -> None:
        self._ask, self._site, self._path, self._pool = ask, site, path, pool
        self.local: dict[str, np.ndarray] = _drawn(site, ask)
        rows = self.local["rows"]
        disjoint = ask.score_at != "input"
        count = min(ask.samples, len(rows) // 2 if disjoint else len(rows))
        if count < cka.MIN_IMAGES:
            need = cka.MIN_IMAGES * (2 if disjoint else 1)
            raise DataError(f"{site.device} has {len(site.train)} examples: scoring needs at least {need}")
        steps = len(path) + sum(2 * len(chain) + len(wanted) for chain, wanted in _chains(ask.blocks, pool))
        self._run = _Runs(site, steps)
        self.scored = images.prepare(site.train.x[rows[:count]], ask.input)
        self._fitted = images.prepare(site.train.x[rows[len(rows) - count :]], ask.input) if disjoint else None
        self._references()

    def input_scores(self) -> dict[str, cka.Score]:
        """Of every block of the pool; a path that is one donor's own needs no run at all."""
        last = self._path[-1]
        if stitch.is_native(self._path) and _reference(last) in self.local:
            here = self.local[_reference(last)]
        else:
            here = self._gram(self._forward(self.scored))
        return {block.id: self._compare(block, here, _reference(block, -1)) for block in self._pool}

    def output_scores(self, candidates: Sequence[Block]) -> dict[str, cka.Score]:
        """Of some blocks of the pool, each donor's own path run once on the images that are fitted on."""
        assert self._fitted is not None
        count = len(self.scored)
        both = self._forward(np.concatenate([self.scored, self._fitted]))
        scored, fitted = both[:count], both[count:]
        scores = {}
        for chain, wanted in _chains(self._ask.blocks, candidates):
            y = self._fitted
            for block in chain:
                if block.id in wanted:
                    scores[block.id] = self._output_score(block, scored, fitted, y)
                if block is not chain[-1]:
                    y = self._run(block, y)
        return scores

    def _output_score(self, block: Block, scored: np.ndarray, fitted: np.ndarray, y: np.ndarray) -> cka.Score:
        junction = None
        if not stitch.continues(self._path[-1], block):
            x = images.resize(fitted, *block.in_shape[1:])
            weights, bias = projection.fit_maps(x, y, self._ask.ridge, self._ask.bias)
            junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        elif stitch.is_native(self._path):
            return cka.Score(self._ask.native_factor, True)  # the donor's own output: CKA of equal matrices is 1
        output = self._run(block, stitch.join(scored, junction, block))
        return self._compare(block, self._gram(output), _reference(block))

    def _compare(self, block: Block, here: np.ndarray, reference: str) -> cka.Score:
        found = cka.cka(here, self.local[reference], self._ask.estimator)
        own = stitch.continues(self._path[-1], block)
        return found._replace(value=found.value * self._ask.native_factor) if own else found

    def _references(self) -> None:
        """The Gram matrices of the donors' own outputs that the pool is compared with, unless they are kept."""
        ask = self._ask
        for chain, wanted in _chains(ask.blocks, self._pool):
            if ask.score_at == "input":
                chain = chain[:-1]  # what the deepest candidate puts out is compared with nothing
            missing = [i for i, block in enumerate(chain) if _reference(block) not in self.local]
            if not missing or not wanted:
                continue
            x = self.scored
            for block in chain[: missing[-1] + 1]:
                x = self._run(block, x)
                self.local[_reference(block)] = self._gram(x)

    def _forward(self, x: np.ndarray) -> np.ndarray:
        return stitch.forward(self._path, stitch.junctions(self._path, self._site.load), self._run, x)

    def _gram(self, activations: np.ndarray) -> np.ndarray:
        return cka.gram(activations, self._ask.maps).astype(np.float32)


def _drawn(site: Site, ask: ScoreAsk) -> dict[str, np.ndarray]:
    """The private state, begun anew when the device's examples have changed in number."""
    size = np.array([len(site.train), ask.samples])
    if "rows" in site.local and np.array_equal(site.local["size"], size):
        return dict(site.local)
    return {"size": size, "rows": site.rng.permutation(len(site.train))[: 2 * ask.samples]}


def _reference(block: Block, offset: int = 0) -> str:
    return f"gram.{block.donor}.{block.index + offset}"


# -- sums -----------------------------------------------------------------------------------------


def fit(ask: FitAsk, site: Site) -> Answer:
    """Bundles "moments.<i>": for the i-th winner, the sums that its junction is solved from."""
    path = [ask.blocks[name] for name in ask.path]
    between = stitch.junctions(path, site.load)
    winners = [ask.blocks[name] for name in ask.winners]
    parts: dict[str, list[projection.Moments]] = {name: [] for name in ask.winners}
    chains = list(_chains(ask.blocks, winners))
    batches = _batches(site, ask.samples)
    run = _Runs(site, len(batches) * (len(path) + sum(len(chain) for chain, _ in chains)))
    for rows in batches:
        shown = images.prepare(site.train.x[rows], ask.input)
        x = stitch.forward(path, between, run, shown)
        for chain, wanted in chains:
            y = shown
            for block in chain:
                if block.id in wanted:
                    sums = projection.moments_of_maps(images.resize(x, *block.in_shape[1:]), y, ask.bias)
                    parts[block.id] = [projection.merge([*parts[block.id], sums])]
                if block is not chain[-1]:
                    y = run(block, y)
    return _sums([parts[name][0] for name in ask.winners], ask, site, exact=ask.ridge == 0)


def head(ask: HeadAsk, site: Site) -> Answer:
    """Bundles "moments.<i>": for the i-th body, the sums of its pooled features and one-hot labels.

    Raises:
        DataError: labels outside those of the job.
    """
    _require_labels(site.train.y, ask.labels, site.device)
    bodies = [[ask.blocks[name] for name in body] for body in ask.bodies]
    between = [stitch.junctions(body, site.load) for body in bodies]
    parts: list[list[projection.Moments]] = [[] for _ in bodies]
    batches = _batches(site, ask.samples)
    run = _Runs(site, len(batches) * sum(len(body) for body in bodies))
    for rows in batches:
        x = images.prepare(site.train.x[rows], ask.input)
        y = np.eye(ask.labels)[site.train.y[rows]]
        for i, body in enumerate(bodies):
            z = stitch.gap(stitch.forward(body, between[i], run, x))
            if ask.random_features:
                z = z @ stitch.random_features(z.shape[1], ask.random_features, ask.projection_seed)
            parts[i] = [projection.merge([*parts[i], projection.moments(z, y)])]
    return _sums([part[0] for part in parts], ask, site, exact=False)


def validate(ask: ValidateAsk, site: Site) -> Answer:
    """Bundle "counts": right answers of each net on the held-out examples, by either way of labelling."""
    _require_labels(site.held.y, ask.labels, site.device)
    nets = [[ask.blocks[name] for name in net] for net in ask.nets]
    run = _Runs(site, -(-len(site.held) // BATCH) * sum(len(net) for net in nets))
    right = {"ridge": np.zeros(len(ask.nets), np.int64), "aligned": np.zeros(len(ask.nets), np.int64)}
    for start in range(0, len(site.held), BATCH):
        x = images.prepare(site.held.x[start : start + BATCH], ask.input)
        y = site.held.y[start : start + BATCH]
        for i, path in enumerate(nets):
            between = stitch.junctions(path, site.load)
            maps = stitch.forward(path[:-1], between[:-1], run, x)
            if ask.heads:
                weights = site.load(f"head.{i}")
                scores = stitch.gap(maps) @ weights["weights"].T + weights["bias"]
                right["ridge"][i] += int((scores.argmax(axis=1) == y).sum())
            groups = ask.align[i]
            if groups is not None:
                logits = run(path[-1], stitch.join(maps, between[-1], path[-1]))
                right["aligned"][i] += int((stitch.align(logits, groups).argmax(axis=1) == y).sum())
    counts = {"examples": np.array([len(site.held)], np.int64), **right}
    return Answer({"counts": counts}, float(len(site.held)), {"turn": float(ask.turn)}, site.local)


def _sums(found: Sequence[projection.Moments], ask: FitAsk | HeadAsk, site: Site, exact: bool) -> Answer:
    bundles: dict[str, Tensors] = {f"moments.{i}": projection.to_tensors(each, exact) for i, each in enumerate(found)}
    return Answer(bundles, float(min(ask.samples, len(site.train))), {"turn": float(ask.turn)}, site.local)


# -- shared ---------------------------------------------------------------------------------------


def _chains(blocks: dict[str, Block], candidates: Iterable[Block]) -> Iterator[tuple[list[Block], set[str]]]:
    """For each donor of the candidates: its own path up to the deepest, and which of it are candidates."""
    by_donor: dict[str, list[Block]] = {}
    for block in candidates:
        by_donor.setdefault(block.donor, []).append(block)
    for donor, own in sorted(by_donor.items()):
        deepest = max(block.index for block in own)
        yield [blocks[f"{donor}.{i}"] for i in range(deepest + 1)], {block.id for block in own}


class _Runs:
    """Runs blocks, and says how far the task is; raises when the task is cancelled."""

    def __init__(self, site: Site, most: int) -> None:
        self._site, self._most, self._done = site, max(most, 1), 0

    def __call__(self, block: Block, x: np.ndarray) -> np.ndarray:
        self._site.progress(min(self._done / self._most, 1.0))
        self._done += 1
        return stitch.run_block(block, lambda graph, x: self._site.engine.run(self._site.path(graph), x), x)


def _batches(site: Site, samples: int) -> list[np.ndarray]:
    """Rows of examples drawn for this task, a batch at a time."""
    if not len(site.train):
        raise DataError(f"{site.device} has no examples")
    rows = site.rng.permutation(len(site.train))[:samples]
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def _require_labels(y: np.ndarray, labels: int, device: str) -> None:
    if len(y) and (y.min() < 0 or y.max() >= labels):
        raise DataError(f"{device} has labels from {y.min()} to {y.max()}; the job's labels are 0 to {labels - 1}")

"""Scores of candidate blocks on a device's own images, by forward passes only.

FedStitch (arXiv 2409.07202), section 3.2, scores by CKA, the similarity to the donor's own activations.

The images are drawn once for each device and job, and their results are cached. `ClientContext.private_state` contains
the Gram matrix of each donor block's output (16 KB for 64 images). `ClientContext.cache` contains the targets of
junctions, which are some positions of each donor block's output, and the outputs of the paths scored last, from which
the next task continues. Missing entries are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, ClientResult, DataError, Tensors
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network, vote
from fedquilt.models.stitching.algebra import cka, least_squares
from fedquilt.models.stitching.device import block_runner
from fedquilt.models.stitching.device.activations import ActivationSource, ActivationStack, MemoryStack, SourceSlice
from fedquilt.models.stitching.device.block_runner import BlockRunner
from fedquilt.models.stitching.stitched_network import Block

ScoreAt = Literal["input", "output", "hybrid"]


@dataclass(frozen=True)
class StitchingRequest:
    turn: int  # step of the search, which the update repeats
    input: inputs.Table
    blocks: dict[str, Block]  # id -> block, for all blocks that the task may run


@dataclass(frozen=True)
class ScoreRequest(StitchingRequest):
    path: tuple[str, ...]
    pool: tuple[str, ...]
    score_at: ScoreAt
    estimator: cka.Estimator
    samples: int
    screen: int
    positions: int  # positions of maps that a junction is fitted on
    ridge: float
    bias: bool
    k: int
    spread: bool
    epsilon: float
    coin: int


def score_pool(request: ScoreRequest, site: ClientContext) -> ClientResult:
    """Score each block of a pool as the next block of a path, and choose the device's votes.

    The result has the arrays of `vote.Ballot`. The input score compares the path's maps with the maps that the
    candidate reads in its donor, without a junction and without running the candidate. The output score fits a junction
    on other images than are scored (on the same images every wide block interpolates and scores 1) and compares the
    candidate's output with its output in the donor. In mode "hybrid" all blocks get the input score, and the best few
    also the output score. Blocks with an output score have level 1, all others level 0. Metric "doubtful" counts scores
    that are 0 because one of the compared arrays does not vary.
    """
    scorer = _BlockScorer(request, site)
    scores_by_block, level = scorer.score_candidate_inputs(), np.zeros(len(request.pool), np.int64)
    screen = np.array([score.value for score in scores_by_block])
    order = vote.greedy_picks(screen, level, request.pool, len(request.pool), request.spread)
    values = screen.copy()
    if request.score_at != "input":
        order = order if request.score_at == "output" else order[: request.screen]
        for j, score in zip(order, scorer.score_outputs(order), strict=True):
            scores_by_block[j], values[j], level[j] = score, score.value, 1
            if request.score_at == "output":
                screen[j] = score.value
    picks, explored = vote.choose_picks(
        values, level, request.pool, request.k, request.epsilon, request.coin, request.spread
    )
    scores = {"screen": screen, "score": values, "level": level, "picks": np.array(picks, np.int64)}
    metrics = {
        "turn": float(request.turn),
        "score": float(values[level == level.max()].max()),
        "explored": float(explored),
        "doubtful": float(sum(not score.sound for score in scores_by_block)),
    }
    return ClientResult({"scores": scores}, float(scorer.count), metrics, scorer.local)


class _BlockScorer:
    """The images of one score task, and the cached results of blocks on them.

    The first `count` images are scored. Junctions are fitted on as many others, unless only inputs are scored.
    """

    def __init__(self, request: ScoreRequest, site: ClientContext) -> None:
        self._request, self._site = request, site
        self._path = [request.blocks[name] for name in request.path]
        self._pool = [request.blocks[name] for name in request.pool]
        self._fits_junctions = request.score_at != "input"
        parts = image_set_count(request.score_at)
        if len(site.train) < cka.MIN_IMAGES * parts:
            need = cka.MIN_IMAGES * parts
            raise DataError(f"{site.device} has {len(site.train)} examples: scoring needs at least {need}")
        self.count = min(request.samples, len(site.train) // parts)
        self.local = load_private_state(site)
        self._rows = example_order(self.local)[: parts * self.count]
        self._junctions = stitched_network.load_junctions(self._path, site.load)
        self._fit_bytes = (
            least_squares.fit_bytes(self._path[-1].out_shape[0], request.positions) if self._fits_junctions else 0
        )
        self._runner = BlockRunner(
            site, request.blocks.values(), self._estimate_flops(), matrices_bytes=self._fit_bytes
        )
        self._images = block_runner.prepare_examples_lazily(site.train.x[self._rows], request.input)
        self._maps: ActivationStack | None = None
        self._cache_donor_references()

    # -- scores --

    def score_candidate_inputs(self) -> list[cka.CkaScore]:
        name = _gram_name(self._path[-1])
        native = stitched_network.is_native_path(self._path) and name in self.local
        gram = self.local[name] if native else self._compute_gram(self._compute_path_output_once(), self.count)
        return [self._compare_with_cached_gram(gram, _gram_name(block, -1)) for block in self._pool]

    def score_outputs(self, candidates: Iterable[int]) -> Iterator[cka.CkaScore]:
        blocks = [self._pool[j] for j in candidates]
        junctions = self._fit_junctions(blocks)
        for block in blocks:
            junction = None
            if block.id in junctions:
                weights, bias = junctions.pop(block.id)
                junction = {"weights": weights.read_examples(0, len(bias)), "bias": bias}
            yield self._score_output(block, junction)

    def _score_output(self, block: Block, junction: Tensors | None) -> cka.CkaScore:
        if junction is None and stitched_network.is_native_path(self._path):
            return cka.CkaScore(1.0, True)  # CKA of equal matrices
        source = block_runner.apply_junction_lazily(self._compute_path_output_once(), junction, block)
        gram = self._compute_gram(self._runner.run_block(block, source, self.count), self.count)
        return self._compare_with_cached_gram(gram, _gram_name(block))

    def _compare_with_cached_gram(self, gram: np.ndarray, reference: str) -> cka.CkaScore:
        reference_gram = self.local[reference][: len(gram), : len(gram)]
        return cka.cka(gram, reference_gram, self._request.estimator)

    def _compute_gram(self, maps: ActivationStack, examples: int) -> np.ndarray:
        return stack_gram(maps, examples).astype(np.float32)

    # -- cached results --

    def _cache_donor_references(self) -> None:
        for chain, _ in donor_chains(self._request.blocks, self._pool):
            if not self._fits_junctions:
                chain = chain[:-1]  # input scores do not use the deepest candidate's output
            uncached = [i for i, block in enumerate(chain) if not self._is_cached(block, block is not chain[-1])]
            maps: ActivationSource = self._images
            for block in chain[: uncached[-1] + 1] if uncached else ():
                feeds = self._fits_junctions and block is not chain[-1]  # a candidate reads this block's output
                maps = self._runner.run_block(block, maps, len(self._rows) if feeds else self.count)
                if _gram_name(block) not in self.local:
                    self.local[_gram_name(block)] = self._compute_gram(maps, self.count)
                if feeds:
                    positions = self._draw_positions(block.out_shape)
                    self._runner.reserve_memory(8 * len(positions) * block.out_shape[0])
                    target = block_runner.sample_vectors(self._select_junction_images(maps), positions)
                    self._runner.shelf.store(self._target_name(block), MemoryStack.from_array(target), spare=False)

    def _is_cached(self, block: Block, feeds: bool) -> bool:
        lacks_target = self._fits_junctions and feeds and self._find_target(block) is None
        return _gram_name(block) in self.local and not lacks_target

    def _find_target(self, block: Block) -> ActivationStack | None:
        shape = (len(self._draw_positions(block.out_shape)), block.out_shape[0])
        return self._runner.shelf.find(self._target_name(block), shape)

    def _target_name(self, block: Block) -> str:
        return block_runner.cache_key([block], self._rows, f"target{self._request.positions}")

    def _draw_positions(self, shape: Sequence[int]) -> np.ndarray:
        return block_runner.draw_positions(self.count, shape, self._request.positions)

    def _select_junction_images(self, maps: ActivationSource) -> ActivationSource:
        return SourceSlice(maps, self.count, 2 * self.count)

    def _compute_path_output_once(self) -> ActivationStack:
        if self._maps is None:
            self._maps = self._runner.run_path(self._path, self._junctions, self._images, self._rows)
        return self._maps

    def _fit_junctions(self, blocks: Sequence[Block]) -> dict[str, tuple[ActivationStack, np.ndarray]]:
        junctions: dict[str, tuple[ActivationStack, np.ndarray]] = {}
        foreign_blocks = [block for block in blocks if not stitched_network.is_continuation(self._path[-1], block)]
        for size in sorted({block.in_shape[1:] for block in foreign_blocks}):
            self._runner.reserve_memory(self._fit_bytes)
            x = block_runner.sample_vectors(
                block_runner.resize_maps_lazily(self._select_junction_images(self._compute_path_output_once()), *size),
                self._draw_positions((0, *size)),
            )
            fit = least_squares.RidgeFit(x, self._request.ridge, self._request.bias)
            for block in foreign_blocks:
                if block.in_shape[1:] == size:
                    junctions[block.id] = self._solve_junction(fit, block)
            del x, fit  # frees their memory before the next fit
        return junctions

    def _solve_junction(self, fit: least_squares.RidgeFit, block: Block) -> tuple[ActivationStack, np.ndarray]:
        # Solved for a few of the block's channels at a time, to bound memory.
        target = self._find_target(self._request.blocks[f"{block.donor}.{block.index - 1}"])
        assert target is not None
        rows, channels = target.shape
        weights = self._runner.shelf.make_stack((channels, self._path[-1].out_shape[0]))
        bias = np.empty(channels, np.float32)
        for first in range(0, channels, least_squares.BLOCK):
            last = min(first + least_squares.BLOCK, channels)
            part, bias[first:last] = fit.solve_weights(target.read_features(first, last, rows))
            weights.append(part.astype(np.float32))
        return weights, bias

    def _estimate_flops(self) -> float:
        request, n = self._request, len(self._rows)
        chain_flops = {b.id: b.flops for chain, _ in donor_chains(request.blocks, self._pool) for b in chain}
        scored_count = {"input": 0, "hybrid": min(request.screen, len(request.pool)), "output": len(request.pool)}[
            request.score_at
        ]
        pool = self.count * scored_count * sum(block.flops for block in self._pool) / len(self._pool)
        is_uncached = not any(_gram_name(block) in self.local for block in self._pool)
        return n * self._path[-1].flops + pool + n * is_uncached * sum(chain_flops.values())


def image_set_count(score_at: ScoreAt) -> int:
    """Return the number of disjoint image sets: one to score and, for output scores, one to fit junctions."""
    return 1 if score_at == "input" else 2


def stack_gram(maps: ActivationStack, examples: int) -> np.ndarray:
    features = prod(maps.shape[1:])
    return cka.gram_from_columns(lambda first, last: maps.read_features(first, last, examples), examples, features)


def _gram_name(block: Block, offset: int = 0) -> str:
    return f"gram.{block.donor}.{block.index + offset}"


def load_private_state(site: ClientContext) -> dict[str, np.ndarray]:
    """Return the device's private state, or a new one if the number of its examples has changed."""
    if "drawn" in site.private_state and site.private_state["drawn"][0] == len(site.train):
        return dict(site.private_state)
    return {"drawn": np.array([len(site.train), site.rng.integers(1 << 62)])}


def example_order(local: Tensors) -> np.ndarray:
    """Return a permutation of the device's examples, the same for all tasks of the job."""
    examples, seed = (int(value) for value in local["drawn"])
    return tensors.seeded_rng("drawn", seed).permutation(examples)


def donor_chains(blocks: dict[str, Block], candidates: Iterable[Block]) -> Iterator[tuple[list[Block], set[str]]]:
    """Yield for each donor its path up to the deepest candidate, and the ids of its candidates."""
    by_donor: dict[str, list[Block]] = {}
    for block in candidates:
        by_donor.setdefault(block.donor, []).append(block)
    for donor, donor_candidates in sorted(by_donor.items()):
        deepest = max(block.index for block in donor_candidates)
        yield [blocks[f"{donor}.{i}"] for i in range(deepest + 1)], {block.id for block in donor_candidates}

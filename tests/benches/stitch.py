"""Benchmark of block scoring on one device, against naive scoring and a forward pass.

The setting is one device, 64 images, the five architectures of the FedStitch paper (arXiv 2409.07202, section 5.1) with
random weights, and one path up to depth 10 without native successors. Some rounds of a search are scored in the three
ways of the engine ("output", "hybrid", "input") and without optimisations (`score_output`). The benchmark fails if
scores differ. Figures are ratios of processor time and of wall time.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt.core import Bundle, ClientContext, DeviceView, Examples, Tensors
from fedquilt.data import inputs
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.formats import job_bundle
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import stitched_network, vote
from fedquilt.models.stitching.algebra import cka, least_squares
from fedquilt.models.stitching.device import block_runner, scoring
from fedquilt.models.stitching.device.activations import SPARE_SUFFIX
from fedquilt.models.stitching.device.scoring import ScoreAt, ScoreRequest
from fedquilt.models.stitching.onnx import export
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.models.stitching.stitched_network import Block
from fedquilt.tools.artefacts.prepare import prepare_bundle
from fedquilt.tools.simulation import DeviceData, local_backend
from tests.benches.figures import compare_at_least, compare_at_most

DONORS = ("alexnet", "densenet121", "mobilenet_v2", "resnet50", "vgg16")
IMAGES = 64
DEPTH = 10
CLOCKS = ("cpu", "wall")  # as `_read_clocks` returns them
DEPTHS = (1, 5, 9)  # of paths
SMALL_SIDE = 64  # pixels
REPEATS = 3  # of references and of a forward pass; the fastest counts
BUDGET_BYTES = 4 << 30  # enough for all procedures
MIN_SPEEDUPS: Mapping[ScoreAt, float] = {
    "output": 8.0,
    "hybrid": 20.0,
    "input": 40.0,
}  # minimum, by processor time of the naive procedure
MIN_SPEEDUPS_LARGE: Mapping[ScoreAt, float] = {"output": 20.0, "hybrid": 30.0, "input": 200.0}  # of images beyond SMALL
MAX_REFERENCE_RATIO = 1.2  # to a plain forward pass
SCORE_TOLERANCE = 1e-4
Run = Callable[[Block, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ScoringRound:
    request: ScoreRequest
    site: ClientContext


def measure(report: Callable[[str], None], size: int = SMALL_SIDE, images: int = IMAGES) -> dict[str, Any]:
    """Time scoring rounds, naive scoring and the references. Return times and judged figures."""
    depths = DEPTHS if size <= SMALL_SIDE else DEPTHS[1:2]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "donors"
        bundle = prepare_donors(folder, size)

        def blob_path(name: str) -> Path:
            return folder / "blobs" / bundle.files[name].sha256

        rounds = walk_path(bundle, blob_path, Path(scratch), max(depths), images)
        forward_costs = measure_forward_pass(bundle, blob_path, Path(scratch), images)
        reference_costs = measure_reference_costs(rounds[0])
        report(f"references {reference_costs[0]:.2f} s of the processor, a forward pass {forward_costs[0]:.2f} s")
        comparisons = [
            compare_scoring(rounds[max(depth - 2, 0)], rounds[depth - 1], blob_path, report) for depth in depths
        ]
    result = _build_result(size, forward_costs, reference_costs, comparisons)
    return {**result, "lines": format_lines(result)}


def prepare_donors(folder: Path, size: int) -> Bundle:
    """Write a bundle with the paper's five networks, cut into blocks, with seeded random weights."""
    print(f"preparing {', '.join(DONORS)} at {size} pixels", file=sys.stderr, flush=True)
    prepare_bundle(
        {
            "labels": [str(i) for i in range(10)],
            "input": {"channels": 3, "size": size, "mean": [0.5], "std": [0.25]},
            "donors": [
                {"name": name.partition("_")[0], "network": {"name": f"torchvision/{name}"}, "seed": 1}
                for name in DONORS
            ],
        },
        folder,
    )
    return job_bundle.load_bundle(folder)


def draw_examples(count: int) -> Examples:
    """Return smooth random images (count, 32, 32, 3), uint8, whose feature maps are not mere noise."""
    draws = np.random.default_rng(5)
    coarse = draws.uniform(0, 255, size=(count, 3, 5, 5)).astype(np.float32)
    x = inputs.resize_maps(coarse, 32, 32).transpose(0, 2, 3, 1).astype(np.uint8)
    return Examples(x, draws.integers(0, 10, size=count))


def walk_path(
    bundle: Bundle, blob_path: Callable[[str], Path], scratch: Path, max_length: int = DEPTH - 1, count: int = IMAGES
) -> list[ScoringRound]:
    """Run a device's scoring rounds along a path of up to `max_length` blocks, and return them in order.

    Each step adds the best-scored block of another donor whose maps are large enough for DEPTH blocks. The pool shrinks
    by the paper's rule.
    """
    params = SearchSettings(
        expansions=DEPTH,
        completion=False,
        depth=DEPTH,
        spread=False,
        samples=count,
        fit_samples=2 * count,
    )
    state = METHOD.init(bundle, params, 0)
    path_of = {ref: blob_path(name) for name, ref in bundle.files.items()}.__getitem__
    examples, engine, blocks = draw_examples(2 * count), OnnxEngine(BUDGET_BYTES), state.stock.blocks
    device = DeviceData("bench", examples, examples)
    make_task_and_site = functools.partial(
        local_backend.make_task_and_context,
        METHOD,
        device=device,
        folder=scratch / "sent",
        engine=engine,
        cache=scratch / "walk",
        path_of_blob=path_of,
    )
    net = next(net for net in steps.starting_networks(state.stock) if net.path[0].startswith("resnet"))
    private_state: Tensors = _initial_state(examples)
    rounds: list[ScoringRound] = []
    while True:
        eligible = [blocks[name] for name in steps.eligible_blocks(net, state.stock, params)]
        pool = [block.id for block in eligible if not stitched_network.is_continuation(blocks[net.path[-1]], block)]
        state = replace(state, current=net, pool=tuple(pool))
        task_spec = METHOD.send(state, DeviceView("bench", None, tuple(range(len(rounds)))))
        assert task_spec is not None
        task, site = make_task_and_site(task_spec, number=len(rounds), local=private_state)
        rounds.append(ScoringRound(msgspec.convert(task.params, ScoreRequest), site))
        print(f"path: {' > '.join(net.path)}", file=sys.stderr, flush=True)
        result = METHOD.work(task, site)
        private_state = result.private_state
        if len(net.path) == max_length:
            break
        rate, seed = steps.exploration_rate(state), steps.choice_seed(state, "bench")
        ballot = vote.read_ballot(result.bundles["scores"], state.pool, params.k, rate, seed)
        min_side = bundle.meta["input"]["size"] >> (2 + len(net.path) // 2)
        fitting_blocks = {
            j
            for j, name in enumerate(state.pool)
            if blocks[name].kind == "middle"
            and blocks[name].out_shape[1] >= min_side
            and blocks[name].donor != blocks[net.path[-1]].donor
        }
        best = state.pool[
            next(j for j in vote.rank_blocks(ballot.score, ballot.level, state.pool) if j in fitting_blocks)
        ]
        shallow = vote.shallow_blocks({"bench": ballot}, [blocks[name] for name in state.pool], 0.0)
        fitted = replace(state, phase="fit", winners=(vote.Winner(best, 1.0, 1.0, 1),))
        task_spec = METHOD.send(fitted, DeviceView("bench", None))
        assert task_spec is not None
        task, site = make_task_and_site(task_spec, local=private_state)
        [moments] = METHOD.work(task, site).bundles.values()
        shape = blocks[net.path[-1]].out_shape[0], blocks[best].in_shape[0]
        weights, bias = least_squares.solve_ridge(least_squares.read_sent_moments(moments, *shape), params.ridge)
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        path = (*net.path, best)
        state = replace(state, junctions={**state.junctions, stitched_network.junction_name(path): junction})
        net = ScoredPath(path, tuple(name for name in net.pool if name != best and name not in shallow), 1.0)
    engine.close()
    return rounds


def _initial_state(train: Examples) -> Tensors:
    return {"drawn": np.array([len(train), 7])}


@dataclass(frozen=True)
class ScoringComparison:
    """Processor and wall seconds and scores of one round, by each way of scoring and by naive scoring."""

    request: ScoreRequest
    seconds: Mapping[str, np.ndarray]
    scores: Mapping[str, np.ndarray]


def compare_scoring(
    earlier_round: ScoringRound,
    scoring_round: ScoringRound,
    blob_path: Callable[[str], Path],
    report: Callable[[str], None],
) -> ScoringComparison:
    """Score a round in each way, with the caches of `earlier_round`, and naively. Return times and scores.

    If both rounds are the same, only the donors are cached, and not the path.
    """
    engine = OnnxEngine(BUDGET_BYTES)
    seconds: dict[str, np.ndarray] = {}
    scores: dict[str, np.ndarray] = {}
    for score_at in MIN_SPEEDUPS:
        with tempfile.TemporaryDirectory() as folder:
            _, _, private_state = _time_scoring(
                earlier_round, score_at, engine, Path(folder), _initial_state(earlier_round.site.train)
            )
            if earlier_round is scoring_round:
                _delete_path_caches(Path(folder))
            seconds[score_at], scores[score_at], _ = _time_scoring(
                scoring_round, score_at, engine, Path(folder), private_state
            )
        report(
            f"{score_at}, after {len(scoring_round.request.path)} blocks: {seconds[score_at][0]:.2f} s of the processor"
        )
    seconds["naive"], scores["naive"] = measure_naive(scoring_round, blob_path, engine)
    report(f"naive, after {len(scoring_round.request.path)} blocks: {seconds['naive'][0]:.1f} s of the processor")
    engine.close()
    return ScoringComparison(scoring_round.request, seconds, scores)


def measure_reference_costs(first_round: ScoringRound) -> np.ndarray:
    """Return the extra processor and wall seconds (2,) of a round in which the donors are not cached."""
    engine = OnnxEngine(BUDGET_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        uncached_times, cached = [], []
        for number in range(1 + REPEATS):  # the first repeat also loads the graphs
            cache = Path(folder) / str(number)
            uncached_time, _, private_state = _time_scoring(
                first_round, "hybrid", engine, cache, _initial_state(first_round.site.train)
            )
            uncached_times.append(uncached_time)
            _delete_path_caches(cache)
            cached.append(_time_scoring(first_round, "hybrid", engine, cache, private_state)[0])
    engine.close()
    return np.min(uncached_times[1:], axis=0) - np.min(cached[1:], axis=0)


def _delete_path_caches(cache: Path) -> None:
    for path in cache.glob(f"*{SPARE_SUFFIX}"):
        path.unlink()


def _time_scoring(
    scoring_round: ScoringRound, score_at: ScoreAt, engine: OnnxEngine, cache: Path, private_state: Tensors
) -> tuple[np.ndarray, np.ndarray, Tensors]:
    site = replace(scoring_round.site, engine=engine, cache_folder=cache, private_state=private_state)
    started = _read_clocks()
    result = scoring.score_pool(replace(scoring_round.request, score_at=score_at), site)
    return _read_clocks() - started, result.bundles["scores"]["score"], result.private_state


def _read_clocks() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def measure_naive(
    scoring_round: ScoringRound, blob_path: Callable[[str], Path], engine: OnnxEngine
) -> tuple[np.ndarray, np.ndarray]:
    """Score one round by the naive procedure.

    Returns:
        Processor and wall seconds (2,) of the whole round, and the scores of the pool.
    """
    request, site = scoring_round.request, scoring_round.site
    count = request.samples

    def run(block: Block, x: np.ndarray) -> np.ndarray:
        return stitched_network.run_block(block, lambda graph, x: engine.run(blob_path(graph), x), x)

    started = _read_clocks()
    rows = scoring.example_order(_initial_state(site.train))
    scored, fitted = (inputs.prepare_images(site.train.x[rows[i : i + count]], request.input) for i in (0, count))
    path = [request.blocks[name] for name in request.path]
    junctions = stitched_network.load_junctions(path, site.load)
    scores = []
    for name in request.pool:
        donor_blocks = [
            request.blocks[f"{request.blocks[name].donor}.{i}"] for i in range(request.blocks[name].index + 1)
        ]
        positions = block_runner.draw_positions(count, donor_blocks[-1].in_shape, request.positions)
        scores.append(score_output(path, junctions, donor_blocks, run, scored, fitted, positions, request.ridge))
    return _read_clocks() - started, np.array(scores)


def measure_forward_pass(
    bundle: Bundle, blob_path: Callable[[str], Path], folder: Path, count: int = IMAGES
) -> np.ndarray:
    """Return processor and wall seconds (2,) of all donors on 2 * count images, without loading graphs."""
    images = inputs.prepare_images(draw_examples(2 * count).x, bundle.meta["input"])
    total = np.zeros(2)
    for donor in bundle.meta["donors"].values():
        file = folder / "whole.onnx"
        donor_pool, files = stitched_network.load_donor_pool(bundle.meta), {n: blob_path(n) for n in bundle.files}
        network = stitched_network.StitchedNetwork((tuple(donor["blocks"]),), {}, align=tuple((i,) for i in range(10)))
        meta, arrays = stitched_network.to_artefact(network, donor_pool)
        file.write_bytes(export.export_stitched(meta, arrays, donor_pool.blocks, files))
        engine = OnnxEngine(BUDGET_BYTES)
        seconds = []
        for _ in range(1 + REPEATS):
            began = _read_clocks()
            engine.run(file, images)
            seconds.append(_read_clocks() - began)
        total += np.min(seconds[1:], axis=0)
        engine.close()
    return total


def _build_result(
    size: int, forward_costs: np.ndarray, reference_costs: np.ndarray, comparisons: Sequence[ScoringComparison]
) -> dict[str, Any]:
    limits = MIN_SPEEDUPS if size <= SMALL_SIDE else MIN_SPEEDUPS_LARGE
    total = {
        score_at: np.sum([comparison.seconds[score_at] for comparison in comparisons], axis=0)
        for score_at in (*MIN_SPEEDUPS, "naive")
    }
    ratios = {f"{score_at}_score_to_naive": total["naive"] / total[score_at] for score_at in limits}
    slower = reference_costs / forward_costs
    differences = [
        float(np.abs(comparison.scores["output"] - comparison.scores["naive"]).max()) for comparison in comparisons
    ]
    table = [
        {
            "path": list(comparison.request.path),
            "candidates": len(comparison.request.pool),
            **{score_at: round(float(times[0]), 4) for score_at, times in comparison.seconds.items()},
        }
        for comparison in comparisons
    ]
    return {
        "bench": "stitch",
        "size": size,
        "images": comparisons[0].request.samples,
        "rounds": table,
        "plain_forward_s": round(float(forward_costs[0]), 3),
        "references_s": round(float(reference_costs[0]), 3),
        "figures": {
            **{
                f"{name}_by_{clock}": compare_at_least(float(comparison[clock_index]), limit, "times faster")
                for (name, comparison), limit in zip(ratios.items(), limits.values(), strict=True)
                for clock_index, clock in enumerate(CLOCKS)
            },
            **{
                f"references_to_plain_forward_by_{clock}": compare_at_most(
                    float(slower[clock_index]), MAX_REFERENCE_RATIO, "times as long"
                )
                for clock_index, clock in enumerate(CLOCKS)
            },
            "difference_of_scores": compare_at_most(max(differences), SCORE_TOLERANCE, ""),
        },
    }


def format_lines(result: dict[str, Any]) -> list[str]:
    head = f"    {'path':>6} {'blocks scored':>14} {'naive':>9} {'output':>9} {'hybrid':>9} {'input':>9}   CPU seconds"
    table = [
        f"    {len(row['path']):6} {row['candidates']:14} "
        + " ".join(f"{row[score_at]:9.3f}" for score_at in ("naive", "output", "hybrid", "input"))
        for row in result["rounds"]
    ]
    return [
        f"{result['size']} pixels, {result['images']} images, {', '.join(DONORS)} with random weights",
        head,
        *table,
        f"    once, on {2 * result['images']} images: references and targets {result['references_s']:.2f} s; "
        f"a plain forward pass {result['plain_forward_s']:.2f} s",
    ]


def score_output(
    path: Sequence[Block],
    junctions: Sequence[Tensors | None],
    donor_blocks: Sequence[Block],
    run: Run,
    scored: np.ndarray,
    fitted: np.ndarray,
    positions: np.ndarray,
    ridge: float,
) -> float:
    """Return the CKA on `scored` images of a candidate's outputs after the path and in its donor.

    The candidate is the last of `donor_blocks`. Its junction is solved on `fitted` images, from the vectors at
    `positions` in its input maps, flattened to n * h * w.
    """
    candidate = donor_blocks[-1]
    path_outputs = stitched_network.run_path(path, junctions, run, np.concatenate([scored, fitted]))
    donor_outputs = stitched_network.run_path(
        donor_blocks[:-1], [None] * (len(donor_blocks) - 1), run, np.concatenate([scored, fitted])
    )
    n = len(scored)
    junction = None
    if not stitched_network.is_continuation(path[-1], candidate):
        x = inputs.resize_maps(path_outputs[n:], *candidate.in_shape[1:])
        rows = [maps.transpose(0, 2, 3, 1).reshape(-1, maps.shape[1])[positions] for maps in (x, donor_outputs[n:])]
        weights, bias = least_squares.RidgeFit(rows[0], ridge).solve_weights(rows[1])
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
    output = run(candidate, stitched_network.apply_junction(path_outputs[:n], junction, candidate))
    return cka.cka(cka.gram_matrix(output), cka.gram_matrix(run(candidate, donor_outputs[:n]))).value

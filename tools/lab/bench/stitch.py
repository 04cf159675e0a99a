"""Benchmark of block scoring on one device, against naive scoring and a forward pass.

One device, 64 images, the five architectures of the FedStitch paper (arXiv 2409.07202, section 5.1) with random
weights, one path up to depth 10 without native successors. Some rounds of a real search are scored in the three ways of
this engine and without its optimisations (`score_output`). The benchmark fails if scores differ. Figures are
ratios of processor time and of wall time.
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
from fedquilt.models.stitching.device.activations import SPARE
from fedquilt.models.stitching.device.scoring import ScoreAt, ScoreRequest
from fedquilt.models.stitching.onnx import export
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.models.stitching.stitched_network import Block
from fedquilt.tools.artefacts.prepare import prepare_bundle
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures
from fedquilt.tools.simulation import DeviceData, local_backend

DONORS = ("alexnet", "densenet121", "mobilenet_v2", "resnet50", "vgg16")
IMAGES = 64
DEPTH = 10
CLOCKS = ("cpu", "wall")  # as `_read_clocks` returns them
DEPTHS = (1, 5, 9)  # of paths
SMALL = 64  # pixels
REPEATS = 3  # of what is compared with a forward pass, and of that: the fastest counts
BUDGET_BYTES = 4 << 30  # both sides have all the memory they want
FASTER: Mapping[ScoreAt, float] = {"output": 8.0, "hybrid": 20.0, "input": 40.0}  # times the naive procedure, at least
FASTER_LARGE: Mapping[ScoreAt, float] = {"output": 20.0, "hybrid": 30.0, "input": 200.0}  # of images beyond SMALL
SLOWER = 1.2  # times a plain forward pass, at most
SAME = 1e-4  # scores of both procedures differ by no more
Run = Callable[[Block, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ScoringRound:
    """Task parameters and site of one scoring round."""

    ask: ScoreRequest
    site: ClientContext


def measure(report: Callable[[str], None], size: int = SMALL, images: int = IMAGES) -> dict[str, Any]:
    """Measure a device's rounds by each way of scoring, naive scoring, and the references."""
    depths = DEPTHS if size <= SMALL else DEPTHS[1:2]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "donors"
        made = prepare_donors(folder, size)

        def find(name: str) -> Path:
            return folder / "blobs" / made.files[name].sha256

        rounds = walk_path(made, find, Path(scratch), max(depths), images)
        whole, own = measure_forward_pass(made, find, Path(scratch), images), measure_reference_costs(rounds[0])
        report(f"references {own[0]:.2f} s of the processor, a forward pass {whole[0]:.2f} s")
        compared = [compare_scoring(rounds[max(depth - 2, 0)], rounds[depth - 1], find, report) for depth in depths]
    return _build_result(size, whole, own, compared)


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
    """Draw smooth random images, so that feature maps are not mere noise."""
    draws = np.random.default_rng(5)
    coarse = draws.uniform(0, 255, size=(count, 3, 5, 5)).astype(np.float32)
    x = inputs.resize_maps(coarse, 32, 32).transpose(0, 2, 3, 1).astype(np.uint8)
    return Examples(x, draws.integers(0, 10, size=count))


def walk_path(
    made: Bundle, find: Callable[[str], Path], scratch: Path, longest: int = DEPTH - 1, count: int = IMAGES
) -> list[ScoringRound]:
    """Run the rounds in which one device scores along a path, up to the longest length.

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
        explore=0.0,
        explore_floor=0.0,
    )
    state = METHOD.init(made, params, 0)
    path_of = {ref: find(name) for name, ref in made.files.items()}.__getitem__
    shown, engine, blocks = draw_examples(2 * count), OnnxEngine(BUDGET_BYTES), state.stock.blocks
    member = DeviceData("bench", shown, shown)
    deliver = functools.partial(
        local_backend.make_task_and_context,
        METHOD,
        member=member,
        folder=scratch / "sent",
        engine=engine,
        cache=scratch / "walk",
        path=path_of,
    )
    net = next(net for net in steps.starting_networks(state.stock) if net.path[0].startswith("resnet"))
    local: Tensors = _initial_state(shown)
    rounds: list[ScoringRound] = []
    while True:
        eligible = [blocks[name] for name in steps.eligible_blocks(net, state.stock, params)]
        pool = [block.id for block in eligible if not stitched_network.is_continuation(blocks[net.path[-1]], block)]
        state = replace(state, current=net, pool=tuple(pool))
        order = METHOD.send(state, DeviceView("bench", None, tuple(range(len(rounds)))))
        assert order is not None
        task, site = deliver(order, number=len(rounds), local=local)
        rounds.append(ScoringRound(msgspec.convert(task.params, ScoreRequest), site))
        print(f"path: {' > '.join(net.path)}", file=sys.stderr, flush=True)
        answer = METHOD.work(task, site)
        local = answer.private_state
        if len(net.path) == longest:
            break
        ballot = vote.read_ballot(answer.bundles["scores"], state.pool, params.k, 0.0, 0)
        least = made.meta["input"]["size"] >> (2 + len(net.path) // 2)
        fit = {
            j
            for j, name in enumerate(state.pool)
            if blocks[name].kind == "middle"
            and blocks[name].out_shape[1] >= least
            and blocks[name].donor != blocks[net.path[-1]].donor
        }
        best = state.pool[next(j for j in vote.rank_blocks(ballot.score, ballot.level, state.pool) if j in fit)]
        shallow = vote.shallow_blocks({"bench": ballot}, [blocks[name] for name in state.pool], 0.0)
        fitted = replace(state, phase="fit", winners=(vote.Winner(best, 1.0, 1.0, 1),))
        order = METHOD.send(fitted, DeviceView("bench", None))
        assert order is not None
        task, site = deliver(order, local=local)
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
    """One round by all ways of scoring and naively: processor and wall seconds, and scores."""

    ask: ScoreRequest
    seconds: Mapping[str, np.ndarray]
    scores: Mapping[str, np.ndarray]


def compare_scoring(
    before: ScoringRound, each: ScoringRound, find: Callable[[str], Path], report: Callable[[str], None]
) -> ScoringComparison:
    """Score a round in each way, after the round before, and naively.

    If both rounds are the same, the donors are cached and the path is not.
    """
    engine = OnnxEngine(BUDGET_BYTES)
    seconds: dict[str, np.ndarray] = {}
    scores: dict[str, np.ndarray] = {}
    for way in FASTER:
        with tempfile.TemporaryDirectory() as folder:
            _, _, local = _time_scoring(before, way, engine, Path(folder), _initial_state(before.site.train))
            if before is each:
                _delete_path_caches(Path(folder))
            seconds[way], scores[way], _ = _time_scoring(each, way, engine, Path(folder), local)
        report(f"{way}, after {len(each.ask.path)} blocks: {seconds[way][0]:.2f} s of the processor")
    seconds["naive"], scores["naive"] = measure_naive(each, find, engine)
    report(f"naive, after {len(each.ask.path)} blocks: {seconds['naive'][0]:.1f} s of the processor")
    engine.close()
    return ScoringComparison(each.ask, seconds, scores)


def measure_reference_costs(first: ScoringRound) -> np.ndarray:
    """Measure the extra processor and wall seconds (2,) of a round in which the donors are loaded and not cached."""
    engine = OnnxEngine(BUDGET_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        uncached, known = [], []
        for number in range(1 + REPEATS):  # the first one loads the graphs
            cache = Path(folder) / str(number)
            took, _, local = _time_scoring(first, "hybrid", engine, cache, _initial_state(first.site.train))
            uncached.append(took)
            _delete_path_caches(cache)
            known.append(_time_scoring(first, "hybrid", engine, cache, local)[0])
    engine.close()
    return np.min(uncached[1:], axis=0) - np.min(known[1:], axis=0)


def _delete_path_caches(cache: Path) -> None:
    for path in cache.glob(f"*{SPARE}"):
        path.unlink()


def _time_scoring(
    each: ScoringRound, way: ScoreAt, engine: OnnxEngine, cache: Path, local: Tensors
) -> tuple[np.ndarray, np.ndarray, Tensors]:
    site = replace(each.site, engine=engine, cache_folder=cache, private_state=local)
    began = _read_clocks()
    answer = scoring.score_pool(replace(each.ask, score_at=way, early=0), site)
    return _read_clocks() - began, answer.bundles["scores"]["score"], answer.private_state


def _read_clocks() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def measure_naive(each: ScoringRound, find: Callable[[str], Path], engine: OnnxEngine) -> tuple[np.ndarray, np.ndarray]:
    """Score one round by the naive procedure.

    Returns:
        Processor and wall seconds (2,) of the whole round, and the scores of the pool.
    """
    ask, site = each.ask, each.site
    count = ask.samples

    def run(block: Block, x: np.ndarray) -> np.ndarray:
        return stitched_network.run_block(block, lambda graph, x: engine.run(find(graph), x), x)

    began = _read_clocks()
    rows = scoring.example_order(_initial_state(site.train))
    scored, fitted = (inputs.prepare_images(site.train.x[rows[i : i + count]], ask.input) for i in (0, count))
    path = [ask.blocks[name] for name in ask.path]
    between = stitched_network.load_junctions(path, site.load)
    scores = []
    for name in ask.pool:
        own = [ask.blocks[f"{ask.blocks[name].donor}.{i}"] for i in range(ask.blocks[name].index + 1)]
        positions = block_runner.draw_positions(count, own[-1].in_shape, ask.positions)
        scores.append(score_output(path, between, own, run, scored, fitted, positions, ask.ridge))
    return _read_clocks() - began, np.array(scores)


def measure_forward_pass(made: Bundle, find: Callable[[str], Path], folder: Path, count: int = IMAGES) -> np.ndarray:
    """Measure the processor and wall seconds (2,) of all donors on twice the images, once their graphs are loaded."""
    shown = inputs.prepare_images(draw_examples(2 * count).x, made.meta["input"])
    total = np.zeros(2)
    for donor in made.meta["donors"].values():
        file = folder / "whole.onnx"
        stock, files = stitched_network.load_donor_pool(made.meta), {name: find(name) for name in made.files}
        network = stitched_network.StitchedNetwork((tuple(donor["blocks"]),), {}, align=tuple((i,) for i in range(10)))
        meta, arrays = stitched_network.to_artefact(network, stock)
        file.write_bytes(export.export_stitched(meta, arrays, stock.blocks, files))
        engine = OnnxEngine(BUDGET_BYTES)
        seconds = []
        for _ in range(1 + REPEATS):
            began = _read_clocks()
            engine.run(file, shown)
            seconds.append(_read_clocks() - began)
        total += np.min(seconds[1:], axis=0)
        engine.close()
    return total


def _build_result(
    size: int, whole: np.ndarray, own: np.ndarray, compared: Sequence[ScoringComparison]
) -> dict[str, Any]:
    limits = FASTER if size <= SMALL else FASTER_LARGE
    total = {way: np.sum([each.seconds[way] for each in compared], axis=0) for way in (*FASTER, "naive")}
    ratios = {f"{way}_score_to_naive": total["naive"] / total[way] for way in limits}
    slower = own / whole
    strays = [float(np.abs(each.scores["output"] - each.scores["naive"]).max()) for each in compared]
    table = [
        {
            "path": list(each.ask.path),
            "candidates": len(each.ask.pool),
            **{way: round(float(took[0]), 4) for way, took in each.seconds.items()},
        }
        for each in compared
    ]
    return {
        "bench": "stitch",
        "size": size,
        "images": compared[0].ask.samples,
        "rounds": table,
        "plain_forward_s": round(float(whole[0]), 3),
        "references_s": round(float(own[0]), 3),
        "figures": {
            **{
                f"{name}_by_{clock}": compare_at_least(float(each[at]), limit, "times faster")
                for (name, each), limit in zip(ratios.items(), limits.values(), strict=True)
                for at, clock in enumerate(CLOCKS)
            },
            **{
                f"references_to_plain_forward_by_{clock}": compare_at_most(float(slower[at]), SLOWER, "times as long")
                for at, clock in enumerate(CLOCKS)
            },
            "difference_of_scores": compare_at_most(max(strays), SAME, ""),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    head = f"    {'path':>6} {'blocks scored':>14} {'naive':>9} {'output':>9} {'hybrid':>9} {'input':>9}   CPU seconds"
    table = [
        f"    {len(row['path']):6} {row['candidates']:14} "
        + " ".join(f"{row[way]:9.3f}" for way in ("naive", "output", "hybrid", "input"))
        for row in result["rounds"]
    ]
    return [
        f"{result['size']} pixels, {result['images']} images, {', '.join(DONORS)} with random weights",
        head,
        *table,
        f"    once, on {2 * result['images']} images: references and targets {result['references_s']:.2f} s; "
        f"a plain forward pass {result['plain_forward_s']:.2f} s",
        *format_figures(result),
    ]


def score_output(
    path: Sequence[Block],
    between: Sequence[Tensors | None],
    own: Sequence[Block],
    run: Run,
    scored: np.ndarray,
    fitted: np.ndarray,
    positions: np.ndarray,
    ridge: float,
) -> float:
    """Return the CKA of the outputs of `own`'s last block behind the path and in its donor, all run from the images.

    `positions` are those of its input maps on `fitted`, of n * h * w.
    """
    candidate = own[-1]
    here = stitched_network.run_path(path, between, run, np.concatenate([scored, fitted]))
    there = stitched_network.run_path(own[:-1], [None] * (len(own) - 1), run, np.concatenate([scored, fitted]))
    n = len(scored)
    junction = None
    if not stitched_network.is_continuation(path[-1], candidate):
        x = inputs.resize_maps(here[n:], *candidate.in_shape[1:])
        rows = [maps.transpose(0, 2, 3, 1).reshape(-1, maps.shape[1])[positions] for maps in (x, there[n:])]
        weights, bias = least_squares.RidgeFit(rows[0], ridge).solve_weights(rows[1])
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
    output = run(candidate, stitched_network.apply_junction(here[:n], junction, candidate))
    return cka.cka(cka.gram_matrix(output), cka.gram_matrix(run(candidate, there[:n]))).value

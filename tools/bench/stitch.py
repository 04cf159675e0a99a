"""`fedquilt bench stitch`: what scoring costs on one device, against the naive procedure and a plain forward pass.

One device, 64 images, the five architectures of the FedStitch paper (arXiv 2409.07202, section 5.1) with
random weights, one path up to depth 10 that avoids a donor's own next block. The rounds are those of a
real search. Some of them are scored by this engine in its three ways and by the naive procedure
(`fedquilt.tools.bench.naive`) in the same runtime, one right after the other; scores that differ make the
bench fail. Figures are ratios of processor time, which other work on the machine changes little; those of wall
time stand beside them.
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

from fedquilt import bundle
from fedquilt.core import Bundle, DeviceView, Examples, Site, Tensors
from fedquilt.data import images
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import block_runner, export_onnx, least_squares, scoring, search, stitched, vote
from fedquilt.models.stitching.activations import SPARE
from fedquilt.models.stitching.scoring import ScoreAsk, ScoreAt
from fedquilt.models.stitching.search_state import Net, Params
from fedquilt.models.stitching.stitched import Block
from fedquilt.tools.artefacts.prepare import prepare
from fedquilt.tools.bench import naive
from fedquilt.tools.report.figures import at_least, figure, figure_lines
from fedquilt.tools.simulation import Member, hands

DONORS = ("alexnet", "densenet121", "mobilenet_v2", "resnet50", "vgg16")
IMAGES = 64
DEPTH = 10
DEPTHS = (1, 5, 9)  # of paths
SMALL = 64  # pixels
REPEATS = 3  # of what is compared with a forward pass, and of that: the fastest counts
BUDGET_BYTES = 4 << 30  # both sides have all the memory they want; `bench memory` is about budgets
FASTER: Mapping[ScoreAt, float] = {"output": 8.0, "hybrid": 20.0, "input": 40.0}  # times the naive procedure, at least
FASTER_LARGE: Mapping[ScoreAt, float] = {"output": 20.0, "hybrid": 30.0, "input": 200.0}  # of images beyond SMALL
SLOWER = 1.2  # times a plain forward pass, at most
SAME = 1e-4  # scores of both procedures differ by no more


@dataclass(frozen=True)
class Round:
    """One round of the search, as the device met it."""

    ask: ScoreAsk
    site: Site


def measure(
    size: int = 64, depths: Sequence[int] = (), work: Path | None = None, shown: int = IMAGES
) -> dict[str, Any]:
    """Seconds of one device's rounds by each way of scoring, of the naive procedure, and of the references.

    Args:
        size: of the images, in pixels.
        depths: lengths of the path at which the ways are compared; none: DEPTHS, or of large images, for which
            it takes minutes each, the middle one.
        work: where the donors are prepared, and found again; none: in a folder that goes afterwards.
        shown: images that are scored, and as many that junctions are fitted on. With fewer, ratios to the naive
            procedure are smaller, as what is loaded and solved does not depend on their number.
    """
    depths = depths or (DEPTHS if size <= SMALL else DEPTHS[1:2])
    with tempfile.TemporaryDirectory() as scratch:
        folder = (work or Path(scratch)) / f"donors-{size}"
        made = donors(folder, size)
        find = finder(folder, made)
        rounds = walk(made, find, Path(scratch), max(depths), shown)
        whole, own = plain(made, find, Path(scratch), shown), references(rounds[0])
        compared = [compare(rounds[max(depth - 2, 0)], rounds[depth - 1], find) for depth in depths]
    return _result(size, whole, own, compared)


def donors(folder: Path, size: int) -> Bundle:
    """The five architectures of the paper with seeded random weights, cut into blocks."""
    if not (folder / "bundle.json").is_file():
        _say(f"preparing {', '.join(DONORS)} at {size} pixels")
        prepare(
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
    return bundle.load(folder)


def finder(folder: Path, made: Bundle) -> Callable[[str], Path]:
    """Where a bundle's file lies."""
    return lambda name: folder / "blobs" / made.files[name].sha256


def examples(count: int) -> Examples:
    """Pictures of nothing in particular: smooth blobs, so that maps are not mere noise."""
    draws = np.random.default_rng(5)
    coarse = draws.uniform(0, 255, size=(count, 3, 5, 5)).astype(np.float32)
    x = images.resize(coarse, 32, 32).transpose(0, 2, 3, 1).astype(np.uint8)
    return Examples(x, draws.integers(0, 10, size=count))


def walk(
    made: Bundle, find: Callable[[str], Path], scratch: Path, longest: int = DEPTH - 1, count: int = IMAGES
) -> list[Round]:
    """The rounds in which one device scores its way along one path, from one block to the longest wanted.

    On goes the best-scored block of another donor that leaves maps large enough for DEPTH blocks; the pool
    shrinks by the paper's rule.
    """
    params = Params(
        native_continuation="exclude",
        depth=DEPTH,
        spread=False,
        samples=count,
        fit_samples=2 * count,
        explore=0.0,
        explore_floor=0.0,
    )
    state = METHOD.init(made, params, 0)
    path_of = {ref: find(name) for name, ref in made.files.items()}.__getitem__
    shown, engine, blocks = examples(2 * count), OnnxEngine(BUDGET_BYTES), state.stock.blocks
    member = Member("bench", shown, shown)
    deliver = functools.partial(
        hands.delivered,
        METHOD,
        member=member,
        folder=scratch / "sent",
        engine=engine,
        cache=scratch / "walk",
        path=path_of,
    )
    net = next(net for net in search.beginnings(state.stock) if net.path[0].startswith("resnet"))
    local: Tensors = _drawn(shown)
    rounds: list[Round] = []
    while True:
        state = replace(state, current=net, pool=search.offered(net, state.stock, params))
        order = METHOD.send(state, DeviceView("bench", None, tuple(range(len(rounds)))))
        assert order is not None
        task, site = deliver(order, number=len(rounds), local=local)
        rounds.append(Round(msgspec.convert(task.params, ScoreAsk), site))
        _say(f"path: {' > '.join(net.path)}")
        answer = METHOD.work(task, site)
        local = answer.local
        if len(net.path) == longest:
            break
        ballot = vote.ballot(answer.bundles["scores"], state.pool, params.k, 0.0, 0)
        least = made.meta["input"]["size"] >> (2 + len(net.path) // 2)
        fit = {
            j
            for j, name in enumerate(state.pool)
            if blocks[name].kind == "middle"
            and blocks[name].out_shape[1] >= least
            and blocks[name].donor != blocks[net.path[-1]].donor
        }
        best = state.pool[next(j for j in vote.ranking(ballot.score, ballot.level, state.pool) if j in fit)]
        shallow = vote.too_shallow({"bench": ballot}, [blocks[name] for name in state.pool], 0.0)
        fitted = replace(state, phase="fit", winners=(vote.Winner(best, 1.0, 1.0, 1),))
        order = METHOD.send(fitted, DeviceView("bench", None))
        assert order is not None
        task, site = deliver(order, local=local)
        [moments] = METHOD.work(task, site).bundles.values()
        shape = blocks[net.path[-1]].out_shape[0], blocks[best].in_shape[0]
        weights, bias = least_squares.solve(least_squares.from_tensors(moments, *shape), params.ridge)
        junction = {"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)}
        path = (*net.path, best)
        state = replace(state, junctions={**state.junctions, stitched.junction_name(path): junction})
        net = Net(path, tuple(name for name in net.pool if name != best and name not in shallow), 1.0)
    engine.close()
    return rounds


def _drawn(train: Examples) -> Tensors:
    """A device's private state before its first task: in which order it takes its images."""
    return {"drawn": np.array([len(train), 7])}


@dataclass(frozen=True)
class Compared:
    """One round by every way of scoring: seconds (2,) as `_now` gives them, and scores; "naive" is one of them."""

    ask: ScoreAsk
    seconds: Mapping[str, np.ndarray]
    scores: Mapping[str, np.ndarray]


def compare(before: Round, each: Round, find: Callable[[str], Path]) -> Compared:
    """A round by each way of scoring, on a device that has been through the one before, and naively.

    Of the first round the one before is itself: its donors are known then, and its path is not.
    """
    engine = OnnxEngine(BUDGET_BYTES)
    seconds: dict[str, np.ndarray] = {}
    scores: dict[str, np.ndarray] = {}
    for way in FASTER:
        with tempfile.TemporaryDirectory() as folder:
            _, _, local = _timed(before, way, engine, Path(folder), _drawn(before.site.train))
            if before is each:
                _forget_paths(Path(folder))
            seconds[way], scores[way], _ = _timed(each, way, engine, Path(folder), local)
        _say(f"{way}, after {len(each.ask.path)} blocks: {seconds[way][0]:.2f} s of the processor")
    seconds["naive"], scores["naive"] = naively(each, find, engine)
    engine.close()
    return Compared(each.ask, seconds, scores)


def references(first: Round) -> dict[str, np.ndarray]:
    """Seconds that a device's first round takes longer because it knows no donor: with loading them, and without."""
    engine = OnnxEngine(BUDGET_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / str(i) for i in range(1 + REPEATS)]
        cold, *warm = (_timed(first, "hybrid", engine, cache, _drawn(first.site.train)) for cache in caches)
        known = []
        for cache, (_, _, local) in zip(caches[1:], warm, strict=True):
            _forget_paths(cache)
            known.append(_timed(first, "hybrid", engine, cache, local)[0])
    engine.close()
    least = np.min(known, axis=0)
    return {"cold_s": cold[0] - least, "warm_s": np.min([each[0] for each in warm], axis=0) - least}


def _forget_paths(cache: Path) -> None:
    for path in cache.glob(f"*{SPARE}"):
        path.unlink()


def _timed(
    each: Round, way: ScoreAt, engine: OnnxEngine, cache: Path, local: Tensors
) -> tuple[np.ndarray, np.ndarray, Tensors]:
    site = replace(each.site, engine=engine, cache_at=cache, local=local)
    began = _now()
    answer = scoring.score(replace(each.ask, score_at=way, early=0), site)
    return _now() - began, answer.bundles["scores"]["score"], answer.local


def _now() -> np.ndarray:
    """Seconds (2,): of the processor by all threads of this process, and of the clock."""
    return np.array([time.process_time(), time.perf_counter()])


def naively(each: Round, find: Callable[[str], Path], engine: OnnxEngine) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one round by the naive procedure, and its scores."""
    ask, site = each.ask, each.site
    count = ask.samples

    def run(block: Block, x: np.ndarray) -> np.ndarray:
        return stitched.run_block(block, lambda graph, x: engine.run(find(graph), x), x)

    began = _now()
    rows = scoring.order(_drawn(site.train))
    scored, fitted = (images.prepare(site.train.x[rows[i : i + count]], ask.input) for i in (0, count))
    path = [ask.blocks[name] for name in ask.path]
    between = stitched.junctions(path, site.load)
    scores = []
    for name in ask.pool:
        own = [ask.blocks[f"{ask.blocks[name].donor}.{i}"] for i in range(ask.blocks[name].index + 1)]
        positions = block_runner.positions(count, own[-1].in_shape, ask.positions)
        scores.append(naive.output_score(path, between, own, run, scored, fitted, positions, ask.ridge))
    took = _now() - began
    _say(f"naive, after {len(path)} blocks, {len(ask.pool)} candidates: {took[0]:.1f} s of the processor")
    return took, np.array(scores)


def plain(made: Bundle, find: Callable[[str], Path], folder: Path, count: int = IMAGES) -> dict[str, np.ndarray]:
    """Seconds of a forward pass of all donors, each as one graph, on twice the images; with loading, and without."""
    shown = images.prepare(examples(2 * count).x, made.meta["input"])
    cold, warm = np.zeros(2), np.zeros(2)
    for donor in made.meta["donors"].values():
        file = folder / "whole.onnx"
        stock, files = stitched.stock(made.meta), {name: find(name) for name in made.files}
        network = stitched.Network((tuple(donor["blocks"]),), {}, align=tuple((i,) for i in range(10)))
        meta, arrays = stitched.to_artefact(network, stock)
        file.write_bytes(export_onnx.export_stitched(meta, arrays, stock.blocks, files))
        engine = OnnxEngine(BUDGET_BYTES)
        seconds = []
        for _ in range(1 + REPEATS):
            began = _now()
            engine.run(file, shown)
            seconds.append(_now() - began)
        cold, warm = cold + seconds[0], warm + np.min(seconds[1:], axis=0)
        engine.close()
    return {"cold_s": cold, "warm_s": warm}


def _result(
    size: int, whole: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray], compared: Sequence[Compared]
) -> dict[str, Any]:
    limits = FASTER if size <= SMALL else FASTER_LARGE
    total = {way: np.sum([each.seconds[way] for each in compared], axis=0) for way in (*FASTER, "naive")}
    ratios = {f"{way}_score_to_naive": total["naive"] / total[way] for way in limits}
    slower = own["warm_s"] / whole["warm_s"]
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
        "plain_forward_s": {key: round(float(value[0]), 3) for key, value in whole.items()},
        "references_s": {key: round(float(value[0]), 3) for key, value in own.items()},
        "by_wall_time": {
            **{name: round(float(each[1]), 2) for name, each in ratios.items()},
            "references_to_plain_forward": round(float(slower[1]), 2),
        },
        "figures": {
            **{
                name: at_least(float(each[0]), limit, "times faster")
                for (name, each), limit in zip(ratios.items(), limits.values(), strict=True)
            },
            "references_to_plain_forward": figure(float(slower[0]), SLOWER, "times as long"),
            "difference_of_scores": figure(max(strays), SAME, ""),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    head = f"    {'path':>6} {'blocks scored':>14} {'naive':>9} {'output':>9} {'hybrid':>9} {'input':>9}   CPU seconds"
    table = [
        f"    {len(row['path']):6} {row['candidates']:14} "
        + " ".join(f"{row[way]:9.3f}" for way in ("naive", "output", "hybrid", "input"))
        for row in result["rounds"]
    ]
    plain_s, own_s = result["plain_forward_s"], result["references_s"]
    return [
        f"{result['size']} pixels, {result['images']} images, {', '.join(DONORS)} with random weights",
        head,
        *table,
        f"    once, on {2 * result['images']} images: references and targets {own_s['warm_s']:.2f} s "
        f"({own_s['cold_s']:.2f} s with loading); a plain forward pass {plain_s['warm_s']:.2f} s "
        f"({plain_s['cold_s']:.2f} s)",
        "    by wall time: " + ", ".join(f"{name} {value:.2f}" for name, value in result["by_wall_time"].items()),
        *figure_lines(result),
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

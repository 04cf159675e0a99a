"""How a search scores candidates: by variance, by output, by the labels; and what that costs a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joint_runs import SMALL
from searches import played
from toy_tasks import deliver_task

from fedquilt.core import Aggregation, BlobRef, DeviceUpdate, DeviceView
from fedquilt.data import inputs
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.device import block_runner, scoring
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.testing.toy_networks import build_donors, image_devices
from tests.benches import stitch


def score_answers(**changes: Any) -> tuple[SearchState, dict[str, np.ndarray], dict[str, float]]:
    """What one device answers when the path is ash.0 > ash.1."""
    bundle, _ = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "completion": False, "spread": False, **changes}), 3)
    net = ScoredPath(("ash.0", "ash.1"), steps.starting_networks(state.stock)[0].pool, 1.0)
    state = replace(state, current=net, pool=steps.eligible_blocks(net, state.stock, state.params))
    seen: list[DeviceUpdate] = []
    spy = replace(
        METHOD,
        init=lambda bundle, params, seed: state,
        aggregation=Aggregation(
            lambda state, total, update: seen.append(update) or METHOD.aggregation.fold(state, total, update)
        ),
    )
    played(spy, image_devices(1), rounds=1)
    return state, dict(seen[0].bundles["scores"]), dict(seen[0].metrics)


@pytest.mark.parametrize("score_at", ["input", "output", "hybrid"])
@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
def test_the_native_next_block_always_scores_one(score_at, estimator):
    state, scores, _ = score_answers(score_at=score_at, estimator=estimator)
    native = state.pool.index("ash.2")
    assert scores["score"][native] == 1.0
    assert scores["screen"][native] == 1.0
    assert all(score < 1 for j, score in enumerate(scores["score"]) if j != native)


def test_hybrid_scores_the_best_few_by_their_output_and_ranks_them_first():
    _, hybrid, _ = score_answers(score_at="hybrid", k=3)
    _, coarse, _ = score_answers(score_at="input")
    _, fine, _ = score_answers(score_at="output")
    reached = np.flatnonzero(hybrid["level"])
    assert len(reached) == 3
    assert set(hybrid["picks"].tolist()) == set(reached.tolist())
    assert np.allclose(hybrid["score"][reached], fine["score"][reached], atol=1e-6)
    assert set(np.argsort(-hybrid["screen"])[:3]) == set(reached)
    # input mode scores the same images: with examples to spare both halves are full
    assert np.allclose(coarse["screen"], hybrid["screen"], atol=1e-6)


def test_references_are_computed_once_per_device():
    bundle, runner = build_donors()
    changes = {"score_at": "input", "subrounds": 3}
    devices = image_devices(1)
    played(METHOD, devices, runner=runner, rounds=1, seed=0, **changes)
    first = dict(runner.runs)
    assert max(first.values()) == 1
    assert not any(runs for name, runs in first.items() if bundle.meta["blocks"][name[:-5]]["kind"] == "end")
    played(METHOD, devices, runner=runner, rounds=2, seed=0, **changes)
    assert runner.runs == {name: 2 * runs for name, runs in first.items()}  # two rounds cost what one does


def score_twice(folder: Path, **changes: Any) -> tuple[list[dict[str, np.ndarray]], list[dict[str, int]], Any]:
    """Scores and runs of a stitched path's task on one device, now and again, and a way to go on."""
    bundle, runner = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "completion": False, **changes}), 3)
    path = ("ash.0", "elm.1")
    net = ScoredPath(path, steps.starting_networks(state.stock)[0].pool, 1.0)
    state = replace(state, current=net, pool=steps.eligible_blocks(net, state.stock, state.params))
    weights = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    junction = {"weights": weights, "bias": np.zeros(5, np.float32)}
    state = replace(state, junctions={stitched_network.junction_name(path): junction})
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    scores, runs, local = [], [], {}

    def again() -> None:
        nonlocal local
        runner.runs = dict.fromkeys(runner.graphs, 0)
        task, site = deliver_task(METHOD, order, image_devices(1)[0], runner, seed=3, local=local, cache=folder)
        answer = METHOD.work(task, site)
        local = answer.private_state
        scores.append(dict(answer.bundles["scores"]))
        runs.append({name: count for name, count in runner.runs.items() if count})

    again()
    again()
    return scores, runs, again


def test_the_naive_procedure_gives_the_same_scores(tmp_path):
    bundle, runner = build_donors()
    state = METHOD.init(bundle, SearchSettings(**SMALL), 3)
    blocks = state.stock.blocks
    path = [blocks["ash.0"], blocks["elm.1"]]
    weights = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
    junction = {"weights": weights, "bias": np.zeros(5, np.float32)}
    scores, _, _ = score_twice(tmp_path, score_at="output", positions=40)
    member = image_devices(1)[0]
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    _, site = deliver_task(METHOD, order, member, runner, seed=3, cache=tmp_path)
    rows = scoring.example_order(scoring.load_private_state(site))[:32]
    shown = inputs.prepare_images(member.train.x[rows], state.stock.input)
    net = ScoredPath(("ash.0", "elm.1"), steps.starting_networks(state.stock)[0].pool, 1.0)
    pool = steps.eligible_blocks(net, state.stock, replace(state.params, completion=False))
    run = lambda block, x: stitched_network.run_block(block, lambda graph, x: runner.run(Path(graph), x), x)  # noqa: E731
    for name, score in zip(pool, scores[0]["score"], strict=True):
        own = [blocks[f"{blocks[name].donor}.{i}"] for i in range(blocks[name].index + 1)]
        positions = block_runner.draw_positions(16, blocks[name].in_shape, 40)
        found = stitch.score_output(path, [None, junction], own, run, shown[:16], shown[16:], positions, 1e-4)
        assert found == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("score_at", ["input", "output", "hybrid"])
def test_nothing_is_run_twice_that_could_be_kept(score_at, tmp_path):
    scores, runs, again = score_twice(tmp_path, score_at=score_at)
    offered = {"ash.2.onnx", "ash.3.onnx", "ash.1.onnx", "elm.2.onnx", "fir.1.onnx", "fir.2.onnx"}
    assert set(runs[0]) >= {"ash.0.onnx", "elm.1.onnx", "fir.0.onnx"}
    assert set(runs[1]) <= offered - ({"elm.2.onnx"} if score_at == "input" else set())
    assert sum(runs[1].values()) == {"input": 0, "output": 6, "hybrid": 3}[score_at]
    assert all(np.array_equal(scores[0][name], scores[1][name]) for name in scores[0])
    for path in tmp_path.rglob("*"):  # what is kept is gone: it is computed again, to the same bits
        if path.is_file():
            path.unlink()
    again()
    assert all(np.array_equal(scores[0][name], scores[2][name]) for name in scores[0])


def test_a_task_brings_only_the_files_it_needs():
    bundle, _ = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "score_at": "input", "completion": False}), 3)
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order.work.flops_per_example > 0
    assert order.work.peak_bytes > 0
    repeat = METHOD.send(state, DeviceView("dev-0", None, (0,)))
    assert repeat.work.flops_per_example < order.work.flops_per_example
    sent = {name for name, value in order.bundles.items() if isinstance(value, BlobRef)}
    assert sent == {name for name in bundle.files if bundle.meta["blocks"][name[:-5]]["kind"] != "end"}

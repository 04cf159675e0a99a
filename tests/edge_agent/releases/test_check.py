"""The check of a model on a board's own data: what is measured, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_graphs
import numpy as np
import pytest
from linear_models import board_data, fitting_budget_bytes, network

from fedquilt.edge_agent.releases import check_process
from fedquilt.edge_agent.releases.acceptance import judge_check
from fedquilt.edge_agent.task.protocol import (
    TIMING_ENDED,
    TIMING_STARTED,
    CheckRequest,
    EngineLoaded,
    ProcessEvent,
    ProgressReport,
    WorkResult,
)
from fedquilt.wire import ReleaseLimits

Laid = Callable[..., str]


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    """A function that writes a model's file into a folder of its own, as a release is laid, and returns its path."""

    def lay(name: str, payload: bytes) -> str:
        path = tmp_path / name / "model.onnx"
        path.parent.mkdir()
        path.write_bytes(payload)
        return str(path)

    return lay


def order(model: str, before: str | None = None, **changes: object) -> CheckRequest:
    given = {"budget_bytes": fitting_budget_bytes(), "data": board_data(), "timing_s": 0.01, **changes}
    return CheckRequest(model=model, current_model=before, **given)


def test_it_measures_accuracy_of_both_latency_and_memory(laid: Laid) -> None:
    events: list[ProcessEvent] = []
    found = check_process.run_check(order(laid("new", network()), laid("old", network(turned=5))), events.append)
    assert (found.code, found.reason) == ("ok", "")
    told = found.metrics
    assert told["accuracy"] > 0.85
    assert told["accuracy_before"] == pytest.approx(told["accuracy"] / 2, abs=0.15)
    assert told["examples"] == 27  # a fifth of a tenth of 1347
    assert 0 < told["latency_s"] < 1
    assert found.examples >= 5
    assert found.peak_bytes is not None
    assert found.peak_bytes > 10_000_000
    assert events[1:] == [ProgressReport(TIMING_STARTED), ProgressReport(TIMING_ENDED)]
    assert isinstance(events[0], EngineLoaded)


def test_different_examples_are_timed_as_a_cascade_takes_longer_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: three examples leave after 1, 1 and 4 s; their mean is 2 s, though the median answer takes 1 s."""
    clock = [0.0]
    monkeypatch.setattr(check_process.time, "perf_counter", lambda: clock[0])

    class Engine:
        def run(self, path: Path, x: np.ndarray) -> np.ndarray:
            clock[0] += float(x[0, 0])
            return np.zeros((1, 2), np.float32)

    model = check_process.LoadedModel(Engine(), Path("model.onnx"), None, (1,))
    assert check_process._measure_latency(model, np.array([[1.0], [1.0], [4.0]]), 0.5) == (2.0, 5)


@pytest.mark.parametrize(
    ("made", "data", "said"),
    [
        ({"size": 28}, {}, ""),  # an image is resized to what the network takes
        ({"size": 28, "facts": False}, {}, "takes inputs of shape (1, 28, 28), the examples of this device have shape"),
        ({"labels": ("0", "1", "2")}, {}, "the network predicts 3 classes"),
        ({}, {"path": "nowhere.npz"}, "nowhere.npz"),
    ],
)
def test_a_model_for_other_data_is_refused_by_name(laid: Laid, made: dict, data: dict, said: str) -> None:
    found = check_process.run_check(order(laid("new", network(**made)), data=board_data(**data)))
    assert said in found.reason
    assert (found.code == "ok") is (said == "")
    if said:
        assert judge_check(ReleaseLimits(), found, None).refusal_reason.startswith("check failed: ")


def test_a_model_for_other_labels_is_refused_by_name(laid: Laid, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,b,y\n" + "1,2,day\n2,3,night\n" * 4)
    found = check_process.run_check(
        order(laid("new", network()), data={"path": str(tmp_path / "own.csv"), "labels": ["day", "night"]})
    )
    assert found.code == "model"
    assert (
        "model labels 0, 1, 2, 3, 4, 5 and 4 more differ from the labels of this device's data day, night"
        in found.reason
    )


def test_without_data_it_only_runs_and_says_so(laid: Laid) -> None:
    found = check_process.run_check(order(laid("new", network()), laid("old", network(turned=5)), data={}))
    assert found.metrics.keys() == {"latency_s"}
    verdict = judge_check(ReleaseLimits(min_gain=-0.01), found, None)
    assert verdict.refusal_reason == ""
    assert verdict.note == "accuracy was not measured: this device has no [data]"


@pytest.mark.parametrize("payload", [b"", b"no graph", network()[:-100]])
def test_bytes_that_are_no_network_are_refused(laid: Laid, payload: bytes) -> None:
    found = check_process.run_check(order(laid("new", payload)))
    assert (found.code, found.metrics) == ("model", {})
    assert "cannot be run" in found.reason


def test_a_budget_that_is_too_small_is_told(laid: Laid) -> None:
    found = check_process.run_check(order(laid("new", network()), budget_bytes=60_000_000))
    assert found.code == "budget"
    assert "raise budget" in found.reason


# -- graphs of other exporters ------------------------------------------------------------------------


def identity(*dims: int) -> Callable[[str], list[Any]]:
    """Nodes that reshape "x" to these sizes, so that no other one fits."""
    shape = made_graphs.numpy_helper.from_array(np.array(dims, np.int64))
    return lambda into: [
        made_graphs.helper.make_node("Constant", [], ["shape"], value=shape),
        made_graphs.helper.make_node("Reshape", ["x", "shape"], [into]),
    ]


def test_the_shape_of_the_release_is_the_one_that_is_run(laid: Laid) -> None:
    model = laid("new", made_graphs.product(["n", "a", "b"], nodes=identity(-1, 5 * 7), size=35).SerializeToString())
    found = check_process.run_check(order(model, data={}, input_shape=(5, 7)))
    assert (found.code, found.note) == ("ok", "accuracy was not measured: this device has no [data]")
    found = check_process.run_check(order(model, data={}, input_shape=(5, 8)))
    assert found.code == "model"
    assert "reshaped to the requested shape" in found.reason


@pytest.mark.parametrize("shape", [["n", "a", "b"], None])
def test_a_model_that_was_not_run_is_refused(laid: Laid, shape: list[str] | None) -> None:
    model = laid("new", made_graphs.product(shape, nodes=identity(-1, 5 * 7), size=35).SerializeToString())
    found = check_process.run_check(order(model, data={}))
    assert (found.code, found.metrics) == ("model", {})
    assert judge_check(ReleaseLimits(), found, None).refusal_reason.startswith(
        "check failed: model takes examples of shape"
    )
    assert "roll it out with --input-shape" in found.reason


@pytest.mark.parametrize(
    ("output", "nodes", "said"),
    [
        (("n", 2, 3), identity(-1, 2, 6), "for an example has shape (2, 3), not one score per class"),
        ((2, "n", 3), identity(2, -1, 6), "output for one example has shape (2, 1, 3)"),  # time first
    ],
)
def test_answers_that_are_no_scores_are_refused_with_a_fix(
    laid: Laid, output: tuple[object, ...], nodes: Any, said: str
) -> None:
    made = made_graphs.product(["n", 12], nodes=nodes, output=made_graphs.value("y", output))
    found = check_process.run_check(order(laid("new", made.SerializeToString()), data={}))
    assert found.code == "model"
    assert said in found.reason
    assert ": roll out a network" in found.reason or ": export the network" in found.reason


def centred(into: str) -> list[Any]:
    """Nodes that take the mean over the batch from each example."""
    return [
        made_graphs.helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        made_graphs.helper.make_node("Sub", ["x", "mean"], [into]),
    ]


def averaged(into: str) -> list[Any]:
    """Nodes that give the mean over the batch, one row for all examples."""
    return [made_graphs.helper.make_node("ReduceMean", ["x"], [into], axes=[0], keepdims=1)]


@pytest.mark.parametrize("mixed", [centred, averaged])
@pytest.mark.parametrize("batch", ["n", 1])
def test_answers_that_depend_on_the_other_examples_of_a_batch_are_refused(
    laid: Laid, mixed: Callable[[str], list[Any]], batch: str | int
) -> None:
    output = made_graphs.value("y", (batch, 3))
    made = made_graphs.product([batch, 6], nodes=mixed, output=output)
    found = check_process.run_check(order(laid("new", made.SerializeToString()), data={}))
    if batch == 1:
        assert (found.code, found.reason) == ("ok", "")
    else:
        assert found.code == "model"
        assert "depends on the other examples of a batch: export the model in evaluation mode" in found.reason


def test_a_batch_of_the_boards_own_examples_is_compared_too(laid: Laid) -> None:
    model = made_graphs.onnx.load_from_string(network())
    flat = next(node for node in model.graph.node if node.op_type == "Flatten")
    flat.output[0] = "x2"
    make = made_graphs.helper.make_node
    whole = [make("ReduceMean", ["x2"], ["flat"], axes=[0], keepdims=1)]
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:2], *whole, *nodes[2:]])
    found = check_process.run_check(order(laid("new", model.SerializeToString())))
    assert found.code == "model"
    assert "depends on the other examples of a batch" in found.reason


def test_without_room_for_a_second_example_a_batch_is_not_compared(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_graphs.product(["n", 6], nodes=centred).SerializeToString()
    monkeypatch.setattr(check_process.memory_budget, "resident_bytes", lambda pid: 0)
    monkeypatch.setattr(check_process.memory_budget, "read_peak_bytes", lambda pid: 3_000_000_000)
    found = check_process.run_check(order(laid("new", made), data={}, budget_bytes=4_000_000_000))
    assert found.code == "ok"
    assert "outputs of a batch were not compared" in found.note


# -- limits ---------------------------------------------------------------------------------------

MEASURED = WorkResult(
    metrics={"accuracy": 0.80, "accuracy_before": 0.85, "latency_s": 0.020}, examples=100, peak_bytes=200_000_000
)


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (ReleaseLimits(), ""),
        (ReleaseLimits(min_gain=-0.05, max_latency_s=0.020, max_energy_j=0.5, max_peak_bytes=200_000_000), ""),
        (
            ReleaseLimits(min_gain=-0.005),
            "accuracy on this device's held-out examples changes from 85.0% to 80.0%: -5.0 points",
        ),
        (ReleaseLimits(max_latency_s=0.0199), "an answer takes 20.0 ms on this device, 19.9 are permitted"),
        (ReleaseLimits(max_energy_j=0.4), "an answer takes 0.5 J on this device, 0.4 are permitted"),
        (
            ReleaseLimits(max_peak_bytes=199_000_000),
            "the model takes 200 MB of memory on this device, 199 MB are permitted",
        ),
    ],
)
def test_limits_decide_with_a_sentence(limits: ReleaseLimits, refused: str) -> None:
    """50 J while a hundred answers were timed."""
    verdict = judge_check(limits, MEASURED, inference_j=50.0)
    assert verdict.refusal_reason.startswith(refused)
    assert bool(verdict.refusal_reason) is bool(refused)
    assert verdict.metrics["energy_j"] == 0.5


def test_limits_on_what_cannot_be_measured_are_told_and_do_not_refuse() -> None:
    outcome = WorkResult(metrics={"accuracy": 0.8, "latency_s": 0.02}, examples=100)
    note = judge_check(ReleaseLimits(min_gain=0.0, max_energy_j=1.0), outcome, None).note
    assert note == (
        "energy was not measured: this device has no meter; accuracy was not compared: this device had no model before"
    )

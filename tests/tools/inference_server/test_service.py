"""What a runner counts, and tells in served.json: answers, labels and drift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import classifiers
from runners import Clock, Running, digest, npy, npz

from fedquilt.core import DataError, ModelError
from fedquilt.tools.operations.inference_server import service as services
from fedquilt.tools.operations.inference_server.service import ModelService, ModelSwitcher


def test_served_json_says_what_the_contract_says(running: Running, models: Path) -> None:
    clock = Clock()
    running.service._clock = clock
    running.client.post(npy(classifiers.image(250)))
    running.client.post(b"garbage")
    running.service.write_status_if_due()
    told = json.loads((models / "served.json").read_text())
    assert told.keys() == {"at", "model", "served", "failed", "latency_s", "drift", "accuracy", "labelled"}
    assert (told["served"], told["failed"], told["drift"], told["accuracy"], told["at"]) == (1, 0, None, None, 1e6)
    assert told["latency_s"] > 0
    running.client.post(npy(classifiers.image(250)))
    clock.now += services.BUSY_WRITE_S / 2
    running.service.write_status_if_due()
    assert json.loads((models / "served.json").read_text())["served"] == 1
    clock.now += services.BUSY_WRITE_S
    running.service.write_status_if_due()
    assert json.loads((models / "served.json").read_text())["served"] == 2
    clock.now += services.IDLE_WRITE_S + 1
    running.service.write_status_if_due()
    assert json.loads((models / "served.json").read_text())["at"] == clock.now  # the agent sees that it lives


@pytest.mark.parametrize("error", [ModelError("numbers that are not finite"), RuntimeError("session")])
def test_a_network_that_cannot_answer_an_input_has_failed(
    running: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise error

    monkeypatch.setattr(running.models.current.network, "compute_scores", fail)
    assert running.client.post(npy(classifiers.image(250)))[0] == 500
    health = running.service.make_health()
    assert (health["failed"], health["refused"], health["served"]) == (1, 0, 0)


def test_drift_is_told_and_outlives_a_new_start(running: Running, models: Path) -> None:
    rng = np.random.default_rng(0)

    def ask(service: ModelService, low: int, high: int, count: int) -> None:
        for level in rng.integers(low, high, count):
            service.predict_bytes(npy(classifiers.image(int(level))))

    ask(running.service, 40, 120, 200)
    assert running.service.make_status()["drift"] == 0.0
    ask(running.service, 120, 200, 100)
    drifted = running.service.make_status()["drift"]
    assert drifted > 0.5
    running.service.write_status()
    assert json.loads((models / "served.json").read_text())["drift"] == drifted
    again = ModelService(ModelSwitcher(models), models, size=100)
    ask(again, 120, 200, 100)
    assert again.make_status()["drift"] > 0.5
    assert again.make_health()["moved"].keys() >= {"mean 0", "class"}
    ask(again, 40, 120, 600)
    assert again.make_status()["drift"] == 0.0
    assert {path.name for path in models.iterdir()} == {"a", "b", "current", "served.json", "reference.json"}
    (models / "reference.json").write_bytes(b'{"damaged')
    assert ModelService(ModelSwitcher(models), models).make_status()["drift"] is None


def test_a_new_model_has_a_reference_of_its_own(running: Running, models: Path) -> None:
    for level in range(200):
        running.service.predict_bytes(npy(classifiers.image(level % 80)))
    assert running.service.make_status()["drift"] == 0.0
    running.service.write_status()
    classifiers.lead(models, "b")
    assert running.models.reload_if_changed()
    for _ in range(100):
        running.service.predict_bytes(npy(classifiers.image(250)))
    assert running.service.make_status()["drift"] is None
    running.service.write_status()
    classifiers.lead(models, "a")
    assert running.models.reload_if_changed()
    for _ in range(100):
        running.service.predict_bytes(npy(classifiers.image(250)))
    assert running.service.make_status()["drift"] > 0.9


def test_what_is_told_of_a_model_was_counted_with_it(running: Running, models: Path) -> None:
    for _ in range(250):
        answer = running.service.predict_bytes(npy(classifiers.image(250)))
        running.service.record_label(answer["id"], answer["prediction"])
    told = running.service.make_status()
    assert (told["drift"], told["accuracy"], told["labelled"]) == (0.0, 1.0, 250)
    classifiers.lead(models, "b")
    assert running.models.reload_if_changed()
    told = running.service.make_status()
    assert told["model"] == running.models.current.sha256
    assert (told["drift"], told["accuracy"], told["labelled"]) == (None, None, 0)


def test_labels_that_arrive_later_make_an_accuracy(running: Running) -> None:
    for number in range(20):
        _, told = running.client.post(npy(classifiers.image(250)))
        truth = "night" if number % 4 == 0 else 1
        label = json.dumps({"id": told["id"], "label": truth})
        wrong = json.dumps({"id": told["id"], "label": "dusk"})
        assert running.client.ask("POST", "/v1/label", wrong)[0] == 400  # and it still waits for a right one
        status, said = running.client.ask("POST", "/v1/label", label)
        assert (status, said) == (200, {"right": number % 4 != 0})
    status, said = running.client.ask("POST", "/v1/label", label)
    assert status == 404
    assert "has a label already" in said["error"]
    assert running.service.make_status()["accuracy"] == 0.75
    assert running.service.make_status()["labelled"] == 20


def test_a_label_is_one_of_the_model_that_answered(running: Running, models: Path) -> None:
    first, second = running.service.predict_bytes(npz(x=np.stack([classifiers.image(250)] * 2)))["answers"]
    classifiers.write_classifier(models / "b" / "model.onnx", labels=("day", "dusk"))
    classifiers.lead(models, "b")
    assert running.models.reload_if_changed()
    assert first["prediction"] == "day"
    assert running.service.record_label(first["id"], "day") == {"right": True}
    with pytest.raises(DataError, match="unknown label 'dusk': choose one of night, day"):
        running.service.record_label(second["id"], "dusk")
    assert running.service.record_label(second["id"], "night") == {"right": False}


def test_references_whose_parts_do_not_fit_are_left_out(running: Running, models: Path) -> None:
    x = np.stack([classifiers.image(level % 80) for level in range(100)])
    running.service.predict_bytes(npz(x=x))
    running.service.write_status()
    kept = json.loads((models / "reference.json").read_text())
    for each in kept.values():
        each["counts"].pop()
    (models / "reference.json").write_text(json.dumps(kept))
    again = ModelService(ModelSwitcher(models), models, size=100)
    again.predict_bytes(npz(x=x))
    assert again.make_status()["drift"] is None
    again.predict_bytes(npz(x=x))
    assert again.make_status()["drift"] == 0.0


def test_the_oldest_answers_wait_no_longer_for_their_labels(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_UNLABELLED", 3)
    first, *others = running.service.predict_bytes(npz(x=np.stack([classifiers.image(250)] * 4)))["answers"]
    with pytest.raises(services.UnknownAnswerError, match="or more than 3 newer results exist"):
        running.service.record_label(first["id"], 1)
    assert all(running.service.record_label(each["id"], 1)["right"] for each in others)


def test_references_of_the_latest_models_alone_are_kept(
    running: Running, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_REFERENCES", 1)
    for name in ("a", "b"):
        classifiers.lead(models, name)
        running.models.reload_if_changed()
        running.service.predict_bytes(npz(x=np.stack([classifiers.image(level % 80) for level in range(100)])))
        running.service.write_status()
        kept = json.loads((models / "reference.json").read_text())
        assert kept.keys() == {digest(models / name / "model.onnx")}


def test_an_npz_is_answered_example_by_example(running: Running) -> None:
    x = np.stack([classifiers.image(level) for level in (10, 250)] * 20)
    status, told = running.client.post(npz(x=x, y=np.array([0, 1] * 20)))
    assert status == 200
    assert [each["prediction"] for each in told["answers"]] == ["night", "day"] * 20
    assert running.service.make_status()["accuracy"] == 1.0


def test_a_folder_that_cannot_be_written_stops_no_answer(running: Running, models: Path, monkeypatch: Any) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(services.REAL, "write_atomically", full)
    running.service.write_status_if_due()
    assert "No space left on device" in running.service.make_health()["trouble"]
    assert running.client.post(npy(classifiers.image(1)))[0] == 200


NETWORK = {"name": "cnn", "classes": 2, "input": {"channels": 1, "size": 4}}


@pytest.mark.parametrize(
    ("task", "prediction", "label", "told", "accuracy", "rmse"),
    [
        ("labels", ["1"], ["0", "1"], {"right": False}, 0.5, {}),
        (
            "regression",
            {"y 0": -0.5, "y 1": 0.5},
            {"y 0": 1.5, "y 1": 0.5},
            {"difference": {"y 0": -2.0, "y 1": 0.0}},
            None,
            {"y 0": 2.0, "y 1": 0.0},
        ),
    ],
)
def test_other_tasks_are_answered_and_labelled(
    tmp_path: Path, task: str, prediction: Any, label: Any, told: Any, accuracy: float | None, rmse: dict[str, float]
) -> None:
    """A white image has the outputs -0.5 and 0.5."""
    facts = {"network": json.dumps({**NETWORK, "task": task}), "reading": json.dumps({"task": task})}
    model = classifiers.write_classifier(tmp_path / "net.onnx", facts=facts)
    service = ModelService(ModelSwitcher(model))
    for _ in range(services.MIN_LABELS):
        answer = service.predict_bytes(npy(classifiers.image(255)))
        assert answer["prediction"] == prediction
        assert service.record_label(answer["id"], label) == told
    assert service.make_status()["accuracy"] == accuracy
    assert service.make_health()["rmse"] == rmse
    waiting = service.predict_bytes(npy(classifiers.image(255)))["id"]
    for wrong in ("none", {"y": 1.0}, True):
        with pytest.raises(DataError, match=r"unknown labels|not a number for each of y 0, y 1"):
            service.record_label(waiting, wrong)

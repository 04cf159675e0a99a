"""Models exchanged while a runner answers."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import classifiers
import numpy as np
import pytest
from runners import Clock, Running, digest, npy
from waiting import wait_until

from fedquilt.core import ModelError
from fedquilt.host.disk import REAL
from fedquilt.tools.operations.inference_server.service import RETRY_S, ModelSwitcher

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def test_ten_thousand_requests_through_swaps_none_dropped_none_mixed(running: Running, models: Path) -> None:
    bodies = [npy(classifiers.image(level)) for level in (10, 40, 220, 250)]
    right = {}
    for name, order in (("a", (0, 0, 1, 1)), ("b", (1, 1, 0, 0))):
        right[digest(models / name / "model.onnx")] = [classifiers.LABELS[number] for number in order]
    found: list[Counter[tuple[str, int, str]]] = [Counter() for _ in range(8)]
    ended = threading.Event()

    def ask(mine: Counter[tuple[str, int, str]]) -> None:
        client = running.connect()
        for number in range(1250):
            which = number % 4
            status, told = client.post(bodies[which])
            assert status == 200, told
            mine[told["model"], which, told["prediction"]] += 1

    def swap() -> None:
        while not ended.is_set():
            before = running.models.current.sha256
            classifiers.lead(models, "b" if os.readlink(models / "current") == "a" else "a")
            assert running.models.reload_if_changed()
            assert running.models.current.sha256 != before
            seen = running.service.served
            wait_until(
                lambda seen=seen: ended.is_set() or running.service.served > seen + 300, "requests between two swaps"
            )

    errors: list[BaseException] = []

    def guarded(body: Any, *given: Any) -> None:
        try:
            body(*given)
        except BaseException as error:
            errors.append(error)

    asking = [threading.Thread(target=guarded, args=(ask, each)) for each in found]
    swapping = threading.Thread(target=guarded, args=(swap,))
    for thread in (*asking, swapping):
        thread.start()
    for thread in asking:
        thread.join()
    ended.set()
    swapping.join()
    assert not errors
    every = sum(found, Counter[tuple[str, int, str]]())
    assert sum(every.values()) == 10_000
    assert {model for model, _, _ in every} == set(right)
    assert all(right[model][which] == told for model, which, told in every)
    assert running.service.swaps >= 5
    assert running.service.make_health()["failed"] == 0


def test_a_request_begun_with_the_old_model_ends_with_it(running: Running, models: Path) -> None:
    old, network = running.models.current, running.models.current.network
    begun, go_on, told = threading.Event(), threading.Event(), []
    scores = network.compute_scores

    def slowly(x: np.ndarray) -> np.ndarray:
        begun.set()
        go_on.wait()
        return scores(x)

    network.compute_scores = slowly  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: told.append(running.connect().post(npy(classifiers.image(250)))))
    thread.start()
    begun.wait()
    classifiers.lead(models, "b")
    assert running.models.reload_if_changed()
    go_on.set()
    thread.join()
    ((status, answer),) = told
    assert (status, answer["model"], answer["prediction"]) == (200, old.sha256, "day")
    assert running.client.post(npy(classifiers.image(250)))[1]["prediction"] == "night"


@pytest.mark.parametrize("what", ["garbage", "labels", "nothing", "link"])
def test_a_model_that_does_not_load_leaves_the_old_one(running: Running, models: Path, what: str) -> None:
    (models / "c").mkdir()
    if what == "garbage":
        (models / "c" / "model.onnx").write_bytes(b"no network" * 100)
    if what == "labels":  # three names for two outputs
        classifiers.write_classifier(models / "c" / "model.onnx", labels=("x", "y", "z"))
    if what == "link":
        (models / "c" / "model.onnx").symlink_to("nowhere")
    old = running.models.current.sha256
    classifiers.lead(models, "c")
    assert not running.models.reload_if_changed()
    status, health = running.client.ask("GET", "/v1/health")
    assert status == 200
    assert health["model"] == old
    assert health["trouble"].endswith("(the previous model stays in use)")
    expected = {
        "garbage": "is not a valid ONNX file",
        "labels": "2 numbers for 3 names",
        "nothing": "is missing: deploy",
    }
    assert expected.get(what, "is missing: deploy") in health["trouble"]
    assert running.client.post(npy(classifiers.image(250)))[0] == 200
    classifiers.lead(models, "b")
    assert running.models.reload_if_changed()
    assert running.client.ask("GET", "/v1/health")[1]["trouble"] == ""


def test_a_model_that_failed_is_tried_again_later(models: Path) -> None:
    clock = Clock()
    found = ModelSwitcher(models, clock=clock)
    (models / "c").mkdir()
    (models / "c" / "model.onnx").write_bytes(b"x")
    classifiers.lead(models, "c")
    tried: list[Path] = []
    found._load_and_try_model, load = lambda path: (tried.append(path), load(path))[1], found._load_and_try_model  # type: ignore[method-assign]
    for _ in range(5):
        assert not found.reload_if_changed()
    assert len(tried) == 1
    clock.now += RETRY_S + 1
    assert not found.reload_if_changed()
    assert len(tried) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(path: Path) -> str:
        os.utime(path, (0, 0))
        return "00"

    monkeypatch.setattr(REAL, "hash_file", late)
    with pytest.raises(ModelError, match=r"model\.onnx was changed while it was read"):
        ModelSwitcher(models)

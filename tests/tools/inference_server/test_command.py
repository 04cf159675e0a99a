"""`fedquilt model serve` as a process of an ordinary user."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from ordinary import User
from waiting import wait_until

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import classifiers

from fedquilt.cli import main

FEDQUILT = (sys.executable, "-m", "fedquilt.cli")


@pytest.fixture
def models(user: User) -> Path:
    place = user.own("models")
    for name, turned in (("a", False), ("b", True)):
        user.owns(classifiers.write_classifier(place / name / "model.onnx", turned=turned))
        user.owns(place / name)
    classifiers.lead(place, "a")
    return place


def test_it_serves_follows_and_ends_in_good_order(user: User, models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = user.start(*FEDQUILT, "model", "serve", str(models), "--listen", "127.0.0.1:0", log=log)
    found = wait_until(lambda: re.search(r"answers at http://127\.0\.0\.1:(\d+)/", log.read_text()), "its address")
    line = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)

    def health() -> dict[str, object]:
        line.request("GET", "/v1/health")
        return json.loads(line.getresponse().read())

    first = health()["model"]
    classifiers.lead(models, "b")
    wait_until(lambda: health()["model"] != first, "the other model")
    line.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    told = json.loads((models / "served.json").read_text())
    assert told["model"] != first
    assert (models / "served.json").stat().st_uid == user.uid


def test_what_cannot_be_served_says_why(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def refused(*words: str) -> tuple[int, str]:
        return main(["model", "serve", *words]), capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert refused(str(tmp_path / "empty"))[0] == 4
    code, said = refused(str(tmp_path / "empty"))
    assert "is missing: deploy" in said
    assert "deploy one with `fedquilt rollout model`" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = refused(str(models), "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (code, "address already in use): choose another address" in said) == (2, True)
    assert refused(str(models), "--listen", "nowhere")[0] == 2

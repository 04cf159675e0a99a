"""`fedquilt model serve` as a process of an ordinary user."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ordinary
import pytest
from ordinary import User
from waiting import until

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import classifiers

from fedquilt.cli import main
from fedquilt.core import JobError
from fedquilt.tools.operations import runner

FEDQUILT = (sys.executable, "-m", "fedquilt.cli")


@pytest.fixture
def user() -> Iterator[User]:
    with ordinary.made() as found:
        yield found


@pytest.fixture
def models(user: User) -> Path:
    """A board's folder of models, that user's own."""
    place = user.own("models")
    for name, turned in (("a", False), ("b", True)):
        user.owns(classifiers.written(place / name / "model.onnx", turned=turned))
        user.owns(place / name)
    classifiers.lead(place, "a")
    return place


def test_it_serves_follows_and_ends_in_good_order(user: User, models: Path, tmp_path: Path) -> None:
    """An answer, another model's after `current` has moved, served.json at the end, exit code 0."""
    log = tmp_path / "log"
    process = user.start(*FEDQUILT, "model", "serve", str(models), "--listen", "127.0.0.1:0", log=log)
    found = until(lambda: re.search(r"answers at http://127\.0\.0\.1:(\d+)/", log.read_text()), "its address")
    line = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)

    def health() -> dict[str, object]:
        line.request("GET", "/v1/health")
        return json.loads(line.getresponse().read())

    first = health()["model"]
    classifiers.lead(models, "b")
    until(lambda: health()["model"] != first, "the other model")
    line.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    told = json.loads((models / "served.json").read_text())
    assert told["model"] != first
    assert (models / "served.json").stat().st_uid == user.uid


def test_what_cannot_be_served_says_why(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A folder without a model, addresses that others reach or have."""

    def refused(*words: str) -> tuple[int, str]:
        return main(["model", "serve", *words]), capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert refused(str(tmp_path / "empty"))[0] == 4
    code, said = refused(str(tmp_path / "empty"))
    assert "there is no model" in said
    assert "`fedquilt rollout model` puts one there" in said
    code, said = refused(str(models), "--listen", "0.0.0.0:0")
    assert (code, "say --listen-anywhere if that is" in said) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = refused(str(models), "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (code, "another program listens there; choose another port with --listen" in said) == (2, True)
    assert refused(str(models), "--listen", "nowhere")[0] == 2


def test_a_camera_needs_opencv(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing package and the extra that brings it."""
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(JobError, match=r"needs cv2, which is not installed: pip install 'fedquilt\[camera\]'"):
        runner.main(models, camera="/dev/video0")


class Video:
    """What OpenCV has of a camera with two pictures."""

    COLOR_BGR2GRAY = COLOR_BGR2RGB = 0
    pictures: tuple[np.ndarray, ...] = (classifiers.image(250, 8), classifiers.image(10, 8))

    def __init__(self, opened: bool = True) -> None:
        self.opened, self.left = opened, list(self.pictures)

    def VideoCapture(self, device: str) -> Video:
        return self

    def isOpened(self) -> bool:
        return self.opened

    def grab(self) -> bool:
        return bool(self.left)

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, self.left.pop(0)

    def cvtColor(self, frame: np.ndarray, kind: int) -> np.ndarray:
        return frame

    def release(self) -> None:
        self.opened = False


def test_a_cameras_pictures_become_lines_of_json(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are answered until the camera gives none any more; a camera that is not there is named."""
    lines: list[str] = []
    video = Video()
    monkeypatch.setitem(sys.modules, "cv2", video)
    with pytest.raises(runner.DataError, match="the camera /dev/video0 gives no pictures any more"):
        runner.main(models, camera="/dev/video0", every_s=1e-9, say=lines.append)
    assert [json.loads(line)["name"] for line in lines] == ["day", "night"]
    assert not video.opened
    monkeypatch.setitem(sys.modules, "cv2", Video(opened=False))
    with pytest.raises(runner.DataError, match=r"cannot open the camera /dev/video9: .*group video"):
        runner.main(models, camera="/dev/video9")

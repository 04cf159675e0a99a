"""The process of a model's check: a real one, confined, which may be killed or held to its budget."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from linear_models import board_data, network
from one_agent import Board
from toy_kinds import release
from waiting import wait_until

from fedquilt.core import BlobRef
from fedquilt.edge_agent.releases.models import ModelReleases
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.settings import AgentSettings, ModelSettings
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.wire import DesiredRelease


class Place:
    """A board's models, with a real process for their checks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        home = folder / "d"
        models = ModelSettings(folder=str(folder / "srv"))
        values = {"data": board_data(), "budget": "600MB", "models": models, **settings}
        self.settings = AgentSettings(device="d", home=str(home), **values)
        private = home / sandbox.CHECK
        self.worker = ChildWorker(0.0, sandbox.task_command(private, sandbox.CHECK_PROGRAM), private_folder=private)
        self.models = ModelReleases(self.settings, Board(), self.worker)
        self.blob = folder / "blob"

    def stage(self) -> DesiredRelease:
        payload = network()
        self.blob.write_bytes(payload)
        wanted = release(1, BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload)))
        self.models.stage(wanted, self.blob)
        return wanted

    def begin(self) -> DesiredRelease:
        wanted = self.stage()
        self.models.start_check(wanted)
        return wanted

    def verdict(self) -> CheckResult:
        return wait_until(self.models.poll_check, "the check's end")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.worker.close()


def pids(place: Place) -> list[int]:
    """The children of this process that check for this place."""
    mark = str(Path(place.settings.home) / sandbox.CHECK).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in words and b"releases.check_process" in words:
                found.append(int(entry.name))
    return found


def test_a_check_measures_the_board_and_the_process_ends(place: Place) -> None:
    place.begin()
    verdict = place.verdict()
    assert verdict.refusal_reason == ""
    assert verdict.metrics["accuracy"] > 0.85
    assert verdict.metrics["energy_j"] > 0
    assert 30e6 < verdict.metrics["peak_bytes"] < 600e6
    wait_until(lambda: not pids(place), "the process has ended")


def test_a_check_that_somebody_kills_can_be_made_again(place: Place) -> None:
    place.begin()
    (pid,) = wait_until(lambda: pids(place), "the process")
    os.kill(pid, signal.SIGKILL)
    assert place.verdict().killed_externally
    place.begin()
    assert place.verdict().metrics["accuracy"] > 0.85


def test_a_check_above_the_budget_is_ended_by_name(tmp_path: Path) -> None:
    place = Place(tmp_path, budget="20MB")
    try:
        place.begin()
        refused = place.verdict().refusal_reason
    finally:
        place.worker.close()
    assert "over its budget of 20 MB" in refused


def test_a_check_that_is_dropped_ends_at_once(place: Place) -> None:
    place.begin()
    wait_until(lambda: pids(place), "the process")
    place.models.discard_unused()
    assert pids(place) == []
    assert place.models.poll_check() == CheckResult("check was not started", {})
    assert not [path for path in place.models.folder.iterdir() if path.is_dir()]


@pytest.mark.skipif("files" not in sandbox.available_restrictions(), reason="this kernel has no Landlock")
def test_the_process_of_a_check_cannot_change_the_model_that_it_checks(place: Place) -> None:
    wanted = place.stage()
    assert wanted.blob is not None
    model = place.models.folder / wanted.blob.sha256[:16] / "model.onnx"
    program = (
        "import sys; from pathlib import Path; from fedquilt.edge_agent.task.sandbox import enter_sandbox; "
        "enter_sandbox(Path(sys.argv[1])); open(sys.argv[2], 'w')"
    )
    private = Path(place.settings.home) / sandbox.CHECK
    for file in (model, model.with_name("release.json")):
        ended = subprocess.run([sys.executable, "-c", program, private, file], capture_output=True, text=True)
        assert "PermissionError" in ended.stderr
    assert model.read_bytes() == place.blob.read_bytes()

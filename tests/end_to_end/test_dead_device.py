"""A device that dies in the middle of a round: what its round does, and what users are shown, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mosquittos import Mosquitto
from processes import Processes, make_job, read_events, read_updates
from waiting import LIMIT_S, wait_until

from fedquilt.coordinator.rounds.events import CohortSelected
from fedquilt.coordinator.views import devices

DEVICES = 3
IMPATIENT = """
import sys
from fedquilt import cli
from fedquilt.coordinator.fleet import registry
registry.QUIET_LIMIT_S, registry.REQUEST_INTERVAL_S = 3.0, 1.0  # instead of a minute
sys.exit(cli.main())
"""


class Fleet:
    """A coordinator that runs the job of `make_job` and three agents, which are suspended in the first round."""

    def __init__(self, folder: Path, broker: Mosquitto, processes: Processes, **cohort: Any) -> None:
        self.folder, self.home, self.processes = folder, folder / "runs", processes
        self.names = sorted(table["device"] for table in self._begin(broker.url, cohort))

    def _begin(self, url: str, cohort: dict[str, Any]) -> list[dict[str, Any]]:
        keepalive_s = cohort.pop("keepalive_s", 10)
        tables = list(make_job(self.folder, deadline_s=2 * LIMIT_S, **cohort).make_agent_tables())
        self.processes.start_agents(self.folder, tables, lambda name: {"url": url, "keepalive_s": keepalive_s})
        run = ("run", str(self.folder / "job.toml"), "--home", str(self.home), "--broker", url)
        self.processes.python("run", self.folder / "run.log", "-c", IMPATIENT, *run)
        return tables

    def suspend(self) -> str:
        """Hold the last device before it can answer the first round, wait for the others' answers, return its name."""
        wait_until(
            lambda: any(isinstance(fact, CohortSelected) for fact in read_events(self.home)), "the beginning of round 0"
        )
        self.processes.running[self.names[-1]].send_signal(signal.SIGSTOP)
        wait_until(lambda: read_updates(self.home, 0) == DEVICES - 1, "the answers of the others")
        return self.names[-1]

    def said(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedquilt.cli", *words, "--home", str(self.home)],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "80"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self) -> str:
        return " ".join((self.folder / "run.log").read_text().split())

    def state(self, device: str) -> str:
        return next((each.state for each in devices.load_devices(self.home) if each.board.device == device), "")


@pytest.fixture
def fleet(tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes) -> Callable[..., Fleet]:
    return lambda *lines, **cohort: Fleet(tmp_path, mosquitto(*lines), processes, **cohort)


WAITS = r"{}, offline since \d\d:\d\d, until (\d{{4}}-\d\d-\d\d )?\d\d:\d\d \((\d+) s\)"


def test_a_killed_device_that_a_round_needs_is_named_with_since_when_and_until_when(
    fleet: Callable[..., Fleet],
) -> None:
    """In `ls`, `why`, `logs --follow` and the output of `run`; nobody is told to start more devices."""
    stage = fleet(min_devices=DEVICES)
    dead = stage.suspend()
    stage.processes.kill(dead)
    wait = re.compile(WAITS.format(dead))
    wait_until(lambda: stage.state(dead) == "offline", "the broker publishes the last will")
    (row,) = json.loads(stage.said("ls", "--format", "json"))
    assert wait.fullmatch(row["waits"]), row["waits"]
    assert 0 < int(wait.fullmatch(row["waits"])[2]) <= 2 * LIMIT_S  # type: ignore[index]
    assert re.search(rf"{row['run']} waits for {wait.pattern}", " ".join(stage.said("ls").split()))
    assert re.search(rf"{row['run']} waits for {wait.pattern}", " ".join(stage.said("why", row["run"]).split()))
    assert f"{dead}  offline" in stage.said("devices")
    wait_until(lambda: wait.search(stage.log()), "`run` names the device", diagnostics=stage.log)
    stage.processes.start("logs", stage.folder / "logs.log", "logs", row["run"], "--follow", "--home", str(stage.home))
    wait_until(lambda: wait.search((stage.folder / "logs.log").read_text()), "`logs --follow` names it")
    assert "start more" not in stage.log() + (stage.folder / "logs.log").read_text()
    assert read_updates(stage.home, 0) == DEVICES - 1


def test_a_device_that_is_suspended_behind_a_broker_that_does_not_notice_is_silent_and_comes_back(
    fleet: Callable[..., Fleet],
) -> None:
    """Its connection stays open, as a half-open one does; the broker would take 15 minutes to see it."""
    stage = fleet(min_devices=DEVICES, keepalive_s=600)
    held = stage.suspend()
    wait_until(lambda: stage.state(held) == "silent", "the device is silent")
    wait = json.loads(stage.said("ls", "--format", "json"))[0]["waits"]
    assert re.match(rf"{held}, silent since (\d\d\d\d-\d\d-\d\d )?\d\d:\d\d, until ", wait), wait
    stage.processes.running[held].send_signal(signal.SIGCONT)
    assert stage.processes.running["run"].wait(timeout=LIMIT_S) == 0, stage.log()
    assert read_updates(stage.home, 0) == DEVICES

"""A wrong [data] table is told as an agent starts, by `agent --check` and by doctor."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import wait_until

from fedquilt.cli import main
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import data_check, sandbox
from fedquilt.edge_agent.task.memory_budget import MemoryLimit


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    path = tmp_path / "flowers.csv"
    path.write_text("length,kind\n1,iris\n2,rose\n")
    return path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"y": "species"}, "has no column 'species' ([data] y); it has length, kind"),
        ({"labels": ["iris"]}, "'rose' is not in [data] labels (iris): add or correct it"),
        ({"x": ["size"]}, "has no column 'size' ([data] x)"),
        ({"share": 2, "shares": 3, "partition": "iid"}, "share 2 of 3 (partition 'iid') has none of the 2 examples"),
        ({"share": 0, "shares": 3, "partition": "iid"}, ""),  # share 2 is another device's
    ],
)
def test_a_table_that_does_not_fit_the_data_is_explained(flowers: Path, change: dict[str, Any], problem: str) -> None:
    data = {"path": str(flowers), "y": "kind", "labels": ["iris", "rose"], **change}
    found = data_check.find_data_problem(data)
    assert problem in found
    assert bool(problem) == bool(found)


class RecordedLimit(MemoryLimit):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def create_group(self) -> None:
        self._calls.append("group of tasks")


def start_check(data: dict[str, Any], home: Path, calls: list[str]) -> None:
    settings = AgentSettings(device="d", home=str(home), data=data)
    data_check.warn_of_unreadable_data(settings, home / "check", RecordedLimit(calls), budget_bytes=1 << 30)


def test_the_group_of_tasks_is_created_before_the_process(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(data_check.threading, "Thread", lambda **options: Mock(start=lambda: calls.append("process")))
    start_check({"path": str(flowers), "y": "kind"}, tmp_path, calls)
    assert calls == ["group of tasks", "process"]


def test_the_process_ends_silently_if_it_needs_more_than_the_budget(flowers: Path, tmp_path: Path) -> None:
    command = [*sandbox.task_command(tmp_path, data_check.PROGRAM), str(8 << 20), str(os.getpid())]
    data = json.dumps({"path": str(flowers), "y": "species"})
    checked = subprocess.run(command, input=data, capture_output=True, text=True)
    assert checked.returncode != 0
    assert checked.stdout == ""


def test_an_agent_logs_it_at_its_start(flowers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"path": str(flowers), "y": "species"}
    with caplog.at_level(logging.WARNING):
        start_check(data, tmp_path, [])
        wait_until(lambda: "data cannot be used" in caplog.text, "the log line")
    assert "has no column 'species' ([data] y); it has length, kind" in caplog.text


def test_a_check_of_the_version_warns_and_passes(
    flowers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "agent.toml"
    settings.write_text(f'device = "d"\nhome = "{tmp_path}/home"\ndata = {{ path = "{flowers}", y = "species" }}\n')
    assert main(["agent", "--check", str(settings)]) == 0
    assert "can run here" in capsys.readouterr().out
    assert f"it has length, kind (fix: correct [data] of {settings})" in caplog.text

"""A wrong [data] table is told as an agent starts, by `agent --check` and by doctor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fedquilt.cli import main
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import data_check


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
    ],
)
def test_a_table_that_does_not_fit_the_data_is_explained(flowers: Path, change: dict[str, Any], problem: str) -> None:
    data = {"path": str(flowers), "y": "kind", "labels": ["iris", "rose"], **change}
    found = data_check.find_data_problem(data)
    assert problem in found
    assert bool(problem) == bool(found)


def test_an_agent_logs_it_at_its_start(flowers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"path": str(flowers), "y": "species"}
    with caplog.at_level(logging.WARNING):
        data_check.warn_of_unreadable_data(AgentSettings(device="d", home=str(tmp_path), data=data), tmp_path / "check")
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

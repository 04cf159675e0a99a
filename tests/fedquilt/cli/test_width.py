"""No line of a table or status wraps on a terminal of 80 columns, however long the names are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.console import table

NAME = "a-job-with-the-longest-name-of-all-jobs1"
JOB = f"""
name = "{NAME}"
method = "fedavg"
rounds = 2
engine = "numpy"
[model]
name = "mlp"
inputs = 64
hidden = [4]
classes = 10
[data]
path = "{Path(table.__file__).parents[1]}/tools/lab/demo/digits.npz"
limit = 200
partition = "dirichlet"
alpha = 0.5
[fleet]
devices = 3
boards = ["jetson-agx-orin-industrial"]
budgets = ["256MB"]
"""
COMMANDS = (
    "ls",
    f"logs {NAME}",
    f"logs {NAME} --follow",
    f"why {NAME}",
    "devices",
    f"model evaluate {NAME}",
    f"model export {NAME} --out weights.safetensors",
    f"report {NAME}",
    f"prune {NAME} --dry-run",
    "rollout status",
    "methods",
    "methods fedstitch",
    "lab partition job.toml",
    "lab front job.toml",
    "lab reproduce",
    "compare job.toml --seeds 0 1 --methods fedavg fedprox",
    "doctor",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    (folder / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["simulate", "job.toml"]) == 0
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(command.split())
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert [line for line in lines if len(line) > 80] == []

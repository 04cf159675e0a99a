"""The small task of `fedquilt agent agent.toml --check`: one that passes, and what is told of those that do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent.task import sandbox
from fedquilt.tools.boards.doctor import version

TELLS = """
import json, sys
order = json.loads(sys.stdin.readline())
told = f"{order['task']['method']}, plugins {order['allowed_plugins']}, data {order['data']}"
print(json.dumps({"type": "outcome", "code": "failed", "reason": told}), flush=True)
sys.stdin.read()
"""


def test_the_small_task_of_this_version_passes_confined_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[Path] = []
    command = sandbox.task_command

    def noted(home: Path) -> tuple[str, ...]:
        homes.append(home)
        return command(home)

    monkeypatch.setattr(sandbox, "task_command", noted)
    version.train_small_task()
    (home,) = homes
    assert not home.exists()


@pytest.mark.parametrize(
    ("command", "limits", "said"),
    [
        (
            (sys.executable, "-c", "raise SystemExit('no numpy')"),
            {},
            "process ended with exit code 1; last output: no numpy",
        ),
        ((sys.executable, "-c", TELLS), {}, f"fedavg, plugins [], data {version.DATA}"),
        (("sh", "-c", "exec cat"), {"TASK_S": 0.0}, "the task has not ended within 0 s"),
        (("sh", "-c", "exec cat"), {"BUDGET_BYTES": 1}, "MB, more than 0 MB"),
        (("/nowhere/python",), {}, "No such file or directory: '/nowhere/python'"),
    ],
    ids=["ends", "fails", "hangs", "too large", "does not start"],
)
def test_a_task_process_that_does_not_hold_is_told_in_its_words(
    command: tuple[str, ...], limits: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "task_command", lambda home: command)
    for name, value in limits.items():
        monkeypatch.setattr(version, name, value)
    with pytest.raises(JobError, match="test task failed: ") as raised:
        version.train_small_task()
    assert said in str(raised.value)

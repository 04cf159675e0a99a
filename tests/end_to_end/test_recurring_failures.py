"""A learning rate that no training survives, on boards that are processes: one attempt, then cause and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, RoundRetried, TaskDeclined
from fedquilt.coordinator.storage.store import Store

JOB = """
name = "steep"
method = "fedavg"
engine = "numpy"
rounds = 3
params = { lr = 1e9, batch = 2, epochs = 5 }
model = { name = "mlp", inputs = 2, classes = 3 }
data = { path = "t.csv", partition = "iid" }
fleet = { devices = 2 }
"""


def test_a_job_that_diverges_on_every_board_fails_in_one_attempt_with_cause_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal, `logs` and `why` say the same two lines; the exit code is 8."""
    rows = [f"{number % 7}.5,{number % 5}.25,{number % 3}" for number in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["p,q,y", *rows]))
    job, home = tmp_path / "job.toml", str(tmp_path / "h")
    job.write_text(JOB)
    assert main(["prepare", str(job)]) == 0
    assert main(["simulate", str(job), "--link", "embedded", "--home", home]) == 8
    printed = capsys.readouterr().out
    with Store(Path(home)) as store:
        (row,) = store.readable_jobs()
        facts = [fact for _, _, fact in store.read_events(row.id)]
    (ended,) = (fact for fact in facts if isinstance(fact, JobEnded))
    assert {fact.attempt for fact in facts if isinstance(fact, CohortSelected)} == {0}
    assert not [fact for fact in facts if isinstance(fact, RoundRetried)]
    assert [fact.code for fact in facts if isinstance(fact, TaskDeclined)] == ["diverged"] * 2
    cause, fix = ended.reason.splitlines()
    assert cause.startswith("training diverged in round 1 on 2 of 2 devices (")
    assert "learning rate 1e+09" in cause
    assert fix.startswith("Fix: lower [params] lr (0.01 to 0.1 is usual with SGD)")
    assert printed.count("learning rate 1e+09") == 1
    for verb in ("logs", "why"):
        assert main([verb, "steep", "--home", home]) == 0
        printed += capsys.readouterr().out
    assert printed.count(f"job failed: {cause}\n") == 3
    assert printed.count(fix) == 3

"""The bench of rounds planned for energy: how it counts joules, and that its runs are the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import CohortSelected, RoundCommitted, UpdateAccepted
from fedquilt.core import BlobRef, Update, Usage
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.lab.bench import planned_rounds
from fedquilt.tools.lab.bench.planned_rounds import PlannedRound, PlannedRunResult

STATE = BlobRef(sha256="0" * 64, size=0)


def job(rounds: int = 2, seed: int = 0, **rule: object) -> settings.JobSettings:
    return planned_rounds.job_of("fednova", {"deadline": "energy", **rule}, seed, rounds)


def answer(device: str, wall_s: float, energy_j: float, round: int = 0) -> UpdateAccepted:
    usage = Usage(wall_s=wall_s, energy_j=energy_j)
    update = Update(job="j", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=usage)
    return UpdateAccepted(round, update, wall_s)


def test_waiting_is_counted_at_idle_power_until_the_round_ends() -> None:
    """A Nano idles at 0.93 W for 30 s and a TX2 at 1.2 W for 10 s; the one of them was late."""
    facts = [
        CohortSelected(0, 0, ("d0", "d1"), deadline_s=25.0),
        answer("d0", 10.0, 100.0),
        answer("d1", 30.0, 300.0),
        RoundCommitted(0, STATE, False, {}, took_s=40.0),
    ]
    found = planned_rounds._make_result(job(), facts, {1: 0.5})
    assert found.in_time == 0.5
    assert found.rounds == [PlannedRound(40.0, pytest.approx(400.0 + 30 * 0.93 + 10 * 1.2), 0.5)]


def test_what_an_accuracy_costs_ends_with_the_round_that_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean of the last two rounds: 0.5 with the third one."""
    monkeypatch.setattr(planned_rounds, "LAST", 2)
    run = PlannedRunResult([PlannedRound(1.0, 10.0, value) for value in (0.9, 0.0, 1.0, 1.0)], 1.0)
    assert run.until(0.5) == (30.0, 3.0)
    assert run.until(0.99) == (40.0, 4.0)
    assert run.until(1.01) is None


def test_a_run_is_a_federation_with_real_training_and_is_above_the_limit(tmp_path: Path) -> None:
    """Four rounds: as deadlines are told from the second one on, it and the next are planned, and do the same work."""
    wanted = job(rounds=4)
    prepare.prepare_and_check(wanted, tmp_path / "bundle")
    run = planned_rounds.play(wanted, tmp_path / "bundle", tmp_path / "home")
    assert len(run.rounds) == 4
    assert run.rounds[-1].accuracy > run.rounds[0].accuracy
    assert run.rounds[-1].joules < run.rounds[0].joules
    best = planned_rounds.limit(wanted, tmp_path / "bundle")
    assert best is not None
    assert best.joules < min(each.joules for each in run.rounds)
    assert set(best.epochs.values()) <= set(range(1, 2 * planned_rounds.EPOCHS + 1))
    even = planned_rounds.limit(job(rounds=4, most_work=1.0), tmp_path / "bundle")
    assert even is not None
    assert even.joules > best.joules

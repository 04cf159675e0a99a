"""A site and a coordinator above it that know different pasts: an older home, and clocks that are years apart."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from unittest import mock

import pytest
from sited import federation, list_states, plan

from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateRejected

ROUNDS = 5


@pytest.mark.parametrize("method", ["fedavg", "robust"])
def test_a_coordinator_above_that_is_put_back_by_rounds_comes_to_the_same_states(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    calm = list_states(tmp_path / "calm", method, (3, 2), waits=3, rounds=ROUNDS)
    table = {"rounds": ROUNDS, "cohort": {"start_devices": 3, "deadline_s": 60}}
    with federation(plan(tmp_path / "sited", method, **table), (3, 2)) as made:
        assert made.play(lambda: len(made.states) == 1) == "running"
        copy = made.copy()
        assert made.play(lambda: len(made.states) == 3) == "running"
        made.put_back(copy)
        assert made.play() == "done", made.facts[-1]
        assert made.states[:3] == calm[:3]
        assert made.states[3:] == calm[1:]
        assert not [fact for fact in made.facts if isinstance(fact, UpdateRejected)]
        assert "parent coordinator requests round 2 of job-1 after round" in caplog.text


def test_clocks_that_are_years_apart_change_no_bit(tmp_path: Path) -> None:
    calm = list_states(tmp_path / "calm", "fedavg", (3, 2), waits=3)
    real, years = time.time, itertools.cycle([0.0, 9.0, -20.0, 30.0, -3.0])
    with mock.patch.object(time, "time", side_effect=lambda: real() + next(years) * 365 * 86400):
        assert list_states(tmp_path / "apart", "fedavg", (3, 2), waits=3) == calm


def test_a_board_that_leaves_does_not_have_the_site_begin_its_round_again(tmp_path: Path) -> None:
    fleet = {"devices": 6, "boards": ["jetson-nano"], "budgets": ["512MB", "8GB", "512MB"]}
    table = {"rounds": 2, "flops": 1e11, "fleet": fleet, "cohort": {"start_devices": 2, "deadline_s": 1500}}
    with federation(plan(tmp_path, **table), (3, 3)) as made:
        below = made.below["site-0"]
        assert made.play(lambda: made.broker.now_s > 600) == "running"
        made.leaves("jetson-nano-01")
        assert made.play() == "done"
        assert [sorted(each) for each in made.answered.values()] == [["site-0", "site-1"]] * 2
        kinds = [type(fact) for fact in below]
        assert kinds.index(JobEnded) > kinds.index(RoundCommitted)


@pytest.mark.parametrize(
    ("step_s", "kept"),
    [(0.0, True), (-9 * 365 * 86400.0, False), pytest.param(9 * 365 * 86400.0, False, marks=pytest.mark.nightly)],
)
def test_a_site_that_is_killed_keeps_what_is_left_of_its_deadline(tmp_path: Path, step_s: float, kept: bool) -> None:
    table = {"rounds": 1, "flops": 3e10, "cohort": {"start_devices": 2, "quorum": 0.5, "deadline_s": 1500}}
    with federation(plan(tmp_path, **table), (3, 3), stalled={"jetson-nano-00"}) as made:
        steps = [0.0]
        with mock.patch.object(time, "time", side_effect=lambda: 1e9 + made.broker.now_s + steps[0]):
            for at_s in (800, 1000):
                assert made.play(lambda at_s=at_s: made.broker.now_s > at_s) == "running"
                steps[0] += step_s
                made.kill("site-0")
            assert made.play() == "done", made.facts[-1]
        assert made.answered[0] == (["site-1", "site-0"] if kept else ["site-1"])

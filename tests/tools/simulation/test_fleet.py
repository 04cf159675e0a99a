"""A simulated fleet as the coordinator's executor: refusals, deadlines, telemetry, private state, resumes, pools."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from simulated_fleets import HEAVY, Fleet, read_events

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    RoundClosed,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
)
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.testing.toy_networks import point_devices
from fedquilt.tools.simulation import run
from fedquilt.tools.simulation.pool import PoolError, WorkerPool
from fedquilt.tools.simulation.processes import ProcessWorkers
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation

FAST, SLOW = "jetson-agx-orin", "jetson-nano"


def answered(simulation: Simulation) -> list[tuple[int, str]]:
    return sorted((fact.round, fact.update.device) for fact in read_events(simulation, UpdateAccepted))


def test_a_device_without_the_memory_declines_and_the_others_go_on(fleet: Fleet) -> None:
    ended = fleet.run_job(fleet={"budgets": ["512MB", "1MB"]})
    refusals = read_events(ended, TaskDeclined)
    assert {(fact.device, fact.code) for fact in refusals} == {("dev-1", "budget")}
    assert "more than the device's budget of 1 MB" in refusals[0].reason
    assert answered(ended) == [(0, "dev-0"), (0, "dev-2"), (1, "dev-0"), (1, "dev-2")]
    assert ended.status == "done"


def test_a_fleet_that_cannot_make_its_quorum_fails_with_the_reasons(fleet: Fleet) -> None:
    ended = fleet.run_job(devices=2, cohort={"size": 2}, fleet={"budgets": ["512MB", "1MB"]})
    assert ended.status == "failed"
    assert ended.reason.startswith("the task does not fit the memory budget in round 1 on 1 of 2 devices (needs ")
    assert [fact.attempt for fact in read_events(ended, CohortSelected)] == [0]


def seconds_of(fleet: Fleet, board: str) -> float:
    ended = fleet.run_job(devices=1, rounds=1, fleet={"boards": [board], "policy": "max"})
    return float(read_events(ended, UpdateAccepted)[0].update.usage.wall_s)


def test_a_deadline_closes_the_round_without_the_slow_board(fleet: Fleet) -> None:
    fast_s, slow_s = seconds_of(fleet, FAST), seconds_of(fleet, SLOW)
    assert fast_s < slow_s / 4
    ended = fleet.run_job(
        cohort={"size": 3, "quorum": 0.6, "deadline_s": 2 * fast_s},
        fleet={"boards": [FAST, SLOW, FAST], "policy": "max"},
    )
    assert answered(ended) == [(0, "dev-0"), (0, "dev-2"), (1, "dev-0"), (1, "dev-2")]
    assert len(read_events(ended, RoundClosed)) == 2
    assert [each.duration_s for each in ended.rounds] == pytest.approx([2 * fast_s] * 2)
    assert ended.status == "done"


def test_without_the_quorum_the_deadline_ends_the_job_after_its_attempts(fleet: Fleet) -> None:
    fast_s = seconds_of(fleet, FAST)
    ended = fleet.run_job(
        cohort={"size": 3, "deadline_s": 2 * fast_s, "attempts": 2},
        fleet={"boards": [FAST, SLOW, FAST], "policy": "max"},
    )
    assert ended.status == "failed"
    assert "no update from dev-1" in ended.reason


def test_limits_of_the_job_end_it_between_rounds(fleet: Fleet) -> None:
    boards = {"boards": ["jetson-tx2"]}
    one = fleet.run_job(rounds=1, fleet=boards)
    limits = {
        "max_joules": 1.5 * (one.rounds[0].energy_j or 0.0),
        "max_bytes": int(1.5 * (one.rounds[0].down_bytes + one.rounds[0].up_bytes)),
        "max_wall_s": 1.5 * one.rounds[0].duration_s,
    }
    for name, limit in limits.items():
        ended = fleet.run_job(rounds=5, fleet=boards, stop={name: limit})
        assert (len(ended.rounds), ended.status) == (2, "done"), name
        assert read_events(ended, JobEnded)[-1].reason, name


def test_boards_run_at_the_point_that_their_governor_chooses_and_tell_their_joules(fleet: Fleet) -> None:
    told = {}
    for policy in ("paper", "max"):
        ended = fleet.run_job(devices=1, rounds=1, fleet={"boards": ["jetson-tx2"], "policy": policy})
        told[policy] = read_events(ended, UpdateAccepted)[0].update.usage
        assert ended.rounds[0].energy_j == told[policy].energy_j > told[policy].idle_j > 0
        assert "jetson-tx2" in told[policy].energy_source
    assert told["paper"].point != told["max"].point
    assert told["paper"].wall_s > told["max"].wall_s


@pytest.mark.parametrize(
    ("code", "limit", "board", "flops"),
    [
        ("battery", {"min_battery": 0.5}, f"{SLOW}?battery=0.1Wh", HEAVY),
        ("hot", {"max_temperature_c": 30.0}, "jetson-tx2", 3e11),
    ],
)
def test_a_board_that_is_spent_is_left_alone(
    fleet: Fleet, code: str, limit: dict[str, float], board: str, flops: float
) -> None:
    ended = fleet.run_job(devices=2, rounds=12, cohort=limit, flops=flops, fleet={"boards": [board, SLOW]})
    assert (code, ("dev-0",)) in [
        item for fact in read_events(ended, EligibilityRecorded) for item in fact.ineligible.items()
    ]
    took_part = [number for number, device in answered(ended) if device == "dev-0"]
    assert 0 < len(took_part) < 12
    assert [number for number, device in answered(ended) if device == "dev-1"] == list(range(12))
    if code == "battery":  # nobody charges it
        assert took_part == list(range(len(took_part)))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(fleet: Fleet, name: str) -> None:
    whole = fleet.run_job(name, rounds=3)
    begun, hands = fleet.begin(name, rounds=3, home="again")
    count = 0

    def breaks(asked: Sequence[WorkRequest]) -> Iterable[WorkResult]:
        nonlocal count
        for outcome in hands(asked):
            count += 1
            if count == 5:
                raise KeyboardInterrupt
            yield outcome

    with pytest.raises(KeyboardInterrupt):
        for _ in run.run_rounds(begun, breaks):
            pass
    begun._store.close()
    ended = fleet.run_job(name, rounds=3, home="again")
    assert ended.run == begun.run
    assert [fact.state for fact in read_events(ended, RoundCommitted)] == [
        fact.state for fact in read_events(whole, RoundCommitted)
    ]
    assert tensors.pack_state(ended.state) == tensors.pack_state(whole.state)
    assert [told(each) for each in ended.rounds] == [told(each) for each in whole.rounds]
    assert all(each.wall_s >= 0 for each in ended.rounds)
    assert ended.rounds[0].duration_s == whole.rounds[0].duration_s > 0


def told(round: SimulatedRound) -> dict[str, Any]:
    return {name: value for name, value in vars(round).items() if name not in ("wall_s", "duration_s", "cpu_s")}


def test_a_kill_while_an_answer_is_noted_loses_no_home(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fleet.run_job("scaffold", rounds=2)
    begun, hands = fleet.begin("scaffold", rounds=2, home="again")

    def killed(source: str, target: str) -> None:
        if str(target).endswith("private/dev-0.safetensors"):
            raise KeyboardInterrupt
        rename(source, target)

    rename = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            for _ in run.run_rounds(begun, hands):
                pass
    begun._store.close()
    ended = fleet.run_job("scaffold", rounds=2, home="again")
    assert tensors.pack_state(ended.state) == tensors.pack_state(whole.state)


def test_a_board_that_is_short_of_memory_does_not_hold_up_a_job_that_wants_it_to_be_there(fleet: Fleet) -> None:
    ended = fleet.run_job(
        devices=3, rounds=4, cohort={"size": 2, "min_devices": 3}, fleet={"budgets": ["512MB", "512MB", "1MB"]}
    )
    assert ended.status == "done"


@pytest.mark.parametrize(
    ("workers", "kills", "said"),
    [
        (
            1,
            [5, 5],
            r"was killed \(SIGKILL\): start again, or .* use a smaller network or batch",
        ),
        (2, [5, 5], r"was killed \(SIGKILL\): .* use fewer --workers than 2"),
        (2, [5, 6], "a worker of the pool was killed, most likely .* use fewer --workers than 2"),
        (2, [None, None], r"was killed \(SIGKILL\): .* use fewer --workers than 2"),
    ],
)
def test_a_worker_that_is_killed_is_told_with_the_mend_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, workers: int, kills: list[int | None], said: str
) -> None:
    counted = iter(kills)
    monkeypatch.setattr(memory_budget, "count_oom_kills", lambda: next(counted))
    with WorkerPool(processes := ProcessWorkers("numpy", workers), point_devices(2, 13)) as pool:
        pool.wait_until_ready()
        assert (pool.folder / "examples").exists()
        os.kill(processes.pid, signal.SIGKILL)
        with pytest.raises(PoolError, match=said):
            pool.wait_until_ready()
    assert not pool.folder.exists()


@pytest.mark.parametrize(
    ("words", "ends", "said"),
    [
        (
            "x\nMemoryError: std::bad_alloc",
            signal.SIGKILL,
            r"ran out of memory \(last line: .*bad_alloc\): use a smaller",
        ),
        ("loading", signal.SIGSEGV, "a worker of the pool died of SIGSEGV: loading"),
    ],
)
def test_what_a_worker_said_last_or_died_of_is_told(words: str, ends: signal.Signals, said: str) -> None:
    with WorkerPool(processes := ProcessWorkers("numpy", 1), point_devices(2, 13)) as pool:
        pool.wait_until_ready()
        (pool.folder / "workers.log").write_text(words)
        os.kill(processes.pid, ends)
        with pytest.raises(PoolError, match=said):
            pool.wait_until_ready()


def test_an_engine_that_cannot_be_imported_is_told_with_the_last_words() -> None:
    with (
        WorkerPool(ProcessWorkers("abacus", 1), point_devices(2, 13)) as pool,
        pytest.raises(PoolError, match=r"engines\.abacus"),
    ):
        pool.wait_until_ready()

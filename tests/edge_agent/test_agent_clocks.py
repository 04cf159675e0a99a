"""The operating point at which an agent holds its board while it works, and that the board gets its clocks back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from one_agent import Board, Site

from fedquilt import profiles
from fedquilt.arrays import tensors
from fedquilt.core import WorkEstimate
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.power.governor import GovernorPolicy, Policy
from fedquilt.edge_agent.state_machine import TaskFailed, UpdateAcked
from fedquilt.edge_agent.task.protocol import DataLoaded, ProgressReport, WorkResult
from fedquilt.edge_agent.task.worker import InlineWorker

LINEAR = {"1.weight": np.zeros((2, 4), np.float32), "1.bias": np.zeros(2, np.float32)}
SGD = {"network": {"name": "mlp", "inputs": 4, "hidden": [], "classes": 2}, "epochs": 1, "batch": 4, "lr": 0.1}


def working(site: Site, **changes: Any) -> None:
    """A task whose data is there, due in a minute unless the test says otherwise."""
    site.ask(**changes)
    site.worker.events.append(DataLoaded(10))
    site.run(1.1)


def test_time_for_the_way_of_the_update_is_left_before_the_deadline(site: Site) -> None:
    """40 s fit into 60 s; not if the last update of the job took 25 s from its offer to its answer."""
    site.agent.task_runner.state = replace(site.agent.task_runner.state, upload_times_s={"j-1": (25.0,)})
    working(site)
    assert site.board.clocks == ["fast"]


def test_a_task_is_worked_on_at_the_point_its_deadline_asks_for(site: Site) -> None:
    """40 s fit into 60 s, and are cheaper; its usage names the point, and then the board is let go."""
    working(site)
    assert site.board.clocks == ["slow"]
    site.worker.finish()
    site.run()
    assert site.board.clocks == ["slow", "-"]
    assert site.all("update")[-1].usage.point == "slow"


def test_time_spent_on_fetching_counts_against_the_deadline(site: Site) -> None:
    """45 s remain when the task comes, which 40 s and a tenth of it fit into, but not 3 s later."""
    site.ask(deadline_s=45.0)
    site.run(3.0)
    site.worker.events.append(DataLoaded(10))
    site.run(1.1)
    assert site.board.clocks == ["fast"]


def test_a_repeated_message_does_not_lengthen_the_deadline(site: Site) -> None:
    task = site.ask()
    due_s = site.agent.task_runner.state.open_task.due_s if site.agent.task_runner.state.open_task else 0.0
    site.say("task", task, retain=True)
    assert site.agent.task_runner.state.open_task is not None
    assert site.agent.task_runner.state.open_task.due_s == due_s
    site.ask(attempt=1, deadline_s=100.0)
    assert site.agent.task_runner.state.open_task.due_s > due_s + 40.0


def test_work_by_the_example_waits_for_the_number_of_examples(site: Site) -> None:
    """Ten of 100 kFLOP are a task of 40 s; before that is known nothing is held."""
    site.ask(work=WorkEstimate(flops_per_example=1e5))
    site.run(2.0)
    assert site.board.clocks == []
    site.worker.events.append(DataLoaded(10))
    site.run(1.1)
    assert site.board.clocks == ["slow"]


def test_a_task_that_turns_out_late_is_stepped_up_once(site: Site) -> None:
    """A tenth in 10 s would be 100 s; at four times the pace the rest takes 22 s."""
    working(site)
    for _ in range(3):
        site.run(3.0)
        site.worker.events.append(ProgressReport(0.1))
        site.run(1.1)
    assert site.board.clocks == ["slow", "fast"]
    site.worker.finish()
    site.run()
    usage = site.all("update")[-1].usage
    assert usage.point == "slow, then fast"
    assert usage.energy_j == pytest.approx(5.0 * site.broker.now_s, abs=15.0)


def test_clocks_are_not_changed_at_once(site: Site) -> None:
    working(site)
    site.worker.events.append(ProgressReport(0.021))
    site.run(1.1)
    assert site.board.clocks == ["slow"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_boards_pace_is_remembered_for_the_next_task(site: Site, restarted: bool) -> None:
    """It took twice the 40 s predicted; so the next one, due in 60 s, runs fast, by a new agent too."""
    working(site, deadline_s=1000.0)
    site.run(79.0)
    site.worker.finish()
    site.run()
    site.ack()
    (known,) = site.agent.task_runner.state.learned_models.values()
    assert known.time is not None
    assert known.time.ratio == pytest.approx(2.0, rel=0.05)
    if restarted:
        site.start()
    working(site, round=1)
    assert site.board.clocks == ["slow", "-", "fast"]


ENDS: dict[str, Callable[[Site], object]] = {
    "done": lambda site: site.worker.finish(),
    "failed": lambda site: site.worker.events.append(WorkResult(code="memory", reason="too much")),
    "withdrawn": lambda site: site.say("task", b"", retain=True),
    "overtaken": lambda site: site.ask(round=1),
    "goodbye": lambda site: site.agent.shut_down(),
    "counted meanwhile": lambda site: site.agent.task_runner.handle_event(
        UpdateAcked(("j-1", 0), True), site.broker.now_s
    ),
    "disk": lambda site: site.agent.task_runner.handle_event(TaskFailed("disk", "full"), site.broker.now_s),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_task_ends_the_board_gets_its_clocks_back(site: Site, end: str) -> None:
    working(site)
    ENDS[end](site)
    site.run()
    assert site.board.clocks == ["slow", "-"]


def test_a_result_that_cannot_be_kept_lets_the_clocks_go(site: Site) -> None:
    working(site)
    outbox = site.folder / "d/outbox"
    outbox.rmdir()
    outbox.write_text("")
    site.worker.finish()
    site.run()
    assert site.all("claim")[-1].code == "disk"
    assert site.board.clocks == ["slow", "-"]


def test_clocks_that_cannot_be_set_are_left_to_the_board(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.board.clock_error = "86 C: too hot to be held"
    for round in (0, 1):
        working(site, round=round)
        site.worker.finish()
        site.run()
        site.ack(round)
    assert [update.usage.point for update in site.all("update")] == [None, None]
    assert [record.message for record in caplog.records] == [
        "clock control failed, using the device's default clocks: " + site.board.clock_error
    ]
    site.board.clock_error = ""
    working(site, round=2)
    assert site.board.clocks == ["slow"]


def test_a_step_up_that_fails_lets_go_of_what_was_held(site: Site) -> None:
    working(site)
    site.board.clock_error = "the clocks did not take"
    site.run(10.0)
    site.worker.events.append(ProgressReport(0.1))
    site.run(1.1)
    assert site.board.clocks == ["slow", "-"]


@pytest.mark.parametrize("before_s", [1.0, 0.0])
def test_a_point_that_was_not_held_to_the_end_is_not_told_as_if_it_were(site: Site, before_s: float) -> None:
    working(site)
    site.board.clocks_unchanged = False
    site.run(before_s)
    site.worker.finish()
    site.run()
    update = site.all("update")[-1]
    assert update.usage.point == "slow, then unpinned"
    assert update.usage.energy_j > 0
    assert site.board.clocks == ["slow"]  # there is nothing to give back
    site.board.clocks_unchanged = True
    site.ack(0)
    working(site, round=1)
    site.worker.finish()
    site.run()
    assert site.all("update")[-1].usage.point == "slow"


@pytest.mark.parametrize(("changes", "adjustable"), [({"policy": "board"}, True), ({}, False)])
def test_a_board_that_may_not_or_cannot_be_held_is_only_measured(
    site: Site, changes: dict[str, Any], adjustable: bool
) -> None:
    site.board.adjustable = adjustable
    site.start(governor=GovernorPolicy(**changes))
    working(site)
    site.worker.finish()
    site.run()
    assert site.board.clocks == []
    assert site.all("update")[-1].usage.energy_j > 0


def test_sensors_are_read_ten_times_a_second_while_a_task_runs_and_else_not(site: Site) -> None:
    """Telemetry every 30 s apart."""
    site.run(5.0)
    before = len(site.board.sensor_reads_s)
    working(site)
    during = len(site.board.sensor_reads_s) - before
    assert 14 <= during <= 20  # 1.6 s, and once when the task came
    site.worker.finish()
    site.run()
    after = len(site.board.sensor_reads_s)
    site.run(5.0)
    assert len(site.board.sensor_reads_s) == after


SIMULATED = """
board = "toy"
title = "two points of round numbers"
memory_bytes = { value = 8e9, source = "made" }
idle_w = { value = 1.0, source = "made" }
sources.made = { provenance = "assumed", text = "made up for this test" }
[[points]]
name = "fast"
flops_per_s = { value = 200e9, source = "made" }
busy_w = { value = 10.0, source = "made" }
[[points]]
name = "slow"
flops_per_s = { value = 100e9, source = "made" }
busy_w = { value = 3.0, source = "made" }
"""


@pytest.mark.parametrize(
    ("policy", "taken"), [("max", ("fast", 25.0, 250.0, 25.0)), ("energy", ("slow", 50.0, 150.0, 50.0))]
)
def test_a_simulated_board_takes_the_time_and_joules_of_its_point(
    site: Site, policy: Policy, taken: tuple[str, float, float, float]
) -> None:
    """5 TFLOP due in a minute take 25 s at 10 W, or 50 s at 3 W and so the fewer joules."""
    np.savez(site.folder / "own.npz", x=np.zeros((10, 4), np.float32), y=np.arange(10) % 2)
    board = SimulatedDevice(profiles.parse_board_profile(SIMULATED, "here"))
    site.board = board  # type: ignore[assignment]
    data = {"path": str(site.folder / "own.npz")}
    site.start(InlineWorker(board), data=data, governor=GovernorPolicy(policy))
    site.ask(
        params=SGD,
        bundles={"model": site.depot.store_bytes(tensors.encode_tensors(LINEAR))},
        work=WorkEstimate(flops=5e12),
    )
    site.run(taken[1])
    usage = site.all("update")[-1].usage
    assert (usage.point, usage.wall_s, usage.energy_j, usage.idle_j) == taken
    assert usage.energy_source == "profile toy (assumed)"


def test_a_method_is_carried_out_on_the_devices_own_data(site: Site) -> None:
    """FedAvg by the numpy engine: 8 of 10 examples, a model that has moved."""
    draw = np.random.default_rng(0)
    np.savez(site.folder / "own.npz", x=draw.random((10, 4), np.float32), y=np.arange(10) % 2)
    board = Board()
    site.start(InlineWorker(board), data={"path": str(site.folder / "own.npz"), "held": 0.2})
    site.ask(params=SGD, bundles={"model": site.depot.store_bytes(tensors.encode_tensors(LINEAR))})
    site.run(11.0)
    update = site.all("update")[-1]
    assert update.weight == 8.0
    assert np.abs(site.fetch_model(update)["1.weight"]).sum() > 0

"""`python -m tests.benches energy`: figures of the tasks of a federation, on boards of round numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt import profiles
from fedquilt.core import Cost, Usage, WorkEstimate
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from tests.benches import energy


def board(
    points: str, work: WorkEstimate, rounds: int = 2, idle: str = "{ value = 1.0, source = 'made' }"
) -> energy.ScaledBoard:
    """A board that idles at 1 W, with "name speed watts" points, of the speeds that SCALE makes of it."""
    named = [line.split() for line in points.split(",")]
    text = "".join(
        f"[[points]]\nname = '{name}'\nflops_per_s = {{ value = {float(speed) * energy.SCALE}, source = 'made' }}\n"
        f"busy_w = {{ value = {watts}, source = 'made' }}\n"
        for name, speed, watts in named
    )
    head = "board = 'toy'\ntitle = 'toy'\nmemory_bytes = { value = 1e9, source = 'made' }\n"
    head += f"idle_w = {idle}\n" if idle else ""
    made = "[sources.made]\nprovenance = 'assumed'\ntext = 'made up for this test'\n"
    found = energy.ScaledBoard(SimulatedDevice(profiles.parse_board_profile(head + made + text, "here")))
    found.tasks += [work] * rounds
    return found


@pytest.fixture
def fleet() -> dict[str, energy.ScaledBoard]:
    """The slow board takes 100 s; the quick one 10 s at 11 W or 40 s at 3 W, that is 200 or 180 J until then."""
    work = WorkEstimate(flops=100.0)
    return {"slow": board("only 1 5", work), "quick": board("fast 10 11,calm 2.5 3", work)}


def test_joules_are_counted_until_the_round_ends(fleet: dict[str, energy.ScaledBoard]) -> None:
    """Two rounds: 2 * (110 + 90) J against 2 * (120 + 60) J."""
    told = energy.replay_tasks(fleet)
    assert (told["rounds"], told["round_s"]) == (2, 100.0)
    assert told["joules"]["quick"] == {"energy": 360, "paper": 360, "max": 400, "board": 400, "cheapest": 360}
    assert told["saved_percent"]["quick"]["energy"] == 10.0
    assert told["saved_percent"]["slow"]["energy"] == 0.0
    assert told["joules"]["fleet"]["max"] == 400 + 1000
    assert told["above_cheapest_percent"]["quick"] == 0.0


def test_a_board_without_an_idle_power_has_no_joules_and_no_saving(fleet: dict[str, energy.ScaledBoard]) -> None:
    """It takes 200 s, so rounds wait for it: 2 * (110 + 190) J at the quick board's fastest point. No sum has it."""
    fleet["dark"] = board("only 0.5 5", WorkEstimate(flops=100.0), idle="")
    told = energy.replay_tasks(fleet)
    assert set(told["joules"]) == set(told["saved_percent"]) == {"slow", "quick", "fleet"}
    assert told["joules"]["quick"]["max"] == 600
    assert told["joules"]["fleet"]["max"] == 600 + 2 * (500 + 100)
    assert (told["round_s"], told["no_time_to_spare"]) == (200.0, ["dark"])
    usages = {
        name: {"dark": Usage(wall_s=60.0, energy_j=9.0), "slow": Usage(wall_s=20.0, energy_j=100.0)} for name in (0,)
    }
    found = energy.summarise_run(
        energy.PolicyRun(("a",), usages, {0: 50.0}, {0: 60.0}, {name: fleet[name] for name in ("dark", "slow")})
    )
    assert found["joules"] == {"slow": 130.0}
    assert found["in_time"] == 0.5


def test_a_board_with_nothing_to_save_says_why(fleet: dict[str, energy.ScaledBoard]) -> None:
    fleet["racer"] = board("fast 10 4,calm 5 3", WorkEstimate(flops=100.0))
    told = energy.replay_tasks(fleet)
    assert told["no_time_to_spare"] == ["slow"]
    assert told["joules"]["racer"]["paper"] > told["joules"]["racer"]["energy"] == told["joules"]["racer"]["max"]


def test_a_laden_board_takes_scale_times_as_long_and_notes_what_ends(fleet: dict[str, energy.ScaledBoard]) -> None:
    quick, work = fleet["quick"], WorkEstimate(flops=100.0)
    assert quick.task_cost(work, Cost(duration_s=0.0)).duration_s == pytest.approx(10.0)
    assert len(quick.tasks) == 2
    quick.pin_clocks(quick.points[1])
    assert quick.task_cost(work, Cost(duration_s=1.0)).energy_j == pytest.approx(120.0)
    assert quick.tasks[2:] == [work]


def test_a_federation_is_told_until_its_deadlines() -> None:
    """100 J and 30 s of 1 W until the deadline; one task of two in time."""
    boards = {name: board("fast 10 11", WorkEstimate(flops=1.0)) for name in energy.BOARDS}
    usages = {name: Usage(wall_s=20.0, energy_j=100.0, point="fast") for name in energy.BOARDS}
    late = {name: Usage(wall_s=60.0, energy_j=100.0, point="fast") for name in energy.BOARDS}
    run = energy.PolicyRun(("a",), {0: usages, 1: late}, {0: 50.0, 1: 50.0}, {0: 20.0, 1: 60.0}, boards)
    told = energy.summarise_run(run)
    assert told["joules"]["jetson-tx2"] == 230.0
    assert (told["in_time"], told["round_s"], told["deadline_s"]) == (0.5, 40.0, 50.0)


def test_a_federation_under_a_policy_is_the_real_one(tmp_path: Path) -> None:
    small = {"expansions": 1, "depth": 3, "finalists": 1, "samples": 6, "fit_samples": 10}
    run = energy.run_federation("energy", tmp_path, {**energy.SEARCH, **small})
    assert run.path
    assert all(set(usages) == set(energy.BOARDS) for usages in run.rounds.values())
    assert all(len(board.tasks) == len(run.rounds) for board in run.boards.values())
    told = energy.summarise_run(run)
    assert told["in_time"] == 1.0
    assert told["points"]["jetson-orin-nano"] != [run.boards["jetson-orin-nano"].points[0].name]

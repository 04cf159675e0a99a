"""Simulated boards, checked by hand."""

from __future__ import annotations

import math
import statistics

import pytest
from toy_profiles import HEAD

from fedquilt import profiles
from fedquilt.core import ClockError, Cost, JobError, OperatingPoint, Reading, WorkEstimate
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice, SimulationTraits

TOY = (
    HEAD
    + """
[[points]]
name = "fast"
flops_per_s = { value = 100, source = "sheet" }
bytes_per_s = { value = 10, source = "guess" }
busy_w = { value = 4, source = "sheet" }

[[points]]
name = "slow"
flops_per_s = { value = 50, source = "sheet" }
busy_w = { value = 3, source = "sheet" }

[[points]]
name = "unknown"
"""
)


def test_a_simulated_board_takes_the_time_its_profile_says():
    """300 / 100 + 20 / 10 = 5 s at 4 W is 20 J, whatever this host took."""
    device = SimulatedDevice(profiles.parse_board_profile(TOY, "toy"))
    assert device.read_sensors(0.0) == Reading()
    cost = device.task_cost(WorkEstimate(flops=300, read_bytes=20), Cost(duration_s=0.01))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (5.0, 20.0, "profile toy (assumed)")


def test_another_operating_point_takes_another_time():
    """300 / 50 = 6 s at 3 W is 18 J; no bandwidth in the profile, no time for bytes; all from a data sheet."""
    device = SimulatedDevice(profiles.parse_board_profile(TOY, "toy"), "slow")
    cost = device.task_cost(WorkEstimate(flops=300, read_bytes=20), Cost(duration_s=0.01))
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (6.0, 18.0, "profile toy (datasheet)")


@pytest.mark.parametrize("host_s", [2.0, 40.0])
def test_undeclared_work_takes_the_measured_time_and_no_known_energy(host_s: float):
    device = SimulatedDevice(profiles.parse_board_profile(TOY, "toy"))
    cost = device.task_cost(WorkEstimate(read_bytes=20), Cost(duration_s=host_s))
    assert (cost.duration_s, cost.energy_j, cost.idle_j, cost.energy_source) == (host_s, None, None, None)


def test_a_profile_without_power_predicts_no_energy():
    cost = SimulatedDevice(profiles.parse_board_profile(TOY, "toy"), "unknown").task_cost(
        WorkEstimate(flops=300), Cost(duration_s=2.0)
    )
    assert (cost.duration_s, cost.energy_j, cost.energy_source) == (2.0, None, None)


def test_a_board_is_made_by_name_and_point():
    device = devices.create_device("jetson-tx2:MAXQ")
    assert (device.board, device.memory_bytes) == ("jetson-tx2", 7854 * 2**20)
    assert [point.name for point in device.points[:4]] == ["MAXN", "MAXP_CORE_ALL", "MAXP_CORE_ARM", "MAXQ"]
    assert device.points == profiles.load_board_profile("jetson-tx2").operating_points()
    assert device.task_cost(
        WorkEstimate(flops=144.8e9, task_share=0.0), Cost(duration_s=0.0)
    ).duration_s == pytest.approx(1.0)
    with pytest.raises(JobError, match="no operating point 'MAXX': choose one of MAXN"):
        devices.create_device("jetson-tx2:MAXX")
    with pytest.raises(JobError, match="'tx3' is unknown"):
        devices.create_device("tx3")


def test_a_held_point_takes_its_own_time_until_it_is_released():
    """300 / 100 = 3 s, 300 / 50 = 6 s at the slow point, 3 s again; no other point can be held."""
    device = SimulatedDevice(profiles.parse_board_profile(TOY, "toy"))
    work = WorkEstimate(flops=300)
    assert device.pin_clocks(device.points[1]) == device.points[1]
    assert device.task_cost(work, Cost(duration_s=0.0)).duration_s == 6.0
    device.unpin_clocks()
    cost = device.task_cost(work, Cost(duration_s=0.0))
    assert (cost.duration_s, cost.point) == (3.0, "fast")
    with pytest.raises(ClockError, match="no operating point 'warp'"):
        device.pin_clocks(OperatingPoint(name="warp"))


def test_every_point_of_the_grid_can_be_held():
    device = devices.create_device("jetson-nano")
    last = device.points[-1]
    assert device.pin_clocks(last) == last
    cost = device.task_cost(WorkEstimate(flops=last.flops_per_s, task_share=0.0), Cost(duration_s=0.0))
    assert cost.duration_s == pytest.approx(1.0)
    assert cost.energy_j == pytest.approx(last.busy_w)
    assert (cost.idle_j, cost.energy_source) == (pytest.approx(0.93), "profile jetson-nano (assumed)")


def board(traits: SimulationTraits, text: str = TOY) -> SimulatedDevice:
    return SimulatedDevice(profiles.parse_board_profile(text, "toy"), None, traits)


def test_noise_scatters_around_the_profile_and_is_the_same_again_with_the_same_seed():
    """1000 tasks of 3 s with 10 % noise: median 3 s, scatter 10 %; joules follow; another seed, other times."""
    done = Cost(duration_s=0.01)

    def times(seed: int) -> list[float]:
        device = board(SimulationTraits(noise=0.1, seed=seed))
        return [device.task_cost(WorkEstimate(flops=300), done).duration_s for _ in range(1000)]

    first = times(1)
    assert statistics.median(first) == pytest.approx(3.0, rel=0.02)
    assert statistics.stdev(map(math.log, first)) == pytest.approx(0.1, rel=0.1)
    assert times(1) == first != times(2)
    cost = board(SimulationTraits(noise=0.1)).task_cost(WorkEstimate(flops=300), done)
    assert cost.energy_j == pytest.approx(4 * cost.duration_s)


def test_asking_in_advance_tells_what_the_task_will_have_taken():
    device = board(SimulationTraits(noise=0.3))
    work = WorkEstimate(flops=300)
    before = device.task_cost(work, Cost(duration_s=0.0))
    assert before == device.task_cost(work, Cost(duration_s=0.0)) == device.task_cost(work, Cost(duration_s=0.01))
    assert device.task_cost(work, Cost(duration_s=0.0)) != before


def test_a_board_may_be_another_than_its_profile():
    device = board(SimulationTraits(spread=0.3, seed=4))
    times = [device.task_cost(WorkEstimate(flops=flops), Cost(duration_s=0.01)).duration_s for flops in (100, 200)]
    assert times == pytest.approx([device.factor, 2 * device.factor])
    assert device.factor not in (1.0, board(SimulationTraits(spread=0.3, seed=5)).factor)
    assert device.points == board(SimulationTraits()).points


def test_work_and_rest_empty_the_battery():
    """0.01 Wh are 36 J. 12 J of work leave 24; 3 s are the work's, 2 s of rest at 1 W leave 22; then it is empty."""
    text = TOY.replace('title = "for these tests"', 'title = "t"\nidle_w = { value = 1, source = "guess" }')
    device = board(SimulationTraits(battery_wh=0.01), text)
    assert (device.read_sensors(0.0).battery, device.read_sensors(0.0).charging) == (1.0, False)
    device.task_cost(WorkEstimate(flops=300), Cost(duration_s=0.0))
    assert device.read_sensors(0.0).battery == 1.0  # asked in advance: nothing has happened
    device.task_cost(WorkEstimate(flops=300), Cost(duration_s=0.01))
    assert device.read_sensors(0.0).battery == pytest.approx(24 / 36)
    assert device.read_sensors(3.0).battery == pytest.approx(24 / 36)
    assert device.read_sensors(5.0).battery == pytest.approx(22 / 36)
    assert device.read_sensors(4.0).battery == pytest.approx(22 / 36)  # a clock set back charges nothing
    assert device.read_sensors(1e6).battery == 0.0


def test_the_temperature_follows_the_work():
    """4 W towards 20 + 10 * 4 = 60 C with a time constant of 3 s: after 3 s 60 - 40 / e; at rest towards 30."""
    text = TOY.replace('title = "for these tests"', 'title = "t"\nidle_w = { value = 1, source = "guess" }')
    heat = "".join(
        f'{key} = {{ value = {value}, source = "guess" }}\n'
        for key, value in (("ambient_c", 20), ("rise_c_per_w", 10), ("time_s", 3))
    )
    device = board(SimulationTraits(), text.replace("[[points]]", f"[thermal]\n{heat}\n[[points]]", 1))
    assert device.read_sensors(0.0).temperature_c == 20.0
    device.task_cost(WorkEstimate(flops=300), Cost(duration_s=0.01))
    warm = 60 - 40 / math.e
    assert device.read_sensors(3.0).temperature_c == pytest.approx(warm)
    assert device.read_sensors(6.0).temperature_c == pytest.approx(30 + (warm - 30) / math.e)


def test_traits_are_told_with_the_board_s_name():
    device = devices.create_device("jetson-tx2:MAXQ?battery=40Wh&noise=0.1&spread=0.2&seed=7")
    assert device.task_cost(WorkEstimate(flops=1e9), Cost(duration_s=0.0)).point == "MAXQ"
    assert device.read_sensors(0.0).battery == 1.0
    assert SimulationTraits.parse("battery=40Wh&noise=0.1&spread=0.2&seed=7") == SimulationTraits(40.0, 0.1, 0.2, 7)
    assert SimulationTraits.parse("battery=2.5") == SimulationTraits(2.5)
    assert SimulationTraits.parse("") == SimulationTraits()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=red", "unknown colour: use battery, noise"),
        ("noise=much", "spread are floats"),
        ("battery=", "spread are floats"),
        ("seed=1.5", "seed an integer"),
        ("noise=-1", "positive numbers"),
        ("battery=0", "positive numbers"),
        ("spread=nan", "positive numbers"),
    ],
)
def test_a_trait_that_is_none_is_refused(text, message):
    with pytest.raises(JobError, match=message):
        devices.create_device(f"jetson-tx2?{text}")

"""The cost model: four times that add up, and what holds for every work and point."""

import msgspec
import pytest
from toy_profiles import HEAD

from fedquilt import profiles
from fedquilt.core import Cost, JobError, OperatingPoint, Rates, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice, SimulationTraits
from fedquilt.tools.boards import record

POINT = OperatingPoint(
    name="p",
    flops_per_s=100.0,
    bytes_per_s=10.0,
    launch_s=0.5,
    task_s=3.0,
    busy_w=4.0,
    rates={"torch-conv": Rates(flops_per_s=200.0, bytes_per_s=20.0, launch_s=0.25, task_s=1.0)},
)
WORK = WorkEstimate(flops=200.0, read_bytes=40.0, launches=6.0)


def test_arithmetic_traffic_launches_and_the_task_add_up():
    assert cost_model.work_seconds(WORK, POINT) == 2 + 4 + 3 + 3
    assert cost_model.overhead_seconds(WORK, POINT) == 6.0
    assert cost_model.work_joules(12.0, POINT) == 48.0


def test_launches_that_take_for_ever_are_taken_for_unknown():
    endless = msgspec.structs.replace(POINT, launch_s=1e300)
    assert cost_model.overhead_seconds(msgspec.structs.replace(WORK, launches=1e300), endless) == 0.0


def test_a_measured_workload_has_rates_of_its_own_and_another_takes_the_points():
    conv = msgspec.structs.replace(WORK, workload="torch-conv")
    assert cost_model.work_seconds(conv, POINT) == 1 + 2 + 1.5 + 1
    assert cost_model.work_seconds(msgspec.structs.replace(WORK, workload="onnx-conv"), POINT) == 12.0


def test_work_that_nobody_predicted_has_no_time():
    assert cost_model.work_seconds(WorkEstimate(), POINT) is None
    assert cost_model.work_seconds(WorkEstimate(read_bytes=5.0), POINT) is None
    assert cost_model.work_seconds(WORK, OperatingPoint(name="p", launch_s=1.0)) is None  # no speed is known
    assert cost_model.work_seconds(WorkEstimate(launches=2.0), OperatingPoint(name="p", launch_s=1.0)) == 2.0
    assert cost_model.work_seconds(WorkEstimate(flops=1e24), OperatingPoint(name="p", flops_per_s=1e-320)) is None


def test_own_examples_count_by_example_and_by_started_batch():
    work = WorkEstimate(
        flops=1, flops_per_example=2, read_bytes=3, bytes_per_example=4, bytes_per_batch=5,
        launches=6, launches_per_batch=7, batch=32,
    )  # fmt: skip
    whole = work.total_for_examples(70)
    assert (whole.flops, whole.read_bytes, whole.launches) == (141, 3 + 280 + 15, 6 + 21)
    assert whole.total_for_examples(70) == whole
    assert msgspec.structs.replace(work, batch=0).total_for_examples(70).launches == 13  # one batch of all examples
    assert work.total_for_examples(0).launches == 6


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_parts_of_work_take_as_long_as_the_whole(share):
    parts = [cost_model.work_seconds(WORK.scale(each), POINT) or 0.0 for each in (share, 1 - share)]
    assert sum(parts) == pytest.approx(cost_model.work_seconds(WORK, POINT))


BOARD = (
    HEAD
    + """
[clocks]
cpu_hz = { values = [1000, 2000], source = "sheet" }

[model]
flop_cpu_cycles = { value = 10, source = "sheet" }
launch_s = { value = 0.001, source = "sheet" }
launch_cpu_cycles = { value = 2, source = "sheet" }
base_w = { value = 1, source = "sheet" }
cpu_w = { value = 4, source = "sheet" }

[workloads.torch-conv]
flop_cpu_cycles = { value = 5, source = "guess" }
task_cpu_cycles = { value = 500, source = "guess" }
launch_cpu_cycles = { value = 4, source = "guess" }

[[points]]
name = "MAX"
cpu_hz = { value = 2000, source = "sheet" }
"""
)


def test_a_profile_tells_the_times_of_each_workload_at_each_of_its_points():
    board = profiles.parse_board_profile(BOARD, "toy")
    top, low = board.operating_points()
    assert (top.flops_per_s, top.launch_s, top.task_s) == (200.0, 0.002, None)
    assert top.rates == {"torch-conv": Rates(flops_per_s=400.0, launch_s=0.002, task_s=0.25)}
    assert low.rates["torch-conv"] == Rates(flops_per_s=200.0, launch_s=0.004, task_s=0.5)
    assert profiles.parse_board_profile(record.format_board(board), "again") == board


def test_a_workload_names_only_clocks_that_the_board_lists():
    with pytest.raises(JobError, match=r"\[workloads.torch-conv\] uses gpu_hz"):
        profiles.parse_board_profile(BOARD.replace("task_cpu_cycles", "task_gpu_cycles"), "toy")


def test_a_simulated_board_is_never_faster_than_its_launches():
    board = profiles.parse_board_profile(BOARD, "toy")
    work = WorkEstimate(flops=1.0, launches=1000.0)  # 2 s of launches, 5 ms of arithmetic
    for seed in range(20):
        device = SimulatedDevice(board, traits=SimulationTraits(noise=0.5, spread=0.5, seed=seed))
        assert device.task_cost(work, Cost(duration_s=0.0)).duration_s >= 2.0
    silent = msgspec.structs.replace(work, flops=0.0, launches=0.0, workload="torch-conv")  # only the task is known
    assert SimulatedDevice(board).task_cost(silent, Cost(duration_s=0.01)).duration_s == 0.25


def test_the_energy_rests_on_what_its_workload_was_measured_by():
    device = SimulatedDevice(profiles.parse_board_profile(BOARD, "toy"))
    assert device.task_cost(WorkEstimate(flops=1.0), Cost(duration_s=0.0)).energy_source == "profile toy (datasheet)"
    measured = device.task_cost(WorkEstimate(flops=1.0, workload="torch-conv"), Cost(duration_s=0.0))
    assert measured.energy_source == "profile toy (assumed)"


def test_a_link_is_what_transfers_of_unlike_sizes_show():
    told = [(size, 2.0 + size / 5e6) for size in (0, 1_000_000, 3_000_000, 9_000_000)]
    link = cost_model.LinkCost.fit_link(told)
    assert (link.transfer_s, link.bytes_per_s) == pytest.approx((2.0, 5e6))
    assert link.transfer_seconds(20_000_000) == pytest.approx(6.0)
    assert cost_model.LinkCost.fit_link(told[:3]) is None  # a task without bytes says nothing of bytes


@pytest.mark.parametrize("times", [(3.0, 3.0, 3.0), (3.0, 2.0, 1.0), (0.1, 2.0, 9.0)])
def test_a_link_that_cannot_be_told_apart_counts_all_time_as_the_bytes(times):
    sizes = (1_000_000,) * 3 if times[0] == times[2] else (1_000_000, 2_000_000, 3_000_000)
    link = cost_model.LinkCost.fit_link(list(zip(sizes, times, strict=True)))
    assert link == (0.0, pytest.approx(sum(sizes) / sum(times)))
    assert cost_model.LinkCost.fit_link([(size, 0.0) for size in sizes]).transfer_seconds(10**9) == 0.0

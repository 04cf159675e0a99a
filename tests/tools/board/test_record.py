"""Recording a profile on a fake board: its clocks, its meter and the time are objects given to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from fedquilt import profiles
from fedquilt.core import ClockError, JobError, OperatingPoint, Reading, StoreError, WorkEstimate
from fedquilt.edge_agent.clocks.client import ClockState
from fedquilt.profiles import clock_model, fit
from fedquilt.tools.boards import record
from fedquilt.tools.boards.record import measurement, probes
from fedquilt.tools.boards.record.measurement import MeasurementSetup

LISTS = {"cpu_hz": (0.5e9, 1e9, 1.5e9, 2e9), "gpu_hz": (0.3e9, 0.8e9, 1.3e9)}
TOP = {"cpu_hz": 2e9, "gpu_hz": 1.3e9}
TIME = clock_model.InverseTimeLaw(2e-12, {"cpu_hz": 2e-3, "gpu_hz": 6e-3})
TRAFFIC = clock_model.InverseTimeLaw(1e-10, {"cpu_hz": 0.2})
POWER = clock_model.PowerModel(3.0, {"cpu_hz": 2.0, "gpu_hz": 6.0}, exponent=2.0)
FACTS = record.BoardFacts("NVIDIA Jetson Toy (rev. 2)", 8 << 30, "A fake board in a test.")


class FakeBoard:
    def __init__(self, *, meter: bool = True) -> None:
        self.now_s, self.meter, self.energy_j = 100.0, meter, 0.0
        self.held: OperatingPoint | None = None
        self.releases = 0
        self.heard_s = self.now_s
        self.trouble: Callable[[OperatingPoint], None] = lambda point: None

    def clocks(self) -> dict[str, float]:
        return {axis: getattr(self.held, axis) if self.held else LISTS[axis][0] for axis in LISTS}

    def pass_s(self, seconds: float, watts: float) -> None:
        self.now_s += seconds
        self.energy_j += watts * seconds

    def compute(self) -> None:
        if self.held is not None:
            self.trouble(self.held)
        self.pass_s(1e9 * TIME.compute_seconds(self.clocks(), TOP), POWER.compute_watts(self.clocks(), TOP))

    def traffic(self) -> None:
        self.pass_s(1e8 * TRAFFIC.compute_seconds(self.clocks(), TOP), POWER.compute_watts(self.clocks(), TOP))

    def read(self, now_s: float) -> Reading:
        return Reading(energy_j=self.energy_j, energy_source="fake counter") if self.meter else Reading()

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        self.held = point
        self.heard_s = self.now_s
        return point

    def send_keepalive(self, now_s: float) -> None:
        assert now_s - self.heard_s < 10.0, "a clock helper would have let go"
        self.heard_s = now_s

    def unpin(self) -> None:
        self.held = None
        self.releases += 1

    def rig(self, *, clocks: bool = True) -> MeasurementSetup:
        work = probes.TimedWorkload("fake work", 1e9, self.compute, 1e8, self.traffic)
        return MeasurementSetup(
            work, self.read, self if clocks else None, lambda: self.now_s, lambda s: self.pass_s(s, 1.5)
        )


POINTS = measurement.select_points(measurement.candidate_points(LISTS))


def test_the_profile_that_comes_out_holds_the_board_s_own_law_and_reads_back():
    result = record.build_profile(measurement.measure_points(FakeBoard().rig(), POINTS, 120.0), FACTS, LISTS)
    board = profiles.parse_board_profile(record.format_board(result.board), "recorded")
    assert board == result.board
    assert (board.board, board.title) == ("nvidia-jetson-toy-rev.-2", "NVIDIA Jetson Toy (rev. 2)")
    assert board.provenance() == "measured"
    assert board.model.time_law("flop").cycles == pytest.approx(dict(TIME.cycles), rel=1e-3)
    assert board.model.time_law("byte").cycles == pytest.approx(dict(TRAFFIC.cycles), rel=1e-3)
    assert (board.model.power_model().base_w, board.model.power_model().exponent) == (pytest.approx(3.0, rel=1e-3), 2.0)
    assert len(board.operating_points()) == 12  # 4 x 3, those measured among them
    assert result.errors["time"].worst < 1e-6
    assert "at points left out of the fit" in board.sources["fit"].text
    assert "A fake board in a test." in board.sources["measured"].text


def test_how_far_to_trust_the_fit_is_said_by_points_left_out_of_it():
    result = record.build_profile(measurement.measure_points(FakeBoard().rig(), POINTS, 120.0), FACTS, LISTS)
    assert record.describe_accuracy(result)[0].startswith(
        "time: the model predicts other points well, within 0.0 % at points left out"
    )
    board = FakeBoard()

    def odd(point: OperatingPoint) -> None:
        if point.name == POINTS[3].name:
            board.pass_s(3 * 1e9 * TIME.compute_seconds(measurement.clocks_by_axis(point), TOP), 1.0)

    board.trouble = odd
    off = record.build_profile(measurement.measure_points(board.rig(), POINTS, 120.0), FACTS, LISTS)
    assert "time: the model predicts other points badly" in record.describe_accuracy(off)[0]
    few = dataclasses.replace(result, errors={"time": fit.RelativeErrors((0.0,), (None,))})
    assert record.describe_accuracy(few) == [
        "time: not cross-validated, too few points were measured: increase --minutes"
    ]


def test_only_points_within_the_owners_mode_are_measured():
    clocks = [ClockState("gpu", "gpu", (1e8, 2e8, 3e8), 1e8, 2e8, 1e8, None, ceiling_hz=2e8)]
    assert record.permitted_settings(clocks) == {"gpu_hz": (1e8, 2e8)}
    assert record.common_settings(clocks) == {"gpu_hz": (1e8, 2e8, 3e8)}


def test_time_is_bounded_and_what_was_left_out_is_said():
    board = FakeBoard()
    found = measurement.measure_points(board.rig(), POINTS, 4.0)
    assert board.now_s - 100.0 < 4.0 + 1e9 * TIME.compute_seconds(
        {axis: values[0] for axis, values in LISTS.items()}, TOP
    )
    assert found.skipped
    assert len(found.points) + len(found.skipped) == len(POINTS)
    assert {reason for _, reason in found.skipped} == {"no time left"}
    assert board.held is None


def test_a_point_too_slow_for_its_time_is_skipped():
    board = FakeBoard()

    def slow(point: OperatingPoint) -> None:
        if point.name == POINTS[2].name:
            board.pass_s(5.0, 1.0)

    board.trouble = slow
    found = measurement.measure_points(board.rig(), POINTS, 60.0)
    assert [name for name, _ in found.skipped] == [POINTS[2].name]
    assert "not enough time" in found.skipped[0][1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_clocks_are_given_back_whatever_happens(error):
    board = FakeBoard()

    def fault(point: OperatingPoint) -> None:
        if point.name == POINTS[3].name:
            raise error

    board.trouble = fault
    with pytest.raises(error):
        measurement.measure_points(board.rig(), POINTS, 120.0)
    assert (board.held, board.releases) == (None, 1)


def test_without_a_clock_helper_the_one_point_is_as_the_board_is():
    found = measurement.measure_points(FakeBoard().rig(clocks=False), [], 20.0)
    result = record.build_profile(found, FACTS, {})
    (point,) = profiles.parse_board_profile(record.format_board(result.board), "recorded").operating_points()
    assert (point.name, point.cpu_hz, result.board.model, result.errors) == ("as-is", None, None, {})
    assert point.flops_per_s == pytest.approx(
        1 / TIME.compute_seconds({a: v[0] for a, v in LISTS.items()}, TOP), rel=1e-3
    )
    assert any("too few to fit" in line for line in record.format_fitted_profile(result))


def test_without_a_meter_power_is_left_out_and_that_is_said():
    found = measurement.measure_points(FakeBoard(meter=False).rig(), POINTS, 120.0)
    result = record.build_profile(found, FACTS, LISTS)
    assert (found.idle_w, result.board.idle_w, result.errors.get("power")) == (None, None, None)
    assert all(point.busy_w is None and point.flops_per_s for point in result.board.operating_points())
    assert "power could not be measured" in result.board.sources["measured"].text
    assert "no power meter: the profile has no power" in record.format_fitted_profile(result)


def test_a_recording_of_nothing_is_an_error_with_the_reasons():
    found = measurement.measure_points(FakeBoard().rig(), POINTS, 0.1)
    with pytest.raises(ClockError, match=r"no time left.*increase --minutes"):
        record.build_profile(found, FACTS, LISTS)


def test_what_the_helper_lists_is_shared_by_all_clocks_of_a_kind():
    def clock(name: str, kind: str, *listed: float) -> ClockState:
        return ClockState(name=name, kind=kind, listed_hz=listed, low_hz=None, high_hz=None, now_hz=None, governor=None)

    clocks = [
        clock("policy0", "cpu", 1, 2),
        clock("policy4", "cpu", 3, 2),
        clock("gpu", "gpu", 9, 7),
        clock("e", "emc"),
    ]
    assert record.common_settings(clocks) == {"cpu_hz": (2.0,), "gpu_hz": (7.0, 9.0)}


def test_results_are_told_to_programs_too(tmp_path):
    result = record.build_profile(measurement.measure_points(FakeBoard().rig(), POINTS, 120.0), FACTS, LISTS)
    told = json.loads(json.dumps(record.make_json_report(result, tmp_path)))
    assert told["error"]["time"]["worst"] < 1e-6
    assert len(told["points"]) == len(POINTS)
    assert told["points"][0]["left_out"]["power"] == pytest.approx(0.0, abs=1e-6)


def test_a_dry_run_measures_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert record.record_profile(None, 1.0, dry_run=True) == 0
    assert "as-is" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_board_is_looked_for_below_the_root_that_is_given(tmp_path):
    with pytest.raises(JobError, match="/proc/meminfo"):
        record.record_profile(None, 1.0, root=tmp_path, dry_run=True)


def test_what_cannot_be_done_is_said_before_minutes_are_spent(tmp_path):
    (tmp_path / "no").write_text("a file is in the folder's place")
    with pytest.raises(StoreError, match=r"cannot write .*board\.toml: File exists"):
        record.record_profile(tmp_path / "no" / "board.toml", 1.0)


def test_the_units_of_work_are_float32_and_count_what_they_say():
    pytest.importorskip("onnxruntime")
    work = probes.build_workload()
    assert "convolutions" in work.name
    assert work.flops == 2 * 2 * 4 * 64 * 64 * 9 * 56 * 56
    (answer,) = work.compute()
    assert (answer.shape, answer.dtype) == ((4, 64, 56, 56), "float32")
    work.traffic()
    assert work.read_bytes == 2 * 64 * 2**20


LAUNCH = clock_model.InverseTimeLaw(1e-5, {"cpu_hz": 2e4})


def test_a_workload_s_rates_are_told_apart_and_fitted_over_the_clocks():
    board = FakeBoard()
    works = [
        WorkEstimate(flops=1e9, launches=10.0),
        WorkEstimate(flops=1e7, launches=900.0),
        WorkEstimate(flops=1e6, launches=1.0),
    ]

    def run(work: WorkEstimate) -> None:
        clocks = board.clocks()
        speed_s, launch_s = TIME.compute_seconds(clocks, TOP), LAUNCH.compute_seconds(clocks, TOP)
        board.pass_s(work.flops * speed_s + work.launches * launch_s + 0.002, 3.0)

    some = {"torch-conv": [probes.TaskProbe(work, lambda work=work: run(work)) for work in works]}
    recorded = record.build_profile(
        measurement.measure_points(dataclasses.replace(board.rig(), probes=some), POINTS, 240.0), FACTS, LISTS
    )
    read = profiles.parse_board_profile(record.format_board(recorded.board), "recorded")
    times = read.workloads["torch-conv"]
    assert times.time_law("launch").cycles == pytest.approx(dict(LAUNCH.cycles), rel=1e-3)
    assert times.time_law("flop").cycles == pytest.approx(dict(TIME.cycles), rel=1e-3)
    assert times.time_law("task").fixed_s == pytest.approx(0.002, rel=1e-3)
    low = next(point for point in read.operating_points() if point.cpu_hz == LISTS["cpu_hz"][1])
    assert low.rates["torch-conv"].launch_s == pytest.approx(LAUNCH.compute_seconds({"cpu_hz": 1e9}, TOP), rel=1e-3)
    assert "torch-conv at" in "\n".join(record.format_fitted_profile(recorded))


def test_a_board_without_clocks_has_the_rates_of_its_one_point_and_no_time_leaves_a_workload_out():
    board = FakeBoard()
    works = [WorkEstimate(flops=1e9, launches=launches, task_share=0.0) for launches in (0.0, 1.0)]
    quick = [probes.TaskProbe(each, lambda each=each: board.pass_s(0.01 * (1 + each.launches), 3.0)) for each in works]
    slow = [probes.TaskProbe(WorkEstimate(flops=1e9), lambda: board.pass_s(50.0, 3.0))]
    rig = dataclasses.replace(board.rig(clocks=False), probes={"torch-dense": quick, "torch-conv": slow})
    recorded = record.build_profile(measurement.measure_points(rig, POINTS, 60.0), FACTS, {})
    assert list(recorded.board.workloads) == ["torch-dense"]
    [point] = recorded.board.operating_points()
    assert point.rates["torch-dense"].launch_s == pytest.approx(0.01)

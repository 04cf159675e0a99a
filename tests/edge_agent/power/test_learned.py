"""Learned speed and power, on laws simple enough to do by hand."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from fedquilt import wire
from fedquilt.core import OperatingPoint, WorkEstimate
from fedquilt.edge_agent.power.governor import GovernorPolicy, choose_operating_point
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, estimate_points, learn_segment

WORK = WorkEstimate(flops=100.0)
CPU, GPU = (0.5e9, 1e9, 2e9), (0.2e9, 0.4e9, 0.8e9)
# recorded on the CPU: 100 s at 1 GHz whatever the GPU does, 4 to 10 W
POINTS = tuple(
    OperatingPoint(name=f"{x}-{y}", cpu_hz=x, gpu_hz=y, flops_per_s=x / 1e9, busy_w=2 + x / 5e8 + y / 2e8)
    for x, y in itertools.product(CPU, GPU)
)
TOP = POINTS[-1]


def true_s(point: OperatingPoint, work: WorkEstimate = WORK) -> float:
    """Seconds on the GPU, whose clock alone matters: 20 s at the highest."""
    return 0.16e9 * work.flops / (point.gpu_hz or 1.0)


def at(learned: LearnedModel, point: OperatingPoint, work: WorkEstimate = WORK) -> tuple[float, float]:
    (found,) = estimate_points(learned, [point], work)
    assert found is not None
    return found.seconds, found.seconds_spread


def after(points: tuple[OperatingPoint, ...], work: WorkEstimate = WORK) -> LearnedModel:
    known = LearnedModel()
    for point in points:
        known = learn_segment(known, TaskSegment(point, work, true_s(point, work), None))
    return known


def test_before_any_task_the_estimates_are_the_profiles() -> None:
    """100 FLOP at 2 FLOP/s, and the point's own watts."""
    (found,) = estimate_points(LearnedModel(), [TOP], WORK)
    assert found == (50.0, 0.0, 10.0, 0.0)


def test_a_profile_that_is_right_leaves_nothing_to_learn() -> None:
    assert learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 50.0, 10.0)) == LearnedModel()


def test_a_task_on_the_gpu_shows_that_its_clock_matters_where_the_cpu_was_recorded() -> None:
    known = after((POINTS[2], POINTS[4], POINTS[8]))
    for point in POINTS:
        assert at(known, point)[0] == pytest.approx(true_s(point), rel=0.1)


def test_an_estimate_is_surest_where_a_task_has_run() -> None:
    known = after((TOP,))
    assert at(known, TOP)[1] < 0.06
    assert all(at(known, point)[1] > 0.06 for point in POINTS if point != TOP)


def test_faster_clocks_are_never_estimated_slower() -> None:
    known = after((POINTS[0], POINTS[8], POINTS[2]))
    known = learn_segment(known, TaskSegment(POINTS[6], WORK, true_s(POINTS[6]) / 1.4, None))
    for one, other in itertools.product(POINTS, POINTS):
        if (one.cpu_hz or 0) >= (other.cpu_hz or 0) and (one.gpu_hz or 0) >= (other.gpu_hz or 0):
            assert at(known, one)[0] <= at(known, other)[0] * (1 + 1e-9)


def test_power_is_learned_of_what_the_task_uses() -> None:
    """A task that leaves half of the units idle draws 40 % less everywhere, as far as one task tells."""
    known = learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 20.0, 6.0))
    (found,) = estimate_points(known, [TOP], WORK)
    assert found is not None
    assert found.watts == pytest.approx(6.0, rel=0.01)
    known = learn_segment(known, TaskSegment(POINTS[4], WORK, 40.0, 3.0))
    (found,) = estimate_points(known, [POINTS[4]], WORK)
    assert found is not None
    assert found.watts == pytest.approx(3.0, rel=0.05)


def test_one_task_unlike_all_before_is_left_out_and_a_second_one_begins_anew() -> None:
    known = after((TOP, POINTS[4], POINTS[2], POINTS[8], POINTS[5]))
    odd = learn_segment(known, TaskSegment(TOP, WORK, 200.0, None))
    assert at(odd, TOP) == at(known, TOP)
    assert at(learn_segment(odd, TaskSegment(TOP, WORK, true_s(TOP), None)), TOP)[0] == pytest.approx(20.0, rel=0.02)
    anew = learn_segment(odd, TaskSegment(TOP, WORK, 200.0, None))
    assert at(anew, TOP)[0] == pytest.approx(200.0, rel=0.01)
    assert at(learn_segment(known, TaskSegment(TOP, WORK, 200.0, None), accept_outlier=True), TOP)[0] == pytest.approx(
        200.0, rel=0.01
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_teach_nothing(seconds: float) -> None:
    assert learn_segment(LearnedModel(), TaskSegment(TOP, WORK, seconds, 5.0)) == LearnedModel()
    assert learn_segment(LearnedModel(), TaskSegment(replace(TOP, flops_per_s=None), WORK, 5.0, 5.0)) == LearnedModel()
    assert learn_segment(LearnedModel(), TaskSegment(TOP, WorkEstimate(), 5.0, 5.0)) == LearnedModel()


@pytest.mark.parametrize("watts", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_impossible_powers_teach_the_time_alone(watts: float | None) -> None:
    known = learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 20.0, watts))
    assert known.time is not None
    assert known.power is None


def test_holes_of_the_profile_stay_unknown() -> None:
    known = after((TOP, POINTS[0]))
    no_speed, no_power = replace(TOP, flops_per_s=None), replace(TOP, busy_w=None)
    found = estimate_points(known, [no_speed, no_power], WORK)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].watts is None


def test_parts_of_a_task_teach_as_much_as_the_task() -> None:
    whole, parts = learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 20.0, 5.0)), LearnedModel()
    for _ in range(10):
        parts = learn_segment(parts, TaskSegment(TOP, WORK.scale(0.1), 2.0, 5.0))
    assert at(parts, POINTS[0])[1] == pytest.approx(at(whole, POINTS[0])[1], rel=0.02)


def test_what_is_kept_does_not_grow_and_survives_the_wire() -> None:
    known = LearnedModel()
    sizes = []
    for index in range(100):
        point = POINTS[index % len(POINTS)]
        known = learn_segment(known, TaskSegment(point, WORK, true_s(point) * (1 + index % 7 / 50), 5.0))
        sizes.append(len(wire.encode(known)))
    assert sizes[-1] < 1.5 * sizes[0]
    assert wire.decode(wire.encode(known), LearnedModel) == known
    assert known.is_valid
    assert known.time is not None
    assert not replace(known, time=replace(known.time, targets=(0.0,))).is_valid


def test_a_point_that_turned_out_to_draw_more_than_the_owner_allows_is_not_held() -> None:
    """10 W by the profile and 14 in truth, with 12 W allowed; a point that the profile has above it never is."""
    known = learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 20.0, 14.0))
    rule = GovernorPolicy("max", max_w=12.0)
    assert choose_operating_point(rule, POINTS, WORK, 1000.0, 1.0) == TOP
    assert choose_operating_point(rule, POINTS, WORK, 1000.0, 1.0, known) not in (None, TOP)
    modest = learn_segment(LearnedModel(), TaskSegment(TOP, WORK, 20.0, 5.0))
    assert choose_operating_point(GovernorPolicy("max", max_w=9.0), POINTS, WORK, 1000.0, 1.0, modest) != TOP


def test_where_the_deadline_is_tight_a_known_point_is_chosen_and_where_there_is_slack_an_unknown_one() -> None:
    """The known point takes 20 s of 22; slower clocks that may be cheaper are tried once there is time."""
    known = after((TOP,))
    known = learn_segment(known, TaskSegment(TOP, WORK, 20.0, 9.0))
    assert choose_operating_point(GovernorPolicy(), POINTS, WORK, 22.0, 1.0, known) == TOP
    assert choose_operating_point(GovernorPolicy(), POINTS, WORK, 200.0, 1.0, known) not in (None, TOP)


def test_older_tasks_count_less() -> None:
    known = LearnedModel()
    for seconds in (*[20.0] * 200, *[24.0] * 100):
        known = learn_segment(known, TaskSegment(TOP, WORK, seconds, None))
    assert at(known, TOP)[0] == pytest.approx(24.0, rel=0.03)


def test_a_first_task_unlike_the_second_sets_no_scale() -> None:
    known = LearnedModel()
    for seconds in (400.0, 20.0):
        known = learn_segment(known, TaskSegment(TOP, WORK, seconds, None))
    assert at(known, TOP)[0] == pytest.approx(20.0, rel=0.2)

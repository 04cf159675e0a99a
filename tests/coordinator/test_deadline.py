"""How long a round may take follows from how long earlier ones took; all numbers are by hand."""

import math

import msgspec
import plain
import pytest

from fedquilt.coordinator.rounds import deadline
from fedquilt.coordinator.rounds.deadline import (
    DeviceWorkload,
    FleetDurations,
    TaskDuration,
    add_duration,
    predict_duration_s,
    work_amount,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import OperatingPoint, WorkEstimate


def cohort(policy: str = "predicted", **changes: float) -> CohortSettings:
    return msgspec.convert({"deadline": policy, **changes}, CohortSettings)


def allowed_s(cohort: CohortSettings, known: deadline.Known, asked: deadline.Asks) -> float | None:
    """Seconds that the cohort's rule allows."""
    return deadline.decide_deadline(cohort, known, asked).seconds


def without_slack_s(known: deadline.Known, asked: deadline.Asks) -> float | None:
    found_s = allowed_s(cohort(), known, asked)
    return None if found_s is None else found_s / (1 + deadline.SLACK)


def asks(amounts: dict[str, float]) -> dict[str, DeviceWorkload]:
    """So much work of devices that have no profile."""
    return {device: DeviceWorkload(WorkEstimate(flops=flops)) for device, flops in amounts.items()}


ONE = {
    "a": (TaskDuration(0, 20.0, 2.0), TaskDuration(1, 40.0, 2.0), TaskDuration(2, 30.0, 2.0))
}  # 10, 20 and 15 s for a unit


def test_a_devices_pace_is_its_slowest_of_late():
    assert allowed_s(cohort(), ONE, asks({"a": 3.0})) == pytest.approx(90.0)


def test_what_is_long_past_is_forgotten():
    known = {}
    for round, seconds in enumerate([500.0, 20.0, 20.0, 20.0, 20.0]):
        known = add_duration(known, "a", TaskDuration(round, seconds, 1.0))
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == 600.0
    known = add_duration(known, "a", TaskDuration(5, 20.0, 1.0))
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == pytest.approx(30.0)


def test_a_device_never_seen_is_as_slow_as_the_slowest():
    known = {**ONE, "b": (TaskDuration(0, 50.0, 1.0),)}
    assert allowed_s(cohort(), known, asks({"a": 1.0, "c": 1.0})) == pytest.approx(75.0)
    assert allowed_s(cohort(), known, asks({"a": 1.0})) == pytest.approx(30.0)


def test_one_device_in_ten_may_be_late_unless_the_quorum_needs_it():
    known = {f"d{i}": (TaskDuration(0, 200.0 if i == 9 else 20.0, 1.0),) for i in range(10)}
    asked = asks(dict.fromkeys(known, 1.0))
    assert allowed_s(cohort(quorum=0.8), known, asked) == pytest.approx(30.0)
    assert allowed_s(cohort(quorum=1.0), known, asked) == pytest.approx(300.0)
    assert allowed_s(cohort(quorum=1.0, over_select=0.25), known, asked) == pytest.approx(30.0)


def test_with_nothing_known_there_is_no_prediction():
    for policy in ("fixed", "predicted", "paper"):
        assert allowed_s(cohort(policy), {}, asks({"a": 1.0})) is None
    assert allowed_s(cohort("fixed"), ONE, asks({"a": 1.0})) is None


def test_no_prediction_is_shorter_than_the_floor_or_longer_than_the_cohorts_deadline():
    assert allowed_s(cohort(), ONE, asks({"a": 1e-6})) == 10.0
    assert allowed_s(cohort(), ONE, asks({"a": 1e9})) == 600.0
    assert allowed_s(cohort(deadline_s=4.0), ONE, asks({"a": 1e-6})) == 4.0


FAST = plain.profile(
    points=(
        OperatingPoint(name="slow", flops_per_s=1.0),
        OperatingPoint(name="fast", flops_per_s=2.0),
        OperatingPoint(name="unknown"),
    )
)


def test_a_profile_tells_of_a_task_at_the_named_point_or_at_the_fastest():
    """100 operations: 50 s at 2 a second, 100 s at 1, between them where both were held; else nothing."""
    work = WorkEstimate(flops=100.0)
    assert predict_duration_s(work, FAST) == 50.0
    assert predict_duration_s(work, FAST, "slow") == 100.0
    assert predict_duration_s(work, FAST, "slow, then fast") == 75.0
    assert predict_duration_s(work, FAST, "slow, then gone since") is None
    assert predict_duration_s(work, FAST, "unknown") is None
    assert predict_duration_s(WorkEstimate(), FAST) is None
    assert predict_duration_s(work, None) is None


def test_before_anybody_has_answered_the_profile_speaks_for_itself_with_a_wide_margin():
    """50 s at the fastest point, times exp(1.2816 * 0.5) = 1.898, and 20 s to fetch 20 MB."""
    ask = DeviceWorkload(WorkEstimate(flops=100.0), FAST, 20_000_000)
    assert without_slack_s({}, {"a": ask}) == pytest.approx(20.0 + 50.0 * 1.898, rel=1e-3)


def test_work_that_grows_with_a_devices_own_examples_is_not_guessed_from_a_profile_alone():
    ask = DeviceWorkload(WorkEstimate(flops_per_example=100.0), FAST)
    assert without_slack_s({}, {"a": ask}) is None
    known = {"b": (TaskDuration(0, 500.0, 100.0, 500.0, 50.0),)}  # 10 examples
    assert without_slack_s(known, {"a": ask}) is not None


def test_a_board_that_is_slower_than_its_profile_is_given_so_much_longer():
    """Twice as long four times over: exp(1.2816 * sd), sd^2 = 2 * 0.2^2 / 5 * 5 / 4 = 0.02, is 1.1987 on top."""
    known = {"a": tuple(TaskDuration(n, 43.0, 40.0, 40.0, 20.0) for n in range(4))}
    ask = DeviceWorkload(WorkEstimate(flops=100.0), FAST)
    assert without_slack_s(known, {"a": ask}) == pytest.approx(3.0 + 2 * 50.0 * 1.1987, rel=1e-3)


def test_a_board_whose_times_scatter_is_given_longer_than_one_that_is_steady():
    ask = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST)}

    def after(*ratios):
        return without_slack_s({"a": tuple(TaskDuration(0, 20.0 * r, 40.0, 20.0 * r, 20.0) for r in ratios)}, ask)

    assert after(0.7, 0.8, 1.0, 1.3, 1.4) > after(1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_new_board_is_taken_for_the_middle_of_the_fleet():
    known = {
        name: (TaskDuration(0, 20.0 * ratio + rest, 40.0, 20.0 * ratio, 20.0),)
        for name, ratio, rest in (("x", 1.0, 1.0), ("y", 2.0, 7.0), ("z", 30.0, 2.0))
    }
    fleet = FleetDurations.from_durations(known)
    assert fleet.logs == pytest.approx((0.0, 0.6931, 3.4012), abs=1e-4)
    given = without_slack_s(known, {"a": DeviceWorkload(WorkEstimate(flops=20.0), FAST)})
    # sd^2 = (0.6931^2 + 2.7081^2 + 2 * 0.5^2) / 4 * 4 / 3 = 2.771
    assert given == pytest.approx(7.0 + 2 * 10.0 * math.exp(1.28155 * math.sqrt(2.771)), rel=1e-3)


def test_boards_that_slow_down_to_meet_a_deadline_do_not_lengthen_the_next():
    known = {}
    ask = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST)}
    slow_s = predict_duration_s(WorkEstimate(flops=100.0), FAST, "slow")
    given = []
    for round in range(6):
        known = add_duration(known, "a", TaskDuration(round, 100.0, 100.0, 100.0, slow_s))
        given.append(without_slack_s(known, ask))
    assert given == sorted(given, reverse=True)
    assert given[-1] < 65.0


def test_a_device_whose_profile_says_nothing_is_told_by_its_pace_among_others_with_profiles():
    known = {"a": (TaskDuration(0, 40.0, 2.0, 40.0, 20.0),), "b": (TaskDuration(0, 30.0, 2.0),)}
    assert without_slack_s(known, asks({"b": 2.0})) == pytest.approx(30.0)
    assert without_slack_s(known, asks({"c": 2.0})) == pytest.approx(40.0)


def test_the_papers_deadline_is_the_slowest_of_the_last_round_scaled_by_the_work():
    known = {**ONE, "b": (TaskDuration(1, 500.0, 2.0), TaskDuration(2, 50.0, 2.0)), "c": (TaskDuration(0, 900.0, 2.0),)}
    assert allowed_s(cohort("paper"), known, asks({"a": 3.0, "b": 1.0})) == pytest.approx(75.0)


def test_the_papers_deadline_never_falls_once_devices_just_meet_it():
    """Whoever slows down to 60 s is given 60 s for ever; this is why it is not the default."""
    known = {"a": (TaskDuration(0, 60.0, 1.0),)}
    for round in range(1, 4):
        given = allowed_s(cohort("paper"), known, asks({"a": 1.0}))
        assert given == 60.0
        known = add_duration(known, "a", TaskDuration(round, given, 1.0))


def test_work_is_one_number_also_where_only_the_device_knows_its_examples():
    assert work_amount(WorkEstimate(flops=5.0, flops_per_example=3.0)) == 8.0
    assert work_amount(WorkEstimate()) == 0.0
    assert work_amount(WorkEstimate(flops=5.0, flops_per_example=3.0, examples=4)) == 17.0  # it uses no more than four


def test_a_first_round_is_predicted_where_the_task_says_how_many_examples_it_uses():
    """With 40 at most it can take no longer than 40 do; one for all of a device's examples cannot be predicted."""
    whole = DeviceWorkload(WorkEstimate(flops=400.0), FAST)
    assert without_slack_s(
        {}, {"a": DeviceWorkload(WorkEstimate(flops_per_example=10.0, examples=40), FAST)}
    ) == without_slack_s({}, {"a": whole})
    assert without_slack_s({}, {"a": DeviceWorkload(WorkEstimate(flops_per_example=10.0), FAST)}) is None


def test_every_policy_that_a_job_may_name_exists():
    with pytest.raises(msgspec.ValidationError):
        cohort("guessed")
    for policy in deadline.POLICIES:
        assert cohort(policy).deadline == policy


def test_a_profile_predicts_with_the_examples_that_a_device_has_told():
    point = msgspec.structs.replace(FAST.points[0], task_s=10.0)
    profile = msgspec.structs.replace(FAST, points=(point,))
    speed = point.flops_per_s
    assert speed is not None
    ask = DeviceWorkload(WorkEstimate(flops_per_example=speed), profile)
    took = TaskDuration(0, 110.0, 1.0, 110.0, ask.predict_duration_s(100), 100)
    assert ask.predict_duration_s(100) == 110.0
    found = without_slack_s({"a": (took,)}, {"a": ask})
    twice = without_slack_s({"a": (took,)}, {"a": DeviceWorkload(WorkEstimate(flops_per_example=2 * speed), profile)})
    assert found is not None
    assert twice is not None
    assert twice / found == pytest.approx(210 / 110)


def test_a_new_boards_transfers_are_predicted_by_what_those_of_others_took():
    """2 s for a task, and 1 s for 5 MB: 20 MB take 6 s, not the 20 s of an assumed link; the task is 50 s * 1.898."""
    known = {
        name: (TaskDuration(0, 10.0 + 2.0 + size / 5e6, 20.0, 10.0, 10.0, 1, size),)
        for name, size in (("x", 1_000_000), ("y", 2_000_000), ("z", 4_000_000))
    }
    ask = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST, 20_000_000)}
    without = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST)}
    more_s = (without_slack_s(known, ask) or 0.0) - (without_slack_s(known, without) or 0.0)
    assert more_s == pytest.approx(6.0 - 2.8)  # the longest of the others is what any board is given
    assert without_slack_s({}, ask) == pytest.approx(20.0 + 50.0 * 1.898, rel=1e-3)

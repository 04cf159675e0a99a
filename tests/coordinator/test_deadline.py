"""How long a round waits: by predictions, by the paper, and by a plan for energy."""

import itertools
import math
import random
from collections.abc import Mapping

import msgspec
import numpy as np
import plain
import pytest
from opened import opened

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import deadline, decisions
from fedquilt.coordinator.rounds.deadline import (
    DeviceWorkload,
    FleetDurations,
    TaskDuration,
    add_duration,
    decide_deadline,
    predict_duration_s,
    work_amount,
)
from fedquilt.coordinator.rounds.energy_scheduling import (
    DeviceForecast,
    EnergyPlan,
    EpochChoice,
    pareto_front,
    plan_least_energy,
    plan_least_time,
)
from fedquilt.coordinator.rounds.events import CohortSelected, JobStarted, RoundClosed, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import tasks
from fedquilt.coordinator.views import event_messages
from fedquilt.core import BlobRef, JobError, OperatingPoint, Profile, TaskSpec, WorkEstimate
from fedquilt.formats import job_bundle


def cohort(policy: str = "predicted", **changes: float) -> CohortSettings:
    return msgspec.convert({"deadline": policy, **changes}, CohortSettings)


def allowed_s(
    cohort: CohortSettings, known: deadline.DurationsByDevice, asked: deadline.WorkloadByDevice
) -> float | None:
    """Seconds that the cohort's rule allows."""
    return deadline.decide_deadline(cohort, known, asked).seconds


def without_slack_s(known: deadline.DurationsByDevice, asked: deadline.WorkloadByDevice) -> float | None:
    found_s = allowed_s(cohort(), known, asked)
    return None if found_s is None else found_s / (1 + deadline.PREDICTION_SLACK)


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
    work = WorkEstimate(flops=100.0)
    assert predict_duration_s(work, FAST) == 50.0
    assert predict_duration_s(work, FAST, "slow") == 100.0
    assert predict_duration_s(work, FAST, "slow, then fast") == 75.0
    assert predict_duration_s(work, FAST, "slow, then gone since") is None
    assert predict_duration_s(work, FAST, "unknown") is None
    assert predict_duration_s(WorkEstimate(), FAST) is None
    assert predict_duration_s(work, None) is None


def test_before_anybody_has_answered_the_profile_speaks_for_itself_with_a_wide_margin():
    ask = DeviceWorkload(WorkEstimate(flops=100.0), FAST, 20_000_000)
    assert without_slack_s({}, {"a": ask}) == pytest.approx(20.0 + 50.0 * 1.898, rel=1e-3)


def test_work_that_grows_with_a_devices_own_examples_is_not_guessed_from_a_profile_alone():
    ask = DeviceWorkload(WorkEstimate(flops_per_example=100.0), FAST)
    assert without_slack_s({}, {"a": ask}) is None
    known = {"b": (TaskDuration(0, 500.0, 100.0, 500.0, 50.0),)}  # 10 examples
    assert without_slack_s(known, {"a": ask}) is not None


def test_a_board_that_is_slower_than_its_profile_is_given_so_much_longer():
    known = {"a": tuple(TaskDuration(n, 43.0, 40.0, 40.0, 20.0) for n in range(4))}
    ask = DeviceWorkload(WorkEstimate(flops=100.0), FAST)
    assert without_slack_s(known, {"a": ask}) == pytest.approx(3.0 + 2 * 50.0 * 1.1987, rel=1e-3)


def test_a_new_board_is_taken_for_the_middle_of_the_fleet():
    known = {
        name: (TaskDuration(0, 20.0 * ratio + rest, 40.0, 20.0 * ratio, 20.0),)
        for name, ratio, rest in (("x", 1.0, 1.0), ("y", 2.0, 7.0), ("z", 30.0, 2.0))
    }
    fleet = FleetDurations.from_durations(known)
    assert fleet.log_ratios == pytest.approx((0.0, 0.6931, 3.4012), abs=1e-4)
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
    known = {"a": (TaskDuration(0, 60.0, 1.0),)}
    for round in range(1, 4):
        given = allowed_s(cohort("paper"), known, asks({"a": 1.0}))
        assert given == 60.0
        known = add_duration(known, "a", TaskDuration(round, given, 1.0))


def test_work_is_one_number_also_where_only_the_device_knows_its_examples():
    assert work_amount(WorkEstimate(flops=5.0, flops_per_example=3.0)) == 8.0
    assert work_amount(WorkEstimate()) == 0.0
    assert (
        work_amount(WorkEstimate(flops=5.0, flops_per_example=3.0, max_examples=4)) == 17.0
    )  # it uses no more than four


def test_a_first_round_is_predicted_where_the_task_says_how_many_examples_it_uses():
    whole = DeviceWorkload(WorkEstimate(flops=400.0), FAST)
    assert without_slack_s(
        {}, {"a": DeviceWorkload(WorkEstimate(flops_per_example=10.0, max_examples=40), FAST)}
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
    known = {
        name: (TaskDuration(0, 10.0 + 2.0 + size / 5e6, 20.0, 10.0, 10.0, 1, size),)
        for name, size in (("x", 1_000_000), ("y", 2_000_000), ("z", 4_000_000))
    }
    ask = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST, 20_000_000)}
    without = {"a": DeviceWorkload(WorkEstimate(flops=100.0), FAST)}
    more_s = (without_slack_s(known, ask) or 0.0) - (without_slack_s(known, without) or 0.0)
    assert more_s == pytest.approx(6.0 - 2.8)  # the longest of the others is what any board is given
    assert without_slack_s({}, ask) == pytest.approx(20.0 + 50.0 * 1.898, rel=1e-3)


def tried(boards: Mapping[str, DeviceForecast], passes: int) -> list[tuple[float, float]]:
    """Seconds and joules of every combination of choices that does the work, by the definition alone."""
    found = []
    for combination in itertools.product(*(board.choices for board in boards.values())):
        pairs = list(zip(boards.values(), combination, strict=True))
        if sum(board.examples * choice.epochs for board, choice in pairs) >= passes:
            end_s = max(choice.seconds for choice in combination)
            above_j = sum(choice.joules for choice in combination)
            found.append((end_s, above_j + sum(board.idle_w * end_s for board in boards.values())))
    return found


def drawn(seed: int) -> tuple[dict[str, DeviceForecast], int]:
    """Three to five boards of unlike speeds, powers and numbers of examples, and the work of two epochs of each."""
    roll = random.Random(seed)
    boards = {}
    for index in range(roll.randint(3, 5)):
        examples = roll.choice((10, 25, 40, 57))
        points = [(roll.uniform(0.05, 0.6), roll.uniform(1.0, 20.0)) for _ in range(roll.randint(1, 3))]
        choices = [
            EpochChoice(roll.uniform(0, 2) + epochs * examples * pace, watts * epochs * examples * pace, epochs)
            for epochs in (1, 2, 3)
            for pace, watts in points
        ]
        boards[f"b{index}"] = DeviceForecast(tuple(choices), examples, roll.choice((0.0, 0.9, 2.2, 6.7)))
    return boards, sum(2 * board.examples for board in boards.values())


def near(plan: EnergyPlan | None, seconds: float, joules: float) -> bool:
    """Whether a plan has these figures."""
    return plan is not None and (plan.seconds, plan.joules) == pytest.approx((seconds, joules))


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_what_trying_everything_finds(seed):
    boards, passes = drawn(seed)
    every = tried(boards, passes)
    cheapest = min((joules, seconds) for seconds, joules in every)
    assert near(plan_least_energy(boards, passes), cheapest[1], cheapest[0])
    fastest_s = min(seconds for seconds, _ in every)
    for share in (0.0, 0.2, 0.5, 0.9):
        limit_s = fastest_s + share * (cheapest[1] - fastest_s) + 1e-9
        joules, seconds = min((joules, seconds) for seconds, joules in every if seconds <= limit_s)
        assert near(plan_least_energy(boards, passes, limit_s), seconds, joules)
    for spare in (1.0, 1.05, 1.3):
        limit_j = cheapest[0] * spare + 1e-9
        seconds = min(seconds for seconds, joules in every if joules <= limit_j)
        found = plan_least_time(boards, passes, limit_j)
        assert found.seconds == pytest.approx(seconds)
        assert found.joules <= limit_j
    told = pareto_front(boards, passes)
    best, edge = math.inf, []
    for seconds, joules in sorted(every):
        if joules < best - 1e-9:
            best = joules
            edge.append((seconds, joules))
    if len(edge) < 50:  # all times are looked at
        assert [value for plan in told for value in plan[:2]] == pytest.approx(
            [value for pair in edge for value in pair]
        )
    assert near(told[0], fastest_s, min(joules for seconds, joules in every if seconds <= fastest_s + 1e-9))
    assert near(told[-1], cheapest[1], cheapest[0])


@pytest.mark.parametrize("seed", range(12))
def test_more_time_never_costs_more_and_more_joules_never_take_longer(seed):
    boards, passes = drawn(seed)
    limits = [2.0 * step for step in range(1, 60)]
    plans = [plan_least_energy(boards, passes, limit) for limit in limits]
    possible = [plan.joules for plan, limit in zip(plans, limits, strict=True) if plan and plan.seconds <= limit]
    assert possible == sorted(possible, reverse=True)
    seconds = [
        plan.seconds for joules in range(50, 3000, 50) if (plan := plan_least_time(boards, passes, float(joules)))
    ]
    reached = [each for each in seconds if each != seconds[0]]
    assert reached == sorted(reached, reverse=True)


def test_work_moves_to_the_board_that_needs_less_for_it():
    cheap = DeviceForecast(tuple(EpochChoice(1.0 * n, 5.0 * n, n) for n in (1, 2, 3)), 10)
    dear = DeviceForecast(tuple(EpochChoice(4.0 * n, 50.0 * n, n) for n in (1, 2, 3)), 10)
    plan = plan_least_energy({"cheap": cheap, "dear": dear}, 40)
    assert plan == EnergyPlan(4.0, 65.0, {"cheap": 3, "dear": 1})


def test_bounds_that_cannot_be_kept_give_the_nearest_plan():
    boards = {"a": DeviceForecast((EpochChoice(5.0, 50.0), EpochChoice(9.0, 20.0)))}
    assert near(plan_least_energy(boards, 1, 1.0), 5.0, 50.0)
    assert near(plan_least_time(boards, 1, 1.0), 9.0, 20.0)
    assert plan_least_energy(boards, 2) is None
    assert plan_least_time({"a": DeviceForecast(())}, 1, 9.0) is None
    assert pareto_front({}, 1) == []


def test_a_large_cohort_is_planned_within_half_a_percent_of_a_bound_below():
    roll = random.Random(5)
    boards = {}
    for index in range(200):
        pace, watts, examples = roll.uniform(0.01, 0.1), roll.uniform(2, 20), roll.randint(100, 999)
        times = [(n, n * examples * pace) for n in range(1, 9)]
        boards[f"b{index:03d}"] = DeviceForecast(tuple(EpochChoice(s, watts * s, n) for n, s in times), examples)
    passes = sum(4 * board.examples for board in boards.values())
    plan = plan_least_energy(boards, passes)
    assert sum(boards[device].examples * epochs for device, epochs in plan.epochs.items()) >= passes
    bounds = []
    for price in (step / 1000 for step in range(200, 600)):
        least = [min(e.joules - price * b.examples * e.epochs for e in b.choices) for b in boards.values()]
        bounds.append(sum(least) + price * passes)
    assert max(bounds) <= plan.joules <= 1.005 * max(bounds)


def cohort_rule(**keys: float) -> CohortSettings:
    return msgspec.convert({"deadline": "energy", **keys}, CohortSettings)


def profile(name: str, *points: tuple[str, float, float | None], idle_w: float | None = 1.0) -> Profile:
    """Points as (name, operations a second, watts)."""
    found = tuple(OperatingPoint(name=point, flops_per_s=speed, busy_w=watts) for point, speed, watts in points)
    return Profile(
        device=name,
        board="toy",
        memory_bytes=1 << 30,
        budget_bytes=1 << 30,
        engines=("numpy",),
        versions={},
        points=found,
        idle_w=idle_w,
    )


DEAR = profile("dear", ("fast", 1.0, 11.0), ("calm", 0.5, 5.0))  # 10 J above idle for a unit, or 8
CHEAP = profile("cheap", ("fast", 4.0, 9.0))  # 2 J for a unit
EPOCH = WorkEstimate(flops_per_example=1.0)


def training(board: Profile, epochs: int = 2) -> DeviceWorkload:
    """Two epochs of 1 operation for each example, whose number may be another."""
    return DeviceWorkload(WorkEstimate(flops_per_example=float(epochs)), board, 0, epochs, EPOCH)


def steady(seconds: float, expected_s: float, examples: int = 10) -> tuple[TaskDuration, ...]:
    """Five rounds that took what the profile predicts for them."""
    return tuple(TaskDuration(n, seconds, 2.0, seconds, expected_s, examples) for n in range(5))


KNOWN = {"dear": steady(20.0, 20.0), "cheap": steady(5.0, 5.0)}
P90 = 1.1755  # of five equal ratios: exp(1.2816 * sqrt(2 * 0.2^2 / 6 * 6 / 5)) = exp(1.2816 * 0.12649)
BOTH = {"dear": training(DEAR), "cheap": training(CHEAP)}


def test_work_moves_to_the_cheaper_board_as_far_as_the_job_allows():
    found = decide_deadline(cohort_rule(), KNOWN, BOTH)
    assert found.epochs == {"dear": 1, "cheap": 3}
    assert found.seconds == pytest.approx(10.0 * P90, rel=1e-3)


def test_where_idling_costs_nothing_a_round_is_as_long_as_the_calm_point_takes_unless_it_is_bounded(monkeypatch):
    monkeypatch.setattr(deadline, "MAX_EPOCH_FACTOR", 1.0)
    resting = {
        device: ask._replace(profile=msgspec.structs.replace(ask.profile, idle_w=0.0)) for device, ask in BOTH.items()
    }
    for keys, seconds in (({}, 40.0), ({"deadline_s": 30.0}, 20.0), ({"joules_per_round": 1e6}, 20.0)):
        found = decide_deadline(cohort_rule(**keys), KNOWN, resting)
        assert found.seconds == pytest.approx(seconds * P90, rel=1e-3)


def test_before_anybody_has_answered_it_is_the_predicted_rule():
    predicted = msgspec.structs.replace(cohort_rule(), deadline="predicted")
    mute = {"dear": training(profile("dear", ("fast", 1.0, None)))}
    for known, asked in (({}, BOTH), (KNOWN, mute)):
        assert decide_deadline(cohort_rule(), known, asked) == decide_deadline(predicted, known, asked)


def test_a_board_whose_joules_are_not_known_keeps_its_epochs_and_is_waited_for():
    mute = training(profile("mute", ("fast", 0.2, None)))
    known = {**KNOWN, "mute": steady(100.0, 100.0)}
    found = decide_deadline(cohort_rule(), known, {**BOTH, "mute": mute})
    assert "mute" not in found.epochs
    assert found.seconds == pytest.approx(100.0 * P90, rel=1e-3)


def test_a_new_board_keeps_its_epochs_until_it_has_told_its_examples():
    found = decide_deadline(cohort_rule(), {"dear": KNOWN["dear"]}, BOTH)
    assert "cheap" not in found.epochs
    assert found.seconds is not None


def test_another_number_of_epochs_is_so_many_times_their_work_and_nothing_else():
    order = TaskSpec({"epochs": 2}, {}, WorkEstimate(flops=4.0, flops_per_example=6.0, launches_per_batch=2.0, batch=5))
    ask = tasks.predict_workload(order, ("work",), "numpy", 0.2, has_unequal_epochs=True)
    assert (ask.epochs, ask.with_epochs(2)) == (2, ask)
    assert ask.with_epochs(3).work == tasks.predict_work(tasks.with_epochs(order, 3), ("work",), "numpy")
    both = tasks.predict_workload(order, ("work", "check"), "numpy", 0.2, has_unequal_epochs=True)
    assert both.with_epochs(3).work.flops_per_example - both.work.flops_per_example == 3.0
    for actions, uneven in ((("check",), True), (("work",), False)):
        assert tasks.predict_workload(order, actions, "numpy", 0.2, has_unequal_epochs=uneven).epochs == 0
    assert tasks.with_epochs(order, None) is order
    assert tasks.with_epochs(None, 3) is None


def test_a_round_is_asked_with_its_epochs_and_the_next_one_begins_without():
    blob = BlobRef(sha256="a" * 64, size=1)
    plan = JobConstants(0, 5, cohort_rule(), 0)
    state = msgspec.structs.replace(apply_event(JobState(plan), JobStarted(blob), 0.0), durations=KNOWN)
    asked = decisions.decide_event(state, 0.0, BOTH.keys(), BOTH.__getitem__)
    assert isinstance(asked, CohortSelected)
    assert asked.epochs == {"dear": 1, "cheap": 3}
    assert asked.work == {"dear": 1.0, "cheap": 3.0}
    state = apply_event(state, asked, 0.0)
    assert state.epochs == asked.epochs
    for device in BOTH:
        update = plain.update(device=device)
        state = apply_event(state, UpdateAccepted(0, update, 5.0, 5.0), 5.0)
    assert [state.durations[device][-1].work for device in ("dear", "cheap")] == [1.0, 3.0]
    state = apply_event(apply_event(state, RoundClosed(0), 5.0), RoundCommitted(0, blob, False, {}), 5.0)
    assert state.epochs == {}


@pytest.mark.parametrize(("method", "uneven"), [("fednova", True), ("fedprox", True), ("fedavg", False)])
def test_a_task_has_the_planned_epochs_also_after_a_restart(tmp_path, method, uneven):
    network = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
    model = {"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)}
    job_bundle.write_bundle(
        tmp_path / "bundle", {"network": network, "flops": 8}, {"model": tensors.encode_tensors(model)}
    )
    table = {"name": "j", "method": method, "params": {"epochs": 4}, "cohort": {"deadline": "energy"}}
    with Store(tmp_path / "home") as store:
        id = store.add_job(settings.parse_job(table), tmp_path / "bundle")
        job = opened(store, id)
        before = job.device_workload("a", CHEAP)
        assert before.epochs == (4 if uneven else 0)
        job.record_event(CohortSelected(0, 0, ("a", "b"), epochs={"a": 7} if uneven else {}), 0.0)
        for running in (job, opened(store, id)):
            sent = {device: running.build_task(device, "numpy", CHEAP, 0.0) for device in "ab"}
            told = {device: task.params["epochs"] for device, task in sent.items() if task}
            assert told == {"a": 7 if uneven else 4, "b": 4}
            works = {device: task.work.flops_per_example for device, task in sent.items() if task}
            assert works["a"] / works["b"] == (7 / 4 if uneven else 1)
            assert running.device_workload("a", CHEAP).work == sent["a"].work


def test_the_log_tells_the_planned_epochs():
    told = event_messages.format_single_event(
        CohortSelected(3, 0, ("a", "b"), deadline_s=42.0, epochs={"b": 8, "a": 1})
    )
    assert told == [
        "round 4: cohort a, b; deadline 42 s",
        "round 4: epochs for least energy: a 1, b 8",
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"joules_per_round": 30}, 'no effect without deadline = "energy"'),
        ({"deadline": "predicted", "joules_per_round": 30}, "joules_per_round has no effect"),
    ],
)
def test_a_bound_that_nothing_heeds_is_refused(keys, told):
    with pytest.raises(JobError, match=told):
        settings.parse_job({"name": "j", "method": "fedavg", "cohort": keys})


def test_every_rule_is_found_by_its_name():
    assert deadline.POLICIES["energy"] is deadline.decide_by_energy

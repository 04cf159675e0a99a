"""Rounds planned for energy, beside an oracle that tries everything, and the laws that any plan has to keep."""

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from fedquilt.coordinator.rounds.energy_scheduling import (
    DeviceForecast,
    EnergyPlan,
    EpochChoice,
    pareto_front,
    plan_least_energy,
    plan_least_time,
)


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
def test_a_plan_does_all_the_work_by_choices_that_there_are(seed):
    boards, passes = drawn(seed)
    for plan in pareto_front(boards, passes):
        assert sum(boards[device].examples * epochs for device, epochs in plan.epochs.items()) >= passes
        above_j = 0.0
        for device, board in boards.items():
            ways = [each for each in board.choices if each.epochs == plan.epochs[device]]
            above_j += min(each.joules for each in ways if each.seconds <= plan.seconds)
        assert plan.joules == pytest.approx(above_j + plan.seconds * sum(each.idle_w for each in boards.values()))


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


def test_waiting_is_paid_for():
    worker = DeviceForecast((EpochChoice(10.0, 100.0), EpochChoice(20.0, 80.0)))
    for idle_w, seconds, joules in ((1.0, 20.0, 80.0 + 20.0 + 5.0), (3.0, 10.0, 100.0 + 30.0 + 5.0)):
        waiting = DeviceForecast((EpochChoice(1.0, 5.0),), idle_w=idle_w)
        assert near(plan_least_energy({"a": worker, "b": waiting}, 2), seconds, joules)


def test_energy_adds():
    one = {"a": DeviceForecast((EpochChoice(10.0, 50.0),), idle_w=1.0)}
    other = {"b": DeviceForecast((EpochChoice(10.0, 30.0),), idle_w=2.0)}
    plans = [plan_least_energy(boards, len(boards)) for boards in (one, other, {**one, **other})]
    joules = [plan.joules for plan in plans if plan]
    assert joules == [60.0, 50.0, 110.0]


def test_work_moves_to_the_board_that_needs_less_for_it():
    """Three epochs of one and one of the other cost 3 * 5 + 50 J, and not 2 * 5 + 2 * 50 J; nobody trains for none."""
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


def test_a_limit_may_be_reached_to_the_second():
    board = DeviceForecast((EpochChoice(1.0, 3.0), EpochChoice(2.0, 1.0)))
    found = plan_least_energy({"a": board}, 1, limit_s=2.0)
    assert found.seconds == 2.0

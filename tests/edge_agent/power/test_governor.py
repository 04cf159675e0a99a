"""Which operating point: boards of three points with round numbers."""

from __future__ import annotations

import random

import pytest

from fedquilt.core import OperatingPoint, WorkEstimate
from fedquilt.edge_agent.power import governor
from fedquilt.edge_agent.power.governor import (
    GovernorPolicy,
    choose_faster_point,
    choose_operating_point,
    forecast_points,
)
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, learn_segment

WORK = WorkEstimate(flops=100.0)


def point(name: str, flops_per_s: float | None, busy_w: float | None) -> OperatingPoint:
    return OperatingPoint(name=name, flops_per_s=flops_per_s, busy_w=busy_w)


# 40 s, 20 s, 10 s; above 1 W of idle they take 40, 40 and 90 J
SLOW, MIDDLE, FAST = point("slow", 2.5, 2.0), point("middle", 5.0, 3.0), point("fast", 10.0, 10.0)
BOARD = (MIDDLE, FAST, SLOW)


def slower(factor: float, held: OperatingPoint = SLOW) -> LearnedModel:
    """What one task teaches that took this much longer than the profile says."""
    seconds = WORK.flops / (held.flops_per_s or 1.0)
    return learn_segment(LearnedModel(), TaskSegment(held, WORK, seconds * factor, held.busy_w))


def name(chosen: OperatingPoint | None) -> str | None:
    return None if chosen is None else chosen.name


def chosen(policy: str, left_s: float, points: tuple[OperatingPoint, ...] = BOARD, **others: float) -> str | None:
    rule = GovernorPolicy(policy)  # type: ignore[arg-type]
    return name(choose_operating_point(rule, points, WORK, left_s, others.pop("idle_w", 1.0), **others))


def test_a_forecast_counts_idle_until_the_deadline() -> None:
    """At 10 W for 10 s and then 1 W for 40 s: 140 J until the deadline in 50 s."""
    (fast, middle, slow) = forecast_points(BOARD, WORK)
    assert (fast.point, fast.seconds, fast.energy_until_deadline_j(50.0, 1.0)) == (FAST, 10.0, 140.0)
    assert (middle.seconds, middle.energy_until_deadline_j(50.0, 1.0)) == (20.0, 90.0)
    assert (slow.seconds, slow.energy_until_deadline_j(50.0, 1.0)) == (40.0, 90.0)


@pytest.mark.parametrize(
    ("policy", "left_s", "expected"),
    [
        ("energy", 100.0, "middle"),  # as cheap as the slow one, and faster
        ("energy", 20.9, "fast"),  # 20 s and a twentieth are too much
        ("energy", 21.0, "middle"),
        ("energy", 5.0, "fast"),  # impossible
        ("energy", -1.0, "fast"),
        ("paper", 100.0, "slow"),
        ("paper", 41.9, "middle"),
        ("paper", 20.9, "fast"),
        ("paper", 5.0, "fast"),
        ("max", 100.0, "fast"),
        ("board", 100.0, None),
    ],
)
def test_each_policy_has_its_own_point(policy: str, left_s: float, expected: str | None) -> None:
    assert chosen(policy, left_s) == expected


@pytest.mark.parametrize(
    ("rows", "left_s", "idle_w", "expected"),
    [
        # FedStitch's Table II, from the second to the third row: 12 % less time and less power
        ((("1.12 GHz", 1.21, 1.25), ("1.30 GHz", 1.38, 1.14)), 1000.0, 0.2, "1.30 GHz"),
        # 4 W for 10 s is less than 2.2 W for 20 s; with 2 W of idle for the 10 s left over it is more
        ((("fast", 10.0, 4.0), ("slow", 5.0, 2.2)), 30.0, 0.0, "fast"),
        ((("fast", 10.0, 4.0), ("slow", 5.0, 2.2)), 30.0, 2.0, "slow"),
        # idle unknown: at 0 W slow takes 44 J and fast 40, at 2.2 W, the least at work, 66 and 84
        ((("fast", 10.0, 4.0), ("slow", 5.0, 2.2)), 30.0, None, "slow"),
        # idle unknown: at 0 W 56 and 40 J, at 2.8 W 84 and 96: slow would lose 16 J, and fast 12
        ((("fast", 10.0, 4.0), ("slow", 5.0, 2.8)), 30.0, None, "fast"),
    ],
)
def test_idle_is_counted_and_where_it_is_unknown_the_least_is_lost(
    rows: tuple[tuple[str, float, float], ...], left_s: float, idle_w: float | None, expected: str
) -> None:
    points = tuple(point(*row) for row in rows)
    assert name(choose_operating_point(GovernorPolicy("energy"), points, WORK, left_s, idle_w)) == expected


def test_the_papers_policy_takes_the_slowest_point_in_time_whatever_it_costs() -> None:
    assert chosen("paper", 1000.0, (point("1.12 GHz", 1.21, 1.25), point("1.30 GHz", 1.38, 1.14)), idle_w=0.2) == (
        "1.12 GHz"
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_point_that_is_cheapest_at_both_ends_is_held_whatever_the_idle_power_is(seed: int) -> None:
    """Joules are linear in the idle power: what holds at 0 W and at the least watts at work holds between them."""
    roll = random.Random(seed)
    points = tuple(point(str(each), roll.uniform(2, 10), roll.uniform(1, 9)) for each in range(4))
    least_w = min(each.busy_w or 0.0 for each in points)
    ends = {name(choose_operating_point(GovernorPolicy(), points, WORK, 60.0, idle_w)) for idle_w in (0.0, least_w)}
    if len(ends) == 1:
        between = [
            name(choose_operating_point(GovernorPolicy(), points, WORK, 60.0, roll.uniform(0, least_w)))
            for _ in range(5)
        ]
        assert {name(choose_operating_point(GovernorPolicy(), points, WORK, 60.0, None)), *between} == ends


def test_a_board_that_is_slower_than_its_profile_gets_a_faster_point() -> None:
    """Twice as slow: about 80, 40 and 20 s, and longer for all that one task tells."""
    assert name(choose_operating_point(GovernorPolicy(), BOARD, WORK, 80.0, 1.0, slower(2.0))) == "middle"
    assert name(choose_operating_point(GovernorPolicy(), BOARD, WORK, 43.0, 1.0, slower(2.0))) == "fast"


def test_points_that_lack_numbers_are_left_out() -> None:
    assert chosen("energy", 100.0, (point("unknown", None, 1.0), FAST)) == "fast"
    assert chosen("energy", 100.0, (point("no power", 5.0, None), FAST)) == "fast"
    assert chosen("energy", 5.0, (point("no power", 50.0, None), FAST)) == "no power"
    assert chosen("paper", 100.0, (point("no power", 5.0, None), FAST)) == "no power"


@pytest.mark.parametrize("policy", ["energy", "paper", "max", "board"])
def test_without_numbers_the_board_is_left_alone(policy: str) -> None:
    assert chosen("energy", 100.0, (point("a", 5.0, None), point("b", 10.0, None))) is None
    assert chosen(policy, 100.0, ()) is None
    assert chosen(policy, 100.0, (point("unknown", None, 5.0),)) is None
    assert choose_operating_point(GovernorPolicy(policy), BOARD, WorkEstimate(), 100.0, 1.0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "left_s", "factor", "expected"),
    [
        ("energy", 15.0, 1.0, "middle"),  # the rest takes 20, 10 or 5 s
        ("energy", 10.4, 1.0, "fast"),
        ("energy", 1.0, 1.0, "fast"),  # late whatever happens: as little as possible
        ("energy", 35.0, 2.0, "middle"),
        ("paper", 15.0, 1.0, "middle"),
        ("max", 1.0, 1.0, None),
        ("board", 1.0, 1.0, None),
    ],
)
def test_a_late_task_is_stepped_up(policy: str, left_s: float, factor: float, expected: str | None) -> None:
    rule = GovernorPolicy(policy)  # type: ignore[arg-type]
    seen = TaskSegment(SLOW, WORK.scale(0.5), 20.0 * factor, None)
    assert name(choose_faster_point(rule, BOARD, seen, WORK.scale(0.5), left_s, 1.0)) == expected


@pytest.mark.parametrize(
    ("points", "held", "share", "seconds", "left_s"),
    [
        (BOARD, SLOW, 0.5, 20.0, 20.0),  # in time
        ((FAST, SLOW), FAST, 0.5, 5.0, 1.0),  # late, at the fastest point
        (BOARD, SLOW, 0.01, 16.0, 1.0),  # a hundredth of the work says nothing of its pace
        (BOARD, SLOW, 0.2, 0.0, 1.0),  # nor does a clock that stands still
    ],
)
def test_a_task_is_left_alone_where_no_point_is_known_to_help(
    points: tuple[OperatingPoint, ...], held: OperatingPoint, share: float, seconds: float, left_s: float
) -> None:
    seen = TaskSegment(held, WORK.scale(share), seconds, None)
    assert choose_faster_point(GovernorPolicy(), points, seen, WORK.scale(1 - share), left_s, 1.0) is None


def test_the_cheapest_is_the_cheapest_of_all_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "MARGIN", 0.0)
    roll = random.Random(0)
    for _ in range(200):
        points = tuple(point(str(i), roll.uniform(1, 20), roll.uniform(1, 30)) for i in range(roll.randint(1, 9)))
        left_s, idle_w = roll.uniform(1, 60), roll.uniform(0, 5)
        best = choose_operating_point(GovernorPolicy("energy"), points, WORK, left_s, idle_w)
        assert best is not None

        def joules(each: OperatingPoint, left_s: float = left_s, idle_w: float = idle_w) -> float:
            seconds = 100.0 / (each.flops_per_s or 1)
            return (each.busy_w or 0) * seconds + idle_w * (left_s - seconds)

        in_time = [each for each in points if 100.0 / (each.flops_per_s or 1) <= left_s]
        if in_time:
            assert joules(best) == pytest.approx(min(joules(each) for each in in_time))
        else:
            assert best.flops_per_s == max(each.flops_per_s or 0 for each in points)

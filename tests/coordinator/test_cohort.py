"""Sampling depends on the seed, the round and the device, and on what is given of costs and waiting."""

import msgspec
import plain

from fedquilt.coordinator.rounds.cohort_selection import draw_numbers, joules_per_flop, rank_devices, select_cohort
from fedquilt.core import OperatingPoint, derive_seed, derive_seeds

FLEET = [f"dev-{i}" for i in range(20)]


def test_the_same_seed_and_round_draw_the_same_devices_in_any_order():
    assert select_cohort(1, 2, FLEET, 5) == select_cohort(1, 2, list(reversed(FLEET)), 5)


def test_another_round_or_seed_draws_others():
    assert len({select_cohort(1, 2, FLEET, 5), select_cohort(1, 3, FLEET, 5), select_cohort(2, 2, FLEET, 5)}) == 3


def test_a_device_that_leaves_changes_no_other_devices_draw():
    """Who was drawn stays drawn when somebody else goes offline."""
    drawn = set(select_cohort(1, 2, FLEET, 5))
    gone = next(device for device in FLEET if device not in drawn)
    assert set(select_cohort(1, 2, [d for d in FLEET if d != gone], 5)) == drawn


def test_every_device_is_drawn_about_equally_often():
    counts = dict.fromkeys(FLEET, 0)
    for round in range(400):
        for device in select_cohort(7, round, FLEET, 5):
            counts[device] += 1
    assert 65 < min(counts.values()) <= max(counts.values()) < 135


def test_asking_for_more_than_there_are_gives_all():
    assert select_cohort(0, 0, FLEET, 99) == tuple(sorted(FLEET))
    assert select_cohort(0, 0, [], 3) == ()


def test_a_device_that_takes_twice_the_joules_is_drawn_half_as_often_when_one_is_taken():
    counts = dict.fromkeys("ab", 0)
    for round in range(3000):
        counts[select_cohort(3, round, "ab", 1, costs={"a": 2e-9, "b": 1e-9})[0]] += 1
    assert 0.3 < counts["a"] / 3000 < 0.37


def test_a_device_whose_joules_nobody_knows_is_taken_for_middling():
    known = {"a": 1.0, "b": 3.0, "c": 5.0}
    for round in range(50):
        assert select_cohort(1, round, "abcd", 2, costs=known) == select_cohort(
            1, round, "abcd", 2, costs={**known, "d": 3.0}
        )
        assert select_cohort(1, round, FLEET, 5, costs=dict.fromkeys(FLEET, 7.0)) == select_cohort(1, round, FLEET, 5)


def test_whoever_has_waited_for_the_given_turns_goes_first_and_nobody_waits_longer_than_a_turn_more():
    costs = {device: 1000.0 if device == "dev-7" else 1.0 for device in FLEET}
    since, longest = dict.fromkeys(FLEET, 0), dict.fromkeys(FLEET, 0)
    for round in range(1000):
        for device in select_cohort(5, round, FLEET, 2, costs=costs, since=since, turns=3.0):
            longest[device] = max(longest[device], round - since[device])
            since[device] = round
    assert longest["dev-7"] >= 30  # it is not preferred otherwise
    assert max(longest.values()) <= 40


def test_of_those_who_have_waited_too_long_the_longest_waiting_come_first():
    since = {"a": 9, "b": 4, "c": 5, "d": 9}
    assert rank_devices(0, 10, "abcd", 2, since=since, turns=2.0)[:2] == ["b", "c"]


def test_a_boards_joules_for_a_flop_are_its_thriftiest_points():
    points = [OperatingPoint(name="slow", flops_per_s=5.0, busy_w=10.0)]
    points += [OperatingPoint(name="fast", flops_per_s=8.0, busy_w=12.0), OperatingPoint(name="?", flops_per_s=99.0)]
    profile = plain.profile(points=tuple(points))
    assert joules_per_flop(profile) == 1.5
    assert joules_per_flop(msgspec.structs.replace(profile, points=())) is None
    assert joules_per_flop(None) is None


def test_the_draws_of_a_round_are_each_devices_own_seed():
    """Made in one loop, they are those of `derive_seed`, so that both give the same cohort."""
    names = ["dev-1", "dev-10", "gerät", ""]
    assert derive_seeds(("cohort", 7, 3), names) == [derive_seed("cohort", 7, 3, name) for name in names]


def test_lots_that_are_drawn_before_they_are_needed_are_the_same():
    assert set(draw_numbers(11, 4, FLEET[:3])) == set(FLEET[:3])
    drawn = draw_numbers(11, 4, FLEET)
    assert drawn == {device: derive_seed("cohort", 11, 4, device) for device in FLEET}
    assert select_cohort(11, 4, FLEET, 5) == tuple(sorted(sorted(FLEET, key=drawn.__getitem__)[:5]))


def test_who_is_sampled_comes_first_in_the_order_of_selection():
    few = [f"late-{i}" for i in range(0, 30, 2)]
    for fleet in (few, [*few, *(f"late-{i}" for i in range(1, 30, 2))], few):
        assert select_cohort(11, 3, set(fleet), 7) == tuple(sorted(rank_devices(11, 3, fleet, 7)[:7]))
        assert sorted(draw_numbers(11, 3, fleet).values()) == list(draw_numbers(11, 3, fleet).values())

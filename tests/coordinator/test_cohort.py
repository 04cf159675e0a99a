"""Sampling depends on the seed, the round and the device, and on what is given of costs and waiting."""

import math
import sys

import msgspec
import plain
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.coordinator.device_columns import DeviceSet, RoundColumn
from fedquilt.coordinator.rounds.selection import joules_per_flop, rank_devices, select_cohort
from fedquilt.core import OperatingPoint, derive_seed

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


def exact_number(seed: int, round: int, device: str) -> int:
    """The draw as it is documented: SplitMix64's mix of the hashes of the name, and of seed and round."""
    mixed = derive_seed("device", device) ^ derive_seed("cohort", seed, round)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> 11


def test_the_devices_with_the_smallest_numbers_are_drawn():
    """Of many, and whoever else this process has met."""
    names = [f"late-{i}" for i in range(3000)] + ["gerät", ""]
    for round in range(5):
        order = sorted(names, key=lambda device: exact_number(11, round, device))
        assert rank_devices(11, round, names, 7) == order
        assert select_cohort(11, round, set(names), 7) == tuple(sorted(order[:7]))


@given(
    st.dictionaries(
        st.sampled_from([f"few-{i}" for i in range(40)]),
        st.tuples(st.none() | st.sampled_from([1.0, 2.0, 5.5]), st.none() | st.integers(0, 60)),
    ),
    st.integers(0, 60),
    st.integers(-1, 45),
    st.sampled_from([0.5, 1.0, 3.0, math.inf]),
)
def test_who_is_selected_comes_first_in_the_order_of_selection(fleet, round, count, turns):
    """By vectorised operations as device by device, with any costs and waits."""
    costs = {device: cost for device, (cost, _) in fleet.items() if cost is not None}
    since = {device: last for device, (_, last) in fleet.items() if last is not None}
    ranked = rank_devices(5, round, fleet, count, costs=costs, since=since, turns=turns)
    found = select_cohort(5, round, set(fleet), count, costs=costs, since=since, turns=turns)
    assert found == tuple(sorted(ranked[: max(count, 0)]))
    assert sorted(ranked) == sorted(fleet)


def test_a_cohort_of_a_large_fleet_costs_no_python_object_per_device():
    """Neither the draw nor what a round changes in the columns of a fleet of 100,000."""
    fleet = DeviceSet.from_devices(f"many-{i}" for i in range(100_000))
    since = RoundColumn(dict.fromkeys(fleet, 0))
    select_cohort(1, 0, fleet, 10)  # the hashes of the names are computed once
    calls = 0

    def count_call(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count_call)
    try:
        drawn = select_cohort(1, 1, fleet - ["many-1"], 10, since=since, turns=1e-9)
        since.with_values(dict.fromkeys(drawn, 1))
    finally:
        sys.setprofile(None)
    assert len(drawn) == 10
    assert calls < 2000

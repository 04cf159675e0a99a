"""Who can be selected, for which reason somebody cannot, and who is drawn."""

import math
import random
import sys

import msgspec
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.coordinator.device_columns import ELIGIBLE, NEVER, DeviceSet, RoundBitmap, RoundColumn
from fedquilt.coordinator.fleet import registry as registry_module
from fedquilt.coordinator.fleet.registry import FRESH_S, MAX_POINT_TABLES, OFFLINE_GRACE_S, DeviceRegistry
from fedquilt.coordinator.rounds.selection import (
    REASONS,
    CohortDraw,
    DeviceSnapshot,
    JobRequirements,
    ineligibility_code,
    joules_per_flop,
    rank_devices,
    reason_key,
    reason_text,
    select_cohort,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import OperatingPoint, derive_seed
from fedquilt.wire import Presence, Telemetry

PROFILE = plain.profile(engines=("torch",))
WANTS = JobRequirements(("numpy", "torch"), CohortSettings(min_battery=0.2, max_temperature_c=70.0))
ANY = JobRequirements(("torch",), CohortSettings())


LAB = plain.profile(engines=("torch",), labels=("site=lab",), codecs=("raw", "int8"))


@pytest.mark.parametrize(
    ("seen", "wants", "code"),
    [
        (DeviceSnapshot(True, PROFILE), WANTS, None),
        (DeviceSnapshot(False, PROFILE), WANTS, "offline"),
        (DeviceSnapshot(False, PROFILE, silent=True), WANTS, "silent"),
        (DeviceSnapshot(False, removed=True), WANTS, "removed"),
        (DeviceSnapshot(True, PROFILE, flooding=True), WANTS, "flooding"),
        (DeviceSnapshot(True), WANTS, "profile"),
        (DeviceSnapshot(True, PROFILE, Telemetry(battery=0.19)), WANTS, "battery"),
        (DeviceSnapshot(True, PROFILE, Telemetry(battery=0.19, charging=False)), WANTS, "battery"),
        (DeviceSnapshot(True, PROFILE, Telemetry(battery=0.19, charging=True)), WANTS, None),
        (DeviceSnapshot(True, PROFILE, Telemetry(battery=0.2)), WANTS, None),
        (DeviceSnapshot(True, PROFILE, Telemetry(temperature_c=70.1)), WANTS, "hot"),
        (DeviceSnapshot(True, PROFILE, Telemetry(temperature_c=70.0)), WANTS, None),
        (DeviceSnapshot(True, PROFILE, Telemetry(power_w=3.0)), WANTS, None),
        (DeviceSnapshot(True, PROFILE, Telemetry(disk_full=True)), WANTS, "full"),
        (DeviceSnapshot(True, PROFILE, Telemetry(battery=0.0, temperature_c=120.0)), ANY, None),
        (DeviceSnapshot(True, PROFILE), JobRequirements(("onnx",), CohortSettings()), "engine"),
        (DeviceSnapshot(True, PROFILE), JobRequirements(("torch",), CohortSettings(select=("site=lab",))), "labels"),
        (DeviceSnapshot(True, LAB), JobRequirements(("torch",), CohortSettings(select=("site=lab",))), None),
        (DeviceSnapshot(True, LAB), JobRequirements(("torch",), CohortSettings(select=("!site=lab",))), "labels"),
        (DeviceSnapshot(True, PROFILE), JobRequirements(("torch",), CohortSettings(), "int8"), "codec"),
        (DeviceSnapshot(True, LAB), JobRequirements(("torch",), CohortSettings(), "int8"), None),
    ],
)
def test_each_reason_holds_when_it_should_and_what_is_unknown_excludes_nobody(seen, wants, code):
    assert ineligibility_code(seen, wants) == code
    assert code is None or code in REASONS


def test_what_sensors_said_long_ago_says_nothing_of_now():
    registry = DeviceRegistry()
    registry.update_presence("a", Presence(online=True, boot="1"), 0.0)
    registry.update_telemetry("a", Telemetry(battery=0.1), 5.0)
    assert registry.device_views(5.0 + FRESH_S - 1) == {"a": DeviceSnapshot(True, None, Telemetry(battery=0.1))}
    assert registry.device_views(5.0 + FRESH_S) == {"a": DeviceSnapshot(True, None, None)}
    registry.update_presence("a", Presence(online=False, boot="1"), 1000.0)
    assert registry.device_views(1000.0 + OFFLINE_GRACE_S - 1)["a"].online
    assert not registry.device_views(1000.0 + OFFLINE_GRACE_S)["a"].online


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["on", "off", "profile", "cold", "hot", "wait"]))))
def test_what_is_kept_from_one_decision_to_the_next_is_what_would_be_found_anew(heard):
    kept, now_s = DeviceRegistry(), 0.0
    for place, (device, what) in enumerate(heard):
        now_s += {"wait": OFFLINE_GRACE_S - 1, "hot": FRESH_S / 2}.get(what, 1.0)
        match what:
            case "on" | "off":
                kept.update_presence(device, Presence(online=what == "on", boot="1"), now_s)
            case "profile":
                kept.update_profile(
                    device, msgspec.structs.replace(PROFILE, engines=("torch",) if place % 2 else ("onnx",))
                )
            case "cold" | "hot":
                kept.update_telemetry(device, Telemetry(temperature_c=90.0 if what == "hot" else 20.0), now_s)
        anew = DeviceRegistry()
        anew.devices.update(kept.devices)
        anew._stale_devices.update(kept.devices)
        assert kept.device_views(now_s) == anew.device_views(now_s)
        assert kept.kinds == anew.kinds
        assert kept.usable_engines(WANTS.engines, now_s) == anew.usable_engines(WANTS.engines, now_s)
        labels = kept.eligibility(WANTS, now_s)
        barred = {device: label for device, label in labels.items() if label != ELIGIBLE}
        codes = {device: ineligibility_code(seen, WANTS) for device, seen in anew.device_views(now_s).items()}
        assert barred == {device: code for device, code in codes.items() if code is not None}
        assert labels.keys() == anew.device_views(now_s).keys()
        assert set(labels.devices_with(ELIGIBLE)) == labels.keys() - barred.keys()


def test_a_decision_costs_what_has_changed_since_the_last(monkeypatch):
    looked = []
    monkeypatch.setattr(registry_module, "ineligibility_code", lambda seen, wants: looked.append(1))
    registry = DeviceRegistry()
    for number in range(50):
        registry.update_presence(f"d-{number}", Presence(online=True, boot="1"), 0.0)
        registry.update_profile(f"d-{number}", PROFILE)
    first, version = registry.eligibility(WANTS, 1.0), registry.refresh_views(1.0)
    assert len(looked) == 50
    assert registry.refresh_views(2.0) == version
    assert registry.eligibility(WANTS, 2.0) is first
    registry.update_presence("d-7", Presence(online=False, boot="1"), 2.0)
    registry.eligibility(WANTS, 2.0)  # within the grace it is still there
    assert len(looked) == 50
    registry.eligibility(WANTS, 2.0 + OFFLINE_GRACE_S)
    assert len(looked) == 51
    assert len(registry.usable_engines(("torch",), 2.0 + OFFLINE_GRACE_S)) == 49


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "lacks package mine-fl 1.0 (aaaaaaaa): install it on the device"),
        ({"plugin mine": f"mine-fl 1.1 {'b' * 64}"}, "has package mine-fl 1.1 (bbbbbbbb), and the job needs 1.0 (aaaa"),
        ({"plugin mine": f"mine-fl 1.0 {'c' * 64}"}, "has package mine-fl 1.0 (cccccccc), and the job needs 1.0 (aaaa"),
        ({"plugin mine": f"mine-fl 1.0 {'a' * 64}"}, None),
    ],
)
def test_a_board_without_the_very_package_is_not_asked_and_told_both_versions(versions, said):
    board = plain.profile(engines=("numpy",), versions=versions, codecs=("raw",))
    wants = JobRequirements(("numpy",), CohortSettings(), plugins=(("mine", f"mine-fl 1.0 {'a' * 64}"),))
    code = ineligibility_code(DeviceSnapshot(True, board), wants)
    if said is None:
        assert code is None
        return
    assert code is not None
    assert reason_key(code) == "plugin"
    assert said in reason_text(code)


def test_boards_of_a_kind_share_their_operating_points():
    registry = DeviceRegistry()

    def said(device, hertz):
        points = (OperatingPoint(name="MAXN", cpu_hz=hertz),)
        registry.update_profile(device, msgspec.structs.replace(PROFILE, device=device, points=points))
        known = registry.latest_profile(device)
        assert known.points == points
        return known.points

    assert said("a", 1e9) is said("b", 1e9)
    assert said("c", 2e9) is not said("a", 1e9)
    first = said("a", 1e9)
    for number in range(MAX_POINT_TABLES):
        said("d", 3e9 + number)
    assert said("e", 1e9) is not first


FLEET = [f"dev-{i}" for i in range(20)]


def test_the_same_seed_and_round_draw_the_same_devices_in_any_order():
    assert select_cohort(CohortDraw(1, 2), FLEET, 5) == select_cohort(CohortDraw(1, 2), list(reversed(FLEET)), 5)


def test_another_round_or_seed_draws_others():
    draws = (CohortDraw(1, 2), CohortDraw(1, 3), CohortDraw(2, 2))
    assert len({select_cohort(draw, FLEET, 5) for draw in draws}) == 3


def test_a_device_that_leaves_changes_no_other_devices_draw():
    drawn = set(select_cohort(CohortDraw(1, 2), FLEET, 5))
    gone = next(device for device in FLEET if device not in drawn)
    assert set(select_cohort(CohortDraw(1, 2), [d for d in FLEET if d != gone], 5)) == drawn


def test_every_device_is_drawn_about_equally_often():
    counts = dict.fromkeys(FLEET, 0)
    for round in range(400):
        for device in select_cohort(CohortDraw(7, round), FLEET, 5):
            counts[device] += 1
    assert 65 < min(counts.values()) <= max(counts.values()) < 135


def test_asking_for_more_than_there_are_gives_all():
    assert select_cohort(CohortDraw(0, 0), FLEET, 99) == tuple(sorted(FLEET))
    assert select_cohort(CohortDraw(0, 0), [], 3) == ()


def test_a_device_that_takes_twice_the_joules_is_drawn_half_as_often_when_one_is_taken():
    counts = dict.fromkeys("ab", 0)
    for round in range(3000):
        counts[select_cohort(CohortDraw(3, round, costs={"a": 2e-9, "b": 1e-9}), "ab", 1)[0]] += 1
    assert 0.3 < counts["a"] / 3000 < 0.37


def test_a_device_whose_joules_nobody_knows_is_taken_for_middling():
    known = {"a": 1.0, "b": 3.0, "c": 5.0}
    for round in range(50):
        draw = CohortDraw(1, round)
        middling = draw._replace(costs={**known, "d": 3.0})
        assert select_cohort(draw._replace(costs=known), "abcd", 2) == select_cohort(middling, "abcd", 2)
        equal = draw._replace(costs=dict.fromkeys(FLEET, 7.0))
        assert select_cohort(equal, FLEET, 5) == select_cohort(draw, FLEET, 5)


def test_whoever_has_waited_for_the_given_turns_goes_first_and_nobody_waits_longer_than_a_turn_more():
    costs = {device: 1000.0 if device == "dev-7" else 1.0 for device in FLEET}
    since, longest = dict.fromkeys(FLEET, 0), dict.fromkeys(FLEET, 0)
    for round in range(1000):
        for device in select_cohort(CohortDraw(5, round, costs=costs, last_selected_rounds=since, turns=3.0), FLEET, 2):
            longest[device] = max(longest[device], round - since[device])
            since[device] = round
    assert longest["dev-7"] >= 30  # it is not preferred otherwise
    assert max(longest.values()) <= 40


def test_of_those_who_have_waited_too_long_the_longest_waiting_come_first():
    since = {"a": 9, "b": 4, "c": 5, "d": 9}
    assert rank_devices(CohortDraw(0, 10, last_selected_rounds=since, turns=2.0), "abcd", 2)[:2] == ["b", "c"]


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
    names = [f"late-{i}" for i in range(3000)] + ["gerät", ""]
    for round in range(5):
        order = sorted(names, key=lambda device: exact_number(11, round, device))
        assert rank_devices(CohortDraw(11, round), names, 7) == order
        assert select_cohort(CohortDraw(11, round), set(names), 7) == tuple(sorted(order[:7]))


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
    costs = {device: cost for device, (cost, _) in fleet.items() if cost is not None}
    since = {device: last for device, (_, last) in fleet.items() if last is not None}
    draw = CohortDraw(5, round, costs=costs, last_selected_rounds=since, turns=turns)
    ranked, found = rank_devices(draw, fleet, count), select_cohort(draw, set(fleet), count)
    assert found == tuple(sorted(ranked[: max(count, 0)]))
    assert sorted(ranked) == sorted(fleet)


def test_a_cohort_of_a_large_fleet_costs_no_python_object_per_device():
    fleet = DeviceSet.from_devices(f"many-{i}" for i in range(100_000))
    since = RoundColumn(dict.fromkeys(fleet, 0))
    select_cohort(CohortDraw(1, 0), fleet, 10)  # the hashes of the names are computed once
    calls = 0

    def count_call(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count_call)
    try:
        drawn = select_cohort(CohortDraw(1, 1, last_selected_rounds=since, turns=1e-9), fleet - ["many-1"], 10)
        since.with_values(dict.fromkeys(drawn, 1))
    finally:
        sys.setprofile(None)
    assert len(drawn) == 10
    assert calls < 2000


def contributed(*rounds: int) -> RoundBitmap:
    found = NEVER
    for round in rounds:
        found = found.with_round(round)
    return found


@pytest.mark.parametrize("rounds", [(), (0,), (3,), (0, 1, 2), (7, 8, 64, 1000)])
def test_it_reads_as_the_tuple_of_its_rounds(rounds):
    found = contributed(*rounds)
    assert (len(found), tuple(found), bool(found)) == (len(rounds), rounds, bool(rounds))
    assert [round in found for round in range(1002)] == [round in rounds for round in range(1002)]
    assert found.last_round == max(rounds, default=None)
    if rounds:
        assert (found[0], found[-1], found[1:]) == (rounds[0], rounds[-1], list(rounds[1:]))
    else:
        with pytest.raises(IndexError):
            found[-1]
    assert tuple(found.rounds_before(8)) == tuple(round for round in rounds if round < 8)
    assert found.with_round(5000) != found == contributed(*rounds)
    assert "a" not in found
    assert -1 not in found


def test_it_comes_back_from_its_bytes():
    roll = random.Random(1)
    found = contributed(9999, *roll.sample(range(10_000), 1000))
    assert RoundBitmap.from_bytes(found.to_bytes()) == found
    assert hash(RoundBitmap.from_bytes(found.to_bytes())) == hash(found)
    assert len(found.to_bytes()) == 1250
    assert RoundBitmap.from_bytes(NEVER.to_bytes()) == NEVER

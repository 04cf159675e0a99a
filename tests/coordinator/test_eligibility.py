"""Who can be asked, and for which reason somebody cannot."""

import msgspec
import plain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.coordinator.device_columns import ELIGIBLE
from fedquilt.coordinator.fleet import registry as registry_module
from fedquilt.coordinator.fleet.registry import FRESH_S, GRACE_S, KINDS_MOST, DeviceRegistry
from fedquilt.coordinator.rounds.selection import (
    REASONS,
    DeviceSnapshot,
    JobRequirements,
    ineligibility_code,
    reason_key,
    reason_text,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import OperatingPoint
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
    """At the limits too; a board that charges may be empty."""
    assert ineligibility_code(seen, wants) == code
    assert code is None or code in REASONS


def test_what_sensors_said_long_ago_says_nothing_of_now():
    registry = DeviceRegistry()
    registry.update_presence("a", Presence(online=True, boot="1"), 0.0)
    registry.update_telemetry("a", Telemetry(battery=0.1), 5.0)
    assert registry.device_views(5.0 + FRESH_S - 1) == {"a": DeviceSnapshot(True, None, Telemetry(battery=0.1))}
    assert registry.device_views(5.0 + FRESH_S) == {"a": DeviceSnapshot(True, None, None)}
    registry.update_presence("a", Presence(online=False, boot="1"), 1000.0)
    assert registry.device_views(1000.0 + GRACE_S - 1)["a"].online
    assert not registry.device_views(1000.0 + GRACE_S)["a"].online


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["on", "off", "profile", "cold", "hot", "wait"]))))
def test_what_is_kept_from_one_decision_to_the_next_is_what_would_be_found_anew(heard):
    kept, now_s = DeviceRegistry(), 0.0
    for place, (device, what) in enumerate(heard):
        now_s += {"wait": GRACE_S - 1, "hot": FRESH_S / 2}.get(what, 1.0)
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
        anew._stale.update(kept.devices)
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
    registry.eligibility(WANTS, 2.0 + GRACE_S)
    assert len(looked) == 51
    assert len(registry.usable_engines(("torch",), 2.0 + GRACE_S)) == 49


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "has no package mine-fl, of which the job needs 1.0 (aaaaaaaa): install it there"),
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
    for number in range(KINDS_MOST):
        said("d", 3e9 + number)
    assert said("e", 1e9) is not first

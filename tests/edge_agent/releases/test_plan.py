"""The plan of releases: pure decisions, and what holds in any order of events."""

from __future__ import annotations

import time
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from toy_kinds import release

from fedquilt import wire
from fedquilt.core import BlobRef, Reading
from fedquilt.edge_agent.releases import state_machine
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.releases.state_machine import ReleaseRecord, ReleaseState, StatusPolled


def ref(number: int) -> BlobRef:
    return BlobRef(sha256=f"{number:064x}", size=number)


def wanted(**changes: object) -> ReleaseState:
    """A state in which a release waits for its blob's fetching."""
    return ReleaseState(record=ReleaseRecord(release=release(1, ref(1), **changes)), next_poll_s=0.0)


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading(), ""),
        (Reading(battery=0.19), "the battery is below 20% and is not charging"),
        (Reading(battery=0.19, charging=True), ""),
        (Reading(battery=0.21), ""),
        (Reading(temperature_c=85.5), "the device is hotter than 85 °C"),
        (Reading(temperature_c=84.5), ""),
    ],
)
def test_a_low_battery_and_heat_are_waited_for_before_anything_begins(reading: Reading, said: str) -> None:
    seen = StatusPolled(reading=reading)
    state, actions = state_machine.advance(wanted(), seen, 1.0)
    assert state.waiting_for == said
    assert bool(actions) is (said == "")
    assert state.next_poll_s == (1.0 + state_machine.POLL_S if said else inf)


@pytest.mark.parametrize(
    ("wish", "hour", "open_"),
    [
        ("02:00-05:00", 1, False),
        ("02:00-05:00", 2, True),
        ("02:00-05:00", 5, False),
        ("22:00-04:00", 23, True),
        ("22:00-04:00", 3, True),
        ("22:00-04:00", 12, False),
        ("", 12, True),
    ],
)
def test_a_window_is_of_the_boards_own_day(wish: str, hour: int, open_: bool) -> None:
    local = time.struct_time((2026, 5, 4, hour, 0, 0, 0, 124, 0))
    assert (state_machine.outside_window_reason(wish, local) == "") is open_


def test_a_window_on_a_board_without_a_clock_stays_shut() -> None:
    assert (
        state_machine.outside_window_reason("02:00-05:00", None)
        == "the window is 02:00-05:00, and the device has no clock"
    )


@pytest.mark.parametrize("text", ["2:00-5:00", "24:00-25:00", "02:00", "02:00-05:00 ", "02:60-05:00", "a"])
def test_other_texts_are_no_windows(text: str) -> None:
    assert state_machine.window_error(text)
    state, _ = state_machine.advance(
        ReleaseState(), state_machine.ReleaseReceived(release(1, ref(1), window=text)), 0.0
    )
    assert state.record is not None
    assert state.record.step == "refused"


def test_the_swap_is_noted_with_what_runs_before_it_is_made() -> None:
    state = replace(wanted(), stage="checked")
    state, actions = state_machine.advance(state, StatusPolled(current_sha256="c" * 64), 1.0)
    assert state.record is not None
    assert (state.record.step, state.record.replaced_sha256) == ("swapping", "c" * 64)
    assert actions == ("activate",)
    assert wire.decode(wire.encode(state.record), ReleaseRecord) == state.record


def test_a_check_that_somebody_kills_is_made_again_twice() -> None:
    state, killed = replace(wanted(), stage="checking"), CheckResult("killed", {}, killed_externally=True)
    for _ in range(2):
        state, actions = state_machine.advance(state, killed, 1.0)
        assert actions == ("check",)
    state, actions = state_machine.advance(state, killed, 1.0)
    assert state.record is not None
    assert (state.record.step, state.record.reason, actions) == ("refused", "killed", ("delete",))


class Board:
    """Carries actions out as a board does that may fail, be killed and find things out in any order."""

    def __init__(self) -> None:
        self.state, self.disk = ReleaseState(), None
        self.now_s, self.serial = 0.0, 0
        self.running, self.previous = "", "none"
        self.proven = {""}  # blobs that may run: nothing, and what a check has passed
        self.checked: str | None = None
        self.told: list[wire.ReleaseStatus] = []

    def feed(self, event: state_machine.Event) -> None:
        state, actions = state_machine.advance(self.state, event, self.now_s)
        self.disk = state.record or self.disk
        self.state = state
        if (told := state_machine.release_status_message(state, self.running)) is not None:
            self.told.append(wire.decode(wire.encode(told), wire.ReleaseStatus))
        for action in actions:
            wish, before = state.record.release, state.record.previous_sha256
            match action:
                case "check":
                    self.checked = wish.blob.sha256
                case "activate":
                    assert self.disk.step in ("swapping", "soaking")
                    assert wish.blob.sha256 in self.proven
                    if self.running != wish.blob.sha256:
                        self.running, self.previous = wish.blob.sha256, self.running
                    self.feed(state_machine.ActionDone(action))
                case "confirm":
                    assert self.disk.step == "soaking"
                    self.feed(state_machine.ActionDone(action))
                case "roll back":
                    assert self.disk.step == "returning"
                    if self.running != before:
                        self.running, self.previous = self.previous, "none"
                    assert self.running == before
                    self.feed(state_machine.ActionDone(action))

    def look(self, **seen: object) -> None:
        self.now_s = max(self.now_s, self.state.next_poll_s if self.state.next_poll_s < inf else 0.0)
        self.feed(StatusPolled(current_sha256=self.running, is_blob_stored=True, **seen))

    def play(self, what: str) -> None:
        self.now_s += 0.5
        match what:
            case "deploy" | "back" | "same":
                self.serial += what != "same"
                blob = None if what == "back" else ref(1 + self.serial % 3)
                rollout = self.state.record.rollout if what == "back" and self.state.record else ""
                wish = release(self.serial, blob, is_rollback=what == "back", rollout=rollout or f"r{self.serial}")
                self.feed(state_machine.ReleaseReceived(wish))
            case "withdrawn":
                self.feed(state_machine.ReleaseCancelled())
            case "good" | "bad":
                if self.state.stage == "checking" and self.state.record.step == "wanted" and what == "good":
                    self.proven.add(self.state.record.release.blob.sha256)
                self.feed(CheckResult("" if what == "good" else "bad", {}))
            case "look" | "works" | "ill":
                self.look(is_task_running=what == "works", unhealthy_reason="ill" if what == "ill" else "")
            case "soaks":
                for _ in range(5):
                    if self.state.record is not None and self.state.record.step == "wanted":
                        self.play("look")
                        self.play("good")
            case "goes on":
                for _ in range(6):
                    self.play("look")
                    self.play("good")
                    self.now_s += 20.0
            case "killed":
                self.state = ReleaseState(record=self.disk)
                self.feed(state_machine.ProcessStarted(self.running))
            case "failed":
                self.feed(state_machine.ActionFailed("disk"))


WHAT = [
    "deploy",
    "goes on",
    "goes on",
    "back",
    "same",
    "withdrawn",
    "good",
    "bad",
    "look",
    "look",
    "works",
    "ill",
    "killed",
    "failed",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WHAT), min_size=20, max_size=60))
def test_in_any_order_nothing_unproven_runs_and_all_comes_to_an_end(played: list[str]) -> None:
    board = Board()
    for what in played:
        board.play(what)
        assert board.running in board.proven
    serials = [each.serial for each in board.told]
    assert serials == sorted(serials)
    for _ in range(6):
        board.play("goes on")
    assert board.state.record is None or board.state.record.step in ("committed", "refused", "returned")
    assert board.state.record is None or "withdrawn" in played or board.state.record.release.serial == board.serial
    assert board.state.record is None or board.state.record.next_release is None
    assert board.told == [] or board.told[-1].current == board.running

"""Boards that refuse a task for what does not change by itself are not asked again, and the others make the rounds."""

from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import plain
import pytest
from by_hand import Hand, Stage, constant_model
from job_facts import apply_events, committed, started_state, update

from fedquilt import wire
from fedquilt.coordinator.fleet import device_status
from fedquilt.coordinator.fleet.registry import DeviceRegistry
from fedquilt.coordinator.rounds import selection
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.decisions import decide_event, devices_to_skip
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    JobResumed,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
)
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.rounds.selection import DECLINE_REASONS, NO_WORK, UPDATE
from fedquilt.core import Task

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()


def alone(state: JobState, devices: str, starts: str = "") -> dict[str, str]:
    """Whom a round leaves alone; `starts`: devices that have started anew."""
    return devices_to_skip(
        state, set(devices), lambda device: DeviceWorkload(), lambda device: "2" if device in starts else "1"
    )


def refuse(stage: Stage, hand: Hand, code: str = "data") -> None:
    task = hand.tasks[-1]
    named = {"job": stage.job, "round": task.round, "attempt": task.attempt}
    hand.say("claim", wire.Claim(**named, accepted=False, code=code, reason="no data here"))


def play(stage: Stage, without: str, seconds: float, code: str = "data") -> None:
    """Let every hand answer its tasks at once, and those of `without` refuse them."""
    done = {hand.name: len(hand.tasks) for hand in stage.hands}
    for _ in range(int(seconds / 0.1)):
        stage.play(0.1)
        for hand in stage.hands:
            latest: Task | None = hand.tasks[-1] if len(hand.tasks) > done[hand.name] else None
            done[hand.name] = len(hand.tasks)
            if latest is not None and hand.name in without:
                refuse(stage, hand, code)
            elif latest is not None:
                hand.answer(constant_model(2.0))


def test_the_table_has_every_code_by_which_a_device_declines_and_the_page_of_jobs_describes_it():
    codes = set(get_args(wire.RefusalCode))
    assert codes == set(get_args(get_type_hints(wire.Claim)["code"])) - device_status.NO_REFUSAL
    assert codes == DECLINE_REASONS.keys() - {NO_WORK, UPDATE, "flooding", "removed"}
    assert {code for code, kind in DECLINE_REASONS.items() if kind.duration != "attempt"} <= selection.REASONS.keys()
    told = {
        "start": "until its agent starts",
        "rounds": "10 rounds",
        "round": "the next round",
        "attempt": "the next att",
    }
    for code in codes:
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {code} |"))
        assert told[DECLINE_REASONS[code].duration] in row
        assert f"| {'yes' if DECLINE_REASONS[code].recurs else 'no'} |" in row


@pytest.mark.parametrize(("code", "without_evaluation"), [("method", {}), ("data", {"a": "data"})])
def test_a_board_that_refused_is_left_alone_until_it_starts_anew_or_can_do_less(code, without_evaluation):
    state = apply_events(started_state(rounds=9, check_every=2, size=2), CohortSelected(0, 0, tuple("abc")))
    state = apply_events(state, state.decline_event("a", code, "none", DeviceWorkload(), "1"))
    assert alone(state, "abc") == {"a": code}
    assert alone(apply_events(state, RoundRetried(0, 1)), "abc") == {"a": code}
    assert alone(state, "abc", starts="a") == {}
    assert alone(apply_events(state, JobEnded("stopped"), JobResumed()), "abc") == {}
    work = apply_events(state, *(UpdateAccepted(0, update(device)) for device in "bc"), RoundClosed(0), committed(0))
    assert work.task_actions == ("work",)
    assert alone(work, "abc") == without_evaluation


def test_where_the_others_are_too_few_all_are_asked_once_in_each_round():
    state = apply_events(started_state(min_devices=2, rounds=9), CohortSelected(0, 0, tuple("abc")))
    state = apply_events(state, state.decline_event("a", "data", "none", DeviceWorkload(), "1"))
    assert alone(apply_events(state, RoundRetried(0, 1)), "ab") == {"a": "data"}
    state = apply_events(state, *(UpdateAccepted(0, update(device)) for device in "bc"), RoundClosed(0), committed(0))
    assert alone(state, "ab") == {}
    assert alone(state, "abc") == {"a": "data"}


def test_late_refusals_cost_no_attempt_while_other_boards_can_be_asked():
    state = apply_events(
        started_state(size=2, deadline_s=600.0),
        CohortSelected(0, 0, ("a", "b")),
        *(TaskDeclined(0, d, "data", "") for d in "ab"),
    )
    assert decide_event(state, 11.0, set("abcd")) == CohortSelected(0, 0, ("c", "d"))
    assert decide_event(state, 11.0, set("ab")) == RoundRetried(0, 1)
    assert decide_event(state, 600.0, set("abcd")) == RoundRetried(0, 1)


def test_a_job_that_fails_names_those_that_an_earlier_attempt_refused():
    state = apply_events(started_state(size=3, attempts=2), CohortSelected(0, 0, tuple("abc")))
    state = apply_events(
        state, state.decline_event("a", "data", "none", DeviceWorkload(), "1"), UpdateAccepted(0, update("b"))
    )
    state = apply_events(state, RoundRetried(0, 1), CohortSelected(0, 1, ("c",)))
    fact = decide_event(state, 10.0, set("bc"))
    assert (
        "1 submitted an update, 1 declined, 1 submitted nothing in time, and 3 updates are needed; "
        "reasons: a: none; no update from c" in fact.reason
    )


def test_a_start_is_another_with_another_boot_or_profile():
    registry, profile = DeviceRegistry(), plain.profile()
    assert registry.agent_start_key("a") == ""
    registry.update_presence("a", wire.Presence(online=True, boot="1"), 0.0)
    registry.update_profile("a", profile)
    first = registry.agent_start_key("a")
    registry.update_presence("a", wire.Presence(online=True, boot="1", seq=7), 1.0)
    registry.update_profile("a", plain.profile())
    assert registry.agent_start_key("a") == first
    registry.update_profile("a", msgspec.structs.replace(profile, labels=("window",)))
    other = registry.agent_start_key("a")
    registry.update_presence("a", wire.Presence(online=True, boot="2"), 2.0)
    assert len({first, other, registry.agent_start_key("a")}) == 3


@pytest.mark.parametrize(
    ("came", "warned"),
    [
        ([("A", 1), ("B", 1), ("A", 2), ("B", 2)], True),
        ([("A", 1), ("B", 1), ("B", 2), ("C", 1), ("D", 1)], False),  # restarts
        ([("B", 5), ("A", 3), ("B", 6), ("B", 7)], False),  # a broker that was killed has a message of an earlier agent
        ([("A", 1), ("B", 1), ("A", 1), ("B", 2), ("A", 1), ("B", 3)], False),  # and sends it repeatedly
    ],
)
def test_two_agents_of_one_device_are_named(
    came: list[tuple[str, int]], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = DeviceRegistry()
    for at_s, (boot, seq) in enumerate(came):
        registry.update_presence("a", wire.Presence(online=True, boot=boot, seq=seq), float(at_s))
    assert (
        "device id a is used by two agents: set a different `device` in agent.toml of each" in caplog.text
    ) is warned


RECURS = sorted(code for code in get_args(wire.RefusalCode) if DECLINE_REASONS[code].recurs)


def asked(stage: Stage) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return round, attempt and devices of every selection."""
    return [(fact.round, fact.attempt, fact.devices) for fact in stage.told(CohortSelected)]


@pytest.mark.parametrize("code", RECURS)
def test_a_failure_that_would_recur_on_every_device_ends_the_job_in_one_attempt(tmp_path, code):
    stage = Stage(tmp_path, rounds=4, cohort={"deadline_s": 30.0, "attempts": 3})
    for name in "abc":
        stage.hand(name)
    play(stage, "abc", 60.0, code)
    (ended,) = stage.told(JobEnded)
    assert asked(stage) == [(0, 0, ("a", "b", "c"))]
    assert len(stage.told(TaskDeclined)) == 3
    assert not stage.told(RoundRetried)
    assert (ended.status, ended.code) == ("failed", code)
    kind = DECLINE_REASONS[code]
    assert ended.reason == f"{kind.cause} in round 1 on 3 of 3 devices (no data here).\nFix: {kind.fix}."


@pytest.mark.parametrize("code", RECURS)
def test_a_device_whose_failure_would_recur_is_asked_once_a_round_and_the_others_go_on(tmp_path, code):
    stage = Stage(tmp_path, rounds=3, cohort={"deadline_s": 30.0, "attempts": 1})
    for name in "abc":
        stage.hand(name)
    play(stage, "c", 60.0, code)
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]
    assert [fact.round for fact in stage.told(RoundCommitted)] == [0, 1, 2]
    declined = [fact.round for fact in stage.told(TaskDeclined)]
    assert declined == ([0, 1, 2] if DECLINE_REASONS[code].duration == "round" else [0])
    assert len(asked(stage)) == 3


def test_one_device_that_reports_a_failure_ends_no_job_of_others(tmp_path):
    stage = Stage(tmp_path, rounds=1, cohort={"deadline_s": 30.0, "attempts": 2, "min_devices": 2})
    for name in "abc":
        stage.hand(name)
    stage.play(0.5)
    refuse(stage, stage.hands[0], "diverged")
    stage.hands[1].answer(constant_model(2.0))
    stage.play(35.0)
    assert [(fact.round, fact.attempt) for fact in stage.told(RoundRetried)] == [(0, 1)]
    stage.hands[2].answer(constant_model(2.0))
    stage.play(2.0)
    assert asked(stage) == [(0, 0, ("a", "b", "c")), (0, 1, ("c",))]
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_job_ends_at_once_where_only_failed_devices_keep_it_from_its_quorum(tmp_path):
    stage = Stage(tmp_path, rounds=1, cohort={"deadline_s": 30.0, "attempts": 3, "min_devices": 2})
    for name in "abc":
        stage.hand(name)
    play(stage, "ab", 40.0, "diverged")
    (ended,) = stage.told(JobEnded)
    assert ended.reason.startswith("training diverged in round 1 on 2 of 3 devices (no data here).\nFix: lower")
    assert len(asked(stage)) == 1


def test_updates_that_are_rejected_are_not_asked_for_again(tmp_path):
    stage = Stage(tmp_path, rounds=1, cohort={"deadline_s": 30.0, "attempts": 3})
    for name in "ab":
        stage.hand(name)
    stage.play(0.5)
    for hand in stage.hands:
        hand.answer(constant_model(float("nan")))
    stage.play(40.0)
    (ended,) = stage.told(JobEnded)
    assert (ended.status, ended.code) == ("failed", "update")
    assert ended.reason.startswith("the update was rejected in round 1 on 2 of 2 devices (")
    assert "not finite" in ended.reason
    assert len(asked(stage)) == 1


def test_a_device_with_a_full_disk_is_not_selected_until_it_reports_free_space(tmp_path):
    stage = Stage(tmp_path, rounds=99, cohort={"deadline_s": 30.0, "attempts": 1})
    for name in "abc":
        stage.hand(name)
    stage.play(0.5)
    full = stage.hands[-1]
    refuse(stage, full, "full")
    full.say("telemetry", wire.Telemetry(disk_full=True))
    for hand in stage.hands[:-1]:
        hand.answer(constant_model(2.0))
    play(stage, "", 5.0)
    assert len(stage.told(RoundCommitted)) > 3
    assert len(full.tasks) == 2  # one task, and that it was withdrawn
    full.say("telemetry", wire.Telemetry(disk_full=False))
    play(stage, "", 5.0)
    assert "c" in {fact.update.device for fact in stage.told(UpdateAccepted)}
    assert len(stage.told(TaskDeclined)) == 1

"""Boards that refuse a task for what does not change by itself are not asked again, and the others make the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import plain
import pytest
from by_hand import Hand, Stage, ones
from job_facts import after, begun, committed, update

from fedquilt import wire
from fedquilt.coordinator import boards, eligibility
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import (
    Answered,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Reopened,
    Resumed,
    Rounds,
)
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.refusals import LASTS, NOTHING
from fedquilt.coordinator.rounds import decide, left_alone
from fedquilt.core import Task

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
START = ("codec", "data", "engine", "method")


def alone(state: Rounds, devices: str, starts: str = "") -> dict[str, str]:
    """Whom a round leaves alone; `starts`: devices that have started anew."""
    return left_alone(state, set(devices), lambda device: Ask(), lambda device: "2" if device in starts else "1")


def refuse(stage: Stage, hand: Hand, code: str = "data") -> None:
    task = hand.tasks[-1]
    assert task is not None
    named = {"job": stage.job, "round": task.round, "attempt": task.attempt}
    hand.say("claim", wire.Claim(**named, accepted=False, code=code, reason="no data here"))  # type: ignore[arg-type]


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
                hand.answer(ones(2.0))


def test_the_table_has_every_code_by_which_a_board_refuses() -> None:
    """And the page of jobs says of each how long it holds."""
    codes = set(get_args(get_type_hints(wire.Claim)["code"])) - boards.NO_REFUSAL
    assert codes == LASTS.keys() - {NOTHING}
    assert {code for code, lasts in LASTS.items() if lasts != "attempt"} <= eligibility.REASONS.keys()
    told = {"start": "until its agent starts anew", "rounds": "10 rounds", "attempt": "the next attempt"}
    for code in codes:
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {code} |"))
        assert told[LASTS[code]] in row


@pytest.mark.parametrize("size", [2, 0])
@pytest.mark.parametrize("code", START)
def test_boards_without_data_are_asked_once_and_the_others_make_every_round(
    tmp_path: Path, code: str, size: int
) -> None:
    """Three of five refuse: each once in eight rounds, and no attempt is lost to them."""
    stage = Stage(tmp_path, rounds=8, cohort={"deadline_s": 30.0, "attempts": 1, "size": size})
    for name in "abcde":
        stage.hand(name)
    play(stage, "cde", 30.0, code)
    assert len(stage.told(Committed)) == 8
    assert not stage.told(Reopened)
    assert sorted(fact.device for fact in stage.told(Declined)) == ["c", "d", "e"]


def test_it_is_asked_again_once_its_agent_has_started_anew(tmp_path: Path) -> None:
    """A restart of the coordinator is no start of the board; one of its agent is."""
    stage = Stage(tmp_path, rounds=99, cohort={"deadline_s": 30.0, "attempts": 1})
    for name in "abc":
        stage.hand(name)
    play(stage, "c", 2.0)
    stage.restart()
    play(stage, "c", 4.0)
    assert [fact.device for fact in stage.told(Declined)] == ["c"]
    before = len(stage.told(Committed))
    assert before > 5
    stage.hands[-1].say("presence", wire.Presence(online=True, boot="2"), retain=True)
    play(stage, "", 4.0)
    assert "c" in {fact.update.device for fact in stage.told(Answered)}
    assert len(stage.told(Declined)) == 1


def test_where_all_refuse_the_job_ends_with_their_reasons(tmp_path: Path) -> None:
    """It does not wait for ever for boards that nobody has."""
    stage = Stage(tmp_path, rounds=4, cohort={"deadline_s": 30.0, "attempts": 2})
    for name in "ab":
        stage.hand(name)
    play(stage, "ab", 40.0)
    (ended,) = stage.told(Ended)
    assert ended.status == "failed"
    assert "2 declined" in ended.reason
    assert "a, b: no data here" in ended.reason


def test_a_board_that_refused_is_left_alone_until_it_starts_anew_or_less_is_asked_for() -> None:
    """Also in another attempt at the same round; a check that it has no data for says nothing of the work."""
    state = after(begun(rounds=9, check_every=2, size=2), Asked(0, 0, tuple("abc")))
    state = after(state, state.declined_by("a", "data", "none", Ask(), "1"))
    assert alone(state, "abc") == {"a": "data"}
    assert alone(after(state, Reopened(0, 1)), "abc") == {"a": "data"}
    assert alone(state, "abc", starts="a") == {}
    assert alone(after(state, Ended("stopped"), Resumed()), "abc") == {}
    work = after(state, *(Answered(0, update(device)) for device in "bc"), Closed(0), committed(0))
    assert work.actions == ("work",)
    assert alone(work, "abc") == {}


def test_where_the_others_are_too_few_all_are_asked() -> None:
    """Two of three would do for no round of three: the third is asked, and its reason ends the job."""
    state = after(begun(min_devices=3, attempts=2), Asked(0, 0, tuple("abc")))
    state = after(state, state.declined_by("a", "data", "none", Ask(), "1"))
    assert alone(after(state, Reopened(0, 1)), "abc") == {}


def test_late_refusals_cost_no_attempt_while_other_boards_can_be_asked() -> None:
    """The time for which a round waits for boards to come has passed when the second refuses: c is there."""
    state = after(begun(size=2, deadline_s=600.0), Asked(0, 0, ("a", "b")), *(Declined(0, d, "data", "") for d in "ab"))
    assert decide(state, 11.0, set("abcd")) == Asked(0, 0, ("c", "d"))
    assert decide(state, 11.0, set("ab")) == Reopened(0, 1)
    assert decide(state, 600.0, set("abcd")) == Reopened(0, 1)


def test_a_job_that_fails_names_those_that_an_earlier_attempt_refused() -> None:
    """They are not told as silent."""
    state = after(begun(size=3, attempts=2), Asked(0, 0, tuple("abc")))
    state = after(state, state.declined_by("a", "data", "none", Ask(), "1"), Answered(0, update("b")))
    state = after(state, Reopened(0, 1), Asked(0, 1, ("c",)))
    fact: Any = decide(state, 10.0, set("bc"))
    assert (
        "1 answered, 1 declined, 1 stayed silent, and 3 updates are needed; refused: a: none; silent: c" in fact.reason
    )


def test_a_start_is_another_with_another_boot_or_profile() -> None:
    """The same messages again are none; of a board that has not been heard there is no start."""
    registry, profile = Registry(), plain.profile()
    assert registry.start("a") == ""
    registry.presence("a", wire.Presence(online=True, boot="1"), 0.0)
    registry.profile("a", profile)
    first = registry.start("a")
    registry.presence("a", wire.Presence(online=True, boot="1", seq=7), 1.0)
    registry.profile("a", plain.profile())
    assert registry.start("a") == first
    registry.profile("a", msgspec.structs.replace(profile, labels=("window",)))
    other = registry.start("a")
    registry.presence("a", wire.Presence(online=True, boot="2"), 2.0)
    assert len({first, other, registry.start("a")}) == 3

"""Rounds are decided by facts, time and who is online; every rule is one sentence."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Extended,
    Lost,
    Plan,
    Rejected,
    Reopened,
    Resumed,
    Rounds,
    Started,
    Surveyed,
    apply,
)
from fedquilt.coordinator.rounds import AGAIN_ROUNDS, decide, left_alone, next_s, survey
from fedquilt.coordinator.settings import Cohort, Stop
from fedquilt.coordinator.transitions import PHASES, TRANSITIONS, Phase, allowed
from fedquilt.core import BlobRef, JobError, OperatingPoint, Profile, Update, Usage, Work

BLOB = BlobRef(sha256="a" * 64, size=1)


def update(device: str, round: int = 0) -> Update:
    return Update(job="j-1", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())


def asking(flops: float) -> Ask:
    return Ask(Work(flops=flops))


def begun(rounds: int = 2, check_every: int = 0, **cohort: float | str) -> Rounds:
    plan = Plan(0, rounds, msgspec.convert({"deadline_s": 10.0, **cohort}, Cohort), check_every)
    return apply(Rounds(plan), Started(BLOB), 0.0)


def after(state: Rounds, *facts: AnyFact, now_s: float = 0.0) -> Rounds:
    for fact in facts:
        state = apply(state, fact, now_s)
    return state


def committed(round: int, finished: bool = False) -> Committed:
    return Committed(round, BLOB, finished, {})


def whole_round(*devices: str, round: int = 0, asked: str = "") -> list[AnyFact]:
    """The facts of a round in which these devices answered."""
    answers = [Answered(round, update(device, round)) for device in devices]
    return [Asked(round, 0, tuple(asked) or devices), *answers, Closed(round), committed(round)]


def test_a_round_asks_everybody_online_when_no_size_is_given() -> None:
    """cohort.size = 0 means all."""
    assert decide(begun(), 0.0, {"b", "a"}) == Asked(0, 0, ("a", "b"))


def test_a_round_waits_for_the_least_number_of_devices() -> None:
    """start_devices holds back the first round only, min_devices every one."""
    for key, waits in (("start_devices", [True, False]), ("min_devices", [True, True])):
        first = begun(size=1, **{key: 2})
        later = after(first, *whole_round("a"))
        assert [decide(state, 0.0, {"a"}) is None for state in (first, later)] == waits
        assert isinstance(decide(later, 0.0, {"a", "b"}), Asked)


def test_no_round_commits_with_fewer_than_the_least_number_whatever_the_quorum() -> None:
    """Half of four would do, three have to be there; a fleet that has gone costs no attempt, one that is there does."""
    state = after(begun(size=4, quorum=0.5, min_devices=3, attempts=1), Asked(0, 0, tuple("abcd")))
    state = after(state, Answered(0, update("a")), Answered(0, update("b")))
    assert decide(state, 10.0, {"a", "b"}) == Reopened(0, 0)
    assert isinstance(decide(state, 10.0, set("abc")), Ended)
    assert decide(after(state, Answered(0, update("c"))), 10.0, set("abc")) == Closed(0)


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_restart_that_finds_boards_offline_does_not_commit_with_those_it_sees(answers: int) -> None:
    """All five were asked and their wills are published: the one that is back is not all there are, ever."""
    state = after(begun(), Asked(0, 0, tuple("abcde")), *(Answered(0, update(d)) for d in "ab"[:answers]))
    assert decide(state, 1.0, {"a"}) is None
    assert decide(state, 10.0, {"a"}) == Reopened(0, 0)  # fewer than half of the five: not a fleet, but a part of one
    state = after(state, Reopened(0, 0), now_s=10.0)
    for device in sorted(set("abc") - state.answered.keys()):
        assert decide(state, 11.0, {device}) == Asked(0, 0, (device,))
        state = after(state, Asked(0, 0, (device,)), now_s=11.0)
        assert decide(state, 12.0, set("abc")) != Closed(0)
        state = after(state, Answered(0, update(device)), now_s=12.0)
    assert decide(state, 13.0, set("abc")) == Closed(0)  # d and e have been silent for an attempt, and are gone


def too_large(peak_bytes: int, budget_bytes: int = 100, flops: float = 0.0) -> Ask:
    profile = Profile(
        device="a", board="b", memory_bytes=1, budget_bytes=budget_bytes, engines=(), versions={}, points=()
    )
    return Ask(Work(peak_bytes=peak_bytes, flops=flops), profile)


def test_a_board_that_declined_for_memory_is_left_alone_until_something_has_changed() -> None:
    """Not in the same round, whose other attempts may find memory free; then for less work or with another budget."""
    state = after(begun(rounds=99), Asked(0, 0, ("a", "b")))
    state = after(state, state.declined_by("a", "memory", "too big", too_large(50)), Answered(0, update("b")))
    assert left_alone(state, {"a", "b"}, lambda device: too_large(50)) == {}
    state = after(state, Closed(0), committed(0))
    assert left_alone(state, {"a", "b"}, lambda device: too_large(50)) == {"a": "memory"}
    assert left_alone(state, {"b"}, lambda device: too_large(50)) == {}
    for ask in (too_large(49), too_large(50, budget_bytes=101)):
        assert left_alone(state, {"a"}, lambda device, ask=ask: ask) == {}  # type: ignore[misc]
    for round, alone in ((AGAIN_ROUNDS - 1, {"a": "memory"}), (AGAIN_ROUNDS, {})):
        assert left_alone(replace(state, round=round), {"a"}, lambda device: too_large(51)) == alone
    answered = after(state, Asked(1, 0, ("a",)), Answered(1, update("a", 1)), Closed(1), committed(1))
    assert left_alone(answered, {"a"}, lambda device: too_large(50)) == {}


def test_a_board_that_declined_for_another_reason_is_asked_again() -> None:
    """And of work whose memory nobody predicts, the operations tell whether it is less."""
    state = after(begun(rounds=99), Asked(0, 0, ("a", "b")))
    state = after(state, state.declined_by("a", "disk", "full", too_large(0, flops=5.0)))
    state = after(state, state.declined_by("b", "memory", "too big", too_large(0, flops=5.0)))
    state = replace(state, round=1)
    assert left_alone(state, {"a", "b"}, lambda device: too_large(0, flops=5.0)) == {"b": "memory"}
    assert left_alone(state, {"a", "b"}, lambda device: too_large(0, flops=4.0)) == {}


def test_the_next_round_of_all_begins_with_half_of_those_who_were_asked_last() -> None:
    """Also after a restart between the rounds; a quorum below a half asks for less, declined boards are not counted."""
    last = after(begun(rounds=9), *whole_round(*"abcde"))
    assert decide(last, 0.0, {"a", "b"}) is None
    assert decide(last, 0.0, {"a", "b", "c"}) == Asked(1, 0, ("a", "b", "c"))
    low = after(begun(rounds=9, quorum=0.4), *whole_round(*"abcde"))
    assert decide(low, 0.0, {"a", "b"}) == Asked(1, 0, ("a", "b"))
    asked, *rest = whole_round("a", "b", asked="abcde")
    declined = [Declined(0, device, "memory", "too big") for device in "cde"]
    assert decide(after(begun(rounds=9), asked, *declined, *rest), 0.0, {"a"}) == Asked(1, 0, ("a",))


def test_updates_that_are_refused_do_not_make_one_board_a_fleet() -> None:
    """Of five, four send what is not finite: they are broken, not absent, and the round is not the fifth's alone."""
    bad = [Rejected(0, device, "NaN") for device in "bcde"]
    state = after(begun(attempts=1), Asked(0, 0, tuple("abcde")), *bad, Answered(0, update("a")))
    assert decide(state, 1.0, set("abcde")) is None
    fact = decide(state, 10.0, set("abcde"))
    assert isinstance(fact, Ended)
    assert "1 answered, 4 sent what was rejected, and 3 updates are needed" in fact.reason


def test_a_sized_round_asks_that_many_and_over_selects_by_the_share() -> None:
    """2 wanted, half more asked: 3."""
    fact = decide(begun(size=2, over_select=0.5), 0.0, set("abcdef"))
    assert isinstance(fact, Asked)
    assert len(fact.devices) == 3


def test_a_round_closes_as_soon_as_enough_have_answered() -> None:
    """One of the three asked is not waited for."""
    state = after(begun(size=2, over_select=0.5), Asked(0, 0, ("a", "b", "c")))
    state = after(state, Answered(0, update("a")), Answered(0, update("c")))
    assert decide(state, 1.0, set("abc")) == Closed(0)


def test_a_device_that_declines_is_replaced_at_once() -> None:
    """And is not asked again in this attempt."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Declined(0, "a", "memory", "too big"))
    assert decide(state, 1.0, set("abc")) == Asked(0, 0, ("c",))


def test_a_device_that_vanished_is_replaced_but_may_still_answer() -> None:
    """Its answer counts when it comes before the replacement's."""
    state = after(begun(size=1), Asked(0, 0, ("a",)))
    assert decide(state, 1.0, {"b"}) == Asked(0, 0, ("b",))
    state = after(state, Asked(0, 0, ("b",)), Answered(0, update("a")))
    assert decide(state, 1.0, {"b"}) == Closed(0)


def test_the_deadline_closes_a_round_that_has_its_quorum() -> None:
    """Half of 4 is 2."""
    state = after(begun(size=4, quorum=0.5), Asked(0, 0, tuple("abcd")))
    state = after(state, Answered(0, update("a")), Answered(0, update("b")))
    assert decide(state, 9.9, set("abcd")) is None
    assert next_s(state) == 10.0
    assert decide(state, 10.0, set("abcd")) == Closed(0)


def test_a_round_without_quorum_is_tried_again_with_what_it_has() -> None:
    """Answers are kept; those who have not answered are asked anew."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Answered(0, update("a")))
    assert decide(state, 10.0, set("ab")) == Reopened(0, 1)
    state = after(state, Reopened(0, 1), now_s=10.0)
    assert decide(state, 10.0, set("ab")) == Asked(0, 1, ("b",))


def test_a_job_fails_with_reasons_when_its_attempts_are_used_up() -> None:
    """The reason names who refused, who was silent, and the mend."""
    state = after(begun(size=2, attempts=1), Asked(0, 0, ("a", "b")), Declined(0, "a", "memory", "too big"))
    fact = decide(state, 10.0, {"b"})
    assert isinstance(fact, Ended)
    assert fact.status == "failed"
    for part in ("a: too big", "silent: b", "fedquilt resume"):
        assert part in fact.reason


def test_a_job_that_fails_says_what_became_of_everybody_who_was_asked() -> None:
    """Also of those whom only an earlier attempt has asked; boards that declined are no part of what is needed."""

    def said(state: Rounds, online: set[str], now_s: float = 10.0) -> str:
        fact = decide(state, now_s, online)
        assert isinstance(fact, Ended)
        return fact.reason

    alone = after(begun(attempts=1), Asked(0, 0, ("a",)), Declined(0, "a", "memory", "too big"))
    assert said(alone, {"a"}).startswith(
        "round 0 asked 1 device in 1 attempt: 0 answered, 1 declined, and 1 update is needed; refused: a: too big; see"
    )
    state = after(begun(size=5, attempts=2, quorum=0.6), Asked(0, 0, tuple("abcde")))
    state = after(state, Answered(0, update("a")), Reopened(0, 1), Asked(0, 1, tuple("bcd")))
    state = after(state, Declined(0, "b", "memory", "too big"), Rejected(0, "c", "NaN"), Declined(0, "d", "none", ""))
    assert said(state, set("abcd")).startswith(
        "round 0 asked 5 devices in 2 attempts: 1 answered, 1 declined, 1 sent what was rejected, 1 had nothing to do, "
        "1 stayed silent, and 3 updates are needed; refused: b: too big; c: NaN; d: ; silent: e; see to these devices"
    )


def test_a_reason_that_many_devices_give_is_told_once() -> None:
    """Nine refuse for one reason, one for another: two reasons, and of nine names five."""
    names = tuple("abcdefghij")
    state = after(begun(size=10, attempts=1), Asked(0, 0, names))
    state = after(state, *(Declined(0, device, "memory", "too big") for device in names[1:]))
    fact = decide(after(state, Declined(0, "a", "data", "none here")), 1e9, set(names))
    assert isinstance(fact, Ended)
    assert "; refused: a: none here; b, c, d, e, f and 4 more: too big; see to" in fact.reason


def test_a_round_in_which_the_method_has_nothing_for_anybody_closes_with_nobody() -> None:
    """Sized or not: there is nothing to wait for, and nothing to try again."""
    for cohort in ({}, {"size": 2}):
        state = after(begun(**cohort), Asked(0, 0, ("a", "b")))
        state = after(state, *(Declined(0, device, "none", "nothing for it now") for device in "ab"))
        assert decide(state, 1.0, set("ab")) == Closed(0)


def test_whom_the_method_has_nothing_for_is_replaced_and_counts_as_answered_only_then() -> None:
    """Of two wanted one has answered and one has nothing to do: c is asked first; where it too is idle, that is all."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Answered(0, update("a")), Declined(0, "b", "none", ""))
    assert decide(state, 1.0, set("abc")) == Asked(0, 0, ("c",))
    state = after(state, Asked(0, 0, ("c",)))
    assert decide(state, 1.0, set("abc")) is None
    assert decide(after(state, Declined(0, "c", "none", "")), 1.0, set("abc")) == Closed(0)
    assert decide(after(state, Declined(0, "c", "memory", "")), 1.0, set("abc")) == Closed(0)


def test_a_refusal_is_no_answer_with_nothing_to_do() -> None:
    """Two refusals and one that is idle do not make the quorum of two; the round is tried again with all of them."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Declined(0, "a", "memory", ""), Declined(0, "b", "none", ""))
    assert decide(state, 1.0, set("ab")) is None
    state = after(state, Reopened(0, 1))
    assert state.idle == frozenset()


def test_without_a_size_a_board_that_is_gone_for_good_is_waited_for_until_the_deadline() -> None:
    """It may be at its task, whatever it looks like; then the others close the round, and nothing stalls."""
    state = after(begun(), Asked(0, 0, ("a", "b", "c")), Answered(0, update("a")), Answered(0, update("b")))
    assert decide(state, 1.0, set("abc")) is None
    assert decide(state, 9.0, set("ab")) is None
    assert decide(state, 10.0, set("ab")) == Reopened(0, 1)
    assert decide(after(state, Reopened(0, 1), now_s=10.0), 10.0, set("ab")) == Closed(0)


def test_a_reopened_round_whose_silent_board_is_gone_closes_or_fails_but_never_stalls() -> None:
    """Of two wanted one answered and the other died: tried again, then failed with its name."""
    state = after(begun(size=2, attempts=2), Asked(0, 0, ("a", "b")), Answered(0, update("a")))
    state = after(state, Reopened(0, 1), now_s=10.0)
    assert decide(state, 11.0, {"a"}) is None
    assert next_s(state) == 20.0
    fact = decide(state, 20.0, {"a"})
    assert isinstance(fact, Ended)
    assert fact.status == "failed"
    assert decide(state, 12.0, {"a", "c"}) == Asked(0, 1, ("c",))


def test_a_fleet_that_is_gone_for_a_night_costs_no_attempt() -> None:
    """Nobody online at the deadline, however often: the job waits, and goes on with whoever comes."""
    state = after(begun(attempts=1), Asked(0, 0, ("a", "b")))
    for hour in (1, 2, 3):
        now_s = 3600.0 * hour
        assert decide(state, now_s, set()) == Reopened(0, 0)
        state = after(state, Reopened(0, 0), now_s=now_s)
    assert decide(state, now_s + 1, {"b"}) == Asked(0, 0, ("b",))


def test_when_everybody_has_declined_the_deadline_is_not_waited_out() -> None:
    """Ten seconds for others to come, of six hundred."""
    state = after(begun(size=1, deadline_s=600.0), Asked(0, 0, ("a",)), Declined(0, "a", "data", "no data"))
    assert next_s(state) == 10.0
    assert decide(state, 9.0, {"a"}) is None
    assert decide(state, 10.0, {"a"}) == Reopened(0, 1)


def test_a_refused_update_frees_its_place() -> None:
    """A rejected device counts like one that declined."""
    state = after(begun(size=1), Asked(0, 0, ("a",)), Rejected(0, "a", "NaN"))
    assert decide(state, 1.0, set("ab")) == Asked(0, 0, ("b",))


def test_facts_of_another_round_are_refused() -> None:
    """Late and early messages never become facts; a log that holds one is not to be trusted."""
    state = after(begun(), Asked(0, 0, ("a",)))
    for fact in (Answered(1, update("a", 1)), Closed(3), committed(1), Declined(2, "a", "x", "y"), Reopened(1, 1)):
        with pytest.raises(JobError, match=f"of round {fact.round} in the log of a job whose running round is 0"):
            apply(state, fact, 5.0)


FACTS: tuple[AnyFact, ...] = (
    Started(BLOB),
    Surveyed(0),
    Asked(0, 0, ("a",)),
    Declined(0, "a", "x", "y"),
    Answered(0, update("a")),
    Rejected(0, "a", "x"),
    Lost(0, "a", "x"),
    Closed(0),
    Extended(0),
    Reopened(0, 1),
    committed(0),
    Ended("done"),
    Ended("failed"),
    Ended("stopped"),
    Resumed(),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: getattr(fact, "status", type(fact).__name__))
@pytest.mark.parametrize("phase", PHASES)
def test_a_fact_leads_where_the_table_says_or_is_refused(fact: AnyFact, phase: Phase) -> None:
    """Every fact in every phase: a Closed never brings a job that has ended back to life."""
    state = replace(begun(), phase=phase)
    to = [p for p in allowed(type(fact).__name__, phase) if getattr(fact, "status", p) == p]
    if to:
        assert apply(state, fact, 1.0).phase in to
    else:
        with pytest.raises(JobError, match=f"{type(fact).__name__} in round 0 cannot happen to a job that is {phase}"):
            apply(state, fact, 1.0)


def test_the_table_knows_every_fact_and_nothing_leads_out_of_done() -> None:
    """A fact without its row would be refused everywhere."""
    assert (
        TRANSITIONS.keys() == {type(fact).__name__ for fact in FACTS} == {kind.__name__ for kind in get_args(AnyFact)}
    )
    assert not any("done" in moves for moves in TRANSITIONS.values())


def test_a_lost_update_opens_its_round_again_for_its_device_alone() -> None:
    """Also if the round was closed already; the other answers stay."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), *(Answered(0, update(name)) for name in "ab"), Closed(0))
    state = after(state, Lost(0, "b", "its blob is damaged"))
    assert (state.phase, state.asked, set(state.answered), state.lost) == ("open", {"b"}, {"a"}, {"b"})
    assert decide(state, 1.0, {"a", "b"}) is None
    state = after(state, Answered(0, update("b")))
    assert decide(state, 1.0, {"a", "b"}) == Closed(0)
    assert after(state, Closed(0), committed(0)).lost == frozenset()


def test_a_log_of_a_job_that_was_stopped_between_two_messages_is_still_replayed() -> None:
    """Earlier coordinators took what came in the same turn as the stop; the work counts once the job is resumed."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Ended("stopped"), Answered(0, update("a")))
    assert state.phase == "stopped"
    state = after(state, Resumed(), Answered(0, update("b")))
    assert decide(state, 1.0, {"a", "b"}) == Closed(0)


def test_the_job_ends_after_its_last_round() -> None:
    """Two rounds, then done."""
    state = begun(rounds=2)
    for round in (0, 1):
        state = after(state, Asked(round, 0, ("a",)), Answered(round, update("a", round)), Closed(round))
        assert decide(state, 0.0, {"a"}) is None
        state = after(state, committed(round))
    assert decide(state, 0.0, {"a"}) == Ended("done")
    assert state.history == {"a": (0, 1)}


def test_a_method_that_is_finished_ends_the_job_early() -> None:
    """FedStitch ends by itself."""
    state = after(begun(rounds=9), Asked(0, 0, ("a",)), Answered(0, update("a")), Closed(0), committed(0, True))
    assert decide(state, 0.0, {"a"}) == Ended("done")


def test_evaluation_accompanies_every_so_many_rounds_and_closes_the_job() -> None:
    """check every 2 of 3 rounds: rounds 0 and 2 check first, round 3 only checks."""
    state, seen = begun(rounds=3, check_every=2), []
    for round in range(4):
        seen.append(state.actions)
        state = after(state, Asked(round, 0, ("a",)), Answered(round, update("a", round)), Closed(round))
        state = after(state, committed(round))
    assert seen == [("check", "work"), ("work",), ("check", "work"), ("check",)]
    assert decide(state, 0.0, {"a"}) == Ended("done")


def test_a_stopped_job_decides_nothing_until_it_is_resumed() -> None:
    """It goes on in the round where it was, with a fresh deadline."""
    state = after(begun(size=2), Asked(0, 0, ("a", "b")), Answered(0, update("a")), Ended("stopped"))
    assert decide(state, 99.0, set("ab")) is None
    state = after(state, Resumed(), now_s=100.0)
    assert decide(state, 101.0, set("ab")) is None
    assert state.deadline_left_s(101.0) == 9.0
    assert decide(after(state, Answered(0, update("b"))), 102.0, set("ab")) == Closed(0)


def paced(**cohort: float | str) -> Rounds:
    """After a round in which a and b took 40 s and 60 s for 2 units of work."""
    state = begun(rounds=9, size=2, deadline_s=600.0, deadline="predicted", **cohort)
    state = after(state, Asked(0, 0, ("a", "b"), {"a": 2.0, "b": 2.0}))
    for device, at_s in (("a", 40.0), ("b", 60.0)):
        state = after(state, state.answered_by(update(device), at_s), now_s=at_s)
    return after(state, Closed(0), committed(0), now_s=60.0)


def test_a_round_opens_with_what_its_devices_have_to_do_and_how_long_that_takes_them() -> None:
    """Half the work of the round before, whose slowest took 60 s, and half as much again: 45 s of 600."""
    fact = decide(paced(), 60.0, {"a", "b"}, lambda device: asking(1.0))
    assert fact == Asked(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0)
    state = after(paced(), fact, now_s=60.0)
    assert next_s(state) == 105.0
    assert state.deadline_left_s(70.0) == 35.0


def test_the_first_round_has_the_cohorts_deadline() -> None:
    """Nothing is known yet; and a deadline that is fixed stays what it is."""
    assert decide(begun(deadline="predicted"), 0.0, {"a"}, lambda device: asking(1.0)) == Asked(
        0, 0, ("a",), {"a": 1.0}
    )
    state = paced()
    state = replace(
        state, plan=replace(state.plan, cohort=msgspec.structs.replace(state.plan.cohort, deadline="fixed"))
    )
    fact = decide(state, 60.0, {"a", "b"})
    assert fact == Asked(1, 0, ("a", "b"))
    assert next_s(after(state, fact, now_s=60.0)) == 660.0


def test_a_prediction_with_a_quorum_ends_the_round() -> None:
    """Half of two have answered after 45 s."""
    state = after(paced(quorum=0.5), Asked(1, 0, ("a", "b"), {}, 45.0), Answered(1, update("a", 1)), now_s=60.0)
    assert decide(state, 104.0, {"a", "b"}) is None
    assert decide(state, 105.0, {"a", "b"}) == Closed(1)


def test_a_prediction_that_was_too_short_costs_no_attempt_and_interrupts_nobody() -> None:
    """The round goes on with those who are at it, and ends with the first quorum."""
    state = after(paced(quorum=0.5, attempts=1), Asked(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    assert decide(state, 105.0, {"a", "b"}) == Extended(1)
    state = after(state, Extended(1), now_s=105.0)
    assert state.asked == {"a", "b"}
    assert decide(state, 106.0, {"a", "b"}) is None
    answered = after(state, Answered(1, update("b", 1)), now_s=300.0)
    assert decide(answered, 300.0, {"a", "b"}) == Closed(1)
    following = after(answered, Closed(1), committed(1), Asked(2, 0, ("a", "b")), Answered(2, update("a", 2)))
    assert decide(following, 1.0, {"a", "b"}) is None
    assert next_s(state) == 660.0  # no later than with a fixed deadline
    fact = decide(state, 660.0, {"a", "b"})
    assert isinstance(fact, Ended)


def test_devices_that_are_not_there_are_waited_for_as_long_as_with_a_fixed_deadline() -> None:
    """All who were asked have answered, and one more is wanted: its absence says nothing of how long work takes."""
    state = after(paced(attempts=1), Asked(1, 0, ("a",), {}, 45.0), Answered(1, update("a", 1)), now_s=60.0)
    assert decide(state, 105.0, {"a"}) == Extended(1)
    state = after(state, Extended(1), now_s=105.0)
    assert next_s(state) == 660.0
    assert decide(state, 300.0, {"a", "c"}) == Asked(1, 0, ("c",))


def test_when_everybody_has_declined_a_prediction_changes_nothing() -> None:
    """Ten seconds for others to come, then the next attempt."""
    state = after(paced(), Asked(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    state = after(state, Declined(1, "a", "memory", "too big"), Declined(1, "b", "memory", "too big"))
    assert next_s(state) == 70.0
    assert decide(state, 70.0, {"a", "b"}) == Reopened(1, 1)


def test_a_round_that_is_tried_again_or_resumed_waits_for_all_anew() -> None:
    """That it was extended once does not make the next attempt end with the first quorum."""
    state = after(paced(quorum=0.5), Asked(1, 0, ("a", "b"), {}, 45.0), Extended(1), now_s=60.0)
    again = after(state, Reopened(1, 1), Asked(1, 1, ("a", "b")), Answered(1, update("a", 1)), now_s=660.0)
    assert decide(again, 661.0, {"a", "b"}) is None
    resumed = after(state, Ended("stopped"), Resumed(), Answered(1, update("a", 1)), now_s=700.0)
    assert decide(resumed, 701.0, {"a", "b"}) is None
    assert next_s(resumed) == 1300.0


def test_what_a_device_took_is_counted_from_when_it_was_asked_and_outlives_a_restart() -> None:
    """A coordinator that was away cannot tell, and takes the device's own time; the log keeps what was told."""
    state = after(begun(deadline="predicted"), Asked(0, 0, ("a",), {"a": 2.0}), now_s=100.0)
    assert state.answered_by(update("a"), 130.0).took_s == 30.0
    restarted = after(begun(deadline="predicted"), Asked(0, 0, ("a",), {"a": 2.0}), now_s=5.0)
    slow = msgspec.structs.replace(update("a"), usage=Usage(wall_s=28.0, down_bytes=700, up_bytes=300))
    assert restarted.answered_by(slow, 6.0).took_s == 28.0
    replayed = after(state, Answered(0, slow, 30.0), now_s=9999.0)
    assert replayed.took == {"a": ((0, 30.0, 2.0, 28.0, None, 1, 1000),)}


def test_what_a_replacement_has_to_do_is_noted_too_and_only_for_its_round() -> None:
    """c takes the place of a, with 4 units; a round later nothing is said of its work."""
    state = after(paced(), Asked(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0), Declined(1, "a", "x", "y"))
    fact = decide(state, 0.0, {"a", "b", "c"}, lambda device: asking(4.0))
    assert fact == Asked(1, 0, ("c",), {"c": 4.0})
    state = after(state, fact, Answered(1, update("c", 1), 20.0), Answered(1, update("b", 1), 9.0), Closed(1))
    assert state.deadline_s == 45.0
    state = after(state, committed(1), Asked(2, 0, ("b", "c")), Answered(2, update("c", 2), 30.0))
    assert state.took["c"] == ((1, 20.0, 4.0, 0.0, None, 1, 0), (2, 30.0, 1.0, 0.0, None, 1, 0))


def test_a_method_that_does_not_say_what_a_round_takes_has_rounds_that_take_the_same() -> None:
    """40 s were taken; the next round is given 60 s."""
    state = after(begun(deadline_s=600.0, deadline="predicted"), Asked(0, 0, ("a",)))
    state = after(state, Answered(0, update("a"), 40.0), Closed(0), committed(0))
    assert decide(state, 0.0, {"a"}) == Asked(1, 0, ("a",), {}, 60.0)


def test_a_survey_notes_what_has_changed_and_then_nothing() -> None:
    """Who can be asked, who cannot and why, and what joules cost; who is not heard of any more is offline."""
    state = begun()
    first = survey(state, {"a", "b"}, {"c": "hot"}, {"a": 2.0})
    assert first == Surveyed(0, ("a", "b"), {"hot": ("c",)}, {"a": 2.0})
    state = after(state, first)
    assert survey(state, {"a", "b"}, {"c": "hot"}, {"a": 2.0}) is None
    second = survey(state, {"a", "c"}, {}, {"a": 3.0})
    assert second == Surveyed(0, ("c",), {"offline": ("b",)}, {"a": 3.0})
    state = after(state, second)
    assert (state.eligible, state.passed, state.costs) == ({"a", "c"}, {"b": "offline"}, {"a": 3.0})
    assert after(state, Surveyed(0, ("b",))).eligible == {"a", "b", "c"}


def test_a_device_waits_from_when_it_was_first_seen_or_last_asked_whatever_comes_between() -> None:
    """Being offline for a while does not send it to the back of the queue."""
    state = replace(after(begun(), Surveyed(0, ("a",), {"hot": ("b",)})), round=5)
    state = replace(after(state, Surveyed(5, ("b",), {"offline": ("a",)})), round=7)
    state = after(state, Surveyed(7, ("a",)))
    assert state.since == {"a": 0, "b": 0}
    assert after(state, Asked(7, 0, ("a",))).since == {"a": 7, "b": 0}


def test_the_choice_rests_on_what_is_in_the_log() -> None:
    """Of two, the one that has not been asked for three turns of two rounds is asked, however the draw falls."""
    for round in range(20, 40):
        state = replace(begun(rounds=99, size=1), round=round, since={"a": round - 1, "b": round - 6})
        assert decide(state, 0.0, {"a", "b"}) == Asked(round, 0, ("b",))


def test_a_job_that_has_taken_enough_is_done_at_the_end_of_its_round() -> None:
    """Not in the middle of one; the reason says which limit."""
    plan = replace(begun(rounds=9, size=1, check_every=1).plan, stop=Stop(max_joules=5.0))
    state = after(Rounds(plan), Started(BLOB), Asked(0, 0, ("a",)))
    answer = msgspec.structs.replace(update("a"), usage=Usage(energy_j=6.0))
    state = after(state, Answered(0, answer))
    assert decide(state, 1.0, {"a"}) == Closed(0)
    state = after(state, Closed(0), committed(0))
    assert decide(state, 1.0, {"a"}) == Ended("done", "max_joules: 6 J of 5 J are used up")


def test_the_time_of_a_job_is_that_of_its_rounds_in_the_log() -> None:
    """30 s and 40 s; a replay at another time gives the same sum."""
    plan = replace(begun(rounds=9, size=1).plan, stop=Stop(max_wall_s=70.0))
    facts: list[AnyFact] = [Started(BLOB)]
    for round, took_s in ((0, 30.0), (1, 40.0)):
        *before, _ = whole_round("a", round=round)
        facts += [*before, Committed(round, BLOB, False, {}, (), took_s)]
    state = after(Rounds(plan), *facts[:5], now_s=5.0)
    assert isinstance(decide(state, 5.0, {"a"}), Asked)
    assert after(Rounds(plan), *facts, now_s=5.0).spent == after(Rounds(plan), *facts, now_s=777.0).spent
    assert decide(after(state, *facts[5:]), 5.0, {"a"}) == Ended("done", "max_wall_s: 70 s of 70 s are used up")


def test_an_answer_is_compared_with_its_profile_at_the_point_where_it_was_held() -> None:
    """100 operations at 1 a second; the log keeps the seconds, not the profile."""
    points = (OperatingPoint(name="slow", flops_per_s=1.0), OperatingPoint(name="fast", flops_per_s=2.0))
    profile = Profile(device="a", board="b", memory_bytes=1, budget_bytes=1, engines=(), versions={}, points=points)
    state = after(begun(deadline="predicted"), Asked(0, 0, ("a",)))
    held = msgspec.structs.replace(update("a"), usage=Usage(wall_s=110.0, point="slow"))
    fact = state.answered_by(held, 120.0, Ask(Work(flops=100.0), profile))
    assert (fact.took_s, fact.expected_s) == (120.0, 100.0)
    assert after(state, fact).took == {"a": ((0, 120.0, 1.0, 110.0, 100.0, 1, 0),)}


def test_facts_of_an_older_log_are_still_read() -> None:
    """Without work, deadline and times."""
    old = b'[{"type":"Asked","round":0,"attempt":0,"devices":["a"]},{"type":"Extended","round":0}]'
    assert msgspec.json.decode(old, type=list[AnyFact]) == [Asked(0, 0, ("a",)), Extended(0)]


def test_nothing_is_due_while_no_round_is_open() -> None:
    """Time alone changes nothing before a task is out."""
    assert next_s(begun()) == math.inf


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.sampled_from(["fixed", "predicted", "paper"]),
)
def test_replaying_the_facts_gives_the_same_state_and_rounds_only_go_forward(
    seed: int, size: int, over: float, quorum: float, policy: str
) -> None:
    """Whatever happens: the log is the state, no round goes back, none is folded twice, no device counts twice."""
    import random

    roll = random.Random(seed)
    state = first = begun(
        rounds=5, size=size, over_select=over, quorum=quorum, attempts=100, deadline=policy, deadline_s=30.0
    )
    facts: list[AnyFact] = []
    now = itertools.count()
    closed: list[int] = []
    for _ in range(400):
        now_s = float(next(now))
        online = {device for device in "abcdef" if roll.random() < 0.8}
        fact = decide(state, now_s, online, lambda device: asking(1.0 + ord(device)))
        if isinstance(fact, Asked):
            passed = dict.fromkeys(set("abcdef") - online, "offline")
            seen = survey(state, online, passed, {"a": 2.0, "b": roll.choice([1.0, 9.0])})
            if seen is not None:
                state = apply(state, seen, now_s)
                facts.append(seen)
                fact = decide(state, now_s, online, lambda device: asking(1.0 + ord(device)))
        if fact is None and state.phase == "closing":
            closed.append(state.round)
            fact = committed(state.round)
        elif fact is None and state.asked:
            device = roll.choice(sorted(state.asked))
            fact = roll.choice(
                [state.answered_by(update(device, state.round), now_s), Declined(state.round, device, "x", "y")]
            )
        if fact is None:
            continue
        before, state = state, apply(state, fact, now_s)
        facts.append(fact)
        assert state.round >= before.round
        assert not state.asked & state.answered.keys()
        if state.phase == "done":
            break
    assert state.phase == "done"
    assert closed == [0, 1, 2, 3, 4]
    replayed = after(first, *facts, now_s=state.opened_s)
    assert (replayed.history, replayed.took) == (state.history, state.took)
    assert (replayed.since, replayed.passed, replayed.spent) == (state.since, state.passed, state.spent)
    assert (replayed.round, replayed.phase, replayed.state) == (state.round, state.phase, state.state)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"type":"Nonsense"}', type=AnyFact)


# -- rounds that gather what an evaluation needs --------------------------------------------------


def played(state: Rounds, online: set[str], most: int = 30) -> list[tuple[int, bool, tuple[str, ...], int]]:
    """(round, whether it settles, what is asked, how many are asked) of every round, until the job ends."""
    found = []
    for _ in range(most):
        fact = decide(state, 0.0, online)
        if isinstance(fact, Ended):
            return found
        assert isinstance(fact, Asked)
        found.append((state.round, state.settling, state.actions, len(fact.devices)))
        answers = [Answered(state.round, update(device, state.round)) for device in fact.devices]
        state = after(state, fact, *answers, Closed(state.round))
        state = after(state, Committed(state.round, BLOB, False, {}, took_s=1.0, settled=state.settling))
    raise AssertionError("the job does not end")


@pytest.mark.parametrize(
    ("check_every", "wanted"),
    [
        (0, [(0, False, ("work",), 2), (1, False, ("work",), 2), (2, True, ("work",), 5)]),
        (
            1,
            [
                (0, False, ("check", "work"), 2),
                (1, True, ("work",), 5),
                (2, False, ("check", "work"), 2),
                (3, True, ("work",), 5),
                (4, False, ("check",), 2),
            ],
        ),
    ],
)
def test_a_round_that_does_not_count_comes_before_each_evaluation_and_before_the_end(
    check_every: int, wanted: list[tuple[int, bool, tuple[str, ...], int]]
) -> None:
    """Two rounds of two devices of five; all five are asked in the others. Without `settles` there is none."""
    plan = Plan(0, 2, msgspec.convert({"size": 2}, Cohort), check_every)
    online = {f"dev-{index}" for index in range(5)}
    assert played(apply(Rounds(plan), Started(BLOB, settles=True), 0.0), online) == wanted
    plain = played(apply(Rounds(plan), Started(BLOB), 0.0), online)
    assert [each[1:] for each in plain] == [each[1:] for each in wanted if not each[1]]


def test_a_job_that_has_taken_enough_gathers_what_an_evaluation_needs_before_it_ends() -> None:
    """[stop] is reached after the first round of five."""
    plan = Plan(0, 5, Cohort(), 0, Stop(max_wall_s=0.5))
    found = played(apply(Rounds(plan), Started(BLOB, settles=True), 0.0), {"a"})
    assert [(number, settles) for number, settles, _, _ in found] == [(0, False), (1, True)]


def test_at_its_deadline_such_a_round_wants_no_more_than_another() -> None:
    """Ten devices, a size of two: five that are silent do not end the job."""
    plan = Plan(0, 1, msgspec.convert({"size": 2, "deadline_s": 10.0}, Cohort), 0)
    state = after(apply(Rounds(plan), Started(BLOB, settles=True), 0.0), Asked(0, 0, ("a", "b")))
    state = after(state, *[Answered(0, update(device)) for device in "ab"], Closed(0), Committed(0, BLOB, False, {}))
    assert state.settling
    online = set("abcdefghij")
    fact = decide(state, 0.0, online)
    assert isinstance(fact, Asked)
    assert set(fact.devices) == online
    state = after(state, fact, *[Answered(1, update(device, 1)) for device in "abcde"])
    assert decide(state, 5.0, online) is None
    assert decide(state, 11.0, online) == Closed(1)


def test_who_stayed_silent_in_one_attempt_is_asked_last_in_the_next() -> None:
    """Else a board that is too slow for the round would be asked again and again, while another one waits."""
    first = decide(begun(size=2), 0.0, set("abcd"))
    assert isinstance(first, Asked)
    slow, quick = first.devices
    state = after(begun(size=2), first, Answered(0, update(quick)), Reopened(0, 1))
    again = decide(state, 0.0, set("abcd"))
    assert isinstance(again, Asked)
    assert again.devices != (slow,)
    assert decide(state, 0.0, {slow, quick}) == Asked(0, 1, (slow,))  # where nobody else is left
    (second,) = again.devices
    turns = after(state, again, Reopened(0, 2))
    assert decide(turns, 0.0, {slow, second, quick}) == Asked(0, 2, (slow,))  # whoever has waited longest
    state = after(state, again, Answered(0, update(second)), Closed(0), committed(0))
    assert state.silent == ()

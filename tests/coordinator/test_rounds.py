"""Rounds are decided by facts, time and who is online; every rule is one sentence."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.coordinator.rounds import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Plan,
    Rejected,
    Reopened,
    Resumed,
    Rounds,
    Started,
    apply,
    decide,
    next_s,
)
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import BlobRef, Update, Usage

BLOB = BlobRef(sha256="a" * 64, size=1)


def update(device: str, round: int = 0) -> Update:
    return Update(job="j-1", round=round, attempt=0, device=device, weight=1.0, bundles={}, metrics={}, usage=Usage())


def begun(rounds: int = 2, check_every: int = 0, **cohort: float) -> Rounds:
    plan = Plan(0, rounds, msgspec.convert({"deadline_s": 10.0, **cohort}, Cohort), check_every)
    return apply(Rounds(plan), Started(BLOB), 0.0)


def after(state: Rounds, *facts: AnyFact, now_s: float = 0.0) -> Rounds:
    for fact in facts:
        state = apply(state, fact, now_s)
    return state


def committed(round: int, finished: bool = False) -> Committed:
    return Committed(round, BLOB, finished, {})


def test_a_round_asks_everybody_online_when_no_size_is_given() -> None:
    """cohort.size = 0 means all."""
    assert decide(begun(), 0.0, {"b", "a"}) == Asked(0, 0, ("a", "b"))


def test_a_round_waits_for_the_least_number_of_devices() -> None:
    """min_devices holds back the first round only."""
    assert decide(begun(min_devices=2), 0.0, {"a"}) is None


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


def test_without_a_size_a_board_that_is_gone_for_good_is_not_waited_for() -> None:
    """Once it is offline past its grace, the others close the round; nothing stalls."""
    state = after(begun(), Asked(0, 0, ("a", "b", "c")), Answered(0, update("a")), Answered(0, update("b")))
    assert decide(state, 1.0, set("abc")) is None
    assert decide(state, 1.0, set("ab")) == Closed(0)


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


def test_facts_of_another_round_change_nothing() -> None:
    """Late and early messages are harmless."""
    state = after(begun(), Asked(0, 0, ("a",)))
    for fact in (Answered(1, update("a", 1)), Closed(3), committed(1), Declined(2, "a", "x", "y"), Reopened(1, 1)):
        assert apply(state, fact, 5.0) == state


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


def test_nothing_is_due_while_no_round_is_open() -> None:
    """Time alone changes nothing before a task is out."""
    assert next_s(begun()) == math.inf


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(0, 1), st.sampled_from([0.25, 0.5, 1.0]))
def test_replaying_the_facts_gives_the_same_state_and_rounds_only_go_forward(
    seed: int, size: int, over: float, quorum: float
) -> None:
    """Whatever happens: the log is the state, no round goes back, none is folded twice, no device counts twice."""
    import random

    roll = random.Random(seed)
    state = first = begun(rounds=5, size=size, over_select=over, quorum=quorum, attempts=100)
    facts: list[AnyFact] = []
    now = itertools.count()
    closed: list[int] = []
    for _ in range(400):
        now_s = float(next(now))
        online = {device for device in "abcdef" if roll.random() < 0.8}
        fact = decide(state, now_s, online)
        if fact is None and state.phase == "closing":
            closed.append(state.round)
            fact = committed(state.round)
        elif fact is None and state.asked:
            device = roll.choice(sorted(state.asked))
            fact = roll.choice(
                [Answered(state.round, update(device, state.round)), Declined(state.round, device, "x", "y")]
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
    assert replayed.history == state.history
    assert (replayed.round, replayed.phase, replayed.state) == (state.round, state.phase, state.state)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"type":"Nonsense"}', type=AnyFact)

"""Decisions of rounds: who is asked, and when a round closes, is tried again, or ends its job."""

import math
import random

import msgspec
import plain
import pytest
from job_facts import BLOB, apply_events, committed, started_state, update, whole_round, workload_of
from msgspec.structs import replace

from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.decisions import can_skip_decision, decide_event, devices_to_skip, next_decision_s
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    DeadlineExtended,
    JobEnded,
    JobResumed,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.rounds.selection import MEMORY_DECLINE_ROUNDS
from fedquilt.coordinator.settings import CohortSettings, JobLimits
from fedquilt.core import JobError, WorkEstimate


def test_a_round_asks_everybody_online_when_no_size_is_given():
    assert decide_event(started_state(), 0.0, {"b", "a"}) == CohortSelected(0, 0, ("a", "b"))


def test_a_round_waits_for_the_least_number_of_devices():
    for key, waits in (("start_devices", [True, False]), ("min_devices", [True, True])):
        first = started_state(size=1, **{key: 2})
        later = apply_events(first, *whole_round("a"))
        assert [decide_event(state, 0.0, {"a"}) is None for state in (first, later)] == waits
        assert isinstance(decide_event(later, 0.0, {"a", "b"}), CohortSelected)


def test_no_round_commits_with_fewer_than_the_least_number_whatever_the_quorum():
    state = apply_events(
        started_state(size=4, quorum=0.5, min_devices=3, attempts=1), CohortSelected(0, 0, tuple("abcd"))
    )
    state = apply_events(state, UpdateAccepted(0, update("a")), UpdateAccepted(0, update("b")))
    assert decide_event(state, 10.0, {"a", "b"}) == RoundRetried(0, 0)
    assert isinstance(decide_event(state, 10.0, set("abc")), JobEnded)
    assert decide_event(apply_events(state, UpdateAccepted(0, update("c"))), 10.0, set("abc")) == RoundClosed(0)


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_restart_that_finds_boards_offline_does_not_commit_with_those_it_sees(answers):
    state = apply_events(
        started_state(), CohortSelected(0, 0, tuple("abcde")), *(UpdateAccepted(0, update(d)) for d in "ab"[:answers])
    )
    assert decide_event(state, 1.0, {"a"}) is None
    # fewer than half of the five: not a fleet, but a part of one
    assert decide_event(state, 10.0, {"a"}) == RoundRetried(0, 0)
    state = apply_events(state, RoundRetried(0, 0), now_s=10.0)
    for device in sorted(set("abc") - state.accepted_updates.keys()):
        assert decide_event(state, 11.0, {device}) == CohortSelected(0, 0, (device,))
        state = apply_events(state, CohortSelected(0, 0, (device,)), now_s=11.0)
        assert decide_event(state, 12.0, set("abc")) != RoundClosed(0)
        state = apply_events(state, UpdateAccepted(0, update(device)), now_s=12.0)
    # d and e have been silent for an attempt, and are gone
    assert decide_event(state, 13.0, set("abc")) == RoundClosed(0)


def too_large(peak_bytes: int, budget_bytes: int = 100, flops: float = 0.0) -> DeviceWorkload:
    return DeviceWorkload(WorkEstimate(peak_bytes=peak_bytes, flops=flops), plain.profile(budget_bytes=budget_bytes))


def test_a_board_that_declined_for_memory_is_left_alone_until_something_has_changed():
    state = apply_events(started_state(rounds=99), CohortSelected(0, 0, ("a", "b")))
    state = apply_events(
        state, state.decline_event("a", "memory", "too big", too_large(50)), UpdateAccepted(0, update("b"))
    )
    assert devices_to_skip(state, {"a", "b"}, lambda device: too_large(50)) == {}
    state = apply_events(state, RoundClosed(0), committed(0))
    assert devices_to_skip(state, {"a", "b"}, lambda device: too_large(50)) == {"a": "memory"}
    assert devices_to_skip(state, {"b"}, lambda device: too_large(50)) == {}
    for ask in (too_large(49), too_large(50, budget_bytes=101)):
        assert devices_to_skip(state, {"a"}, lambda device, ask=ask: ask) == {}
    for round, alone in ((MEMORY_DECLINE_ROUNDS - 1, {"a": "memory"}), (MEMORY_DECLINE_ROUNDS, {})):
        assert devices_to_skip(replace(state, round=round), {"a"}, lambda device: too_large(51)) == alone
    answered = apply_events(
        state, CohortSelected(1, 0, ("a",)), UpdateAccepted(1, update("a", 1)), RoundClosed(1), committed(1)
    )
    assert devices_to_skip(answered, {"a"}, lambda device: too_large(50)) == {}


def test_a_board_that_declined_for_another_reason_is_asked_again():
    state = apply_events(started_state(rounds=99), CohortSelected(0, 0, ("a", "b")))
    state = apply_events(state, state.decline_event("a", "disk", "full", too_large(0, flops=5.0)))
    state = apply_events(state, state.decline_event("b", "memory", "too big", too_large(0, flops=5.0)))
    state = replace(state, round=1)
    assert devices_to_skip(state, {"a", "b"}, lambda device: too_large(0, flops=5.0)) == {"b": "memory"}
    assert devices_to_skip(state, {"a", "b"}, lambda device: too_large(0, flops=4.0)) == {}


def test_the_next_round_of_all_begins_with_half_of_those_who_were_asked_last():
    last = apply_events(started_state(rounds=9), *whole_round(*"abcde"))
    assert decide_event(last, 0.0, {"a", "b"}) is None
    assert decide_event(last, 0.0, {"a", "b", "c"}) == CohortSelected(1, 0, ("a", "b", "c"))
    low = apply_events(started_state(rounds=9, quorum=0.4), *whole_round(*"abcde"))
    assert decide_event(low, 0.0, {"a", "b"}) == CohortSelected(1, 0, ("a", "b"))
    asked, *rest = whole_round("a", "b", selected="abcde")
    declined = [TaskDeclined(0, device, "memory", "too big") for device in "cde"]
    assert decide_event(apply_events(started_state(rounds=9), asked, *declined, *rest), 0.0, {"a"}) == CohortSelected(
        1, 0, ("a",)
    )


def test_updates_that_are_refused_do_not_make_one_board_a_fleet():
    bad = [UpdateRejected(0, device, "NaN") for device in "bcde"]
    state = apply_events(
        started_state(attempts=1), CohortSelected(0, 0, tuple("abcde")), *bad, UpdateAccepted(0, update("a"))
    )
    assert decide_event(state, 1.0, set("abcde")) is None
    fact = decide_event(state, 10.0, set("abcde"))
    assert isinstance(fact, JobEnded)
    assert fact.reason.startswith("the update was rejected in round 1 on 4 of 5 devices (NaN).\nFix: ")


def test_a_sized_round_asks_that_many_and_over_selects_by_the_share():
    fact = decide_event(started_state(size=2, over_select=0.5), 0.0, set("abcdef"))
    assert isinstance(fact, CohortSelected)
    assert len(fact.devices) == 3


def test_a_device_that_vanished_is_replaced_but_may_still_answer():
    state = apply_events(started_state(size=1), CohortSelected(0, 0, ("a",)))
    assert decide_event(state, 1.0, {"b"}) == CohortSelected(0, 0, ("b",))
    state = apply_events(state, CohortSelected(0, 0, ("b",)), UpdateAccepted(0, update("a")))
    assert decide_event(state, 1.0, {"b"}) == RoundClosed(0)


def test_the_deadline_closes_a_round_that_has_its_quorum():
    state = apply_events(started_state(size=4, quorum=0.5), CohortSelected(0, 0, tuple("abcd")))
    state = apply_events(state, UpdateAccepted(0, update("a")), UpdateAccepted(0, update("b")))
    assert decide_event(state, 9.9, set("abcd")) is None
    assert next_decision_s(state) == 10.0
    assert decide_event(state, 10.0, set("abcd")) == RoundClosed(0)


def test_a_round_without_quorum_is_tried_again_with_what_it_has():
    state = apply_events(started_state(size=2), CohortSelected(0, 0, ("a", "b")), UpdateAccepted(0, update("a")))
    assert decide_event(state, 10.0, set("ab")) == RoundRetried(0, 1)
    state = apply_events(state, RoundRetried(0, 1), now_s=10.0)
    assert decide_event(state, 10.0, set("ab")) == CohortSelected(0, 1, ("b",))


def test_a_job_that_fails_says_what_became_of_everybody_who_was_asked():
    def said(state, online, now_s=10.0):
        fact = decide_event(state, now_s, online)
        assert isinstance(fact, JobEnded)
        return fact.reason

    alone = apply_events(
        started_state(attempts=1), CohortSelected(0, 0, ("a",)), TaskDeclined(0, "a", "failed", "too big")
    )
    assert said(alone, {"a"}).startswith(
        "round 1 selected 1 device in 1 attempt: 0 submitted an update, 1 declined, and 1 update is needed; "
        "reasons: a: too big.\nFix"
    )
    state = apply_events(started_state(size=5, attempts=2, quorum=0.6), CohortSelected(0, 0, tuple("abcde")))
    state = apply_events(state, UpdateAccepted(0, update("a")), RoundRetried(0, 1), CohortSelected(0, 1, tuple("bcd")))
    state = apply_events(
        state,
        TaskDeclined(0, "b", "failed", "too big"),
        UpdateRejected(0, "c", "NaN"),
        TaskDeclined(0, "d", "none", ""),
    )
    assert said(state, set("abcd")).startswith(
        "round 1 selected 5 devices in 2 attempts: 1 submitted an update, 1 declined, 1 submitted an invalid update, "
        "1 had no task, 1 submitted nothing in time, and 3 updates are needed; reasons: b: too big; c: NaN; d: ; "
        "no update from e.\n"
        "Fix: check"
    )


def test_a_reason_that_many_devices_give_is_told_once():
    names = tuple("abcdefghij")
    state = apply_events(started_state(size=10, attempts=1), CohortSelected(0, 0, names))
    state = apply_events(state, *(TaskDeclined(0, device, "failed", "too big") for device in names[1:]))
    fact = decide_event(apply_events(state, TaskDeclined(0, "a", "disk", "broken")), 1e9, set(names))
    assert isinstance(fact, JobEnded)
    assert "; reasons: a: broken; b, c, d, e, f and 4 more: too big.\nFix: check" in fact.reason


def test_a_round_in_which_the_method_has_nothing_for_anybody_closes_with_nobody():
    for cohort in ({}, {"size": 2}):
        state = apply_events(started_state(**cohort), CohortSelected(0, 0, ("a", "b")))
        state = apply_events(state, *(TaskDeclined(0, device, "none", "nothing for it now") for device in "ab"))
        assert decide_event(state, 1.0, set("ab")) == RoundClosed(0)


def test_whom_the_method_has_nothing_for_is_replaced_and_counts_as_answered_only_then():
    state = apply_events(
        started_state(size=2),
        CohortSelected(0, 0, ("a", "b")),
        UpdateAccepted(0, update("a")),
        TaskDeclined(0, "b", "none", ""),
    )
    assert decide_event(state, 1.0, set("abc")) == CohortSelected(0, 0, ("c",))
    state = apply_events(state, CohortSelected(0, 0, ("c",)))
    assert decide_event(state, 1.0, set("abc")) is None
    assert decide_event(apply_events(state, TaskDeclined(0, "c", "none", "")), 1.0, set("abc")) == RoundClosed(0)
    assert decide_event(apply_events(state, TaskDeclined(0, "c", "memory", "")), 1.0, set("abc")) == RoundClosed(0)


def test_a_refusal_is_no_answer_with_nothing_to_do():
    state = apply_events(
        started_state(size=2),
        CohortSelected(0, 0, ("a", "b")),
        TaskDeclined(0, "a", "memory", ""),
        TaskDeclined(0, "b", "none", ""),
    )
    assert decide_event(state, 1.0, set("ab")) is None
    state = apply_events(state, RoundRetried(0, 1))
    assert state.devices_without_work == frozenset()


def test_without_a_size_a_board_that_is_gone_for_good_is_waited_for_until_the_deadline():
    state = apply_events(
        started_state(),
        CohortSelected(0, 0, ("a", "b", "c")),
        UpdateAccepted(0, update("a")),
        UpdateAccepted(0, update("b")),
    )
    assert decide_event(state, 1.0, set("abc")) is None
    assert decide_event(state, 9.0, set("ab")) is None
    assert decide_event(state, 10.0, set("ab")) == RoundRetried(0, 1)
    assert decide_event(apply_events(state, RoundRetried(0, 1), now_s=10.0), 10.0, set("ab")) == RoundClosed(0)


def test_a_reopened_round_whose_silent_board_is_gone_closes_or_fails_but_never_stalls():
    state = apply_events(
        started_state(size=2, attempts=2), CohortSelected(0, 0, ("a", "b")), UpdateAccepted(0, update("a"))
    )
    state = apply_events(state, RoundRetried(0, 1), now_s=10.0)
    assert decide_event(state, 11.0, {"a"}) is None
    assert next_decision_s(state) == 20.0
    fact = decide_event(state, 20.0, {"a"})
    assert isinstance(fact, JobEnded)
    assert fact.status == "failed"
    assert decide_event(state, 12.0, {"a", "c"}) == CohortSelected(0, 1, ("c",))


def test_a_fleet_that_is_gone_for_a_night_costs_no_attempt():
    state = apply_events(started_state(attempts=1), CohortSelected(0, 0, ("a", "b")))
    for hour in (1, 2, 3):
        now_s = 3600.0 * hour
        assert decide_event(state, now_s, set()) == RoundRetried(0, 0)
        state = apply_events(state, RoundRetried(0, 0), now_s=now_s)
    assert decide_event(state, now_s + 1, {"b"}) == CohortSelected(0, 0, ("b",))


def test_when_everybody_has_declined_the_deadline_is_not_waited_out():
    state = apply_events(
        started_state(size=1, deadline_s=600.0), CohortSelected(0, 0, ("a",)), TaskDeclined(0, "a", "data", "no data")
    )
    assert next_decision_s(state) == 10.0
    assert decide_event(state, 9.0, {"a"}) is None
    assert decide_event(state, 10.0, {"a"}) == RoundRetried(0, 1)


def test_a_refused_update_frees_its_place():
    state = apply_events(started_state(size=1), CohortSelected(0, 0, ("a",)), UpdateRejected(0, "a", "NaN"))
    assert decide_event(state, 1.0, set("ab")) == CohortSelected(0, 0, ("b",))


def test_facts_of_another_round_are_refused():
    state = apply_events(started_state(), CohortSelected(0, 0, ("a",)))
    for fact in (
        UpdateAccepted(1, update("a", 1)),
        RoundClosed(3),
        committed(1),
        TaskDeclined(2, "a", "x", "y"),
        RoundRetried(1, 1),
    ):
        with pytest.raises(JobError, match=f"belongs to round {fact.round + 1}, but the running round is 1"):
            apply_event(state, fact, 5.0)


def test_the_job_ends_after_its_last_round():
    state = started_state(rounds=2)
    for round in (0, 1):
        state = apply_events(
            state, CohortSelected(round, 0, ("a",)), UpdateAccepted(round, update("a", round)), RoundClosed(round)
        )
        assert decide_event(state, 0.0, {"a"}) is None
        state = apply_events(state, committed(round))
    assert decide_event(state, 0.0, {"a"}) == JobEnded("done")
    assert list(state.history["a"]) == [0, 1]


def test_a_stopped_job_decides_nothing_until_it_is_resumed():
    state = apply_events(
        started_state(size=2), CohortSelected(0, 0, ("a", "b")), UpdateAccepted(0, update("a")), JobEnded("stopped")
    )
    assert decide_event(state, 99.0, set("ab")) is None
    state = apply_events(state, JobResumed(), now_s=100.0)
    assert decide_event(state, 101.0, set("ab")) is None
    assert state.remaining_s("b", 101.0) == 9.0
    assert decide_event(apply_events(state, UpdateAccepted(0, update("b"))), 102.0, set("ab")) == RoundClosed(0)


def test_nothing_is_due_while_no_round_is_open():
    assert next_decision_s(started_state()) == math.inf


def test_who_stayed_silent_in_one_attempt_is_asked_last_in_the_next():
    first = decide_event(started_state(size=2), 0.0, set("abcd"))
    assert isinstance(first, CohortSelected)
    slow, quick = first.devices
    state = apply_events(started_state(size=2), first, UpdateAccepted(0, update(quick)), RoundRetried(0, 1))
    again = decide_event(state, 0.0, set("abcd"))
    assert isinstance(again, CohortSelected)
    assert again.devices != (slow,)
    assert decide_event(state, 0.0, {slow, quick}) == CohortSelected(0, 1, (slow,))  # where nobody else is left
    (second,) = again.devices
    turns = apply_events(state, again, RoundRetried(0, 2))
    # whoever has waited longest
    assert decide_event(turns, 0.0, {slow, second, quick}) == CohortSelected(0, 2, (slow,))
    state = apply_events(state, again, UpdateAccepted(0, update(second)), RoundClosed(0), committed(0))
    assert state.silent_devices == ()


def test_a_round_of_all_devices_closes_without_one_that_was_silent_for_two_attempts():
    state = apply_events(
        started_state(), CohortSelected(0, 0, tuple("abc")), *(UpdateAccepted(0, update(d)) for d in "ab")
    )
    assert decide_event(state, 10.0, set("abc")) == RoundRetried(0, 1)
    state = apply_events(state, RoundRetried(0, 1), CohortSelected(0, 1, ("c",)), now_s=10.0)
    assert decide_event(state, 19.0, set("abc")) is None
    assert decide_event(state, 20.0, set("abc")) == RoundClosed(0)


def test_answers_alone_lead_to_nothing_until_all_or_enough_have_answered():
    draw, left_out = random.Random(0), 0
    for _ in range(300):
        devices = [f"d{number}" for number in range(draw.randrange(2, 8))]
        online = draw.sample(devices, draw.randrange(1, len(devices) + 1))
        state = started_state(
            size=draw.choice([0, 0, 1, 2, 3]), quorum=draw.choice([0.5, 1.0]), over_select=draw.choice([0.0, 0.4, 1.0])
        )
        while isinstance(fact := decide_event(state, 1.0, online), CohortSelected):
            state = apply_event(state, fact, 0.0)
        while state.phase == "open" and state.pending_devices and decide_event(state, 1.0, online) is None:
            waits = can_skip_decision(state, 1.0)
            state = apply_event(state, UpdateAccepted(0, update(draw.choice(sorted(state.pending_devices)))), 1.0)
            if waits and can_skip_decision(state, 1.0):
                left_out += 1
                assert decide_event(state, 1.0, online) is None
    assert left_out > 100


def played(state: JobState, online: set[str], most: int = 30) -> list[tuple[int, bool, tuple[str, ...], int]]:
    """(round, whether it settles, what is asked, how many are asked) of every round, until the job ends."""
    found = []
    for _ in range(most):
        fact = decide_event(state, 0.0, online)
        if isinstance(fact, JobEnded):
            return found
        assert isinstance(fact, CohortSelected)
        found.append((state.round, state.is_evaluation_round, state.task_actions, len(fact.devices)))
        answers = [UpdateAccepted(state.round, update(device, state.round)) for device in fact.devices]
        state = apply_events(state, fact, *answers, RoundClosed(state.round))
        state = apply_events(
            state,
            RoundCommitted(state.round, BLOB, False, {}, took_s=1.0, is_evaluation_round=state.is_evaluation_round),
        )
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
def test_a_round_that_does_not_count_comes_before_each_evaluation_and_before_the_end(check_every, wanted):
    plan = JobConstants(0, 2, msgspec.convert({"size": 2}, CohortSettings), check_every)
    online = {f"dev-{index}" for index in range(5)}
    assert played(apply_event(JobState(plan), JobStarted(BLOB, has_evaluation_rounds=True), 0.0), online) == wanted
    plain = played(apply_event(JobState(plan), JobStarted(BLOB), 0.0), online)
    assert [each[1:] for each in plain] == [each[1:] for each in wanted if not each[1]]


def test_a_job_that_has_taken_enough_gathers_what_an_evaluation_needs_before_it_ends():
    plan = JobConstants(0, 5, CohortSettings(), 0, JobLimits(max_wall_s=0.5))
    found = played(apply_event(JobState(plan), JobStarted(BLOB, has_evaluation_rounds=True), 0.0), {"a"})
    assert [(number, settles) for number, settles, _, _ in found] == [(0, False), (1, True)]


def test_at_its_deadline_such_a_round_wants_no_more_than_another():
    plan = JobConstants(0, 1, msgspec.convert({"size": 2, "deadline_s": 10.0}, CohortSettings), 0)
    state = apply_events(
        apply_event(JobState(plan), JobStarted(BLOB, has_evaluation_rounds=True), 0.0), CohortSelected(0, 0, ("a", "b"))
    )
    state = apply_events(
        state,
        *[UpdateAccepted(0, update(device)) for device in "ab"],
        RoundClosed(0),
        RoundCommitted(0, BLOB, False, {}),
    )
    assert state.is_evaluation_round
    online = set("abcdefghij")
    fact = decide_event(state, 0.0, online)
    assert isinstance(fact, CohortSelected)
    assert set(fact.devices) == online
    state = apply_events(state, fact, *[UpdateAccepted(1, update(device, 1)) for device in "abcde"])
    assert decide_event(state, 5.0, online) is None
    assert decide_event(state, 11.0, online) == RoundClosed(1)


def paced(**cohort: float | str) -> JobState:
    """The state after a round in which boards a and b took 40 s and 60 s for 2 units of work."""
    state = started_state(rounds=9, size=2, deadline_s=600.0, deadline="predicted", **cohort)
    state = apply_events(state, CohortSelected(0, 0, ("a", "b"), {"a": 2.0, "b": 2.0}))
    for device, at_s in (("a", 40.0), ("b", 60.0)):
        state = apply_events(state, state.acceptance_event(update(device), at_s), now_s=at_s)
    return apply_events(state, RoundClosed(0), committed(0), now_s=60.0)


def test_a_round_opens_with_what_its_devices_have_to_do_and_how_long_that_takes_them():
    fact = decide_event(paced(), 60.0, {"a", "b"}, lambda device: workload_of(1.0))
    assert fact == CohortSelected(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0)
    state = apply_events(paced(), fact, now_s=60.0)
    assert next_decision_s(state) == 105.0
    assert state.remaining_s("a", 70.0) == 35.0


def test_the_first_round_has_the_cohorts_deadline():
    assert decide_event(
        started_state(deadline="predicted"), 0.0, {"a"}, lambda device: workload_of(1.0)
    ) == CohortSelected(0, 0, ("a",), {"a": 1.0})
    state = paced()
    state = replace(
        state,
        constants=replace(state.constants, cohort=msgspec.structs.replace(state.constants.cohort, deadline="fixed")),
    )
    fact = decide_event(state, 60.0, {"a", "b"})
    assert fact == CohortSelected(1, 0, ("a", "b"))
    assert next_decision_s(apply_events(state, fact, now_s=60.0)) == 660.0


def test_a_prediction_with_a_quorum_ends_the_round():
    state = apply_events(
        paced(quorum=0.5), CohortSelected(1, 0, ("a", "b"), {}, 45.0), UpdateAccepted(1, update("a", 1)), now_s=60.0
    )
    assert decide_event(state, 104.0, {"a", "b"}) is None
    assert decide_event(state, 105.0, {"a", "b"}) == RoundClosed(1)


def test_a_prediction_that_was_too_short_costs_no_attempt_and_interrupts_nobody():
    state = apply_events(paced(quorum=0.5, attempts=1), CohortSelected(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    assert decide_event(state, 105.0, {"a", "b"}) == DeadlineExtended(1)
    state = apply_events(state, DeadlineExtended(1), now_s=105.0)
    assert state.pending_devices == {"a", "b"}
    assert decide_event(state, 106.0, {"a", "b"}) is None
    answered = apply_events(state, UpdateAccepted(1, update("b", 1)), now_s=300.0)
    assert decide_event(answered, 300.0, {"a", "b"}) == RoundClosed(1)
    following = apply_events(
        answered, RoundClosed(1), committed(1), CohortSelected(2, 0, ("a", "b")), UpdateAccepted(2, update("a", 2))
    )
    assert decide_event(following, 1.0, {"a", "b"}) is None
    assert next_decision_s(state) == 660.0  # no later than with a fixed deadline
    fact = decide_event(state, 660.0, {"a", "b"})
    assert isinstance(fact, JobEnded)


def test_devices_that_are_not_there_are_waited_for_as_long_as_with_a_fixed_deadline():
    state = apply_events(
        paced(attempts=1), CohortSelected(1, 0, ("a",), {}, 45.0), UpdateAccepted(1, update("a", 1)), now_s=60.0
    )
    assert decide_event(state, 105.0, {"a"}) == DeadlineExtended(1)
    state = apply_events(state, DeadlineExtended(1), now_s=105.0)
    assert next_decision_s(state) == 660.0
    assert decide_event(state, 300.0, {"a", "c"}) == CohortSelected(1, 0, ("c",))


def test_a_round_that_is_tried_again_or_resumed_waits_for_all_anew():
    state = apply_events(paced(quorum=0.5), CohortSelected(1, 0, ("a", "b"), {}, 45.0), DeadlineExtended(1), now_s=60.0)
    again = apply_events(
        state, RoundRetried(1, 1), CohortSelected(1, 1, ("a", "b")), UpdateAccepted(1, update("a", 1)), now_s=660.0
    )
    assert decide_event(again, 661.0, {"a", "b"}) is None
    resumed = apply_events(state, JobEnded("stopped"), JobResumed(), UpdateAccepted(1, update("a", 1)), now_s=700.0)
    assert decide_event(resumed, 701.0, {"a", "b"}) is None
    assert next_decision_s(resumed) == 1300.0


def test_what_a_replacement_has_to_do_is_noted_too_and_only_for_its_round():
    state = apply_events(
        paced(), CohortSelected(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0), TaskDeclined(1, "a", "x", "y")
    )
    fact = decide_event(state, 0.0, {"a", "b", "c"}, lambda device: workload_of(4.0))
    assert fact == CohortSelected(1, 0, ("c",), {"c": 4.0})
    state = apply_events(
        state, fact, UpdateAccepted(1, update("c", 1), 20.0), UpdateAccepted(1, update("b", 1), 9.0), RoundClosed(1)
    )
    assert state.deadline_s == 45.0
    state = apply_events(state, committed(1), CohortSelected(2, 0, ("b", "c")), UpdateAccepted(2, update("c", 2), 30.0))
    assert state.durations["c"] == ((1, 20.0, 4.0, 0.0, None, 1, 0), (2, 30.0, 1.0, 0.0, None, 1, 0))


def test_a_method_that_does_not_say_what_a_round_takes_has_rounds_that_take_the_same():
    state = apply_events(started_state(deadline_s=600.0, deadline="predicted"), CohortSelected(0, 0, ("a",)))
    state = apply_events(state, UpdateAccepted(0, update("a"), 40.0), RoundClosed(0), committed(0))
    assert decide_event(state, 0.0, {"a"}) == CohortSelected(1, 0, ("a",), {}, 60.0)


def test_when_everybody_has_declined_a_prediction_changes_nothing():
    state = apply_events(paced(), CohortSelected(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    state = apply_events(state, TaskDeclined(1, "a", "memory", "too big"), TaskDeclined(1, "b", "memory", "too big"))
    assert next_decision_s(state) == 70.0
    assert decide_event(state, 70.0, {"a", "b"}) == RoundRetried(1, 1)

"""The facts of a job: which may follow which, what a replay of them gives, what is written down of a round."""

import itertools
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_facts import BLOB, apply_events, committed, started_state, update, whole_round, workload_of
from msgspec.structs import replace

from fedquilt.coordinator.device_columns import ELIGIBLE, CostColumn, LabelColumn, RoundColumn
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.decisions import decide_event, eligibility_event
from fedquilt.coordinator.rounds.events import (
    PHASES,
    TRANSITIONS,
    AnyEvent,
    AttemptResumed,
    CohortSelected,
    DeadlineExtended,
    EligibilityRecorded,
    JobEnded,
    JobResumed,
    JobStarted,
    ModeChosen,
    NoteRecorded,
    PrivacyPlanned,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    TasksCancelled,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
    UpdatesAggregated,
)
from fedquilt.coordinator.rounds.job_state import JobState, apply_event
from fedquilt.coordinator.settings import JobLimits
from fedquilt.core import JobError, OperatingPoint, Profile, Usage, WorkEstimate

FACTS: tuple[AnyEvent, ...] = (
    JobStarted(BLOB),
    ModeChosen(0, "buffered", "x"),
    PrivacyPlanned(0, 4, 3, 1.0),
    EligibilityRecorded(0),
    CohortSelected(0, 0, ("a",)),
    TaskDeclined(0, "a", "x", "y"),
    TasksCancelled(0, ("a",), "deadline"),
    UpdateAccepted(0, update("a")),
    UpdateRejected(0, "a", "x"),
    UpdateLost(0, "a", "x"),
    RoundClosed(0),
    DeadlineExtended(0),
    UpdatesAggregated(0, ("a",), BLOB),
    RoundRetried(0, 1),
    AttemptResumed(0, 3.0),
    committed(0),
    JobEnded("done"),
    JobEnded("failed"),
    JobEnded("stopped"),
    JobResumed(),
    NoteRecorded("by [trigger]"),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: getattr(fact, "status", type(fact).__name__))
@pytest.mark.parametrize("phase", PHASES)
def test_a_fact_leads_where_the_table_says_or_is_refused(fact, phase):
    state = replace(started_state(), phase=phase)
    to = [p for p in TRANSITIONS[type(fact).__name__].get(phase, ()) if getattr(fact, "status", p) == p]
    if to:
        assert apply_event(state, fact, 1.0).phase in to
    else:
        with pytest.raises(
            JobError, match=f"{type(fact).__name__} in round 1 is not allowed while the job is {phase!r}"
        ):
            apply_event(state, fact, 1.0)


def test_the_table_knows_every_fact_and_nothing_leads_out_of_done():
    assert (
        TRANSITIONS.keys() == {type(fact).__name__ for fact in FACTS} == {kind.__name__ for kind in get_args(AnyEvent)}
    )
    assert not any("done" in moves for moves in TRANSITIONS.values())


def test_a_lost_update_opens_its_round_again_for_its_device_alone():
    state = apply_events(
        started_state(size=2),
        CohortSelected(0, 0, ("a", "b")),
        *(UpdateAccepted(0, update(name)) for name in "ab"),
        RoundClosed(0),
    )
    state = apply_events(state, UpdateLost(0, "b", "its blob is damaged"))
    assert (state.phase, state.pending_devices, set(state.accepted_updates), state.redoing_devices) == (
        "open",
        {"b"},
        {"a"},
        {"b"},
    )
    assert decide_event(state, 1.0, {"a", "b"}) is None
    state = apply_events(state, UpdateAccepted(0, update("b")))
    assert decide_event(state, 1.0, {"a", "b"}) == RoundClosed(0)
    assert apply_events(state, RoundClosed(0), committed(0)).redoing_devices == frozenset()


def test_a_log_of_a_job_that_was_stopped_between_two_messages_is_still_replayed():
    state = apply_events(
        started_state(size=2), CohortSelected(0, 0, ("a", "b")), JobEnded("stopped"), UpdateAccepted(0, update("a"))
    )
    assert state.phase == "stopped"
    state = apply_events(state, JobResumed(), UpdateAccepted(0, update("b")))
    assert decide_event(state, 1.0, {"a", "b"}) == RoundClosed(0)


def test_what_a_device_took_is_counted_from_when_it_was_asked_and_outlives_a_restart():
    state = apply_events(started_state(deadline="predicted"), CohortSelected(0, 0, ("a",), {"a": 2.0}), now_s=100.0)
    assert state.acceptance_event(update("a"), 130.0).took_s == 30.0
    restarted = apply_events(started_state(deadline="predicted"), CohortSelected(0, 0, ("a",), {"a": 2.0}), now_s=5.0)
    slow = msgspec.structs.replace(update("a"), usage=Usage(wall_s=28.0, down_bytes=700, up_bytes=300))
    assert restarted.acceptance_event(slow, 6.0).took_s == 28.0
    replayed = apply_events(state, UpdateAccepted(0, slow, 30.0), now_s=9999.0)
    assert replayed.durations == {"a": ((0, 30.0, 2.0, 28.0, None, 1, 1000),)}


def test_a_removed_device_stays_removed_until_it_is_online():
    state = apply_events(started_state(), eligibility_event(started_state(), LabelColumn({"a": "removed"})))
    assert eligibility_event(state, LabelColumn()) is None  # after a restart
    assert eligibility_event(state, LabelColumn({"a": "offline"})) is None
    assert eligibility_event(state, LabelColumn({"a": ELIGIBLE})) == EligibilityRecorded(0, ("a",), {})


def test_a_survey_notes_what_has_changed_and_then_nothing():
    state = started_state()
    there = LabelColumn({"a": ELIGIBLE, "b": ELIGIBLE, "c": "hot"})
    first = eligibility_event(state, there, CostColumn({"a": 2.0, "c": 5.0}))
    assert first == EligibilityRecorded(0, ("a", "b"), {"hot": ("c",)}, {"a": 2.0})
    state = apply_events(state, first)
    assert eligibility_event(state, there, CostColumn({"a": 2.0, "c": 5.0})) is None
    second = eligibility_event(state, LabelColumn({"a": ELIGIBLE, "c": ELIGIBLE}), CostColumn({"a": 3.0}))
    assert second == EligibilityRecorded(0, ("c",), {"offline": ("b",)}, {"a": 3.0})
    state = apply_events(state, second)
    assert (state.eligible, state.ineligibility_reasons, state.costs) == ({"a", "c"}, {"b": "offline"}, {"a": 3.0})
    assert apply_events(state, EligibilityRecorded(0, ("b",))).eligible == {"a", "b", "c"}


def test_a_device_waits_from_when_it_was_first_seen_or_last_asked_whatever_comes_between():
    state = replace(apply_events(started_state(), EligibilityRecorded(0, ("a",), {"hot": ("b",)})), round=5)
    state = replace(apply_events(state, EligibilityRecorded(5, ("b",), {"offline": ("a",)})), round=7)
    state = apply_events(state, EligibilityRecorded(7, ("a",)))
    assert state.last_selected_rounds == {"a": 0, "b": 0}
    assert apply_events(state, CohortSelected(7, 0, ("a",))).last_selected_rounds == {"a": 7, "b": 0}


def test_the_choice_rests_on_what_is_in_the_log():
    for round in range(20, 40):
        state = replace(
            started_state(rounds=99, size=1),
            round=round,
            last_selected_rounds=RoundColumn({"a": round - 1, "b": round - 6}),
        )
        assert decide_event(state, 0.0, {"a", "b"}) == CohortSelected(round, 0, ("b",))


def test_a_job_that_has_taken_enough_is_done_at_the_end_of_its_round():
    plan = replace(started_state(rounds=9, size=1, check_every=1).constants, stop=JobLimits(max_joules=5.0))
    state = apply_events(JobState(plan), JobStarted(BLOB), CohortSelected(0, 0, ("a",)))
    answer = msgspec.structs.replace(update("a"), usage=Usage(energy_j=6.0))
    state = apply_events(state, UpdateAccepted(0, answer))
    assert decide_event(state, 1.0, {"a"}) == RoundClosed(0)
    state = apply_events(state, RoundClosed(0), committed(0))
    assert decide_event(state, 1.0, {"a"}) == JobEnded("done", "max_joules: 6 J of 5 J are used")


def test_the_time_of_a_job_is_that_of_its_rounds_in_the_log():
    plan = replace(started_state(rounds=9, size=1).constants, stop=JobLimits(max_wall_s=70.0))
    facts = [JobStarted(BLOB)]
    for round, took_s in ((0, 30.0), (1, 40.0)):
        *before, _ = whole_round("a", round=round)
        facts += [*before, RoundCommitted(round, BLOB, False, {}, (), took_s)]
    state = apply_events(JobState(plan), *facts[:5], now_s=5.0)
    assert isinstance(decide_event(state, 5.0, {"a"}), CohortSelected)
    assert (
        apply_events(JobState(plan), *facts, now_s=5.0).usage == apply_events(JobState(plan), *facts, now_s=777.0).usage
    )
    assert decide_event(apply_events(state, *facts[5:]), 5.0, {"a"}) == JobEnded(
        "done", "max_wall_s: 70 s of 70 s are used"
    )


def test_an_answer_is_compared_with_its_profile_at_the_point_where_it_was_held():
    points = (OperatingPoint(name="slow", flops_per_s=1.0), OperatingPoint(name="fast", flops_per_s=2.0))
    profile = Profile(device="a", board="b", memory_bytes=1, budget_bytes=1, engines=(), versions={}, points=points)
    state = apply_events(started_state(deadline="predicted"), CohortSelected(0, 0, ("a",)))
    held = msgspec.structs.replace(update("a"), usage=Usage(wall_s=110.0, point="slow"))
    fact = state.acceptance_event(held, 120.0, DeviceWorkload(WorkEstimate(flops=100.0), profile))
    assert (fact.took_s, fact.expected_s) == (120.0, 100.0)
    assert apply_events(state, fact).durations == {"a": ((0, 120.0, 1.0, 110.0, 100.0, 1, 0),)}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.sampled_from(["fixed", "predicted", "paper"]),
)
def test_replaying_the_facts_gives_the_same_state_and_rounds_only_go_forward(seed, size, over, quorum, policy):
    import random

    roll = random.Random(seed)
    state = first = started_state(
        rounds=5, size=size, over_select=over, quorum=quorum, attempts=100, deadline=policy, deadline_s=30.0
    )
    facts = []
    now = itertools.count()
    closed = []
    for _ in range(400):
        now_s = float(next(now))
        online = {device for device in "abcdef" if roll.random() < 0.8}
        fact = decide_event(state, now_s, online, lambda device: workload_of(1.0 + ord(device)))
        if isinstance(fact, CohortSelected):
            labels = LabelColumn({device: ELIGIBLE if device in online else "offline" for device in "abcdef"})
            seen = eligibility_event(state, labels, CostColumn({"a": 2.0, "b": roll.choice([1.0, 9.0])}))
            if seen is not None:
                state = apply_event(state, seen, now_s)
                facts.append(seen)
                fact = decide_event(state, now_s, online, lambda device: workload_of(1.0 + ord(device)))
        if fact is None and state.phase == "closing":
            closed.append(state.round)
            fact = committed(state.round)
        elif fact is None and state.pending_devices:
            device = roll.choice(sorted(state.pending_devices))
            fact = roll.choice(
                [
                    state.acceptance_event(update(device, state.round), now_s),
                    TaskDeclined(state.round, device, "x", "y"),
                ]
            )
        if fact is None:
            continue
        before, state = state, apply_event(state, fact, now_s)
        facts.append(fact)
        assert state.round >= before.round
        assert not state.pending_devices & state.accepted_updates.keys()
        if state.phase == "done":
            break
    assert state.phase == "done"
    assert closed == [0, 1, 2, 3, 4]
    replayed = apply_events(first, *facts, now_s=state.opened_s)
    assert (replayed.history, replayed.durations) == (state.history, state.durations)
    assert (replayed.last_selected_rounds, replayed.ineligibility_reasons, replayed.usage) == (
        state.last_selected_rounds,
        state.ineligibility_reasons,
        state.usage,
    )
    assert (replayed.round, replayed.phase, replayed.state) == (state.round, state.phase, state.state)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"type":"Nonsense"}', type=AnyEvent)

"""Rounds whose deadline follows from what their devices have to do."""

import msgspec
from job_facts import after, asking, begun, committed, update
from msgspec.structs import replace

from fedquilt.coordinator.rounds.decisions import decide_event, next_decision_s
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    DeadlineExtended,
    JobEnded,
    JobResumed,
    JobState,
    RoundClosed,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
)


def paced(**cohort: float | str) -> JobState:
    """The state after a round in which boards a and b took 40 s and 60 s for 2 units of work."""
    state = begun(rounds=9, size=2, deadline_s=600.0, deadline="predicted", **cohort)
    state = after(state, CohortSelected(0, 0, ("a", "b"), {"a": 2.0, "b": 2.0}))
    for device, at_s in (("a", 40.0), ("b", 60.0)):
        state = after(state, state.acceptance_event(update(device), at_s), now_s=at_s)
    return after(state, RoundClosed(0), committed(0), now_s=60.0)


def test_a_round_opens_with_what_its_devices_have_to_do_and_how_long_that_takes_them():
    fact = decide_event(paced(), 60.0, {"a", "b"}, lambda device: asking(1.0))
    assert fact == CohortSelected(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0)
    state = after(paced(), fact, now_s=60.0)
    assert next_decision_s(state) == 105.0
    assert state.remaining_s(70.0) == 35.0


def test_the_first_round_has_the_cohorts_deadline():
    assert decide_event(begun(deadline="predicted"), 0.0, {"a"}, lambda device: asking(1.0)) == CohortSelected(
        0, 0, ("a",), {"a": 1.0}
    )
    state = paced()
    state = replace(
        state, plan=replace(state.plan, cohort=msgspec.structs.replace(state.plan.cohort, deadline="fixed"))
    )
    fact = decide_event(state, 60.0, {"a", "b"})
    assert fact == CohortSelected(1, 0, ("a", "b"))
    assert next_decision_s(after(state, fact, now_s=60.0)) == 660.0


def test_a_prediction_with_a_quorum_ends_the_round():
    state = after(
        paced(quorum=0.5), CohortSelected(1, 0, ("a", "b"), {}, 45.0), UpdateAccepted(1, update("a", 1)), now_s=60.0
    )
    assert decide_event(state, 104.0, {"a", "b"}) is None
    assert decide_event(state, 105.0, {"a", "b"}) == RoundClosed(1)


def test_a_prediction_that_was_too_short_costs_no_attempt_and_interrupts_nobody():
    state = after(paced(quorum=0.5, attempts=1), CohortSelected(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    assert decide_event(state, 105.0, {"a", "b"}) == DeadlineExtended(1)
    state = after(state, DeadlineExtended(1), now_s=105.0)
    assert state.asked == {"a", "b"}
    assert decide_event(state, 106.0, {"a", "b"}) is None
    answered = after(state, UpdateAccepted(1, update("b", 1)), now_s=300.0)
    assert decide_event(answered, 300.0, {"a", "b"}) == RoundClosed(1)
    following = after(
        answered, RoundClosed(1), committed(1), CohortSelected(2, 0, ("a", "b")), UpdateAccepted(2, update("a", 2))
    )
    assert decide_event(following, 1.0, {"a", "b"}) is None
    assert next_decision_s(state) == 660.0  # no later than with a fixed deadline
    fact = decide_event(state, 660.0, {"a", "b"})
    assert isinstance(fact, JobEnded)


def test_devices_that_are_not_there_are_waited_for_as_long_as_with_a_fixed_deadline():
    state = after(
        paced(attempts=1), CohortSelected(1, 0, ("a",), {}, 45.0), UpdateAccepted(1, update("a", 1)), now_s=60.0
    )
    assert decide_event(state, 105.0, {"a"}) == DeadlineExtended(1)
    state = after(state, DeadlineExtended(1), now_s=105.0)
    assert next_decision_s(state) == 660.0
    assert decide_event(state, 300.0, {"a", "c"}) == CohortSelected(1, 0, ("c",))


def test_when_everybody_has_declined_a_prediction_changes_nothing():
    state = after(paced(), CohortSelected(1, 0, ("a", "b"), {}, 45.0), now_s=60.0)
    state = after(state, TaskDeclined(1, "a", "memory", "too big"), TaskDeclined(1, "b", "memory", "too big"))
    assert next_decision_s(state) == 70.0
    assert decide_event(state, 70.0, {"a", "b"}) == RoundRetried(1, 1)


def test_a_round_that_is_tried_again_or_resumed_waits_for_all_anew():
    state = after(paced(quorum=0.5), CohortSelected(1, 0, ("a", "b"), {}, 45.0), DeadlineExtended(1), now_s=60.0)
    again = after(
        state, RoundRetried(1, 1), CohortSelected(1, 1, ("a", "b")), UpdateAccepted(1, update("a", 1)), now_s=660.0
    )
    assert decide_event(again, 661.0, {"a", "b"}) is None
    resumed = after(state, JobEnded("stopped"), JobResumed(), UpdateAccepted(1, update("a", 1)), now_s=700.0)
    assert decide_event(resumed, 701.0, {"a", "b"}) is None
    assert next_decision_s(resumed) == 1300.0


def test_what_a_replacement_has_to_do_is_noted_too_and_only_for_its_round():
    state = after(paced(), CohortSelected(1, 0, ("a", "b"), {"a": 1.0, "b": 1.0}, 45.0), TaskDeclined(1, "a", "x", "y"))
    fact = decide_event(state, 0.0, {"a", "b", "c"}, lambda device: asking(4.0))
    assert fact == CohortSelected(1, 0, ("c",), {"c": 4.0})
    state = after(
        state, fact, UpdateAccepted(1, update("c", 1), 20.0), UpdateAccepted(1, update("b", 1), 9.0), RoundClosed(1)
    )
    assert state.deadline_s == 45.0
    state = after(state, committed(1), CohortSelected(2, 0, ("b", "c")), UpdateAccepted(2, update("c", 2), 30.0))
    assert state.took["c"] == ((1, 20.0, 4.0, 0.0, None, 1, 0), (2, 30.0, 1.0, 0.0, None, 1, 0))


def test_a_method_that_does_not_say_what_a_round_takes_has_rounds_that_take_the_same():
    state = after(begun(deadline_s=600.0, deadline="predicted"), CohortSelected(0, 0, ("a",)))
    state = after(state, UpdateAccepted(0, update("a"), 40.0), RoundClosed(0), committed(0))
    assert decide_event(state, 0.0, {"a"}) == CohortSelected(1, 0, ("a",), {}, 60.0)

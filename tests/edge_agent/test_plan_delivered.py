"""An update waits in the outbox until it is acknowledged."""

from __future__ import annotations

import math

from planned import MEANS, A, B, after, claim, done, task, update

from fedquilt.core import RESEND
from fedquilt.edge_agent import state_machine
from fedquilt.edge_agent.state_machine import (
    MAX_JOBS,
    BlobFetched,
    CountedRound,
    DeleteUpdate,
    DeviceState,
    OutboxUpdate,
    PublishClaim,
    SendUpdate,
    SessionStarted,
    StartTask,
    StopTask,
    TaskCancelled,
    TaskCompleted,
    TaskReceived,
    TimerFired,
    UpdateAcked,
    advance,
    next_due_s,
)
from fedquilt.wire import Claim


def test_a_result_is_offered_at_once_and_then_ever_more_rarely() -> None:
    """5, 10, 20, 40, 60, 60 seconds: never given up."""
    state, actions = after(TaskReceived(task()), TaskCompleted(update(), False))
    assert actions == (SendUpdate(update()),)
    waits, now_s = [], 0.0
    for _ in range(6):
        waits.append(next_due_s(state) - now_s)
        now_s = next_due_s(state)
        state, actions = advance(state, TimerFired(), now_s)
        assert actions == (SendUpdate(update()),)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_time_that_is_not_due_brings_nothing() -> None:
    assert advance(done(), TimerFired(), RESEND.first_s / 2)[1] == ()


def test_a_new_session_offers_everything_at_once() -> None:
    state, actions = advance(done(), SessionStarted(), 1.0)
    assert actions == (SendUpdate(update()),)
    assert next_due_s(state) == 1.0 + RESEND.first_s


def test_a_task_whose_result_waits_in_the_outbox_is_answered_by_it_under_the_new_attempt() -> None:
    _, actions = advance(done(), TaskReceived(task(attempt=3)), 1.0)
    assert actions == (SendUpdate(update(attempt=3)),)


def test_an_acknowledged_update_is_gone_and_its_task_ignored_for_ever() -> None:
    state, actions = advance(done(), UpdateAcked(("j-1", 0), True), 1.0)
    assert actions == ()
    assert next_due_s(state) == math.inf
    claim = Claim(
        job="j-1",
        round=0,
        attempt=0,
        accepted=False,
        code="counted",
        reason=state_machine.COUNTED_REASON,
        last_counted_round=0,
    )
    assert advance(state, TaskReceived(task()), 2.0) == (state, (PublishClaim(claim),))
    assert StartTask(task(1)) in advance(state, TaskReceived(task(1)), 2.0)[1]


def test_a_coordinator_of_a_later_start_may_ask_for_a_round_that_was_counted() -> None:
    state, _ = advance(done(), UpdateAcked(("j-1", 0), True, epoch=4), 1.0)
    _, refused = advance(state, TaskReceived(task(epoch=2)), 2.0)
    told = [
        (each.claim.code, each.claim.last_counted_round, each.claim.epoch)
        for each in refused
        if isinstance(each, PublishClaim)
    ]
    assert told == [("counted", 0, 4)]
    state, actions = advance(state, TaskReceived(task(epoch=5)), 2.0)
    assert StartTask(task(epoch=5)) in actions
    assert [
        (each.claim.accepted, each.claim.last_counted_round) for each in actions if isinstance(each, PublishClaim)
    ] == [(True, 0)]
    state, _ = after(TaskCompleted(update(epoch=5), False), UpdateAcked(("j-1", 0), True, epoch=4), state=state)
    assert ("j-1", 0) in state.outbox  # an answer of the earlier start, which came late
    state, _ = advance(state, UpdateAcked(("j-1", 0), True, epoch=5), 3.0)
    assert (dict(state.outbox), state.counted_rounds["j-1"]) == ({}, CountedRound(0, 5))


def test_a_restored_coordinator_takes_the_place_of_the_one_before_it() -> None:
    state, _ = after(UpdateAcked(("j-1", 4), True, epoch=1), TaskReceived(task(5, epoch=1)))
    state, actions = advance(state, TaskReceived(task(3, epoch=2)), 1.0)
    assert [type(each) for each in actions] == [StopTask, PublishClaim, StartTask]
    assert advance(state, TaskReceived(task(5, epoch=1)), 1.0) == (state, ())
    state, _ = after(TaskCompleted(update(3, epoch=2), False), UpdateAcked(("j-1", 3), True, epoch=2), state=state)
    assert state.counted_rounds["j-1"] == CountedRound(3, 2)


def test_a_late_answer_to_an_earlier_round_takes_nothing_back() -> None:
    """A restarted coordinator answers round 0 again after round 1 counted, as the first answer was lost."""
    state, _ = after(TaskCompleted(update(0, epoch=1), False), TaskCompleted(update(1, epoch=1), False))
    state, _ = after(UpdateAcked(("j-1", 1), True, epoch=1), UpdateAcked(("j-1", 0), True, epoch=2), state=state)
    assert (dict(state.outbox), state.counted_rounds["j-1"]) == ({}, CountedRound(1, 1))


def test_an_update_from_a_state_that_the_coordinator_does_not_have_is_dropped_and_worked_for_again() -> None:
    state, _ = after(TaskReceived(task(state=A.sha256)), TaskCompleted(update(state=A.sha256), True))
    kept, actions = advance(state, TaskReceived(task(state=A.sha256, epoch=2)), 1.0)
    assert actions == (SendUpdate(update(state=A.sha256, epoch=2)),)
    assert ("j-1", 0) in kept.outbox
    state, actions = advance(state, TaskReceived(task(state=B.sha256, epoch=2)), 1.0)
    assert actions[0] == DeleteUpdate(update(state=A.sha256))
    assert StartTask(task(state=B.sha256, epoch=2)) in actions
    assert dict(state.outbox) == {}


def test_a_refused_update_is_gone_but_its_task_may_be_asked_again() -> None:
    state, _ = advance(done(), UpdateAcked(("j-1", 0), False), 1.0)
    assert next_due_s(state) == math.inf
    assert StartTask(task()) in advance(state, TaskReceived(task()), 2.0)[1]


def test_a_refusal_of_an_earlier_attempt_leaves_what_was_offered_for_a_later_one() -> None:
    state, actions = advance(done(), TaskReceived(task(attempt=3)), 1.0)
    assert actions == (SendUpdate(update(attempt=3)),)
    assert advance(state, UpdateAcked(("j-1", 0), False, attempt=0), 2.0) == (state, ())
    refused, _ = advance(state, UpdateAcked(("j-1", 0), False, attempt=3), 2.0)
    counted, _ = advance(state, UpdateAcked(("j-1", 0), True, attempt=0), 2.0)
    assert (dict(refused.outbox), dict(counted.outbox)) == ({}, {})


def test_what_was_counted_is_remembered_for_the_latest_jobs() -> None:
    state = DeviceState(MEANS)
    for number in range(MAX_JOBS):
        state, _ = advance(state, UpdateAcked((f"j-{number}", 0), True), 0.0)
    state, _ = after(UpdateAcked(("j-0", 1), True), UpdateAcked(("new", 0), True), state=state)
    assert len(state.counted_rounds) == MAX_JOBS
    assert state.counted_rounds["j-0"] == CountedRound(1)
    assert "j-1" not in state.counted_rounds


def test_the_next_round_waits_while_a_private_state_is_undecided() -> None:
    state, actions = advance(done(private=True), TaskReceived(task(1)), 1.0)
    assert actions == (claim(1),)
    assert advance(state, UpdateAcked(("j-1", 0), True), 2.0)[1] == (StartTask(task(1)),)
    assert advance(state, UpdateAcked(("j-1", 0), False), 2.0)[1] == (StartTask(task(1)),)


def test_the_next_round_does_not_wait_for_an_update_without_private_state() -> None:
    assert StartTask(task(1)) in advance(done(private=False), TaskReceived(task(1)), 1.0)[1]
    other = task(job="k-1")
    assert StartTask(other) in advance(done(private=True), TaskReceived(other), 1.0)[1]


def test_a_task_that_turns_out_to_be_counted_is_given_up() -> None:
    state = advance(DeviceState(MEANS), TaskReceived(task()), 0.0)[0]
    assert state.open_task is not None
    state, actions = advance(state, UpdateAcked(("j-1", 0), True), 1.0)
    assert actions == (StopTask(),)
    assert state.open_task is None


def test_a_clear_leaves_the_outbox_alone() -> None:
    state, actions = advance(done(), TaskCancelled(), 1.0)
    assert actions == ()
    assert len(state.outbox) == 1


# -- time for its way -----------------------------------------------------------------------------


def at_work(
    state: DeviceState, *, now_s: float, round: int = 0, fetched_s: float = 0.0, deadline_s: float = 60.0
) -> DeviceState:
    """A task that arrived `fetched_s` ago, whose one blob has come now."""
    state, _ = advance(state, TaskReceived(task(round, deadline_s=deadline_s), frozenset({A})), now_s - fetched_s)
    return advance(state, BlobFetched(A.sha256), now_s)[0]


def test_before_the_first_update_its_way_is_left_as_long_as_the_model_took_to_come() -> None:
    """8 s of 60; of 20, whose rest is 12, no more than half of those: something has to be left for the work."""
    assert state_machine.upload_reserve_s(at_work(DeviceState(MEANS), now_s=8.0, fetched_s=8.0), 8.0) == 8.0
    assert (
        state_machine.upload_reserve_s(at_work(DeviceState(MEANS), now_s=8.0, fetched_s=8.0, deadline_s=20.0), 8.0)
        == 6.0
    )


def test_later_the_middle_of_the_last_three_ways_is_left() -> None:
    """3, 40, 5 and 4 s: the first is forgotten, and the one that met an outage does not count."""
    state, now_s = DeviceState(MEANS), 0.0
    for round, way_s in enumerate((3.0, 40.0, 5.0, 4.0)):
        state = at_work(state, now_s=now_s, round=round)
        state, _ = advance(state, TaskCompleted(update(round), False), now_s)
        now_s += way_s
        state, _ = advance(state, UpdateAcked(("j-1", round), True), now_s)
    assert state_machine.upload_reserve_s(at_work(state, now_s=now_s + 9.0, round=4, fetched_s=9.0), now_s + 9.0) == 5.0


def test_an_update_that_is_sent_under_a_new_attempt_has_been_on_its_way_since_it_was_made() -> None:
    state = at_work(DeviceState(MEANS), now_s=0.0)
    state, _ = advance(state, TaskCompleted(update(), False), 0.0)
    state, _ = advance(state, TaskReceived(task(attempt=1)), 20.0)
    state, _ = advance(state, UpdateAcked(("j-1", 0), True), 21.0)
    assert state.upload_times_s == {"j-1": (21.0,)}


def test_a_refused_update_and_one_from_before_a_restart_tell_nothing_of_the_way() -> None:
    refused, _ = advance(done(), UpdateAcked(("j-1", 0), False), 30.0)
    older = DeviceState(MEANS, outbox={("j-1", 0): OutboxUpdate(update(), True, 0.0)})
    recovered, _ = advance(older, UpdateAcked(("j-1", 0), True), 30.0)
    assert refused.upload_times_s == recovered.upload_times_s == {}

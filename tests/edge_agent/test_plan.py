"""What the agent does next; every rule is one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MEANS, A, B, after, claim, task, update

from fedquilt.core import REFETCH, Task
from fedquilt.edge_agent import state_machine
from fedquilt.edge_agent.state_machine import (
    MAX_KILLS,
    BlobFetched,
    CancelFetch,
    CountedRound,
    DeviceState,
    Event,
    FetchBlobs,
    PublishClaim,
    SendUpdate,
    SessionStarted,
    StartTask,
    StopTask,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskReceived,
    TimerFired,
    UpdateAcked,
    advance,
    next_due_s,
)
from fedquilt.wire import Claim


# -- a process that is killed ----------------------------------------------------------------------
def test_a_task_whose_process_is_killed_from_outside_is_begun_again_twice_then_refused() -> None:
    killed = TaskFailed("memory", "killed by the kernel", ran_out_of_memory=True, killed_externally=True)
    state, _ = after(TaskReceived(task()))
    for _ in range(MAX_KILLS):
        state, actions = advance(state, killed, 1.0)
        assert actions == (StartTask(task()),)
        assert state_machine.plan_limit_bytes(state, task()) == MEANS.budget_bytes  # the same bits as the first time
    state, actions = advance(state, killed, 1.0)
    stop, say = actions
    assert stop == StopTask()
    assert isinstance(say, PublishClaim)
    assert (say.claim.code, say.claim.reason) == ("memory", "killed by the kernel (3 times)")
    assert state_machine.plan_limit_bytes(state, task()) < MEANS.budget_bytes


def test_the_kills_of_one_task_are_not_held_against_the_next() -> None:
    killed = TaskFailed("failed", "killed", killed_externally=True)
    state, _ = after(TaskReceived(task()), killed, killed)
    state, actions = advance(state, TaskReceived(task(round=1)), 1.0)
    assert StartTask(task(round=1)) in actions
    assert advance(state, killed, 1.0)[1] == (StartTask(task(round=1)),)
    assert StartTask(task(round=1)) not in advance(state, TaskFailed("failed", "a bug"), 1.0)[1]


# -- taking a task --------------------------------------------------------------------------------
def test_a_task_is_claimed_and_begins_when_its_last_blob_is_here() -> None:
    state, actions = after(TaskReceived(task(), frozenset({B, A})))
    assert actions == (claim(), FetchBlobs((A, B)))
    state, actions = advance(state, BlobFetched(A.sha256), 0.0)
    assert actions == ()
    state, actions = advance(state, BlobFetched(B.sha256), 0.0)
    assert actions == (StartTask(task()),)
    assert state.open_task is not None
    assert state.open_task.down_bytes == 30
    assert after(TaskReceived(task()))[1] == (claim(), StartTask(task()))  # all are here at once


def test_a_task_repeated_is_claimed_again_and_not_begun_again() -> None:
    state, actions = after(TaskReceived(task()), TaskReceived(task(attempt=1, deadline_s=5.0)))
    assert actions == (claim(attempt=1),)
    assert state.open_task is not None
    assert state.open_task.is_running
    assert state.open_task.task.attempt == 1


@pytest.mark.parametrize(
    ("first", "then"), [(task(), task(params={"lr": 0.5})), (task(5), task(job="k-1")), (task(), task(1))]
)
def test_other_work_another_job_and_a_later_round_supersede_the_task_in_hand(first: Task, then: Task) -> None:
    claimed = PublishClaim(Claim(job=then.job, round=then.round, attempt=0, accepted=True))
    assert after(TaskReceived(first), TaskReceived(then))[1] == (StopTask(), claimed, StartTask(then))


def test_a_later_round_lets_go_of_blobs_and_fetches_on_what_both_need() -> None:
    state, _ = after(TaskReceived(task(), frozenset({A, B})))
    assert advance(state, TaskReceived(task(1), frozenset({B})), 0.0)[1] == (CancelFetch(A.sha256), claim(1))


def test_an_earlier_round_that_comes_late_is_ignored() -> None:
    state, _ = after(TaskReceived(task(2)))
    assert advance(state, TaskReceived(task(1)), 0.0) == (state, ())


def test_a_cleared_task_is_given_up() -> None:
    state, (stop, say) = after(TaskReceived(task()), TaskCancelled())
    assert (stop, state.open_task) == (StopTask(), None)
    assert isinstance(say, PublishClaim)
    assert (say.claim.accepted, say.claim.code, say.claim.round) == (False, "cleared", 0)
    assert after(TaskReceived(task(), frozenset({A})), TaskCancelled())[1][0] == CancelFetch(A.sha256)
    assert advance(state, TaskCancelled(), 0.0)[1] == ()


def test_a_superseding_task_fetches_anew_what_had_failed_before() -> None:
    state, _ = after(TaskReceived(task(), frozenset({A})), BlobFetched(A.sha256, "gone"))
    assert advance(state, TaskReceived(task(1), frozenset({A})), 0.0)[1] == (claim(1), FetchBlobs((A,)))


# -- fetching -------------------------------------------------------------------------------------
def test_a_blob_that_cannot_be_had_is_asked_for_again_ever_more_rarely() -> None:
    state, actions = after(TaskReceived(task(), frozenset({A})), BlobFetched(A.sha256, "not offered"))
    assert actions == ()
    assert next_due_s(state) == REFETCH.first_s
    state, actions = advance(state, TimerFired(), REFETCH.first_s)
    assert actions == (FetchBlobs((A,)),)
    state, _ = advance(state, BlobFetched(A.sha256, "not offered"), 10.0)
    assert next_due_s(state) == 10.0 + 2 * REFETCH.first_s
    assert advance(state, BlobFetched(A.sha256), 11.0)[1] == (StartTask(task()),)


def test_a_blob_of_no_task_is_nothing() -> None:
    assert after(BlobFetched(A.sha256)) == (DeviceState(MEANS), ())


# -- any order of events --------------------------------------------------------------------------
EVENTS = st.one_of(
    st.builds(
        TaskReceived,
        st.builds(task, st.integers(0, 2), attempt=st.integers(0, 1), engine=st.sampled_from(["numpy", "torch"])),
        st.sets(st.sampled_from([A, B])).map(frozenset),
    ),
    st.builds(BlobFetched, st.sampled_from([A.sha256, B.sha256]), st.sampled_from([None, "gone"])),
    st.builds(UpdateAcked, st.tuples(st.just("j-1"), st.integers(0, 2)), st.booleans()),
    st.sampled_from([SessionStarted(), TaskCancelled(), TimerFired(), TaskFailed("data", "none")]),
    st.booleans(),  # the work in hand is done, with private state or without
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_whatever_happens_one_task_is_worked_on_at_a_time_and_none_that_was_counted(events: list[Event | bool]) -> None:
    state, busy, now_s = DeviceState(MEANS), False, 0.0
    for event in events:
        now_s += 3.0
        if isinstance(event, bool):
            if state.open_task is None or not state.open_task.is_running:
                continue
            event, busy = TaskCompleted(update(state.open_task.task.round), event), False
        elif isinstance(event, TaskFailed) and busy:
            busy = False  # the worker is free; the plan may stop it all the same
        state, actions = advance(state, event, now_s)
        for action in actions:
            if isinstance(action, StopTask):
                busy = False
            elif isinstance(action, StartTask):
                assert not busy
                assert action.task.round > state.counted_rounds.get("j-1", CountedRound(-1)).round
                assert state.open_task is not None
                assert not state.open_task.missing_blobs
                busy = True
            elif isinstance(action, SendUpdate):
                assert (action.update.job, action.update.round) in state.outbox
        assert busy == (state.open_task is not None and state.open_task.is_running)
        assert next_due_s(advance(state, TimerFired(), now_s)[0]) > now_s

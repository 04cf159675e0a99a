"""What the agent does next; every rule is one sentence."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.core import BlobRef, Encoding, OperatingPoint, Reading, Task, Update, Usage, Work
from fedquilt.edge_agent import plan
from fedquilt.edge_agent.events import (
    REFETCH_S,
    RESEND_S,
    Abandon,
    Acked,
    Action,
    Arrived,
    Begin,
    Cleared,
    Connected,
    Done,
    Drop,
    Event,
    Failed,
    Fetch,
    Fetched,
    Learn,
    Means,
    Open,
    Say,
    Send,
    State,
    Stop,
    Tick,
)
from fedquilt.edge_agent.plan import KILLED_MOST, REMEMBERED_JOBS, REMEMBERED_WORKLOADS, RESEND_MOST_S, advance, next_s
from fedquilt.edge_agent.power.learned import Learned, Seen, taught
from fedquilt.edge_agent.remembered import Counted
from fedquilt.edge_agent.task.budget import ASSUMED_BASE_BYTES
from fedquilt.wire import Claim

MEANS = Means(budget_bytes=100 << 20, engines=("numpy",), methods=("fedavg",))
A, B = BlobRef(sha256="a" * 64, size=10), BlobRef(sha256="b" * 64, size=20)


def task(round: int = 0, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "job": "j-1",
        "round": round,
        "attempt": 0,
        "method": "fedavg",
        "engine": "numpy",
        "actions": ("work",),
        "params": {},
        "bundles": {"model": A},
        "work": Work(peak_bytes=1 << 20),
        "seed": 1,
        "deadline_s": 60.0,
    }
    return Task(**{**values, **changes})


def update(round: int = 0, base_bytes: int | None = None, attempt: int = 0, **changes: Any) -> Update:
    values: dict[str, Any] = {"job": "j-1", "round": round, "attempt": attempt, "device": "d", "weight": 1.0}
    return Update(**{**values, "bundles": {}, "metrics": {}, "usage": Usage(base_bytes=base_bytes), **changes})


def claim(round: int = 0, attempt: int = 0) -> Say:
    return Say(Claim(job="j-1", round=round, attempt=attempt, accepted=True))


def after(*events: Event, now_s: float = 0.0, state: State = State(MEANS)) -> tuple[State, tuple[Action, ...]]:
    """The state after events, and what the last one asked for."""
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = advance(state, event, now_s)
    return state, actions


def refusal(wanted: Task, reading: Reading = Reading()) -> Claim:
    _, actions = advance(State(MEANS), Arrived(wanted), 0.0, reading)
    (say,) = actions
    assert isinstance(say, Say)
    assert not say.claim.accepted
    return say.claim


# -- a process that is killed ----------------------------------------------------------------------


def test_a_task_whose_process_is_killed_from_outside_is_begun_again_twice_then_refused() -> None:
    """An operator, or a kernel that others have brought out of memory, does not cost the board its round."""
    killed = Failed("memory", "killed by the kernel", overrun=True, killed=True)
    state, _ = after(Arrived(task()))
    for _ in range(KILLED_MOST):
        state, actions = advance(state, killed, 1.0)
        assert actions == (Begin(task()),)
        assert plan.plannable_bytes(state, task()) == MEANS.budget_bytes  # the same bits as the first time
    state, actions = advance(state, killed, 1.0)
    stop, say = actions
    assert stop == Stop()
    assert isinstance(say, Say)
    assert (say.claim.code, say.claim.reason) == ("memory", "killed by the kernel (3 times)")
    assert plan.plannable_bytes(state, task()) < MEANS.budget_bytes


def test_the_kills_of_one_task_are_not_held_against_the_next() -> None:
    """Each begins with both tries; a failure of its own doing is refused at once."""
    killed = Failed("failed", "killed", killed=True)
    state, _ = after(Arrived(task()), killed, killed)
    state, actions = advance(state, Arrived(task(round=1)), 1.0)
    assert Begin(task(round=1)) in actions
    assert advance(state, killed, 1.0)[1] == (Begin(task(round=1)),)
    assert Begin(task(round=1)) not in advance(state, Failed("failed", "a bug"), 1.0)[1]


# -- taking a task --------------------------------------------------------------------------------


def test_a_task_is_claimed_and_its_missing_blobs_are_fetched() -> None:
    """Nothing is begun before they are here."""
    _, actions = after(Arrived(task(), frozenset({B, A})))
    assert actions == (claim(), Fetch((A, B)))


def test_a_task_begins_when_its_last_blob_is_here() -> None:
    """What came is counted as downloaded."""
    state, actions = after(Arrived(task(), frozenset({A, B})), Fetched(A.sha256))
    assert actions == ()
    state, actions = advance(state, Fetched(B.sha256), 0.0)
    assert actions == (Begin(task()),)
    assert state.open is not None
    assert state.open.down_bytes == 30


def test_a_task_whose_blobs_are_all_here_begins_at_once() -> None:
    """No transfer, no wait."""
    assert after(Arrived(task()))[1] == (claim(), Begin(task()))


def test_a_task_repeated_is_claimed_again_and_not_begun_again() -> None:
    """The first claim may be lost; the attempt is the coordinator's latest."""
    state, actions = after(Arrived(task()), Arrived(task(attempt=1, deadline_s=5.0)))
    assert actions == (claim(attempt=1),)
    assert state.open is not None
    assert state.open.working
    assert state.open.task.attempt == 1


def test_the_same_round_with_other_work_starts_over() -> None:
    """What is worked on would answer another question."""
    other = task(params={"lr": 0.5})
    assert after(Arrived(task()), Arrived(other))[1] == (Stop(), claim(), Begin(other))


def test_a_later_round_supersedes_the_task_in_hand() -> None:
    """The old work is killed, the old blobs are let go of, what both need is fetched on."""
    state, _ = after(Arrived(task(), frozenset({A, B})))
    assert advance(state, Arrived(task(1), frozenset({B})), 0.0)[1] == (Abandon(A.sha256), claim(1))
    state, _ = after(Arrived(task()))
    assert advance(state, Arrived(task(1)), 0.0)[1] == (Stop(), claim(1), Begin(task(1)))


def test_another_job_supersedes_the_task_in_hand_whatever_its_round() -> None:
    """The coordinator runs one job at a time, and has gone on."""
    other = task(job="k-1")
    assert Begin(other) in after(Arrived(task(5)), Arrived(other))[1]


def test_an_earlier_round_that_comes_late_is_ignored() -> None:
    """Messages overtake each other."""
    state, _ = after(Arrived(task(2)))
    assert advance(state, Arrived(task(1)), 0.0) == (state, ())


def test_a_cleared_task_is_given_up() -> None:
    """Its process is killed, its half blobs go, and the coordinator hears of it: it may not have been the one."""
    state, (stop, say) = after(Arrived(task()), Cleared())
    assert (stop, state.open) == (Stop(), None)
    assert isinstance(say, Say)
    assert (say.claim.accepted, say.claim.code, say.claim.round) == (False, "cleared", 0)
    assert after(Arrived(task(), frozenset({A})), Cleared())[1][0] == Abandon(A.sha256)
    assert advance(state, Cleared(), 0.0)[1] == ()


def test_a_superseding_task_fetches_anew_what_had_failed_before() -> None:
    """A blob that waits for its next try is not under way."""
    state, _ = after(Arrived(task(), frozenset({A})), Fetched(A.sha256, "gone"))
    assert advance(state, Arrived(task(1), frozenset({A})), 0.0)[1] == (claim(1), Fetch((A,)))


# -- refusing one ---------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_with_the_mend() -> None:
    """The coordinator is newer than this agent."""
    said = refusal(task(method="fedfuture"))
    assert said.code == "method"
    assert "'fedfuture'" in said.reason
    assert "install" in said.reason


def test_an_engine_that_is_not_here_is_refused_with_those_that_are() -> None:
    """A board that only stitches has no torch."""
    said = refusal(task(engine="torch"))
    assert said.code == "engine"
    assert "numpy" in said.reason


def test_a_codec_that_is_not_known_here_is_refused_with_those_that_are() -> None:
    """A coordinator that is newer than this device."""
    said = refusal(task(wire=Encoding(codec="wavelet")))
    assert said.code == "codec"
    assert "'wavelet' here (known: raw, fp16, int8, topk)" in said.reason


def test_work_above_the_budget_is_refused_with_numbers() -> None:
    """1000 MB for the work do not go into 105 MB."""
    said = refusal(task(work=Work(peak_bytes=1000 * 10**6)))
    assert said.code == "memory"
    assert "1000 MB for the work" in said.reason
    assert "budget here is 105 MB" in said.reason


def test_the_engines_own_size_counts_against_the_budget() -> None:
    """The budget is the whole process's."""
    room = MEANS.budget_bytes - ASSUMED_BASE_BYTES["numpy"]
    assert after(Arrived(task(work=Work(peak_bytes=room))))[0].open is not None
    assert refusal(task(work=Work(peak_bytes=room + 1))).code == "memory"


def test_work_above_what_the_board_has_left_is_refused() -> None:
    """The budget would allow it, the board cannot give it; a board that cannot tell is believed."""
    said = refusal(task(), Reading(available_bytes=1 << 20))
    assert said.code == "memory"
    assert "the board has 1 MB left" in said.reason
    assert after(Arrived(task()))[0].open is not None


def test_the_engines_size_as_seen_here_replaces_the_assumed_one() -> None:
    """The least that was seen: a warm process holds more than its engine."""
    state, _ = after(Arrived(task()), Done(update(base_bytes=90 << 20), False), Arrived(task(1)))
    state, _ = advance(state, Done(update(1, base_bytes=95 << 20), False), 0.0)
    assert state.base_bytes == {"numpy": 90 << 20}
    _, actions = advance(state, Arrived(task(2, work=Work(peak_bytes=11 << 20))), 0.0)
    assert isinstance(actions[0], Say)
    assert actions[0].claim.code == "memory"


def test_a_task_that_ran_out_of_memory_is_planned_smaller_the_next_time_and_refused_once_nothing_smaller_fits() -> None:
    """Beside 38 MB of the engine, 66.8 MB are planned with, then 53.4, then 42.8; 30 MB of work grow to 37.5, 46.9
    and 58.6 MB, which still fit, and then to 73.2 MB, which do not."""
    asked = task(work=Work(peak_bytes=30 * 10**6))
    room, state = MEANS.budget_bytes - ASSUMED_BASE_BYTES["numpy"], State(MEANS)
    for failures in range(3):
        state, actions = after(Arrived(again(asked, failures)), state=state)
        assert actions[-1] == Begin(again(asked, failures))
        planned = plan.plannable_bytes(state, asked)
        assert planned == ASSUMED_BASE_BYTES["numpy"] + int(room / 1.25**failures)
        state, _ = after(Failed("memory", "it was killed", overrun=True), state=state)
    state, _ = after(Arrived(again(asked, 3)), Failed("memory", "it was killed", overrun=True), state=state)
    _, actions = after(Arrived(again(asked, 4)), state=state)
    assert isinstance(actions[0], Say)
    assert actions[0].claim.code == "memory"
    assert "2.44 times what was predicted" in actions[0].claim.reason


def again(asked: Task, attempt: int) -> Task:
    """Whatever is needed is on the device."""
    return msgspec.structs.replace(asked, attempt=attempt, bundles={})


def test_an_engine_that_refuses_beforehand_teaches_nothing() -> None:
    """Planning with even less would have it refuse the more."""
    state, _ = after(Arrived(task()), Failed("memory", "one example does not fit"))
    assert plan.plannable_bytes(state, task()) == MEANS.budget_bytes


def test_what_a_method_taught_of_memory_holds_for_it_and_its_engine_alone() -> None:
    """The peak beside the engine was 1.5 times what was planned: 1 + 0.3 / 2 = 1.15, one step of 1.25."""
    usage = Usage(base_bytes=40 * 10**6, peak_bytes=70 * 10**6)
    seen = msgspec.structs.replace(update(), usage=usage)
    state, _ = after(Arrived(task()), Done(seen, False, planned_bytes=20 * 10**6))
    assert state.cautions[("fedavg", "numpy")].ratio == pytest.approx(1.15)
    assert plan.plannable_bytes(state, task()) < MEANS.budget_bytes
    assert plan.plannable_bytes(state, task(method="fedprox")) == MEANS.budget_bytes
    untold, _ = after(Arrived(task()), Done(seen, False))
    assert not untold.cautions


def test_a_refused_task_still_ends_the_one_in_hand() -> None:
    """The coordinator no longer wants the old one."""
    state, actions = after(Arrived(task()), Arrived(task(1, engine="torch")))
    assert actions[0] == Stop()
    assert state.open is None


def test_a_refusal_is_repeated_with_its_task_and_reconsidered_at_the_next_attempt() -> None:
    """The claim may be lost; the work is not tried again for that."""
    state, (_, said) = after(Arrived(task()), Failed("data", "no examples"))
    assert advance(state, Arrived(task(deadline_s=1.0)), 0.0)[1] == (said,)
    assert Begin(task(attempt=1)) in advance(state, Arrived(task(attempt=1)), 0.0)[1]
    assert Begin(task()) in after(Cleared(), Arrived(task()), state=state)[1]


def test_work_that_fails_becomes_a_refusal_with_its_reason() -> None:
    """And the device is free again, with no process left that has failed once."""
    state, (stop, say) = after(Arrived(task()), Failed("memory", "too much"))
    assert stop == Stop()
    assert isinstance(say, Say)
    assert (say.claim.accepted, say.claim.code, say.claim.reason) == (False, "memory", "too much")
    assert state.open is None


def test_a_failure_without_a_task_is_nothing() -> None:
    """Its task has been cleared meanwhile."""
    assert after(Failed("disk", "full")) == (State(MEANS), ())


# -- fetching -------------------------------------------------------------------------------------


def test_a_blob_that_cannot_be_had_is_asked_for_again_ever_more_rarely() -> None:
    """First after REFETCH_S, then after twice as long."""
    state, actions = after(Arrived(task(), frozenset({A})), Fetched(A.sha256, "not offered"))
    assert actions == ()
    assert next_s(state) == REFETCH_S
    state, actions = advance(state, Tick(), REFETCH_S)
    assert actions == (Fetch((A,)),)
    state, _ = advance(state, Fetched(A.sha256, "not offered"), 10.0)
    assert next_s(state) == 10.0 + 2 * REFETCH_S
    assert advance(state, Fetched(A.sha256), 11.0)[1] == (Begin(task()),)


def test_a_blob_of_no_task_is_nothing() -> None:
    """It was fetched for a task that is gone."""
    assert after(Fetched(A.sha256)) == (State(MEANS), ())


# -- delivering -----------------------------------------------------------------------------------


def done(private: bool = False, round: int = 0) -> State:
    return after(Arrived(task(round)), Done(update(round), private))[0]


def test_a_result_is_offered_at_once_and_then_ever_more_rarely() -> None:
    """5, 5, 10, 20, 40, 60, 60 seconds: never given up."""
    state, actions = after(Arrived(task()), Done(update(), False))
    assert actions == (Send(update()),)
    waits, now_s = [], 0.0
    for _ in range(7):
        waits.append(next_s(state) - now_s)
        now_s = next_s(state)
        state, actions = advance(state, Tick(), now_s)
        assert actions == (Send(update()),)
    assert waits == [RESEND_S, 5.0, 10.0, 20.0, 40.0, RESEND_MOST_S, RESEND_MOST_S]


def test_time_that_is_not_due_brings_nothing() -> None:
    """A tick is not an offer."""
    assert advance(done(), Tick(), RESEND_S / 2)[1] == ()


def test_a_new_session_offers_everything_at_once() -> None:
    """The broker may have lost what it was given."""
    state, actions = advance(done(), Connected(), 1.0)
    assert actions == (Send(update()),)
    assert next_s(state) == 1.0 + RESEND_S


def test_a_task_whose_result_waits_in_the_outbox_is_answered_by_it_under_the_new_attempt() -> None:
    """The work is not done twice."""
    _, actions = advance(done(), Arrived(task(attempt=3)), 1.0)
    assert actions == (Send(update(attempt=3)),)


def test_an_acknowledged_update_is_gone_and_its_task_ignored_for_ever() -> None:
    """An old message must not have it worked for again."""
    state, actions = advance(done(), Acked(("j-1", 0), True), 1.0)
    assert actions == ()
    assert next_s(state) == math.inf
    claim = Claim(job="j-1", round=0, attempt=0, accepted=False, code="counted", reason=plan.COUNTED, counted=0)
    assert advance(state, Arrived(task()), 2.0) == (state, (Say(claim),))
    assert Begin(task(1)) in advance(state, Arrived(task(1)), 2.0)[1]


def test_a_coordinator_of_a_later_start_may_ask_for_a_round_that_was_counted() -> None:
    """Its log has lost it; the claim says so. One of an earlier start is refused, and is told which one it was."""
    state, _ = advance(done(), Acked(("j-1", 0), True, epoch=4), 1.0)
    _, refused = advance(state, Arrived(task(epoch=2)), 2.0)
    told = [(each.claim.code, each.claim.counted, each.claim.epoch) for each in refused if isinstance(each, Say)]
    assert told == [("counted", 0, 4)]
    state, actions = advance(state, Arrived(task(epoch=5)), 2.0)
    assert Begin(task(epoch=5)) in actions
    assert [(each.claim.accepted, each.claim.counted) for each in actions if isinstance(each, Say)] == [(True, 0)]
    state, _ = after(Done(update(epoch=5), False), Acked(("j-1", 0), True, epoch=4), state=state)
    assert ("j-1", 0) in state.outbox  # an answer of the earlier start, which came late
    state, _ = advance(state, Acked(("j-1", 0), True, epoch=5), 3.0)
    assert (dict(state.outbox), state.counted["j-1"]) == ({}, Counted(0, 5))


def test_a_restored_coordinator_takes_the_place_of_the_one_before_it() -> None:
    """Its earlier round replaces the task in hand; what was counted later is forgotten once it counts."""
    state, _ = after(Acked(("j-1", 4), True, epoch=1), Arrived(task(5, epoch=1)))
    state, actions = advance(state, Arrived(task(3, epoch=2)), 1.0)
    assert [type(each) for each in actions] == [Stop, Say, Begin]
    assert advance(state, Arrived(task(5, epoch=1)), 1.0) == (state, ())
    state, _ = after(Done(update(3, epoch=2), False), Acked(("j-1", 3), True, epoch=2), state=state)
    assert state.counted["j-1"] == Counted(3, 2)


def test_an_update_from_a_state_that_the_coordinator_does_not_have_is_dropped_and_worked_for_again() -> None:
    """A restored coordinator has come to the same round by another way; a restarted one has the same state."""
    state, _ = after(Arrived(task(state=A.sha256)), Done(update(state=A.sha256), True))
    kept, actions = advance(state, Arrived(task(state=A.sha256, epoch=2)), 1.0)
    assert actions == (Send(update(state=A.sha256, epoch=2)),)
    assert ("j-1", 0) in kept.outbox
    state, actions = advance(state, Arrived(task(state=B.sha256, epoch=2)), 1.0)
    assert actions[0] == Drop(update(state=A.sha256))
    assert Begin(task(state=B.sha256, epoch=2)) in actions
    assert dict(state.outbox) == {}


def test_a_refused_update_is_gone_but_its_task_may_be_asked_again() -> None:
    """A stopped job refuses updates and, once resumed, asks for them anew."""
    state, _ = advance(done(), Acked(("j-1", 0), False), 1.0)
    assert next_s(state) == math.inf
    assert Begin(task()) in advance(state, Arrived(task()), 2.0)[1]


def test_what_was_counted_is_remembered_for_the_latest_jobs() -> None:
    """A bounded memory: the job longest without a contribution is forgotten."""
    state = State(MEANS)
    for number in range(REMEMBERED_JOBS):
        state, _ = advance(state, Acked((f"j-{number}", 0), True), 0.0)
    state, _ = after(Acked(("j-0", 1), True), Acked(("new", 0), True), state=state)
    assert len(state.counted) == REMEMBERED_JOBS
    assert state.counted["j-0"] == Counted(1)
    assert "j-1" not in state.counted


def test_the_next_round_waits_while_a_private_state_is_undecided() -> None:
    """Whether the last contribution counted decides what the next round begins from."""
    state, actions = advance(done(private=True), Arrived(task(1)), 1.0)
    assert actions == (claim(1),)
    assert advance(state, Acked(("j-1", 0), True), 2.0)[1] == (Begin(task(1)),)
    assert advance(state, Acked(("j-1", 0), False), 2.0)[1] == (Begin(task(1)),)


def test_the_next_round_does_not_wait_for_an_update_without_private_state() -> None:
    """Nor for another job's."""
    assert Begin(task(1)) in advance(done(private=False), Arrived(task(1)), 1.0)[1]
    other = task(job="k-1")
    assert Begin(other) in advance(done(private=True), Arrived(other), 1.0)[1]


def test_a_task_that_turns_out_to_be_counted_is_given_up() -> None:
    """An acknowledgement may come while the same round is being done again after a crash."""
    state = advance(State(MEANS), Arrived(task()), 0.0)[0]
    assert state.open is not None
    state, actions = advance(state, Acked(("j-1", 0), True), 1.0)
    assert actions == (Stop(),)
    assert state.open is None


def test_a_clear_leaves_the_outbox_alone() -> None:
    """The task is withdrawn when its update has come; the acknowledgement may still be on its way."""
    state, actions = advance(done(), Cleared(), 1.0)
    assert actions == ()
    assert len(state.outbox) == 1


# -- any order of events --------------------------------------------------------------------------

EVENTS = st.one_of(
    st.builds(
        Arrived,
        st.builds(task, st.integers(0, 2), attempt=st.integers(0, 1), engine=st.sampled_from(["numpy", "torch"])),
        st.sets(st.sampled_from([A, B])).map(frozenset),
    ),
    st.builds(Fetched, st.sampled_from([A.sha256, B.sha256]), st.sampled_from([None, "gone"])),
    st.builds(Acked, st.tuples(st.just("j-1"), st.integers(0, 2)), st.booleans()),
    st.sampled_from([Connected(), Cleared(), Tick(), Failed("data", "none")]),
    st.booleans(),  # the work in hand is done, with private state or without
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_whatever_happens_one_task_is_worked_on_at_a_time_and_none_that_was_counted(events: list[Event | bool]) -> None:
    """Nor is anything offered that is not in the outbox, or begun with blobs missing; and time always moves on."""
    state, busy, now_s = State(MEANS), False, 0.0
    for event in events:
        now_s += 3.0
        if isinstance(event, bool):
            if state.open is None or not state.open.working:
                continue
            event, busy = Done(update(state.open.task.round), event), False
        elif isinstance(event, Failed) and busy:
            busy = False  # the worker is free; the plan may stop it all the same
        state, actions = advance(state, event, now_s)
        for action in actions:
            if isinstance(action, Stop):
                busy = False
            elif isinstance(action, Begin):
                assert not busy
                assert action.task.round > state.counted.get("j-1", Counted(-1)).round
                assert state.open is not None
                assert not state.open.missing
                busy = True
            elif isinstance(action, Send):
                assert (action.update.job, action.update.round) in state.outbox
        assert busy == (state.open is not None and state.open.working)
        assert next_s(advance(state, Tick(), now_s)[0]) > now_s


def test_what_was_learned_is_kept_of_the_latest_workloads_and_written_down() -> None:
    """By engine and method; the longest unseen goes first, and a task that taught nothing writes nothing."""
    state = State(MEANS)
    learned = taught(Learned(), Seen(OperatingPoint(name="a", flops_per_s=1.0), Work(flops=1.0), 2.0, None))
    for index in range(REMEMBERED_WORKLOADS + 1):
        each = task(method=f"m{index}")
        done = Done(Update(**{**vars_of(each), "usage": Usage()}), False, learned)
        state, actions = advance(msgspec.structs.replace(state, open=Open(each, frozenset(), working=True)), done, 0.0)
        assert actions[-1] == Learn(state.learned)
    assert list(state.learned) == [f"numpy m{index}" for index in range(1, REMEMBERED_WORKLOADS + 1)]
    again = msgspec.structs.replace(state, open=Open(each, frozenset(), working=True))
    assert not any(isinstance(action, Learn) for action in advance(again, done, 0.0)[1])


def vars_of(each: Task) -> dict[str, Any]:
    """An update's fields that answer a task."""
    return {
        "job": each.job, "round": each.round, "attempt": 0, "device": "d", "weight": 1.0, "bundles": {}, "metrics": {}
    }  # fmt: skip

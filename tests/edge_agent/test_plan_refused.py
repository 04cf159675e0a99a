"""Which tasks an agent refuses, and what it learns of the memory that they take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from planned import MEANS, after, task, update

from fedquilt.core import Encoding, OperatingPoint, Reading, Task, Update, Usage, WorkEstimate
from fedquilt.edge_agent import state_machine
from fedquilt.edge_agent.power.learned_model import LearnedModel, TaskSegment, learn_segment
from fedquilt.edge_agent.state_machine import (
    MAX_WORKLOADS,
    DeviceState,
    OpenTask,
    PublishClaim,
    StartTask,
    StopTask,
    StoreLearnedCosts,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskReceived,
    advance,
)
from fedquilt.edge_agent.task.memory_budget import ASSUMED_BASE_BYTES
from fedquilt.wire import Claim


def refusal(wanted: Task, reading: Reading = Reading()) -> Claim:
    _, actions = advance(DeviceState(MEANS), TaskReceived(wanted), 0.0, reading)
    (say,) = actions
    assert isinstance(say, PublishClaim)
    assert not say.claim.accepted
    return say.claim


@pytest.mark.parametrize(
    ("changes", "reading", "code", "said"),
    [
        ({"method": "fedfuture"}, Reading(), "method", ("'fedfuture'", "install")),  # of a newer coordinator
        ({"engine": "torch"}, Reading(), "engine", ("numpy",)),
        (
            {"wire": Encoding(codec="wavelet")},
            Reading(),
            "codec",
            ("'wavelet' is unknown here (known: raw, fp16, int8, topk)",),
        ),
        (
            {"work": WorkEstimate(peak_bytes=1000 * 10**6)},
            Reading(),
            "budget",
            ("1000 MB for the work", "device's budget of 105 MB"),
        ),
        (
            {},
            Reading(available_bytes=1 << 20),
            "memory",
            ("more than the 1 MB available",),
        ),  # the budget would allow it
    ],
)
def test_what_cannot_be_done_here_is_refused_with_what_could(
    changes: dict[str, Any], reading: Reading, code: str, said: tuple[str, ...]
) -> None:
    found = refusal(task(**changes), reading)
    assert found.code == code
    assert [part for part in said if part not in found.reason] == []
    assert after(TaskReceived(task()))[0].open_task is not None  # a board that cannot tell its memory is believed


def test_the_engines_own_size_counts_against_the_budget() -> None:
    room = MEANS.budget_bytes - ASSUMED_BASE_BYTES["numpy"]
    assert after(TaskReceived(task(work=WorkEstimate(peak_bytes=room))))[0].open_task is not None
    assert refusal(task(work=WorkEstimate(peak_bytes=room + 1))).code == "budget"


def test_the_engines_size_as_seen_here_replaces_the_assumed_one() -> None:
    state, _ = after(TaskReceived(task()), TaskCompleted(update(base_bytes=90 << 20), False), TaskReceived(task(1)))
    state, _ = advance(state, TaskCompleted(update(1, base_bytes=95 << 20), False), 0.0)
    assert state.base_bytes == {"numpy": 90 << 20}
    _, actions = advance(state, TaskReceived(task(2, work=WorkEstimate(peak_bytes=11 << 20))), 0.0)
    assert isinstance(actions[0], PublishClaim)
    assert actions[0].claim.code == "budget"


def test_a_task_that_ran_out_of_memory_is_planned_smaller_the_next_time_and_refused_once_nothing_smaller_fits() -> None:
    """Beside 38 MB of the engine, 66.8 MB are planned with, then 53.4, then 42.8; 30 MB of work grow to 37.5, 46.9
    and 58.6 MB, which still fit, and then to 73.2 MB, which do not."""
    asked = task(work=WorkEstimate(peak_bytes=30 * 10**6))
    room, state = MEANS.budget_bytes - ASSUMED_BASE_BYTES["numpy"], DeviceState(MEANS)
    for failures in range(3):
        state, actions = after(TaskReceived(again(asked, failures)), state=state)
        assert actions[-1] == StartTask(again(asked, failures))
        planned = state_machine.plan_limit_bytes(state, asked)
        assert planned == ASSUMED_BASE_BYTES["numpy"] + int(room / 1.25**failures)
        state, _ = after(TaskFailed("memory", "it was killed", ran_out_of_memory=True), state=state)
    state, _ = after(
        TaskReceived(again(asked, 3)), TaskFailed("memory", "it was killed", ran_out_of_memory=True), state=state
    )
    _, actions = after(TaskReceived(again(asked, 4)), state=state)
    assert isinstance(actions[0], PublishClaim)
    assert actions[0].claim.code == "budget"
    assert "2.44 times the prediction" in actions[0].claim.reason


def again(asked: Task, attempt: int) -> Task:
    """Whatever is needed is on the device."""
    return msgspec.structs.replace(asked, attempt=attempt, bundles={})


def test_an_engine_that_refuses_beforehand_teaches_nothing() -> None:
    state, _ = after(TaskReceived(task()), TaskFailed("budget", "one example does not fit"))
    assert state_machine.plan_limit_bytes(state, task()) == MEANS.budget_bytes


def test_what_a_method_taught_of_memory_holds_for_it_and_its_engine_alone() -> None:
    """The peak beside the engine was 1.5 times what was planned: 1 + 0.3 / 2 = 1.15, one step of 1.25."""
    usage = Usage(base_bytes=40 * 10**6, peak_bytes=70 * 10**6)
    seen = msgspec.structs.replace(update(), usage=usage)
    state, _ = after(TaskReceived(task()), TaskCompleted(seen, False, planned_bytes=20 * 10**6))
    assert state.memory_margins[("fedavg", "numpy")].ratio == pytest.approx(1.15)
    assert state_machine.plan_limit_bytes(state, task()) < MEANS.budget_bytes
    assert state_machine.plan_limit_bytes(state, task(method="fedprox")) == MEANS.budget_bytes
    untold, _ = after(TaskReceived(task()), TaskCompleted(seen, False))
    assert not untold.memory_margins


def test_a_refused_task_still_ends_the_one_in_hand() -> None:
    state, actions = after(TaskReceived(task()), TaskReceived(task(1, engine="torch")))
    assert actions[0] == StopTask()
    assert state.open_task is None


def test_a_refusal_is_repeated_with_its_task_and_reconsidered_at_the_next_attempt() -> None:
    state, (_, said) = after(TaskReceived(task()), TaskFailed("data", "no examples"))
    assert advance(state, TaskReceived(task(deadline_s=1.0)), 0.0)[1] == (said,)
    assert StartTask(task(attempt=1)) in advance(state, TaskReceived(task(attempt=1)), 0.0)[1]
    assert StartTask(task()) in after(TaskCancelled(), TaskReceived(task()), state=state)[1]


def test_work_that_fails_becomes_a_refusal_with_its_reason() -> None:
    state, (stop, say) = after(TaskReceived(task()), TaskFailed("memory", "too much"))
    assert stop == StopTask()
    assert isinstance(say, PublishClaim)
    assert (say.claim.accepted, say.claim.code, say.claim.reason) == (False, "memory", "too much")
    assert state.open_task is None


def test_a_failure_without_a_task_is_nothing() -> None:
    assert after(TaskFailed("disk", "full")) == (DeviceState(MEANS), ())


def test_what_was_learned_is_kept_of_the_latest_workloads_and_written_down() -> None:
    state = DeviceState(MEANS)
    learned = learn_segment(
        LearnedModel(), TaskSegment(OperatingPoint(name="a", flops_per_s=1.0), WorkEstimate(flops=1.0), 2.0, None)
    )
    for index in range(MAX_WORKLOADS + 1):
        each = task(method=f"m{index}")
        done = TaskCompleted(Update(**{**vars_of(each), "usage": Usage()}), False, learned)
        state, actions = advance(
            msgspec.structs.replace(state, open_task=OpenTask(each, frozenset(), is_running=True)), done, 0.0
        )
        assert actions[-1] == StoreLearnedCosts(state.learned_models)
    assert list(state.learned_models) == [f"numpy m{index}" for index in range(1, MAX_WORKLOADS + 1)]
    again = msgspec.structs.replace(state, open_task=OpenTask(each, frozenset(), is_running=True))
    assert not any(isinstance(action, StoreLearnedCosts) for action in advance(again, done, 0.0)[1])


def vars_of(each: Task) -> dict[str, Any]:
    """An update's fields that answer a task."""
    return {
        "job": each.job, "round": each.round, "attempt": 0, "device": "d", "weight": 1.0, "bundles": {}, "metrics": {}
    }  # fmt: skip

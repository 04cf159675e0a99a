"""Rounds that train nothing and gather what an evaluation needs."""

import msgspec
import pytest
from job_facts import BLOB, after, update

from fedquilt.coordinator.rounds.decisions import decide_event
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobConstants,
    JobEnded,
    JobStarted,
    JobState,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    apply_event,
)
from fedquilt.coordinator.settings import CohortSettings, JobLimits


def played(state: JobState, online: set[str], most: int = 30) -> list[tuple[int, bool, tuple[str, ...], int]]:
    """(round, whether it settles, what is asked, how many are asked) of every round, until the job ends."""
    found = []
    for _ in range(most):
        fact = decide_event(state, 0.0, online)
        if isinstance(fact, JobEnded):
            return found
        assert isinstance(fact, CohortSelected)
        found.append((state.round, state.settling, state.task_actions, len(fact.devices)))
        answers = [UpdateAccepted(state.round, update(device, state.round)) for device in fact.devices]
        state = after(state, fact, *answers, RoundClosed(state.round))
        state = after(state, RoundCommitted(state.round, BLOB, False, {}, took_s=1.0, settled=state.settling))
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
    assert played(apply_event(JobState(plan), JobStarted(BLOB, settles=True), 0.0), online) == wanted
    plain = played(apply_event(JobState(plan), JobStarted(BLOB), 0.0), online)
    assert [each[1:] for each in plain] == [each[1:] for each in wanted if not each[1]]


def test_a_job_that_has_taken_enough_gathers_what_an_evaluation_needs_before_it_ends():
    plan = JobConstants(0, 5, CohortSettings(), 0, JobLimits(max_wall_s=0.5))
    found = played(apply_event(JobState(plan), JobStarted(BLOB, settles=True), 0.0), {"a"})
    assert [(number, settles) for number, settles, _, _ in found] == [(0, False), (1, True)]


def test_at_its_deadline_such_a_round_wants_no_more_than_another():
    plan = JobConstants(0, 1, msgspec.convert({"size": 2, "deadline_s": 10.0}, CohortSettings), 0)
    state = after(apply_event(JobState(plan), JobStarted(BLOB, settles=True), 0.0), CohortSelected(0, 0, ("a", "b")))
    state = after(
        state,
        *[UpdateAccepted(0, update(device)) for device in "ab"],
        RoundClosed(0),
        RoundCommitted(0, BLOB, False, {}),
    )
    assert state.settling
    online = set("abcdefghij")
    fact = decide_event(state, 0.0, online)
    assert isinstance(fact, CohortSelected)
    assert set(fact.devices) == online
    state = after(state, fact, *[UpdateAccepted(1, update(device, 1)) for device in "abcde"])
    assert decide_event(state, 5.0, online) is None
    assert decide_event(state, 11.0, online) == RoundClosed(1)

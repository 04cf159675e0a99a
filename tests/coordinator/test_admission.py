"""What a device says means for the running round what its situation says: every event in every situation."""

import itertools
from typing import Any, get_args

import msgspec
import plain
import pytest

from fedquilt.coordinator.rounds.deadline import DeviceWorkload, MemoryShortage
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.rounds.responses import (
    FLOODED,
    UNFINISHED,
    AckUpdate,
    CancelTask,
    ClaimReceived,
    Decision,
    DeviceChange,
    DiscardUpdate,
    FetchUpdate,
    Input,
    RenewTask,
    SendTask,
    SlowResends,
    UpdateAnnounced,
    UpdateReceived,
    UpdateValidated,
    ValidateUpdate,
    decide_response,
)
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.core import BlobRef, Update, Usage, WorkEstimate
from fedquilt.wire import Claim

JOB, OTHER = "j-1", "j-2"
STATE = BlobRef(sha256="a" * 64, size=1)
BLOB, DECODED = BlobRef(sha256="b" * 64, size=1 << 20), BlobRef(sha256="c" * 64, size=4 << 20)
PROFILE = plain.profile(engines=("numpy",))
NOW_S = 7.0


def update(device: str = "a", **changes: Any) -> Update:
    plain = {"job": JOB, "round": 1, "attempt": 0, "device": device, "weight": 1.0, "bundles": {"model": BLOB}}
    return Update(**{**plain, "metrics": {}, "usage": Usage(), "state": STATE.sha256, **changes})


def claim(accepted: bool = True, **changes: Any) -> Claim:
    return Claim(**{"job": JOB, "round": 1, "attempt": 0, "accepted": accepted, **changes})


def after(*facts: AnyEvent) -> JobState:
    """Round 1 of three, after round 0 with "a" and "b"."""
    state = JobState(JobConstants(0, 3, CohortSettings(size=2, min_devices=1), 0))
    first = (
        CohortSelected(0, 0, ("a", "b")),
        *(UpdateAccepted(0, update(name, round=0)) for name in ("a", "b")),
        RoundClosed(0),
    )
    for fact in (JobStarted(STATE), *first, RoundCommitted(0, STATE, False, {}), *facts):
        state = apply_event(state, fact, 0.0)
    return state


ASKED = CohortSelected(1, 0, ("a", "b"))
SITUATIONS: dict[str, JobState | None] = {
    "no job": None,
    "new": JobState(JobConstants(0, 3, CohortSettings(), 0)),
    "between rounds": after(),
    "asked": after(ASKED),
    "another was asked": after(CohortSelected(1, 0, ("b",))),
    "asked again": after(ASKED, RoundRetried(1, 1), CohortSelected(1, 1, ("a",))),
    "tried again without it": after(ASKED, RoundRetried(1, 1), CohortSelected(1, 1, ("b",))),
    "answered": after(ASKED, UpdateAccepted(1, update())),
    "declined": after(ASKED, TaskDeclined(1, "a", "data", "no data")),
    "rejected": after(ASKED, UpdateRejected(1, "a", "not finite")),
    "closed": after(ASKED, UpdateAccepted(1, update()), RoundClosed(1)),
    "closed without it": after(ASKED, UpdateAccepted(1, update("b")), RoundClosed(1)),
    "stopped": after(ASKED, JobEnded("stopped")),
}
CODES: tuple[str, ...] = get_args(next(field.type for field in msgspec.structs.fields(Claim) if field.name == "code"))
WAITED_FOR = ("asked", "asked again", "stopped")  # situations in which an update of "a" counts
EVENTS: dict[str, Input] = {
    "appeared": DeviceChange("a", "online"),
    "flooded": DeviceChange("a", "flooding"),
    "claimed": ClaimReceived("a", claim()),
    "claimed another job": ClaimReceived("a", claim(job=OTHER)),
    "claimed an old round": ClaimReceived("a", claim(round=0)),
    "claimed another attempt": ClaimReceived("a", claim(attempt=1)),
    **{f"declined: {code}": ClaimReceived("a", claim(False, code=code, reason="x")) for code in CODES},
    "offered": UpdateAnnounced("a", update()),
    "offered nothing to fetch": UpdateAnnounced("a", update(bundles={})),
    "offered an old round": UpdateAnnounced("a", update(round=0)),
    "offered a round to come": UpdateAnnounced("a", update(round=2)),
    "offered for another": UpdateAnnounced("a", update("b")),
    "offered too much": UpdateAnnounced("a", update(), manifest_problem="too large"),
    **{
        f"offered of a job {s or 'unknown'}": UpdateAnnounced("a", update(job=OTHER), s)
        for s in (*UNFINISHED, "done", "")
    },
    "arrived": UpdateReceived("a"),
    "arrived with an error": UpdateReceived("a", "it is not here any more"),
    "examined": UpdateValidated("a", update(), update()),
    "examined and refused": UpdateValidated("a", update(), None, "not finite"),
}


def hear(situation: str, event: Input, arriving: Update | None = None, job: str = JOB) -> Decision:
    state = SITUATIONS[situation]
    return decide_response(job if state else "", state, arriving, event, NOW_S)


def fetching(situation: str) -> Update | None:
    """What may be on its way from "a": an update, if it is asked."""
    state = SITUATIONS[situation]
    return update() if state and "a" in state.pending_devices else None


# -- whatever is said -----------------------------------------------------------------------------


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_follows_from_an_event_may_happen_and_touches_no_other_device(situation):
    state = SITUATIONS[situation]
    for event, arriving in itertools.product(EVENTS.values(), (None, fetching(situation))):
        step = hear(situation, event, arriving)
        for fact in step.events:
            assert "a" in state.pending_devices
            assert "a" not in apply_event(state, fact, NOW_S).pending_devices
            assert CancelTask("a") in step.actions
            assert step.arriving_update is None
        assert len(step.events) <= 1
        assert {getattr(action, "device", "a") for action in step.actions} <= {"a"}
        assert sum(isinstance(action, AckUpdate) for action in step.actions) <= 1
        assert step.arriving_update is None or (state is not None and "a" in state.pending_devices)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_device_that_appears_gets_its_task_where_it_is_asked(situation):
    state = SITUATIONS[situation]
    asked = state is not None and state.phase == "open" and "a" in state.pending_devices
    assert hear(situation, DeviceChange("a", "online")) == Decision(None, (), (SendTask("a"),) if asked else ())
    assert hear(situation, DeviceChange("stranger", "online")) == Decision(None)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_device_that_floods_is_out_of_the_round_with_what_it_has_under_way(situation):
    state, arriving = SITUATIONS[situation], fetching(situation)
    step = hear(situation, DeviceChange("a", "flooding"), arriving)
    if state is None or "a" not in state.pending_devices:
        assert step == Decision(arriving)
    else:
        assert step == Decision(None, (UpdateRejected(1, "a", FLOODED, "flooding"),), (CancelTask("a"),))


# -- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_task_that_nobody_waits_for_is_taken_back(situation, accepted):
    state, code = SITUATIONS[situation], "ok" if accepted else "data"
    step = hear(situation, ClaimReceived("a", claim(accepted, job=OTHER, round=0, code=code)))
    assert step == Decision(None, (), () if state is not None and "a" in state.pending_devices else (CancelTask("a"),))
    assert hear(situation, ClaimReceived("stranger", claim(accepted, code=code))) == Decision(
        None, (), (CancelTask("stranger"),)
    )


def test_who_takes_a_task_is_left_alone_with_it_whatever_the_attempt():
    for situation, attempt in itertools.product(("asked", "asked again"), (0, 1)):
        assert hear(situation, ClaimReceived("a", claim(attempt=attempt))) == Decision(None, (), (SlowResends("a"),))


@pytest.mark.parametrize("code", [code for code in CODES if code not in ("ok", "cleared", "counted")])
def test_who_declines_is_asked_no_more_in_this_attempt(code):
    ask = DeviceWorkload(WorkEstimate(flops=9.0, peak_bytes=5), PROFILE)
    step = hear("asked", ClaimReceived("a", claim(False, code=code, reason="too little"), ask), fetching("asked"))
    short = MemoryShortage(5, 9.0, 1) if code in ("budget", "memory") else None
    assert step.events == (TaskDeclined(1, "a", code, "too little", short),)
    assert step.actions == (CancelTask("a"),)
    assert step.arriving_update is None


def test_who_has_counted_the_round_is_asked_again_as_by_a_later_coordinator():
    told = claim(False, code="counted", last_counted_round=3, epoch=7)
    assert hear("asked", ClaimReceived("a", told)) == Decision(None, (), (RenewTask("a", 7),))
    old = claim(False, code="counted", last_counted_round=3, epoch=7, round=0)
    assert hear("asked", ClaimReceived("a", old)) == Decision(None)


def test_an_update_of_another_state_is_refused():
    same, other = update(state=STATE.sha256), update(state="f" * 64)
    assert hear("asked", UpdateAnnounced("a", same)).actions[-1] == FetchUpdate("a", same)
    (answer,) = hear("asked", UpdateAnnounced("a", other)).actions
    assert isinstance(answer, AckUpdate)
    assert not answer.accepted
    assert "its round has another state" in answer.reason


def test_a_refusal_of_another_attempt_or_round_or_job_is_old():
    for changes in ({"attempt": 0}, {"attempt": 1, "round": 0}, {"attempt": 1, "job": OTHER}):
        assert hear("asked again", ClaimReceived("a", claim(False, code="data", **changes))) == Decision(None)
    assert hear("asked again", ClaimReceived("a", claim(False, code="data", attempt=1))).events


def test_a_task_that_was_cleared_by_somebody_else_is_sent_again():
    for attempt in (0, 1):
        assert hear("asked again", ClaimReceived("a", claim(False, code="cleared", attempt=attempt))).actions == (
            SendTask("a"),
        )
    assert hear("asked", ClaimReceived("a", claim(False, code="cleared", round=0))) == Decision(None)
    assert hear("answered", ClaimReceived("a", claim(False, code="cleared"))).actions == (CancelTask("a"),)


# -- updates at the door --------------------------------------------------------------------------


@pytest.mark.parametrize("situation", WAITED_FOR)
def test_an_update_that_is_waited_for_is_fetched_then_examined_then_counted(situation):
    given = update()
    offered = hear(situation, UpdateAnnounced("a", given))
    assert offered == Decision(given, (), (SlowResends("a"), FetchUpdate("a", given)))
    arrived = hear(situation, UpdateReceived("a"), offered.arriving_update)
    assert arrived == Decision(given, (), (ValidateUpdate("a", given),))
    examined = hear(situation, UpdateValidated("a", given, given), arrived.arriving_update)
    assert [fact.update for fact in examined.events if isinstance(fact, UpdateAccepted)] == [given]
    assert examined.actions == (AckUpdate("a", given, True), CancelTask("a"))
    assert not examined.arriving_update
    bare = update(bundles={})
    assert hear(situation, UpdateAnnounced("a", bare)) == Decision(
        bare, (), (SlowResends("a"), ValidateUpdate("a", bare))
    )


def test_an_update_of_the_attempt_before_counts():
    assert hear("asked again", UpdateAnnounced("a", update(attempt=0))).actions[-1] == FetchUpdate(
        "a", update(attempt=0)
    )


def test_an_update_that_is_offered_again_takes_the_place_of_the_first():
    first, second = update(), update(weight=2.0)
    step = hear("asked", UpdateAnnounced("a", second), first)
    assert step.arriving_update == second
    assert step.actions == (SlowResends("a"), FetchUpdate("a", second))
    assert hear("asked", UpdateValidated("a", first, first), step.arriving_update) == Decision(second)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name not in ("no job", "new")])
def test_an_update_that_has_been_counted_is_acknowledged_as_often_as_it_is_offered(situation):
    assert hear(situation, UpdateAnnounced("a", update(round=0))) == Decision(
        None, (), (AckUpdate("a", update(round=0), True),)
    )
    if situation in ("answered", "closed"):
        assert hear(situation, UpdateAnnounced("a", update())) == Decision(None, (), (AckUpdate("a", update(), True),))


@pytest.mark.parametrize("status", ["done", "failed", "stopped", "queued"])
def test_an_update_that_another_jobs_log_has_counted_is_acknowledged(status):
    told = UpdateAnnounced("a", update(job=OTHER), status, is_counted=True)
    for situation in SITUATIONS:
        assert hear(situation, told) == Decision(None, (), (AckUpdate("a", update(job=OTHER), True),))


def test_an_update_of_a_round_that_has_asked_nobody_yet_stays_with_its_device():
    assert hear("between rounds", UpdateAnnounced("a", update())) == Decision(None)


@pytest.mark.parametrize(
    "situation", ["another was asked", "tried again without it", "declined", "rejected", "closed without it"]
)
def test_an_update_that_nobody_asked_for_is_turned_down_and_its_task_taken_back(situation):
    answer, idle = hear(situation, UpdateAnnounced("a", update())).actions
    assert isinstance(answer, AckUpdate)
    assert not answer.accepted
    assert "round 2 is closed, or this device was not selected for it" in answer.reason
    assert idle == CancelTask("a")


def test_an_update_of_another_round_is_turned_down_and_the_task_stays_out():
    for given in (update(round=2), update("b", round=3)):
        (answer,) = hear("asked", UpdateAnnounced(given.device, given)).actions
        assert isinstance(answer, AckUpdate)
        assert not answer.accepted


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nobody_speaks_for_another(situation):
    step = hear(situation, UpdateAnnounced("stranger", update("a")))
    assert step.actions == (
        AckUpdate("stranger", update("a"), False, "the update names another device, a"),
        CancelTask("stranger"),
    )
    assert not step.events


@pytest.mark.parametrize("situation", ["no job", "asked", "closed"])
@pytest.mark.parametrize("status", ["queued", "running", "stopping", "stopped", "done", "failed", ""])
def test_an_update_of_another_job_is_kept_by_its_device_as_long_as_that_may_go_on(situation, status):
    step = hear(situation, UpdateAnnounced("a", update(job=OTHER), status))
    if status in ("done", "failed", ""):
        assert isinstance(step.actions[0], AckUpdate)
        assert (step.actions[0].accepted, "job j-2 is not active" in step.actions[0].reason) == (False, True)
    else:
        assert step == Decision(None)


def test_an_update_whose_manifest_does_not_fit_is_rejected_before_it_is_fetched():
    both = update(bundles={"model": BLOB, "more": msgspec.structs.replace(BLOB, sha256="d" * 64)})
    assert FetchUpdate("a", both) in hear("asked", UpdateAnnounced("a", both)).actions
    step = hear("asked", UpdateAnnounced("a", both, manifest_problem="a: too large"), update())
    assert step.events == (UpdateRejected(1, "a", "a: too large"),)
    assert step.actions == (AckUpdate("a", both, False, "a: too large"), CancelTask("a"), DiscardUpdate(both))
    assert not step.arriving_update


# -- updates that are here ------------------------------------------------------------------------


@pytest.mark.parametrize("situation", SITUATIONS)
def test_blobs_that_nobody_waits_for_mean_nothing(situation):
    for event in (
        UpdateReceived("a"),
        UpdateReceived("a", "gone"),
        UpdateValidated("a", update(), update()),
        UpdateValidated("a", update(), None),
    ):
        assert hear(situation, event) == Decision(None)


def test_an_update_that_could_not_be_fetched_is_waited_for_again():
    step = hear("asked", UpdateReceived("a", "it is not here any more"), fetching("asked"))
    assert step == Decision(None)
    assert hear("asked", UpdateAnnounced("a", update()), step.arriving_update).arriving_update == update()


def test_an_update_that_may_not_be_folded_is_rejected_with_the_reason():
    given = update()
    step = hear("asked", UpdateValidated("a", given, None, "not finite"), given)
    assert step.events == (UpdateRejected(1, "a", "not finite"),)
    assert step.actions == (AckUpdate("a", given, False, "not finite"), CancelTask("a"), DiscardUpdate(given))


def test_an_update_that_was_decoded_is_kept_as_that_and_acknowledged_as_it_came():
    given = update(usage=Usage(wall_s=3.0))
    taken = msgspec.structs.replace(given, bundles={"model": DECODED})
    step = hear("asked", UpdateValidated("a", given, taken), given)
    assert step.events == (UpdateAccepted(1, taken, NOW_S, None),)
    assert step.actions == (AckUpdate("a", given, True), CancelTask("a"), DiscardUpdate(given))

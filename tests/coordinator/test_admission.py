"""What a device says means for the running round what its situation says: every event in every situation."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import msgspec
import plain
import pytest

from fedquilt.coordinator.admission import (
    FLOODED,
    UNFINISHED,
    Answer,
    Appeared,
    Arrived,
    Claimed,
    Discard,
    Event,
    Examine,
    Examined,
    Fetch,
    Flooded,
    Issue,
    Offered,
    Patience,
    Renew,
    Step,
    Withdraw,
    decide_response,
)
from fedquilt.coordinator.deadline import Ask, Short
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Rejected,
    Reopened,
    Rounds,
    Started,
    apply_event,
)
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.settings import Cohort
from fedquilt.core import BlobRef, Update, Usage, Work
from fedquilt.wire import Claim

JOB, OTHER = "j-1", "j-2"
STATE = BlobRef(sha256="a" * 64, size=1)
BLOB, DECODED = BlobRef(sha256="b" * 64, size=1 << 20), BlobRef(sha256="c" * 64, size=4 << 20)
PROFILE = plain.profile(engines=("numpy",))
NOW_S = 7.0


def update(device: str = "a", **changes: Any) -> Update:
    plain = {"job": JOB, "round": 1, "attempt": 0, "device": device, "weight": 1.0, "bundles": {"model": BLOB}}
    return Update(**{**plain, "metrics": {}, "usage": Usage(), **changes})


def claim(accepted: bool = True, **changes: Any) -> Claim:
    return Claim(**{"job": JOB, "round": 1, "attempt": 0, "accepted": accepted, **changes})


def after(*facts: AnyFact) -> Rounds:
    """Round 1 of three, after round 0 with "a" and "b"."""
    state = Rounds(Plan(0, 3, Cohort(size=2, min_devices=1), 0))
    first = (Asked(0, 0, ("a", "b")), *(Answered(0, update(name, round=0)) for name in ("a", "b")), Closed(0))
    for fact in (Started(STATE), *first, Committed(0, STATE, False, {}), *facts):
        state = apply_event(state, fact, 0.0)
    return state


ASKED = Asked(1, 0, ("a", "b"))
SITUATIONS: dict[str, Rounds | None] = {
    "no job": None,
    "new": Rounds(Plan(0, 3, Cohort(), 0)),
    "between rounds": after(),
    "asked": after(ASKED),
    "another was asked": after(Asked(1, 0, ("b",))),
    "asked again": after(ASKED, Reopened(1, 1), Asked(1, 1, ("a",))),
    "tried again without it": after(ASKED, Reopened(1, 1), Asked(1, 1, ("b",))),
    "answered": after(ASKED, Answered(1, update())),
    "declined": after(ASKED, Declined(1, "a", "data", "no data")),
    "rejected": after(ASKED, Rejected(1, "a", "not finite")),
    "closed": after(ASKED, Answered(1, update()), Closed(1)),
    "closed without it": after(ASKED, Answered(1, update("b")), Closed(1)),
    "stopped": after(ASKED, Ended("stopped")),
}
CODES: tuple[str, ...] = get_args(next(field.type for field in msgspec.structs.fields(Claim) if field.name == "code"))
WAITED_FOR = ("asked", "asked again", "stopped")  # situations in which an update of "a" counts
EVENTS: dict[str, Event] = {
    "appeared": Appeared("a"),
    "flooded": Flooded("a"),
    "claimed": Claimed("a", claim()),
    "claimed another job": Claimed("a", claim(job=OTHER)),
    "claimed an old round": Claimed("a", claim(round=0)),
    "claimed another attempt": Claimed("a", claim(attempt=1)),
    **{f"declined: {code}": Claimed("a", claim(False, code=code, reason="x")) for code in CODES},
    "offered": Offered("a", update()),
    "offered nothing to fetch": Offered("a", update(bundles={})),
    "offered an old round": Offered("a", update(round=0)),
    "offered a round to come": Offered("a", update(round=2)),
    "offered for another": Offered("a", update("b")),
    "offered too much": Offered("a", update(), unfit="too large"),
    **{f"offered of a job {s or 'unknown'}": Offered("a", update(job=OTHER), s) for s in (*UNFINISHED, "done", "")},
    "arrived": Arrived("a"),
    "arrived with an error": Arrived("a", "it is not here any more"),
    "examined": Examined("a", update(), update()),
    "examined and refused": Examined("a", update(), None, "not finite"),
}


def hear(situation: str, event: Event, arriving: Update | None = None, job: str = JOB) -> Step:
    state = SITUATIONS[situation]
    return decide_response(job if state else "", state, arriving, event, NOW_S)


def fetching(situation: str) -> Update | None:
    """What may be on its way from "a": an update, if it is asked."""
    state = SITUATIONS[situation]
    return update() if state and "a" in state.asked else None


# -- whatever is said -----------------------------------------------------------------------------


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_follows_from_an_event_may_happen_and_touches_no_other_device(situation: str) -> None:
    """Facts are legal and of the running round, only who is asked can cause one, and nobody is answered twice."""
    state = SITUATIONS[situation]
    for event, arriving in itertools.product(EVENTS.values(), (None, fetching(situation))):
        step = hear(situation, event, arriving)
        for fact in step.facts:
            assert state is not None
            assert "a" in state.asked
            assert "a" not in apply_event(state, fact, NOW_S).asked
            assert Withdraw("a") in step.actions
            assert step.arriving is None
        assert len(step.facts) <= 1
        assert {getattr(action, "device", "a") for action in step.actions} <= {"a"}
        assert sum(isinstance(action, Answer) for action in step.actions) <= 1
        assert step.arriving is None or (state is not None and "a" in state.asked)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_device_that_appears_gets_its_task_where_it_is_asked(situation: str) -> None:
    """And nothing otherwise; one that nobody knows gets nothing either."""
    state = SITUATIONS[situation]
    asked = state is not None and state.phase == "open" and "a" in state.asked
    assert hear(situation, Appeared("a")) == Step(None, (), (Issue("a"),) if asked else ())
    assert hear(situation, Appeared("stranger")) == Step(None)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_device_that_floods_is_out_of_the_round_with_what_it_has_under_way(situation: str) -> None:
    """Its task is taken back, and its update is fetched no further; of a round that did not ask it nothing changes."""
    state, arriving = SITUATIONS[situation], fetching(situation)
    step = hear(situation, Flooded("a"), arriving)
    if state is None or "a" not in state.asked:
        assert step == Step(arriving)
    else:
        assert step == Step(None, (Rejected(1, "a", FLOODED, "flooding"),), (Withdraw("a"),))


# -- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_task_that_nobody_waits_for_is_taken_back(situation: str, accepted: bool) -> None:
    """The broker had kept it; of a device that is asked this holds for no claim, and of a stranger for each."""
    state, code = SITUATIONS[situation], "ok" if accepted else "data"
    step = hear(situation, Claimed("a", claim(accepted, job=OTHER, round=0, code=code)))
    assert step == Step(None, (), () if state is not None and "a" in state.asked else (Withdraw("a"),))
    assert hear(situation, Claimed("stranger", claim(accepted, code=code))) == Step(None, (), (Withdraw("stranger"),))


def test_who_takes_a_task_is_left_alone_with_it_whatever_the_attempt() -> None:
    """A task of the attempt before is the same work."""
    for situation, attempt in itertools.product(("asked", "asked again"), (0, 1)):
        assert hear(situation, Claimed("a", claim(attempt=attempt))) == Step(None, (), (Patience("a"),))


@pytest.mark.parametrize("code", [code for code in CODES if code not in ("ok", "cleared", "counted")])
def test_who_declines_is_asked_no_more_in_this_attempt(code: Any) -> None:
    """With its words; what it had been asked for is noted where its memory was too small."""
    ask = Ask(Work(flops=9.0, peak_bytes=5), PROFILE)
    step = hear("asked", Claimed("a", claim(False, code=code, reason="too little"), ask), fetching("asked"))
    short = Short(5, 9.0, 1) if code in ("budget", "memory") else None
    assert step.facts == (Declined(1, "a", code, "too little", short),)
    assert step.actions == (Withdraw("a"),)
    assert step.arriving is None


def test_who_has_counted_the_round_is_asked_again_as_by_a_later_coordinator() -> None:
    """The log has lost the round; an old claim, or one of a device that is not asked, changes nothing."""
    told = claim(False, code="counted", counted=3, epoch=7)
    assert hear("asked", Claimed("a", told)) == Step(None, (), (Renew("a", 7),))
    old = claim(False, code="counted", counted=3, epoch=7, round=0)
    assert hear("asked", Claimed("a", old)) == Step(None)


def test_an_update_of_another_state_is_refused() -> None:
    """It was worked for when the log was another: a copy of this one, which went on without it."""
    same, other = update(state=STATE.sha256), update(state="f" * 64)
    assert hear("asked", Offered("a", same)).actions[-1] == Fetch("a", same)
    (answer,) = hear("asked", Offered("a", other)).actions
    assert isinstance(answer, Answer)
    assert not answer.accepted
    assert "began with another" in answer.reason


def test_a_refusal_of_another_attempt_or_round_or_job_is_old() -> None:
    """The task that is out now gets an answer of its own."""
    for changes in ({"attempt": 0}, {"attempt": 1, "round": 0}, {"attempt": 1, "job": OTHER}):
        assert hear("asked again", Claimed("a", claim(False, code="data", **changes))) == Step(None)
    assert hear("asked again", Claimed("a", claim(False, code="data", attempt=1))).facts


def test_a_task_that_was_cleared_by_somebody_else_is_sent_again() -> None:
    """The device is still asked, whichever attempt it speaks of; of another round it is old."""
    for attempt in (0, 1):
        assert hear("asked again", Claimed("a", claim(False, code="cleared", attempt=attempt))).actions == (Issue("a"),)
    assert hear("asked", Claimed("a", claim(False, code="cleared", round=0))) == Step(None)
    assert hear("answered", Claimed("a", claim(False, code="cleared"))).actions == (Withdraw("a"),)


# -- updates at the door --------------------------------------------------------------------------


@pytest.mark.parametrize("situation", WAITED_FOR)
def test_an_update_that_is_waited_for_is_fetched_then_examined_then_counted(situation: str) -> None:
    """One without blobs is examined at once."""
    given = update()
    offered = hear(situation, Offered("a", given))
    assert offered == Step(given, (), (Patience("a"), Fetch("a", given)))
    arrived = hear(situation, Arrived("a"), offered.arriving)
    assert arrived == Step(given, (), (Examine("a", given),))
    examined = hear(situation, Examined("a", given, given), arrived.arriving)
    assert [fact.update for fact in examined.facts if isinstance(fact, Answered)] == [given]
    assert examined.actions == (Answer("a", given, True), Withdraw("a"))
    assert not examined.arriving
    bare = update(bundles={})
    assert hear(situation, Offered("a", bare)) == Step(bare, (), (Patience("a"), Examine("a", bare)))


def test_an_update_of_the_attempt_before_counts() -> None:
    """It is of this round, so it is the same work."""
    assert hear("asked again", Offered("a", update(attempt=0))).actions[-1] == Fetch("a", update(attempt=0))


def test_an_update_that_is_offered_again_takes_the_place_of_the_first() -> None:
    """Also while that is fetched; what was examined of the first counts no more."""
    first, second = update(), update(weight=2.0)
    step = hear("asked", Offered("a", second), first)
    assert step.arriving == second
    assert step.actions == (Patience("a"), Fetch("a", second))
    assert hear("asked", Examined("a", first, first), step.arriving) == Step(second)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name not in ("no job", "new")])
def test_an_update_that_has_been_counted_is_acknowledged_as_often_as_it_is_offered(situation: str) -> None:
    """Of an earlier round, and of this one: its device may not have heard it."""
    assert hear(situation, Offered("a", update(round=0))) == Step(None, (), (Answer("a", update(round=0), True),))
    if situation in ("answered", "closed"):
        assert hear(situation, Offered("a", update())) == Step(None, (), (Answer("a", update(), True),))


@pytest.mark.parametrize("status", ["done", "failed", "stopped", "queued"])
def test_an_update_that_another_jobs_log_has_counted_is_acknowledged(status: str) -> None:
    """Its answer was lost and its job has ended, or waits: refused, its board would drop the state of that round."""
    told = Offered("a", update(job=OTHER), status, counted=True)
    for situation in SITUATIONS:
        assert hear(situation, told) == Step(None, (), (Answer("a", update(job=OTHER), True),))


def test_an_update_of_a_round_that_has_asked_nobody_yet_stays_with_its_device() -> None:
    """This log is an older copy: refused, its device would drop private state that the round is about to count."""
    assert hear("between rounds", Offered("a", update())) == Step(None)


@pytest.mark.parametrize(
    "situation",
    ["another was asked", "tried again without it", "declined", "rejected", "closed without it"],
)
def test_an_update_that_nobody_asked_for_is_turned_down_and_its_task_taken_back(situation: str) -> None:
    """Its round is closed, or it was not asked, or not any more."""
    answer, idle = hear(situation, Offered("a", update())).actions
    assert isinstance(answer, Answer)
    assert not answer.accepted
    assert "round 1 is closed or did not ask for this" in answer.reason
    assert idle == Withdraw("a")


def test_an_update_of_another_round_is_turned_down_and_the_task_stays_out() -> None:
    """Round 2 has not begun; "b" has no part in a round before the first."""
    for given in (update(round=2), update("b", round=3)):
        (answer,) = hear("asked", Offered(given.device, given)).actions
        assert isinstance(answer, Answer)
        assert not answer.accepted


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nobody_speaks_for_another(situation: str) -> None:
    """Whatever is under way, and whoever is asked."""
    step = hear(situation, Offered("stranger", update("a")))
    assert step.actions == (
        Answer("stranger", update("a"), False, "it names another device, a"),
        Withdraw("stranger"),
    )
    assert not step.facts


@pytest.mark.parametrize("situation", ["no job", "asked", "closed"])
@pytest.mark.parametrize("status", ["queued", "running", "stopping", "stopped", "done", "failed", ""])
def test_an_update_of_another_job_is_kept_by_its_device_as_long_as_that_may_go_on(situation: str, status: str) -> None:
    """Of one that is over, or that nobody here knows, it is refused."""
    step = hear(situation, Offered("a", update(job=OTHER), status))
    if status in ("done", "failed", ""):
        assert isinstance(step.actions[0], Answer)
        assert (step.actions[0].accepted, "no job j-2 is under way" in step.actions[0].reason) == (False, True)
    else:
        assert step == Step(None)


def test_an_update_whose_manifest_does_not_fit_is_rejected_before_it_is_fetched() -> None:
    """Also in place of one that is being fetched; one that fits is fetched."""
    both = update(bundles={"model": BLOB, "more": msgspec.structs.replace(BLOB, sha256="d" * 64)})
    assert Fetch("a", both) in hear("asked", Offered("a", both)).actions
    step = hear("asked", Offered("a", both, unfit="a: too large"), update())
    assert step.facts == (Rejected(1, "a", "a: too large"),)
    assert step.actions == (Answer("a", both, False, "a: too large"), Withdraw("a"), Discard(both))
    assert not step.arriving


# -- updates that are here ------------------------------------------------------------------------


@pytest.mark.parametrize("situation", SITUATIONS)
def test_blobs_that_nobody_waits_for_mean_nothing(situation: str) -> None:
    """The round has been closed meanwhile, or the device has declined; so has what could not be fetched."""
    for event in (Arrived("a"), Arrived("a", "gone"), Examined("a", update(), update()), Examined("a", update(), None)):
        assert hear(situation, event) == Step(None)


def test_an_update_that_could_not_be_fetched_is_waited_for_again() -> None:
    """Nothing is answered, so that its device offers it again."""
    step = hear("asked", Arrived("a", "it is not here any more"), fetching("asked"))
    assert step == Step(None)
    assert hear("asked", Offered("a", update()), step.arriving).arriving == update()


def test_an_update_that_may_not_be_folded_is_rejected_with_the_reason() -> None:
    """Its blobs go."""
    given = update()
    step = hear("asked", Examined("a", given, None, "not finite"), given)
    assert step.facts == (Rejected(1, "a", "not finite"),)
    assert step.actions == (Answer("a", given, False, "not finite"), Withdraw("a"), Discard(given))


def test_an_update_that_was_decoded_is_kept_as_that_and_acknowledged_as_it_came() -> None:
    """What it came as is discarded; how long it took is counted from when it was asked for."""
    given = update(usage=Usage(wall_s=3.0))
    taken = msgspec.structs.replace(given, bundles={"model": DECODED})
    step = hear("asked", Examined("a", given, taken), given)
    assert step.facts == (Answered(1, taken, NOW_S, None),)
    assert step.actions == (Answer("a", given, True), Withdraw("a"), Discard(given))

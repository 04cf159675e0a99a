"""Rollouts: their decisions and their log."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolled import MODEL, OTHER, Ground

from fedquilt import wire
from fedquilt.coordinator.rounds.rollout import (
    ALLOWED,
    MAX_REPORTING_S,
    AnyRolloutEvent,
    PhasePassed,
    ReleaseOffered,
    Rollout,
    RolloutCompleted,
    RolloutDevice,
    RolloutPlan,
    RolloutResumed,
    RolloutReverted,
    RolloutStarted,
    StatusReported,
    apply_rollout_event,
    decide_rollout_event,
    earlier_wait_s,
    event_from_report,
    find_blocking_devices,
    release_for_device,
    select_step_devices,
)
from fedquilt.coordinator.storage.rollout_log import StoredRollout
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import rollouts as view
from fedquilt.core import BlobRef, JobError, StoreError

BLOB = BlobRef(sha256="a" * 64, size=1)


def names(count: int) -> list[str]:
    return [f"b-{number:03d}" for number in range(count)]


def state(*facts: AnyRolloutEvent, **plan: Any) -> Rollout:
    """A rollout with serial 7 after some facts."""
    found = apply_rollout_event(
        Rollout("r", RolloutPlan(**{"kind": "model", "name": "n", "blob": BLOB, **plan})), RolloutStarted(7)
    )
    for fact in facts:
        found = apply_rollout_event(found, fact)
    return found


def there(devices: list[str], since_s: float = 0.0) -> dict[str, RolloutDevice]:
    return {device: RolloutDevice(True, since_s) for device in devices}


def message(phase: Any, serial: int = 7, rollout: str = "r", **changes: Any) -> wire.ReleaseStatus:
    return wire.ReleaseStatus(**{"rollout": rollout, "kind": "model", "serial": serial, "phase": phase, **changes})


@pytest.mark.parametrize(
    ("count", "canary", "wanted"), [(200, 0.05, 10), (199, 0.05, 9), (8, 0.05, 1), (1, 0.05, 1), (10, 0.3, 3)]
)
def test_the_canary_is_no_more_than_its_share(count, canary, wanted):
    fact = decide_rollout_event(state(canary=canary, phases=(1.0,)), there(names(count)), 0.0, 8)
    assert isinstance(fact, ReleaseOffered)
    assert len(fact.devices) == wanted


def test_boards_are_drawn_by_the_rollouts_id():
    fleet = there(names(100))
    once, other = state(), Rollout("other", state().plan, "running", 7)
    assert select_step_devices(once, fleet) == select_step_devices(once, dict(reversed(fleet.items())))
    assert select_step_devices(once, fleet) != select_step_devices(other, fleet)
    assert select_step_devices(once, fleet) != tuple(names(5))


def test_a_canary_waits_for_a_board_that_is_there():
    fleet = {name: RolloutDevice(False, 0.0) for name in names(10)}
    assert decide_rollout_event(state(), fleet, 1e9, 8) is None
    assert decide_rollout_event(state(), {**fleet, "b-003": RolloutDevice(True, 0.0)}, 0.0, 8) == ReleaseOffered(
        0, ("b-003",)
    )


def test_only_a_step_that_was_offered_passes():
    alone = there(["a"])
    now = state(ReleaseOffered(0, ("a",)), StatusReported("a", 7, "committed"))
    for fact in (PhasePassed(0), RolloutCompleted()):
        assert decide_rollout_event(now, alone, 0.0, 8) == fact
        now = apply_rollout_event(now, fact)
    assert (now.status, view.format_step(now)) == ("done", "phase 100 %")
    assert decide_rollout_event(now, alone, 0.0, 8) is None


def test_a_phase_without_devices_is_left_out():
    fleet = {**there(["a"]), "away": RolloutDevice(False, 0.0)}
    now = state(ReleaseOffered(0, ("a",)), StatusReported("a", 7, "committed"), PhasePassed(0))
    offered = decide_rollout_event(now, fleet, 0.0, 8)
    assert offered == ReleaseOffered(2, ("away",))
    now = apply_rollout_event(apply_rollout_event(now, offered), StatusReported("away", 7, "committed"))
    assert decide_rollout_event(now, fleet, 0.0, 8) == PhasePassed(2)


def test_the_last_step_takes_boards_that_are_away():
    fleet = {**there(["a", "b"]), "away": RolloutDevice(False, 0.0)}
    now = state(
        ReleaseOffered(0, ("a",)),
        StatusReported("a", 7, "committed"),
        PhasePassed(0),
        canary=0.5,
        phases=(1.0,),
        patience_s=60.0,
    )
    assert decide_rollout_event(now, fleet, 0.0, 8) == ReleaseOffered(1, ("away", "b"))
    now = apply_rollout_event(
        apply_rollout_event(now, ReleaseOffered(1, ("away", "b"))), StatusReported("b", 7, "committed")
    )
    assert decide_rollout_event(now, fleet, 59.0, 8) is None
    assert decide_rollout_event(now, fleet, 61.0, 8) == PhasePassed(1, ("away",))


def test_a_step_begins_with_no_time_waited_by_coordinators_before():
    restarts = [ReleaseOffered(0, ("a",)), StatusReported("a", 7, "committed"), RolloutResumed(50.0, 40.0)]
    now = state(*restarts)
    assert (earlier_wait_s(now, "b", False), now.restarts) == (50.0, 1)
    now = state(*restarts, PhasePassed(0), ReleaseOffered(1, ("b",)), phases=(1.0,))
    assert (earlier_wait_s(now, "b", False), earlier_wait_s(now, "b", True), now.restarts) == (0.0, 0.0, 0)


@pytest.mark.parametrize("phase", ["waiting", "fetching", "checking", "soaking"])
def test_a_board_that_is_there_and_talks_is_waited_for_a_day(phase):
    fleet = there(["a", "b", "c", "d"])
    both = ReleaseOffered(0, ("a", "b")), StatusReported("a", 7, "committed"), StatusReported("b", 7, phase)
    now = state(*both, canary=0.5, phases=(1.0,), patience_s=60.0, abort_above=1.0)
    assert decide_rollout_event(now, fleet, MAX_REPORTING_S, 8) is None
    assert find_blocking_devices(now, fleet, MAX_REPORTING_S) == ("b",)
    assert find_blocking_devices(now, fleet, MAX_REPORTING_S + 61.0) == ()
    assert decide_rollout_event(now, fleet, MAX_REPORTING_S + 61.0, 8) == PhasePassed(0, ("b",))


@pytest.mark.parametrize(("failure", "passed"), [("refused", 0), ("returned", 0), ("refused", 20)])
def test_more_failures_than_allowed_abort_it(failure, passed):
    """In the canary, and after a good one: at once, not when all boards of the step have answered."""
    devices = names(400)
    canary = tuple(devices[380:]) if passed else tuple(devices[:20])
    now = state(ReleaseOffered(0, canary), canary=0.05, abort_above=0.1)
    if passed:
        reports = [StatusReported(device, 7, "committed") for device in canary]
        for fact in (*reports, PhasePassed(0), ReleaseOffered(1, tuple(devices[:100]))):
            now = apply_rollout_event(now, fact)
    for device in devices[:2]:
        now = apply_rollout_event(now, StatusReported(device, 7, failure, "worse"))
    assert decide_rollout_event(now, there(devices), 0.0, 8) is None
    fact = decide_rollout_event(
        apply_rollout_event(now, StatusReported(devices[2], 7, failure, "worse")), there(devices), 0.0, 8
    )
    assert fact == RolloutReverted(8, f"3 of {passed + 3} devices failed, more than 10 % (b-000 {failure}: worse)")


def test_at_the_end_of_a_step_only_those_that_answered_count():
    devices = names(200)
    now = state(ReleaseOffered(0, tuple(devices[:20])), patience_s=10.0, abort_above=0.1)
    for device in devices[:2]:
        now = apply_rollout_event(now, StatusReported(device, 7, "refused"))
    assert isinstance(
        decide_rollout_event(now, {name: RolloutDevice(False, 0.0) for name in devices}, 11.0, 8), RolloutReverted
    )


@given(
    st.lists(st.sampled_from(["committed", "refused", "returned", "soaking", "waiting", ""]), min_size=1, max_size=30)
)
def test_a_step_passes_only_if_few_enough_failed(phases):
    devices = names(len(phases))
    now = state(ReleaseOffered(0, tuple(devices)), canary=0.5, phases=(1.0,), abort_above=0.2, patience_s=10.0)
    for device, phase in zip(devices, phases, strict=True):
        now = apply_rollout_event(now, StatusReported(device, 7, phase)) if phase else now
    fact = decide_rollout_event(now, {name: RolloutDevice(False, 0.0) for name in devices}, 1e6, 8)
    failed = sum(phase in ("refused", "returned", "soaking") for phase in phases)
    ended = sum(phase not in ("waiting", "") for phase in phases)
    if isinstance(fact, PhasePassed):
        assert failed <= 0.2 * ended
        assert ended
    elif fact is None:
        assert not any(phase in ("committed", "refused", "returned") for phase in phases)
    else:
        assert isinstance(fact, RolloutReverted)
        assert failed > 0.2 * ended


def test_a_board_that_died_in_its_check_is_shown_as_lost_until_it_is_heard_again():
    devices = names(12)
    now = state(ReleaseOffered(0, tuple(devices)), canary=0.5, phases=(1.0,), abort_above=0.2, patience_s=10.0)
    for device in devices[2:]:
        now = apply_rollout_event(now, StatusReported(device, 7, "committed"))
    now = apply_rollout_event(now, StatusReported(devices[0], 7, "checking"))
    fleet = {name: RolloutDevice(False, 0.0) for name in devices}
    assert now.count_outcomes() == {"checking": 1, "": 1, "committed": 10}
    for fact in (decide_rollout_event(now, fleet, 1e6, 8), PhasePassed(1), RolloutCompleted()):
        assert isinstance(fact, PhasePassed | RolloutCompleted)
        now = apply_rollout_event(now, fact)
    assert (now.status, now.count_outcomes()) == ("done", {"lost": 1, "": 1, "committed": 10})
    told = view.summarise_rollout_and_devices(StoredRollout(now, 0.0, 0.0, "me", ""))
    assert told["counts"] == {"committed": 10, "lost": 1, "silent": 1}
    assert (told["boards"][0]["phase"], told["boards"][1]["phase"]) == ("lost", "silent")
    assert told["boards"][0]["reason"] == "silent since phase checking: counts as failed"
    assert apply_rollout_event(now, StatusReported(devices[0], 7, "committed")).count_outcomes() == {
        "": 1,
        "committed": 11,
    }


def test_new_boards_get_what_is_done_unless_it_was_for_some_alone():
    rest = (
        ReleaseOffered(0, ("a",)),
        StatusReported("a", 7, "committed"),
        PhasePassed(0),
        PhasePassed(1),
        PhasePassed(2),
        RolloutCompleted(),
    )
    assert decide_rollout_event(state(*rest), there(["a", "new"]), 0.0, 8) == ReleaseOffered(2, ("new",))
    some = (*rest[:3], PhasePassed(1), RolloutCompleted())
    assert decide_rollout_event(state(*some, phases=(0.25,)), there(["a", "new"]), 0.0, 8) is None


# -- what boards say, and are to have -------------------------------------------------------------
def test_what_a_board_says_is_noted_once():
    now = state(ReleaseOffered(0, ("a",)))
    said = message("soaking", metrics={"accuracy": 0.9, "latency_s": float("inf"), "mine": 1.0}, reason="r")
    fact = event_from_report(now, "a", said)
    assert fact == StatusReported("a", 7, "soaking", "r", {"accuracy": 0.9})
    assert event_from_report(apply_rollout_event(now, fact), "a", said) is None


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("b", message("committed")),
        ("a", message("committed", kind="agent")),
        ("a", message("committed", serial=6)),
        ("a", message("committed", serial=6, rollout="before")),
    ],
)
def test_what_is_of_something_else_is_no_fact(device, said):
    assert event_from_report(state(ReleaseOffered(0, ("a",))), device, said) is None


def test_a_later_release_of_elsewhere_is_a_refusal():
    fact = event_from_report(state(ReleaseOffered(0, ("a",))), "a", message("committed", serial=9, rollout="other"))
    assert (fact.serial, fact.phase) == (7, "refused")
    assert "release 9 of other, this is 7" in fact.reason


@pytest.mark.parametrize(
    ("heard", "back"),
    [((), True), (("waiting",), True), (("soaking",), True), (("committed",), True), (("refused",), False)],
)
@pytest.mark.parametrize(("done", "status"), [(False, "aborted"), (True, "rolled back")])
def test_every_board_that_may_have_it_is_to_return(heard, back, done, status):
    facts = [ReleaseOffered(0, ("a",)), *(StatusReported("a", 7, phase) for phase in heard)]
    facts += [PhasePassed(0), RolloutCompleted()] if done else []
    now = state(*facts, RolloutReverted(9, "why"))
    assert (now.status, now.reason) == (status, "why")
    sent = release_for_device(now, "a")
    if not back:
        assert sent is None
        assert now.device_phase("a") == "refused"
        return
    assert sent == wire.DesiredRelease(rollout="r", kind="model", serial=9, name="n", is_rollback=True)
    assert now.device_phase("a") == ""
    assert apply_rollout_event(now, StatusReported("a", 9, "returned")).device_phase("a") == "returned"


def test_who_was_not_offered_it_is_sent_nothing():
    assert release_for_device(state(ReleaseOffered(0, ("a",))), "b") is None


def test_facts_that_cannot_follow_are_refused():
    facts = {
        RolloutStarted: RolloutStarted(8),
        ReleaseOffered: ReleaseOffered(0, ("a",)),
        StatusReported: StatusReported("a", 7, "waiting"),
        RolloutResumed: RolloutResumed(1.0, 1.0),
        PhasePassed: PhasePassed(0),
        RolloutCompleted: RolloutCompleted(),
        RolloutReverted: RolloutReverted(9),
    }
    assert facts.keys() == ALLOWED.keys()
    for kind, allowed in ALLOWED.items():
        for status in ("queued", "running", "done", "aborted", "rolled back"):
            now = Rollout("r", RolloutPlan("model", "n"), status)
            if status in allowed:
                apply_rollout_event(now, facts[kind])
            else:
                with pytest.raises(JobError, match=f"is not allowed while the rollout is {status}"):
                    apply_rollout_event(now, facts[kind])


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """A home without boards."""
    return Ground(tmp_path)


def test_blobs_are_kept_while_some_board_may_ask_for_them(ground):
    ground.fleet(2, lambda device, release: "refused" if release.name == "bad" else "committed")
    digests = [ground.store.blob_store.store_bytes(each).sha256 for each in (MODEL, OTHER, b"bad")]
    ground.deploy(MODEL, name="first")
    assert ground.store.referenced_blobs() == {digests[0]}
    ground.play(30.0)
    ground.deploy(b"bad", name="bad")
    assert ground.store.referenced_blobs() == {digests[0], digests[2]}
    ground.play(30.0)
    assert ground.state().status == "aborted"
    ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert ground.state().status == "done"
    assert ground.store.referenced_blobs() == {digests[1]}


def test_who_reads_while_a_coordinator_writes_sees_one_moment(ground):
    id = ground.deploy()
    ground.play(8.0)
    with Store(ground.home) as reader:
        line = reader.rollouts._rows.find_job
        number = itertools.count(100)

        def slow(wanted):
            found = line(wanted)
            ground.store.rollouts.append_events([(id, ReleaseOffered(0, (f"x-{next(number)}",)))])
            return found

        reader.rollouts._rows.find_job = slow
        assert [kept.state.id for kept in reader.rollouts.readable_rollouts()] == [id]
        assert reader.rollouts.find_rollout().state.id == id
        assert reader.rollouts.read_events(id)
        assert reader.rollouts.read_errors() == {}


def test_a_damaged_log_is_named_and_hides_no_other(ground, caplog):
    ground.fleet(2)
    first = ground.deploy(MODEL, name="first")
    ground.play(30.0)
    ground.store._db.execute("update rollout_facts set at = at + 1 where seq = 2")
    ground.restart()
    second = ground.deploy(OTHER, name="second")
    ground.play(30.0)
    assert ground.state(second).status == "done"
    assert f"the event log of {first} in" in caplog.text
    assert ground.store.find_damaged_ids() == [first]
    with pytest.raises(StoreError, match="is damaged: event 2"):
        ground.store.rollouts.find_rollout(first)


def test_a_rollout_that_there_is_not_is_named(ground):
    log = ground.store.rollouts
    for act in (
        lambda: log.read_events("none"),
        lambda: log.request_revert("none"),
        lambda: log.append_events([(ground.deploy(), RolloutStarted(1)), ("none", RolloutStarted(2))]),
    ):
        with pytest.raises(StoreError, match=r"no rollout 'none' in .*: `fedquilt rollout status` lists them"):
            act()
    (kept,) = log.readable_rollouts()
    assert (kept.state.status, log.read_events(kept.state.id)) == ("queued", [])
    assert ground.store._db.execute("select count(*) from rollout_facts").fetchone() == (0,)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_rollout_that_was_replaced_is_read_anew(ground, name):
    log = ground.store.rollouts
    id = ground.deploy(name="first")
    log.append_events([(id, RolloutStarted(1)), (id, ReleaseOffered(0, ("a", "b")))])
    assert log.find_rollout(id).state.offered.keys() == {"a", "b"}
    for table, key in (("rollout_facts", "job"), ("rollouts", "id")):
        ground.store._db.execute(f"delete from {table} where {key} = ?", (id,))
    log.add_rollout(RolloutPlan("model", name, blob=ground.store.blob_store.store_bytes(OTHER)), id=id)
    log.append_events([(id, RolloutStarted(2)), (id, ReleaseOffered(0, ("c",))), (id, ReleaseOffered(1, ("d",)))])
    with Store(ground.home) as fresh:
        assert log.find_rollout(id) == fresh.rollouts.find_rollout(id)
    assert log.find_rollout(id).state.offered.keys() == {"c", "d"}


def test_a_serial_is_later_than_any_before_and_than_any_of_a_home_that_was_put_back(ground, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 5e9)
    assert ground.store.rollouts.next_serial() == 5_000_000_000
    ground.store.rollouts.append_events([(ground.deploy(), RolloutStarted(6_000_000_000))])
    assert ground.store.rollouts.next_serial() == 6_000_000_001


def test_a_plan_is_read_back_as_it_was(ground):
    plan = RolloutPlan(
        "settings", "s", settings={"budget": "1GB", "governor": {"max_w": 7.5}}, limits=wire.ReleaseLimits(min_gain=0.0)
    )
    id = ground.store.rollouts.add_rollout(plan)
    ground.restart()
    assert ground.state(id).plan == plan

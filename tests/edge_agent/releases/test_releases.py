"""Releases on one agent, with a kind that the test has in its hands, on virtual time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path

import pytest
from one_agent import TOPICS, Site
from toy_kinds import ToyKind, release

from fedquilt import wire
from fedquilt.core import BlobRef, ModelError, StoreError
from fedquilt.edge_agent.releases import window
from fedquilt.edge_agent.releases.kind import Verdict
from fedquilt.edge_agent.served import Runner
from fedquilt.testing.faults.disk import Crash
from fedquilt.wire import Installed, Release


@pytest.fixture
def toy() -> ToyKind:
    return ToyKind()


@pytest.fixture
def site(tmp_path: Path, toy: ToyKind) -> Site:
    site = Site(tmp_path)
    site.kinds["model"] = toy
    site.start()
    return site


def deploy(site: Site, serial: int = 1, **changes: object) -> Release:
    """Publish a release of a blob of its own, as the coordinator does."""
    wanted = release(serial, site.depot.put(b"model %d" % serial), **changes)
    site.say("model", wanted, retain=True)
    return wanted


def phases(site: Site) -> list[str]:
    """Phases that were told, each once where it follows itself."""
    told = [each.phase for each in site.all("installed")]
    return [phase for at, phase in enumerate(told) if at == 0 or phase != told[at - 1]]


def last(site: Site) -> Installed:
    return site.all("installed")[-1]


def test_a_release_is_fetched_checked_swapped_soaked_and_committed(site: Site, toy: ToyKind) -> None:
    """Each phase is told, and the blob that runs with the last one."""
    wanted = deploy(site)
    assert wanted.blob is not None
    site.run(5.0)
    assert phases(site) == ["waiting", "fetching", "checking", "soaking"]
    assert toy.staged == b"model 1"
    site.run(10.0)
    assert (last(site).phase, last(site).current, last(site).name) == ("committed", wanted.blob.sha256, "v1")
    assert last(site).metrics == {"accuracy": 0.9}


def test_what_ran_before_is_what_it_returns_to(site: Site, toy: ToyKind) -> None:
    """The second release soaks, and turns out to be ill."""
    first = deploy(site)
    site.run(20.0)
    deploy(site, 2)
    site.run(3.0)
    toy.illness, toy.lasting = "it failed 9 of 10 times", "hook failed"
    site.run(3.0)
    assert first.blob is not None
    assert (last(site).phase, last(site).reason) == (
        "returned",
        "it failed 9 of 10 times; after the return: hook failed",
    )
    assert (last(site).current, last(site).name) == (first.blob.sha256, "v1")


@pytest.mark.parametrize("method", ["stage", "check"])
def test_what_cannot_be_staged_or_checked_is_refused_by_name(site: Site, toy: ToyKind, method: str) -> None:
    """Nothing has been exchanged, and the next release is taken."""
    toy.fails[method] = ModelError("it is for another board")
    deploy(site)
    site.run(5.0)
    assert (last(site).phase, last(site).reason, last(site).current) == ("refused", "it is for another board", "")
    assert "swap" not in toy.calls
    assert not site.agent.duty.state.rests
    deploy(site, 2)
    site.run(20.0)
    assert last(site).phase == "committed"


def test_a_check_that_refuses_ends_the_release(site: Site, toy: ToyKind) -> None:
    """The end is told with what was measured."""
    toy.verdict = Verdict("its accuracy is 40.0%", {"accuracy": 0.4})
    deploy(site)
    site.run(5.0)
    assert (last(site).phase, last(site).reason) == ("refused", "its accuracy is 40.0%")
    assert last(site).metrics == {"accuracy": 0.4}
    assert toy.calls[-1] == "drop"


def test_a_swap_that_fails_leaves_what_ran(site: Site, toy: ToyKind) -> None:
    """A full disk lets nothing be exchanged."""
    first = deploy(site)
    site.run(20.0)
    toy.fails["swap"] = StoreError("cannot exchange the model: No space left on device; free some space")
    deploy(site, 2)
    site.run(20.0)
    assert first.blob is not None
    assert (last(site).phase, last(site).current) == ("refused", first.blob.sha256)
    assert "No space left on device" in last(site).reason


def test_a_release_larger_than_the_disk_is_refused(site: Site) -> None:
    """Room is asked for before anything is fetched."""
    site.say("model", release(1, BlobRef(sha256="a" * 64, size=1 << 52)), retain=True)
    site.run(2.0)
    assert last(site).phase == "refused"
    assert "are free" in last(site).reason


def test_a_blob_that_cannot_be_had_is_asked_for_again(site: Site) -> None:
    """A coordinator that has the blob a little later is asked in time."""
    payload = b"late"
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    site.say("model", release(1, ref), retain=True)
    site.run(5.0)
    assert last(site).phase == "fetching"
    assert last(site).reason
    site.depot.put(payload)
    site.run(120.0)
    assert last(site).phase == "committed"


# -- what it waits for ----------------------------------------------------------------------------


def test_no_task_begins_while_a_release_is_checked(site: Site, toy: ToyKind) -> None:
    """The check needs a task's memory: a task that arrives is accepted, and begins afterwards."""
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "checking"
    killed = site.bench.killed
    assert killed == 1  # the process that waited for the next task
    site.ask()
    site.run(5.0)
    assert site.all("claim")[-1].accepted
    assert site.bench.orders == []
    toy.verdict = verdict
    site.run(1.0)
    assert len(site.bench.orders) == 1


@pytest.mark.parametrize("force", [False, True])
def test_a_task_that_runs_is_waited_for_unless_the_release_is_forced(site: Site, toy: ToyKind, force: bool) -> None:
    """A forced release is checked beside the task, which goes on."""
    site.ask()
    deploy(site, force=force)
    site.run(20.0)
    told = last(site)
    assert (told.phase, told.reason) == (("committed", "") if force else ("waiting", "a task runs"))
    assert site.bench.killed == 0
    site.bench.finish()
    site.run(30.0)
    assert last(site).phase == "committed"
    assert len(site.all("update")) >= 1


def test_memory_that_is_not_free_is_waited_for(site: Site, toy: ToyKind) -> None:
    """The blob is fetched already: the check waits."""
    toy.need, site.board.available_bytes = 100_000_000, 99_000_000
    deploy(site)
    site.run(10.0)
    assert last(site).reason == "its check takes 100 MB of memory, and less is free"
    site.board.available_bytes = 100_000_000
    site.run(20.0)
    assert last(site).phase == "committed"


def test_its_blob_is_kept_while_it_waits_however_little_room_there_is_for_others(site: Site, toy: ToyKind) -> None:
    """A task's blobs take all of the cache meanwhile; once the model is staged, its blob may go."""
    site.start(cache="10B")
    toy.need, site.board.available_bytes = 5 << 30, 4 << 30
    wanted = deploy(site)
    site.run(5.0)
    assert last(site).phase == "waiting"
    fetched = len(site.all("installed"))
    site.ask()
    site.bench.finish()
    site.run(5.0)
    assert wanted.blob is not None
    assert site.agent.local.depot.has(wanted.blob)
    site.ack()
    site.board.available_bytes = 6 << 30
    site.run(20.0)
    assert last(site).phase == "committed"
    assert "fetching" not in [each.phase for each in site.all("installed")[fetched:] if each.reason]
    assert site.agent.releases.needed() == set()


def test_a_clock_in_1970_does_not_open_a_window(site: Site) -> None:
    """The board says so, and goes on once its clock is set and the window is open."""
    site.clock = lambda: site.broker.now_s
    deploy(site, window="00:00-23:59")
    site.run(20.0)
    assert (last(site).phase, last(site).reason) == ("waiting", "its window is 00:00-23:59, and its clock says 1970")
    midday_s = time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, -1))
    site.clock = lambda: midday_s + site.broker.now_s
    site.run(30.0)
    assert last(site).phase == "committed"


def test_a_text_that_is_no_window_is_refused(site: Site) -> None:
    deploy(site, window="25:00-3")
    assert (last(site).phase, last(site).reason) == ("refused", f"'25:00-3' is no window: {window.FORM}")


# -- one after the other --------------------------------------------------------------------------


def test_the_same_release_again_is_answered_and_not_done_again(site: Site, toy: ToyKind) -> None:
    """The coordinator repeats a release until it has heard; a release of a smaller serial is old news."""
    wanted = deploy(site, 5)
    site.run(20.0)
    calls, told = list(toy.calls), len(site.all("installed"))
    site.say("model", wanted, retain=True)
    deploy(site, 4)
    site.run(20.0)
    assert toy.calls == calls
    again = site.all("installed")[told:]
    assert [(each.serial, each.phase) for each in again] == [(5, "committed")] * 2


@pytest.mark.parametrize("anew", [False, True])
def test_an_old_release_that_is_kept_and_sent_again_changes_nothing(site: Site, toy: ToyKind, anew: bool) -> None:
    """Whoever has an old retained message cannot bring its model back: after a later one, and after a return from that.

    `anew`: the agent was started anew meanwhile, and finds the old message in its topic.
    """

    def replayed(old: Release) -> None:
        running, calls, told = toy.running, list(toy.calls), len(site.all("installed"))
        if anew:
            site.link.publish(TOPICS.device("d", "dn", "model"), wire.encode(old), retain=True)
            site.start()
        else:
            site.say("model", old, retain=True)
        site.run(20.0)
        assert (toy.running, toy.calls[len(calls) :]) == (running, ["drop"] * (len(toy.calls) - len(calls)))
        assert all(each.serial > old.serial for each in site.all("installed")[told:])

    old = deploy(site)
    site.run(20.0)
    later = deploy(site, 2)
    site.run(20.0)
    replayed(old)
    site.say("model", release(3, rollout="r2", back=True), retain=True)
    site.run(20.0)
    assert (last(site).serial, last(site).phase) == (3, "returned")
    replayed(later)
    replayed(old)


def test_a_newer_release_takes_the_place_of_one_that_is_not_in_use(site: Site, toy: ToyKind) -> None:
    """The check of the older release is ended."""
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    toy.verdict = verdict
    newer = deploy(site, 2)
    site.run(20.0)
    assert newer.blob is not None
    assert toy.running == newer.blob.sha256
    assert toy.previous == ""
    assert not site.agent.duty.state.rests


def test_a_release_that_soaks_comes_to_its_end_before_the_next_one(site: Site, toy: ToyKind) -> None:
    """What the next release would return to has held."""
    deploy(site)
    site.run(3.0)
    assert last(site).phase == "soaking"
    deploy(site, 2)
    assert last(site).serial == 1
    site.run(30.0)
    assert [each.serial for each in site.all("installed") if each.phase == "committed"] == [1, 2]


def test_what_a_rollout_has_brought_is_taken_back(site: Site, toy: ToyKind) -> None:
    """A rollout is taken back once; of one that this board has never had there is nothing to take back."""
    first = deploy(site)
    site.run(20.0)
    deploy(site, 2)
    site.run(20.0)
    assert first.blob is not None
    for serial, rollout, running in ((3, "r1", False), (4, "r2", True), (5, "r2", True)):
        site.say("model", release(serial, rollout=rollout, back=True), retain=True)
        site.run(5.0)
        assert (last(site).serial, last(site).phase) == (serial, "returned")
        assert (toy.running == first.blob.sha256) is running
    assert last(site).reason == "it does not run what that rollout has brought"
    assert toy.calls.count("back") == 1


def test_what_soaks_is_taken_back_at_once(site: Site, toy: ToyKind) -> None:
    """Nothing ran before the first release, and nothing runs after its return."""
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "soaking"
    site.say("model", release(2, rollout="r1", back=True), retain=True)
    site.run(2.0)
    assert (last(site).phase, last(site).current, last(site).name) == ("returned", "", "")


def test_a_release_that_is_withdrawn_is_given_up(site: Site, toy: ToyKind) -> None:
    """An empty topic ends a check; a release that soaks goes on."""
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    site.say("model", b"", retain=True)
    assert (last(site).phase, last(site).reason) == ("refused", "it was withdrawn")
    toy.verdict = verdict
    deploy(site, 2)
    site.run(3.0)
    site.say("model", b"", retain=True)
    site.run(20.0)
    assert last(site).phase == "committed"


def test_the_same_model_again_is_not_exchanged(site: Site, toy: ToyKind) -> None:
    """Another rollout of what runs is committed at once; taking that rollout back leaves the model."""
    wanted = deploy(site)
    site.run(20.0)
    site.say("model", release(2, wanted.blob), retain=True)
    site.run(2.0)
    assert (last(site).phase, last(site).reason) == ("committed", "it ran here already")
    site.say("model", release(3, rollout="r2", back=True), retain=True)
    site.run(2.0)
    assert wanted.blob is not None
    assert toy.running == wanted.blob.sha256


def test_a_kind_that_this_board_does_not_exchange_is_refused(site: Site) -> None:
    """The agent was started without that kind."""
    site.say("settings", release(1, kind="settings"), retain=True)
    assert (last(site).kind, last(site).phase) == ("settings", "refused")


def test_a_release_on_the_topic_of_another_kind_is_dropped(site: Site) -> None:
    """Such a release counts as bad bytes."""
    site.say("agent", release(1), retain=True)
    assert site.agent.garbage.dropped == 1
    assert site.all("installed") == []


def test_it_tells_how_far_it_is_in_every_new_session(site: Site) -> None:
    """A broker may have lost what was told."""
    deploy(site)
    site.run(20.0)
    told = len(site.all("installed"))
    site.start()
    assert {each.phase for each in site.all("installed")[told:]} == {"committed"}


def test_telemetry_tells_what_the_runner_tells(site: Site) -> None:
    """A runner that has written nothing for a minute is left out of telemetry."""
    site.runner = Runner(site.folder, clock=lambda: site.broker.now_s)
    told = {"served": 120, "failed": 3, "drift": 0.25, "accuracy": 0.75, "labelled": 40, "model": "", "latency_s": None}
    (site.folder / "served.json").write_text(json.dumps({**told, "at": time.time()}))
    site.start(telemetry_s=50.0)
    site.run(100.0)
    found = [(each.served, each.drift, each.accuracy) for each in site.all("telemetry")[-3:]]
    assert found == [(120, 0.25, 0.75), (120, 0.25, 0.75), (None, None, None)]


@pytest.mark.parametrize("calls", range(12))
def test_what_cannot_be_read_for_a_while_ends_nothing(
    site: Site, toy: ToyKind, caplog: pytest.LogCaptureFixture, calls: int
) -> None:
    """Any call that asks a kind what is in use may be the first to fail; a task that runs goes on."""
    site.ask()
    site.bench.finish()
    site.run()
    site.ask(1)
    current, left = toy.current, iter(range(calls))

    def unreadable() -> str:
        if next(left, None) is not None:
            return current()
        raise StoreError("cannot read choice.json: Input/output error")

    toy.current = unreadable
    deploy(site, force=True)
    site.run(10.0)
    assert "releases of kind model wait: cannot read choice.json" in caplog.text
    assert all(claim.accepted for claim in site.all("claim"))
    toy.current = current
    site.bench.finish()
    site.run(30.0)
    assert last(site).phase == "committed"
    assert len(site.all("update")) >= 2


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["stage", "begin_check", "swap", "back", "drop"])
@pytest.mark.parametrize("late", [False, True])
def test_killed_in_any_call_it_goes_on_by_itself(site: Site, toy: ToyKind, method: str, late: bool) -> None:
    """Death comes before the call has done anything, or after; the second release is ill, and returns to the first."""
    first = deploy(site)
    site.run(20.0)
    assert first.blob is not None
    original = getattr(toy, method)

    def dies(*given: object) -> object:
        if late:
            original(*given)
        raise Crash

    setattr(toy, method, dies)
    second = deploy_and_die(site)
    setattr(toy, method, original)
    site.start()
    site.run(4.0)
    toy.illness = "bad"
    site.run(20.0)
    assert toy.running == first.blob.sha256
    assert (last(site).rollout, last(site).phase) == (second.rollout, "returned")
    assert toy.calls.count("stage") + toy.calls.count("check") >= 2


def deploy_and_die(site: Site) -> Release:
    """Publish the second release; the process dies in it."""
    wanted = release(2, site.depot.put(b"model 2"))
    with contextlib.suppress(Crash):
        site.say("model", wanted, retain=True)
        site.run(4.0)
        assert isinstance(site.kinds["model"], ToyKind)
        site.kinds["model"].illness = "bad"
        site.run(20.0)
        pytest.fail("nothing has died")
    site.kinds["model"].illness = ""  # type: ignore[attr-defined]
    return wanted


def test_something_that_returned_outside_the_agent_is_found(site: Site, toy: ToyKind) -> None:
    """A launcher that could not start the new version put the old one back."""
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "soaking"
    toy.running = ""
    toy.illness = "it could not be started"
    site.start()
    assert (last(site).phase, last(site).reason, last(site).current) == ("returned", "it could not be started", "")
    assert toy.calls.count("swap") == 1


def test_damaged_notes_are_forgotten(site: Site, toy: ToyKind, caplog: pytest.LogCaptureFixture) -> None:
    """A release that is still on the broker is found to run already."""
    deploy(site)
    site.run(20.0)
    (site.folder / "d/releases/model.json").write_bytes(b"nonsense")
    site.start()
    site.run(2.0)
    assert "is damaged" in caplog.text
    assert (last(site).phase, last(site).reason) == ("committed", "it ran here already")


def test_a_swap_that_cannot_be_noted_is_not_made(site: Site, toy: ToyKind) -> None:
    """A process that begins has to know what ran before."""
    deploy(site)
    site.run(20.0)
    verdict, toy.verdict = toy.verdict, None
    deploy(site, 2)
    site.run(2.0)
    (site.folder / "d/releases/model.json.part").mkdir()  # nothing can be written there
    toy.verdict = verdict
    site.run(5.0)
    assert last(site).phase == "refused"
    assert "cannot write" in last(site).reason
    assert toy.calls.count("swap") == 1

"""Releases on one agent, with a kind that the test has in its hands, on virtual time."""

from __future__ import annotations

import contextlib
import hashlib
import time

import pytest
from one_agent import Site
from toy_kinds import ToyKind, deploy, last, release

from fedquilt.core import BlobRef, ModelError, StoreError
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.wire import DesiredRelease
from tests.faults.disk import SimulatedCrash


def phases(site: Site) -> list[str]:
    """Phases that were told, each once where it follows itself."""
    told = [each.phase for each in site.all("installed")]
    return [phase for at, phase in enumerate(told) if at == 0 or phase != told[at - 1]]


def test_a_release_is_fetched_checked_swapped_soaked_and_committed(site: Site, toy: ToyKind) -> None:
    wanted = deploy(site)
    assert wanted.blob is not None
    site.run(5.0)
    assert phases(site) == ["waiting", "fetching", "checking", "soaking"]
    assert toy.staged == b"model 1"
    site.run(10.0)
    assert (last(site).phase, last(site).current, last(site).name) == ("committed", wanted.blob.sha256, "v1")
    assert last(site).metrics == {"accuracy": 0.9}


def test_what_ran_before_is_what_it_returns_to(site: Site, toy: ToyKind) -> None:
    first = deploy(site)
    site.run(20.0)
    deploy(site, 2)
    site.run(3.0)
    toy.illness, toy.lasting = "it failed 9 of 10 times", "hook failed"
    site.run(3.0)
    assert first.blob is not None
    assert (last(site).phase, last(site).reason) == (
        "returned",
        "it failed 9 of 10 times; after the roll-back: hook failed",
    )
    assert (last(site).current, last(site).name) == (first.blob.sha256, "v1")


def test_a_soak_goes_on_though_what_is_in_use_could_not_be_read_when_it_was_told_again(
    site: Site, toy: ToyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(site)
    site.run(5.0)
    assert last(site).phase == "soaking"

    def fail() -> str:
        raise StoreError("cannot read the model's folder: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(toy, "current_sha256", fail)
        site.agent.releases.republish_progress(site.broker.now_s)
    site.run(20.0)
    assert last(site).phase == "committed"


def test_a_killed_check_is_made_again(site: Site, toy: ToyKind) -> None:
    toy.verdict = None
    deploy(site)
    site.run(5.0)
    toy.verdict = CheckResult("killed", {}, killed_externally=True)
    site.agent.releases.step(site.broker.now_s)
    assert toy.calls.count("check") == 2
    toy.verdict = CheckResult("", {})
    site.run(20.0)
    assert last(site).phase == "committed"


@pytest.mark.parametrize("method", ["stage", "check"])
def test_what_cannot_be_staged_or_checked_is_refused_by_name(site: Site, toy: ToyKind, method: str) -> None:
    toy.fails[method] = ModelError("it is for another board")
    deploy(site)
    site.run(5.0)
    assert (last(site).phase, last(site).reason, last(site).current) == ("refused", "it is for another board", "")
    assert "swap" not in toy.calls
    assert not site.agent.task_runner.state.is_paused
    deploy(site, 2)
    site.run(20.0)
    assert last(site).phase == "committed"


def test_a_check_that_refuses_ends_the_release(site: Site, toy: ToyKind) -> None:
    toy.verdict = CheckResult("its accuracy is 40.0%", {"accuracy": 0.4})
    deploy(site)
    site.run(5.0)
    assert (last(site).phase, last(site).reason) == ("refused", "its accuracy is 40.0%")
    assert last(site).metrics == {"accuracy": 0.4}
    assert toy.calls[-1] == "drop"


def test_a_swap_that_fails_leaves_what_ran(site: Site, toy: ToyKind) -> None:
    first = deploy(site)
    site.run(20.0)
    toy.fails["swap"] = StoreError("cannot exchange the model: No space left on device; free some space")
    deploy(site, 2)
    site.run(20.0)
    assert first.blob is not None
    assert (last(site).phase, last(site).current) == ("refused", first.blob.sha256)
    assert "No space left on device" in last(site).reason


def test_a_release_larger_than_the_disk_is_refused(site: Site) -> None:
    site.say("model", release(1, BlobRef(sha256="a" * 64, size=1 << 52)), retain=True)
    site.run(2.0)
    assert last(site).phase == "refused"
    assert "are free" in last(site).reason


def test_a_blob_that_cannot_be_had_is_asked_for_again(site: Site) -> None:
    payload = b"late"
    ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    site.say("model", release(1, ref), retain=True)
    site.run(5.0)
    assert last(site).phase == "fetching"
    assert last(site).reason
    site.depot.store_bytes(payload)
    site.run(120.0)
    assert last(site).phase == "committed"


# -- what it waits for ----------------------------------------------------------------------------


def test_no_task_begins_while_a_release_is_checked(site: Site, toy: ToyKind) -> None:
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "checking"
    killed = site.worker.killed_externally
    assert killed == 1  # the process that waited for the next task
    site.ask()
    site.run(5.0)
    assert site.all("claim")[-1].accepted
    assert site.worker.requests == []
    toy.verdict = verdict
    site.run(1.0)
    assert len(site.worker.requests) == 1


@pytest.mark.parametrize("force", [False, True])
def test_a_task_that_runs_is_waited_for_unless_the_release_is_forced(site: Site, toy: ToyKind, force: bool) -> None:
    site.ask()
    deploy(site, force=force)
    site.run(20.0)
    told = last(site)
    assert (told.phase, told.reason) == (("committed", "") if force else ("waiting", "a task runs"))
    assert site.worker.killed_externally == 0
    site.worker.finish()
    site.run(30.0)
    assert last(site).phase == "committed"
    assert len(site.all("update")) >= 1


def test_a_release_goes_on_as_soon_as_a_task_has_ended(site: Site) -> None:
    site.ask()
    deploy(site)
    site.run(6.0)
    assert last(site).reason == "a task runs"
    site.worker.finish()
    site.run(0.5)
    site.ask()
    site.run(0.5)
    assert last(site).phase == "soaking"


def test_memory_that_is_not_free_is_waited_for(site: Site, toy: ToyKind) -> None:
    toy.need, site.board.available_bytes = 100_000_000, 99_000_000
    deploy(site)
    site.run(10.0)
    assert last(site).reason == "the check needs 100 MB of memory, and less is free"
    site.board.available_bytes = 100_000_000
    site.run(20.0)
    assert last(site).phase == "committed"


def test_its_blob_is_kept_while_it_waits_however_little_room_there_is_for_others(site: Site, toy: ToyKind) -> None:
    site.start(cache="10B")
    toy.need, site.board.available_bytes = 5 << 30, 4 << 30
    wanted = deploy(site)
    site.run(5.0)
    assert last(site).phase == "waiting"
    fetched = len(site.all("installed"))
    site.ask()
    site.worker.finish()
    site.run(5.0)
    assert wanted.blob is not None
    assert site.agent.storage.blob_store.has_blob(wanted.blob)
    site.ack()
    site.board.available_bytes = 6 << 30
    site.run(20.0)
    assert last(site).phase == "committed"
    assert "fetching" not in [each.phase for each in site.all("installed")[fetched:] if each.reason]
    assert site.agent.releases.needed_hashes() == set()


def test_a_clock_in_1970_does_not_open_a_window(site: Site) -> None:
    site.clock = lambda: site.broker.now_s
    deploy(site, window="00:00-23:59")
    site.run(20.0)
    assert (last(site).phase, last(site).reason) == (
        "waiting",
        "the window is 00:00-23:59, and the device's clock is not set (year 1970)",
    )
    midday_s = time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, -1))
    site.clock = lambda: midday_s + site.broker.now_s
    site.run(30.0)
    assert last(site).phase == "committed"


# -- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SimulatedCrash(), StoreError("the disk is full")])
def test_a_release_is_committed_only_once_its_kind_has_noted_that_it_held(
    site: Site, toy: ToyKind, error: BaseException
) -> None:
    toy.fails["keep"] = error
    deploy(site)
    with contextlib.suppress(SimulatedCrash):
        site.run(20.0)
    if isinstance(error, SimulatedCrash):
        assert all(told.phase != "committed" for told in site.all("installed"))
        site.start()
        site.run(20.0)
    assert [told.phase for told in site.all("installed")][-1] == "committed"
    assert toy.calls.count("keep") == 2


@pytest.mark.parametrize("method", ["stage", "start_check", "activate", "roll_back", "discard_unused"])
@pytest.mark.parametrize("late", [False, True])
def test_killed_in_any_call_it_goes_on_by_itself(site: Site, toy: ToyKind, method: str, late: bool) -> None:
    first = deploy(site)
    site.run(20.0)
    assert first.blob is not None
    original = getattr(toy, method)

    def dies(*given: object) -> object:
        if late:
            original(*given)
        raise SimulatedCrash

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


def deploy_and_die(site: Site) -> DesiredRelease:
    """Publish the second release; the process dies in it."""
    wanted = release(2, site.depot.store_bytes(b"model 2"))
    with contextlib.suppress(SimulatedCrash):
        site.say("model", wanted, retain=True)
        site.run(4.0)
        assert isinstance(site.kinds["model"], ToyKind)
        site.kinds["model"].illness = "bad"
        site.run(20.0)
        pytest.fail("nothing has died")
    site.kinds["model"].illness = ""  # type: ignore[attr-defined]
    return wanted


def test_something_that_returned_outside_the_agent_is_found(site: Site, toy: ToyKind) -> None:
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "soaking"
    toy.running = ""
    toy.illness = "it could not be started"
    site.start()
    assert (last(site).phase, last(site).reason, last(site).current) == ("returned", "it could not be started", "")
    assert toy.calls.count("swap") == 1


def test_damaged_notes_are_forgotten(site: Site, toy: ToyKind, caplog: pytest.LogCaptureFixture) -> None:
    deploy(site)
    site.run(20.0)
    (site.folder / "d/releases/model.json").write_bytes(b"nonsense")
    site.start()
    site.run(2.0)
    assert "is damaged" in caplog.text
    assert (last(site).phase, last(site).reason) == ("committed", "release was in use already")


def test_a_swap_that_cannot_be_noted_is_not_made(site: Site, toy: ToyKind) -> None:
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

"""Releases of one kind one after the other: which one a device carries out, keeps and takes back."""

from __future__ import annotations

import json
import time

import pytest
from one_agent import TOPICS, Site
from toy_kinds import ToyKind, deploy, last, release

from fedquilt import wire
from fedquilt.core import StoreError
from fedquilt.edge_agent.runner_status import RunnerStatusReader
from fedquilt.wire import DesiredRelease


def test_the_same_release_again_is_answered_and_not_done_again(site: Site, toy: ToyKind) -> None:
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
    def replayed(old: DesiredRelease) -> None:
        running, calls, told = toy.running, list(toy.calls), len(site.all("installed"))
        if anew:
            site.link.publish(TOPICS.device_topic("d", "dn", "model"), wire.encode(old), retain=True)
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
    site.say("model", release(3, rollout="r2", is_rollback=True), retain=True)
    site.run(20.0)
    assert (last(site).serial, last(site).phase) == (3, "returned")
    replayed(later)
    replayed(old)


def test_a_newer_release_takes_the_place_of_one_that_is_not_in_use(site: Site, toy: ToyKind) -> None:
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    toy.verdict = verdict
    newer = deploy(site, 2)
    site.run(20.0)
    assert newer.blob is not None
    assert toy.running == newer.blob.sha256
    assert toy.previous == ""
    assert not site.agent.task_runner.state.is_paused


def test_a_release_that_soaks_comes_to_its_end_before_the_next_one(site: Site, toy: ToyKind) -> None:
    deploy(site)
    site.run(3.0)
    assert last(site).phase == "soaking"
    deploy(site, 2)
    assert last(site).serial == 1
    site.run(30.0)
    assert [each.serial for each in site.all("installed") if each.phase == "committed"] == [1, 2]


def test_what_a_rollout_has_brought_is_taken_back(site: Site, toy: ToyKind) -> None:
    first = deploy(site)
    site.run(20.0)
    deploy(site, 2)
    site.run(20.0)
    assert first.blob is not None
    for serial, rollout, running in ((3, "r1", False), (4, "r2", True), (5, "r2", True)):
        site.say("model", release(serial, rollout=rollout, is_rollback=True), retain=True)
        site.run(5.0)
        assert (last(site).serial, last(site).phase) == (serial, "returned")
        assert (toy.running == first.blob.sha256) is running
    assert last(site).reason == "this device does not use a release of that rollout"
    assert toy.calls.count("back") == 1


def test_a_release_is_not_said_to_be_taken_back_after_a_later_one_has_replaced_the_one_before(
    site: Site, toy: ToyKind
) -> None:
    for serial in (1, 2, 3):
        deploy(site, serial)
        site.run(20.0)
    running = toy.previous
    for serial, rollout, phase in ((4, "r3", "returned"), (5, "r2", "refused"), (6, "r1", "returned")):
        site.say("model", release(serial, rollout=rollout, is_rollback=True), retain=True)
        site.run(5.0)
        assert (last(site).serial, last(site).phase, toy.running) == (serial, phase, running)
        if rollout == "r2":
            assert "no release before is stored any more" in last(site).reason
    assert toy.calls.count("back") == 1


def test_what_soaks_is_taken_back_at_once(site: Site, toy: ToyKind) -> None:
    deploy(site)
    site.run(2.0)
    assert last(site).phase == "soaking"
    site.say("model", release(2, rollout="r1", is_rollback=True), retain=True)
    site.run(2.0)
    assert (last(site).phase, last(site).current, last(site).name) == ("returned", "", "")


def test_a_release_that_is_withdrawn_is_given_up(site: Site, toy: ToyKind) -> None:
    verdict, toy.verdict = toy.verdict, None
    deploy(site)
    site.run(2.0)
    site.say("model", b"", retain=True)
    assert (last(site).phase, last(site).reason) == ("refused", "release was cancelled")
    toy.verdict = verdict
    deploy(site, 2)
    site.run(3.0)
    site.say("model", b"", retain=True)
    site.run(20.0)
    assert last(site).phase == "committed"


def test_the_same_model_again_is_not_exchanged(site: Site, toy: ToyKind) -> None:
    wanted = deploy(site)
    site.run(20.0)
    site.say("model", release(2, wanted.blob), retain=True)
    site.run(2.0)
    assert (last(site).phase, last(site).reason) == ("committed", "release was in use already")
    site.say("model", release(3, rollout="r2", is_rollback=True), retain=True)
    site.run(2.0)
    assert wanted.blob is not None
    assert toy.running == wanted.blob.sha256


def test_a_kind_that_this_board_does_not_exchange_is_refused(site: Site) -> None:
    site.say("settings", release(1, kind="settings"), retain=True)
    assert (last(site).kind, last(site).phase) == ("settings", "refused")


def test_a_release_on_the_topic_of_another_kind_is_dropped(site: Site) -> None:
    site.say("agent", release(1), retain=True)
    assert site.agent.malformed_messages.dropped == 1
    assert site.all("installed") == []


def test_it_tells_how_far_it_is_in_every_new_session(site: Site) -> None:
    deploy(site)
    site.run(20.0)
    told = len(site.all("installed"))
    site.start()
    assert {each.phase for each in site.all("installed")[told:]} == {"committed"}


def test_telemetry_tells_what_the_runner_tells(site: Site) -> None:
    site.runner = RunnerStatusReader(site.folder, clock=lambda: site.broker.now_s)
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
    site.ask()
    site.worker.finish()
    site.run()
    site.ask(1)
    current, left = toy.current_sha256, iter(range(calls))

    def unreadable() -> str:
        if next(left, None) is not None:
            return current()
        raise StoreError("cannot read choice.json: Input/output error")

    toy.current_sha256 = unreadable
    deploy(site, force=True)
    site.run(10.0)
    assert "model release waits for the disk, trying again in 5 s: cannot read choice.json" in caplog.text
    assert all(claim.accepted for claim in site.all("claim"))
    toy.current_sha256 = current
    site.worker.finish()
    site.run(30.0)
    assert last(site).phase == "committed"
    assert len(site.all("update")) >= 2

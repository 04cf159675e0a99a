"""The agent against a coordinator driven by hand: a task goes round, what can go wrong, what it tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from one_agent import MODEL, TOPICS, Site, until_offered

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, Profile
from fedquilt.edge_agent.task.protocol import ProgressReport, WorkResult


# -- a task goes round ----------------------------------------------------------------------------
def test_a_task_goes_round_and_leaves_nothing_behind(site: Site) -> None:
    task = site.ask()
    assert [(claim.accepted, claim.round) for claim in site.all("claim")] == [(True, 0)]
    (order,) = site.worker.requests
    assert order.task == task
    np.testing.assert_array_equal(tensors.read_tensors(Path(order.bundles["model"]))["w"], MODEL["w"])
    site.worker.finish()
    site.run()
    update = site.all("update")[-1]
    np.testing.assert_array_equal(site.fetch_model(update)["w"], MODEL["w"] + 1)
    assert site.outbox == ["j-1@0"]
    site.ack()
    assert site.outbox == []
    assert not site.agent.storage.blob_store.has_blob(update.bundles["model"])
    offered = len(site.all("update"))
    site.run(200.0)
    assert len(site.all("update")) == offered


def test_an_update_says_what_it_took(site: Site) -> None:
    """5 W for the time between begin and end; the bytes of the blobs fetched and offered."""
    task = site.ask()
    site.run(3.0)
    site.worker.finish()
    site.run(0.1)
    (update,) = site.all("update")
    usage = update.usage
    assert (update.weight, update.metrics) == (3.0, {"loss": 0.5})
    assert (usage.wall_s, usage.cpu_s, usage.peak_bytes, usage.base_bytes) == (2.0, 1.5, 9, 4)
    assert usage.energy_j == pytest.approx(5.0 * 3.5, abs=2.5)  # `ask` lets half a second pass
    assert usage.idle_j == pytest.approx(usage.energy_j / 5.0)  # 1 W in the same time
    assert usage.energy_error_j == pytest.approx(0.5, abs=0.06)  # a tenth of a second
    assert usage.energy_source == "meter, counter"
    assert usage.point is None  # nothing was known of the work
    assert usage.down_bytes == task.bundles["model"].size
    assert usage.up_bytes == update.bundles["model"].size


def test_only_blobs_of_the_outbox_are_served(site: Site) -> None:
    task = site.ask()
    secret = site.agent.storage.blob_store.store_bytes(b"private")
    for ref in (secret, task.bundles["model"]):
        site.depot.remove_blob(ref.sha256)
        site.transfers.request_blob("d", ref)
    site.run(5.0)
    assert not site.depot.has_blob(secret)
    assert not site.depot.has_blob(task.bundles["model"])


def test_a_blob_that_is_here_is_not_fetched_again(site: Site) -> None:
    first = site.ask()
    site.worker.finish()
    site.run()
    site.ack()
    site.ask(1, bundles=first.bundles)
    site.worker.finish()
    site.run()
    assert [update.usage.down_bytes > 0 for update in site.all("update")] == [True, False]


# -- what can go wrong ----------------------------------------------------------------------------
def test_work_that_fails_is_refused_with_its_reason(site: Site) -> None:
    site.ask()
    site.worker.events.append(WorkResult(code="data", reason="no examples of class 3"))
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code, claim.reason) == (False, "data", "no examples of class 3")


def test_a_task_whose_process_somebody_killed_is_carried_out_all_the_same(site: Site) -> None:
    site.ask()
    site.worker.events.append(WorkResult(code="failed", reason="killed by somebody", killed_externally=True))
    site.run()
    first, second = site.worker.requests
    assert first.task == second.task
    assert not any(Path(second.output_folder).iterdir())
    site.worker.finish()
    site.run()
    assert len(site.all("update")) == 1
    assert all(claim.accepted for claim in site.all("claim"))


def test_a_board_without_memory_left_refuses(site: Site) -> None:
    site.board.available_bytes = 1 << 20
    site.ask()
    assert site.all("claim")[-1].code == "memory"
    assert site.worker.requests == []


def test_memory_that_the_waiting_task_process_holds_counts_as_free(site: Site) -> None:
    site.board.available_bytes = 1 << 20
    site.worker.resident_bytes = 1 << 30
    site.ask()
    assert site.all("claim")[-1].accepted
    assert len(site.worker.requests) == 1


def test_a_task_larger_than_the_disk_is_refused(site: Site) -> None:
    site.ask(bundles={"model": BlobRef(sha256="a" * 64, size=1 << 52)})
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "full")
    assert "are free" in claim.reason


def test_a_result_that_cannot_be_kept_is_refused_and_the_agent_goes_on(site: Site) -> None:
    site.ask()
    (site.folder / "d/outbox").rmdir()
    (site.folder / "d/outbox").touch()
    site.worker.finish()
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "disk")
    assert "cannot store the result of j-1, round 1" in claim.reason
    (site.folder / "d/outbox").unlink()
    (site.folder / "d/outbox").mkdir()
    site.ask(1)
    site.worker.finish()
    site.run()
    assert site.outbox == ["j-1@1"]


def test_an_answer_that_cannot_be_noted_is_waited_for_again(site: Site) -> None:
    until_offered(site)
    blocked = site.folder / "d/counted.json.part"
    blocked.mkdir()
    site.ack()
    assert site.outbox == ["j-1@0"]
    blocked.rmdir()
    before = len(site.all("update"))
    site.run(10.0)
    assert len(site.all("update")) > before
    site.ack()
    assert site.outbox == []


def test_an_answer_too_large_to_be_sent_is_refused(site: Site) -> None:
    site.ask()
    site.worker.finish(metrics={f"m{n}": 0.0 for n in range(1001)})
    site.run()
    claim = site.all("claim")[-1]
    assert (claim.accepted, claim.code) == (False, "exception")
    assert "cannot be sent" in claim.reason
    assert site.outbox == []


@pytest.mark.parametrize("leaf", ["task", "ack", "blob/get", f"blob/{'a' * 64}/manifest", "nonsense", "blob/x/1"])
def test_bad_bytes_are_counted_and_dropped(site: Site, leaf: str) -> None:
    for payload in (b"\x80\x04K\x01.", b'{"v":1,"crc":"00000000","job":1}', b"{" * 70_000):
        site.say(leaf, payload)
    assert site.agent.malformed_messages.dropped == 3
    site.ask()
    assert len(site.worker.requests) == 1


def test_a_cleared_task_is_killed(site: Site) -> None:
    site.ask()
    site.say("task", b"", retain=True)
    assert site.worker.killed_externally == 1
    site.run(60.0)
    assert site.all("update") == []


# -- what it tells --------------------------------------------------------------------------------
def test_a_new_agent_introduces_itself(site: Site) -> None:
    (profile,) = site.all("profile")
    assert isinstance(profile, Profile)
    assert (profile.board, profile.budget_bytes, profile.idle_w) == ("hand-made", 4 << 30, 1.0)
    assert "numpy" in profile.engines
    assert {"fedquilt", "numpy", "python"} <= profile.versions.keys()
    first = site.all("presence")[-1]
    assert first.online
    site.run(30.0)
    again = site.all("presence")[-1]
    assert (again.boot, again.seq > first.seq) == (first.boot, True)
    site.start()
    assert site.all("presence")[-1].boot != first.boot


def test_a_goodbye_is_an_absence_that_keeps_the_outbox(site: Site) -> None:
    until_offered(site)
    killed = site.worker.killed_externally
    site.agent.shut_down()
    site.broker.now_s += 1.0
    site.broker.deliver_due()
    site.listen()
    assert not site.all("presence")[-1].online
    assert site.worker.killed_externally == killed + 1
    assert site.outbox == ["j-1@0"]


def test_a_coordinator_that_comes_up_is_offered_the_outbox_at_once(site: Site) -> None:
    until_offered(site)
    site.run(100.0)
    before = len(site.all("update"))
    site.link.publish(TOPICS.coord, wire.encode(wire.CoordState(online=True, epoch=2)), retain=True)
    site.run(0.1)
    assert len(site.all("update")) == before + 1


def test_a_device_that_is_asked_for_its_presence_answers_though_it_is_at_work(site: Site) -> None:
    site.ask()
    site.run(100.0)
    before = {leaf: len(site.all(leaf)) for leaf in site.heard}
    site.say("presence", wire.CoordState(online=True, epoch=1))
    assert {leaf: len(site.all(leaf)) - count for leaf, count in before.items() if len(site.all(leaf)) != count} == {
        "presence": 1
    }
    assert site.all("presence")[-1].online


def test_progress_is_told_now_and_then(site: Site) -> None:
    site.ask()
    for step in range(55):
        site.worker.events.append(ProgressReport(step / 55))
        site.run(0.1)
    told = [progress.fraction for progress in site.all("progress")]
    assert len(told) == 3
    assert told == sorted(told)


def test_telemetry_is_told_in_its_own_time(site: Site) -> None:
    """Every 30 s in 100 s, and only what can be measured."""
    site.run(100.0)
    told = site.all("telemetry")
    assert len(told) == 4
    assert (told[0].power_w, told[0].temperature_c) == (5.0, None)


def test_a_profile_says_what_an_engine_with_a_gpu_ran_on_last(site: Site) -> None:
    for round, where in enumerate(("CUDA", "processor")):
        site.ask(round)
        site.run(3.0)
        site.worker.finish(runs_on=where)
        site.run(31.0)
        site.ack(round)
        site.run(1.0)
    said = [profile.versions.get("numpy runs on") for profile in site.all("profile")]
    assert said[0] is None
    assert list(dict.fromkeys(said)) == [None, "CUDA", "processor"]
    site.agent.apply_settings(site.agent.settings)  # other settings do not make it forgotten
    site.run(1.0)
    assert site.all("profile")[-1].versions["numpy runs on"] == "processor"

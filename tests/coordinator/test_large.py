"""Large updates: examined, folded and committed by a worker; a stored sum takes the place of what is in it."""

import select
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from by_hand import Killed, SlowWorker, Stage, constant_model

from fedquilt import compression, wire
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.coordinator.background_worker import BackgroundWorker, ThreadWorker
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    RoundClosed,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
    UpdatesAggregated,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates import aggregation, job_blobs
from fedquilt.coordinator.updates.aggregation import Aggregator
from fedquilt.core import Encoding, StoreError


@pytest.fixture(autouse=True)
def laid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of any size lie on the disk, where the job is large."""
    monkeypatch.setattr(aggregation, "ScratchFile", partial(ScratchFile, min_entries=1))
    monkeypatch.setattr(job_blobs, "WHOLE_BYTES", 0)
    monkeypatch.setattr(aggregation, "WHOLE_BYTES", 0)


VALUES = {"a": 1.0, "b": 0.1, "c": 1e-9}
COHORT = {"start_devices": 3, "quorum": 1.0, "deadline_s": 1000.0}


def eager() -> BackgroundWorker:
    """A worker for updates of any size, which stores a sum as soon as there is something in it."""
    made = BackgroundWorker(large_bytes=0)
    made.min_unsaved_ratio = 0.0
    return made


def played(folder: Path, order: str, worker: BackgroundWorker | None, **table: Any) -> Stage:
    """A stage of three devices, some of which have answered in this order."""
    stage = Stage(folder, worker=worker, cohort=COHORT, **table)
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    for name in order:
        hands[name].answer(constant_model(VALUES[name]))
        stage.play()
    return stage


def settle(stage: Stage) -> None:
    """Wait for the thread, and take its results."""
    while stage.worker is not None and not stage.worker.is_idle:
        select.select(stage.worker.fds(), (), (), 60)
        stage.server.step(stage.broker.now_s)


def states(stage: Stage) -> list[str]:
    return [fact.state.sha256 for fact in stage.told(RoundCommitted)]


def blobs(stage: Stage) -> set[str]:
    """Blobs that are on the coordinator's disk, with or without a file of their own."""
    depot = stage.store.blob_store
    refs = [ref for fact in stage.told(UpdateAccepted) for ref in fact.update.bundles.values()]
    return {ref.sha256 for ref in refs if depot.has_blob(ref)}


@pytest.mark.parametrize("order", ["abc", "cab"])
@pytest.mark.parametrize("method", ["fedavg", "robust"])
def test_a_worker_comes_to_the_bits_of_the_loop_whatever_the_order(tmp_path, order, method):
    calm = played(tmp_path / "calm", "abc", None, method=method)
    large = played(tmp_path / "large", order, eager(), method=method)
    assert len(states(calm)) == 1
    assert states(large) == states(calm)
    assert bool(large.told(UpdatesAggregated)) == (method == "fedavg")


def test_a_lossy_codec_is_decoded_by_the_worker(tmp_path):
    coded = {"wire": {"codec": "fp16"}}
    found = []
    for name, worker in (("calm", None), ("large", eager())):
        stage = Stage(tmp_path / name, worker=worker, cohort=COHORT, **coded)
        hands = {each: stage.hand(each) for each in "abc"}
        stage.play()
        for each in "cab":
            hands[each].answer(
                compression.encode_bundle(Encoding(codec="fp16"), constant_model(VALUES[each]), {}, {})[0]
            )
            stage.play()
        assert not [fact.reason for fact in stage.told(UpdateRejected)]
        found.append(states(stage))
    assert len(found[0]) == 1
    assert found[0] == found[1]


def test_what_is_in_a_stored_sum_is_dropped_and_a_restart_goes_on_from_it(tmp_path):
    calm = played(tmp_path / "calm", "abc", None)
    stage = played(tmp_path / "large", "ca", eager())
    assert [fact.devices for fact in stage.told(UpdatesAggregated)] == [("c",), ("a", "c")]
    assert [stage.store.blob_store.has_blob(fact.sum) for fact in stage.told(UpdatesAggregated)] == [False, True]
    assert blobs(stage) == set()
    stage.restart()
    stage.play()
    stage.hands[1].answer(constant_model(VALUES["b"]))
    stage.play()
    assert states(stage) == states(calm)
    assert not stage.told(UpdateLost)
    sums = {fact.sum.sha256 for fact in stage.told(UpdatesAggregated)}
    assert not any((stage.store.blob_store.folder / sha256).exists() for sha256 in sums)


def test_a_coordinator_that_dies_between_a_sum_and_its_fact_folds_once(tmp_path, monkeypatch):
    calm = played(tmp_path / "calm", "abc", None)
    stage = played(tmp_path / "large", "c", None)
    append = Store.append_event

    def dies(store, id, fact):
        if isinstance(fact, UpdatesAggregated):
            raise Killed
        append(store, id, fact)

    monkeypatch.setattr(Store, "append_event", dies)
    stage.worker = eager()
    stage.restart()
    with pytest.raises(Killed):
        stage.play()
    monkeypatch.setattr(Store, "append_event", append)
    stage.worker = eager()
    stage.restart()
    stage.play()
    for hand in stage.hands[:2]:
        hand.answer(constant_model(VALUES[hand.name]))
        stage.play()
    assert states(stage) == states(calm)


def test_a_damaged_sum_is_named_and_the_devices_in_it_are_asked_again(tmp_path):
    stage = played(tmp_path, "ca", eager())
    path = stage.store.blob_store.folder / stage.told(UpdatesAggregated)[-1].sum.sha256
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 4
    path.write_bytes(payload)
    stage.restart()
    stage.play()
    stage.hands[1].answer(constant_model(VALUES["b"]))
    stage.play()
    assert sorted(fact.device for fact in stage.told(UpdateLost)) == ["a", "c"]
    assert "the partial aggregate" in stage.told(UpdateLost)[0].reason
    for hand in (stage.hands[0], stage.hands[2]):
        hand.answer(constant_model(VALUES[hand.name]), epoch=stage.store.epoch)
        stage.play()
    assert len(states(stage)) == 1
    assert [fact.status for fact in stage.told(JobEnded)] == ["done"]


def test_a_large_update_that_is_not_finite_is_refused_by_name_and_in_no_sum(tmp_path):
    stage = Stage(tmp_path, worker=eager(), cohort={**COHORT, "quorum": 0.5})
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    hands["a"].answer(constant_model(1.0))
    stage.play()
    hands["b"].answer(constant_model(float("nan")))
    hands["c"].answer(constant_model(3.0))
    stage.play()
    assert [fact.device for fact in stage.told(UpdateRejected)] == ["b"]
    assert "not finite" in stage.told(UpdateRejected)[0].reason
    assert all("b" not in fact.devices for fact in stage.told(UpdatesAggregated))


def test_an_update_that_came_in_time_counts_though_it_is_read_past_the_deadline(tmp_path):
    worker, gate = ThreadWorker(large_bytes=0), threading.Event()
    stage = Stage(tmp_path, worker=worker, rounds=2, cohort={**COHORT, "quorum": 0.5, "deadline_s": 20.0})
    hands = {name: stage.hand(name) for name in "abc"}
    stage.play()
    settle(stage)
    stage.play()
    for name in "ab":
        stage.submit(hands[name])
        settle(stage)
    worker.submit(lambda: gate.wait(60), lambda result, now_s: None)
    hands["c"].answer(constant_model(2.0))
    stage.play(25.0)
    assert stage.broker.now_s > 20.0
    assert not stage.told(RoundClosed)
    gate.set()
    settle(stage)
    stage.play()
    settle(stage)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "b", "c"]
    assert len(stage.told(RoundCommitted)) == 1
    assert not stage.told(JobEnded)
    worker.close()


def test_an_update_that_is_offered_again_while_it_waits_for_the_worker_is_examined_once(tmp_path):
    worker, gate = ThreadWorker(large_bytes=0), threading.Event()
    stage = Stage(tmp_path, worker=worker)
    (hand,) = stage.connect("a")
    settle(stage)
    stage.play()
    worker.submit(lambda: gate.wait(60), lambda result, now_s: None)
    update = hand.answer(constant_model(1.0))
    stage.play()
    begun = worker._pending_count
    for _ in range(3):
        hand.say("update", update)
        stage.play()
    assert worker._pending_count == begun == 2
    gate.set()
    while not worker.is_idle or not stage.told(RoundCommitted):
        select.select(worker.fds(), (), (), 60)
        stage.server.step(stage.broker.now_s)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a"]
    worker.close()


def test_an_update_that_is_given_up_while_it_is_read_ends_nothing(tmp_path, monkeypatch):
    worker, gate = ThreadWorker(large_bytes=0), threading.Event()
    stage = Stage(tmp_path, worker=worker, cohort={**COHORT, "start_devices": 2})
    hand, _ = stage.connect("ab")
    settle(stage)
    stage.play()
    worker.submit(lambda: gate.wait(60), lambda result, now_s: None)
    update = hand.answer(constant_model(1.0))
    stage.play()
    hand.say("claim", wire.Claim(update.job, 0, 0, accepted=False, code="failed", reason="out of memory"))
    stage.play()

    def gone(*given):
        raise StoreError("the blob is gone")

    monkeypatch.setattr(Aggregator, "decode_large_update", gone)
    gate.set()
    while not worker.is_idle:
        select.select(worker.fds(), (), (), 60)
        stage.server.step(stage.broker.now_s)
    assert [fact.device for fact in stage.told(TaskDeclined)] == ["a"]
    assert not stage.told(UpdateAccepted)
    worker.close()


def test_a_job_that_begins_is_read_made_and_stored_by_the_worker(tmp_path):
    worker = SlowWorker()
    stage = played(tmp_path, "", worker)
    assert not stage.facts
    assert not list(stage.store.blob_store.folder.iterdir())
    worker.run_pending()
    stage.play()
    assert [type(fact) for fact in stage.facts].count(CohortSelected) == 1
    calm = played(tmp_path / "calm", "", None)
    sent = {hand.tasks[-1].bundles["model"] for each in (stage, calm) for hand in each.hands if hand.tasks[-1]}
    assert len(sent) == 1
    stage.worker = SlowWorker()
    stage.restart()
    stage.play()
    assert len(stage.worker.begun) == 1
    stage.worker.run_pending()
    stage.play()
    assert {hand.tasks[-1].epoch for hand in stage.hands if hand.tasks[-1]} == {stage.store.epoch}
    assert stage.store.blob_store.has_blob(sent.pop())


def test_two_boards_send_the_same_bytes_and_one_of_them_waits_when_the_other_is_in_the_sum(tmp_path):
    worker = SlowWorker()
    stage = played(tmp_path, "", worker)
    worker.run_pending()  # what they are sent is stored
    stage.play()
    for hand in stage.hands[:2]:
        hand.answer(constant_model(1.0))
    for _ in range(4):  # read a, read b, fold a, fold b
        stage.play()
        worker.run_pending()
    stage.play()
    assert [fact.devices for fact in stage.told(UpdatesAggregated)] == [("a",), ("a", "b")]
    assert not stage.told(UpdateLost)

"""Garbage and the background worker."""

import select
import threading

import pytest
from by_hand import TABLE, Stage
from waiting import wait_until

from fedquilt.blobs import chunks
from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.background_worker import ThreadWorker
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.jobs.retention import GarbageCollector
from fedquilt.coordinator.rounds.events import JobEnded, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import StoreError


def test_a_blob_that_is_collected_before_its_rollout_is_queued_is_stored_again(tmp_path):
    with Store(tmp_path) as served, Store(tmp_path) as other:
        collector, put = GarbageCollector(served), other.blob_store.store_bytes

        def overtaken(*given):
            ref = put(*given)
            if not other._db.in_transaction:
                collector.add_all_blobs()
                assert collector.collect()
                assert not served.blob_store.has_blob(ref)
            return ref

        other.blob_store.store_bytes = overtaken
        run_control.queue_rollout(other, RolloutPlan(kind="model", name="digits-1"), b"a model")
        collector.add_all_blobs()
        assert collector.collect()
        (rollout,) = served.rollouts.readable_rollouts()
        assert served.blob_store.load(rollout.state.plan.blob.sha256) == b"a model"


def test_a_run_whose_update_is_also_another_runs_goes_on_when_that_one_is_deleted(tmp_path):
    stage = Stage(tmp_path)
    a, b = stage.connect("ab")
    stage.submit(a, factor=3.0)
    stage.store.set_status(stage.job, "stopping")
    stage.play()
    doomed, stage.job = stage.job, stage.store.add_job(settings.parse_job(TABLE), tmp_path / "bundle")
    stage.restart()
    stage.play()
    stage.submit(a, factor=3.0)
    with Store(tmp_path / "home") as command:
        swept = retention.remove_runs(command, [doomed])
    assert not swept.blobs_left
    stage.restart()
    stage.play()
    stage.submit(b, factor=5.0)
    assert [fact.update.device for fact in stage.told(UpdateAccepted)] == ["a", "a", "b"]
    assert [fact.status for fact in stage.told(JobEnded)] == ["stopped", "done"]
    (committed,) = stage.told(RoundCommitted)
    assert stage.store.blob_store.has_blob(committed.state)


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_is_deleted_while_a_damaged_log_may_name_it(tmp_path, damaged):
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job(TABLE), tmp_path)
        if damaged:
            store._db.execute("update jobs set status = 'odd' where id = ?", (run,))
            store._db.commit()
        left, collector = store.blob_store.store_bytes(b"left"), GarbageCollector(store)
        collector.add_candidates({left.sha256}, urgent=True)
        assert (collector.collect(), store.blob_store.has_blob(left)) == (not damaged, damaged)


def test_a_thread_takes_pieces_in_order_and_the_loop_goes_on_meanwhile():
    worker, gate, told = ThreadWorker(large_bytes=1), threading.Event(), list[object]()
    assert worker.is_idle
    assert not worker.fds()

    def fails():
        raise StoreError("the disk is full")

    worker.submit(lambda: gate.wait(60), lambda result, now_s: told.append(result()))
    worker.submit(fails, lambda result, now_s: told.append(result))
    assert not worker.run_callbacks(0.0)
    assert (worker.is_idle, told) == (False, [])
    gate.set()
    while not worker.is_idle:
        select.select(worker.fds(), (), (), 60)
        worker.run_callbacks(0.0)
    assert told[0] is True
    with pytest.raises(StoreError, match="the disk is full"):
        told[1]()
    worker.close()


def test_a_worker_that_is_closed_begins_no_further_piece():
    worker, gate, ran = ThreadWorker(large_bytes=1), threading.Event(), list[str]()
    worker.submit(lambda: gate.wait(60), lambda result, now_s: None)
    worker.submit(lambda: ran.append("next"), lambda result, now_s: None)
    closing = threading.Thread(target=worker.close)
    closing.start()
    wait_until(lambda: worker._closed, "the worker is told to end")
    gate.set()
    closing.join()
    assert ran == []


def test_blobs_of_a_work_item_are_kept_until_its_result_is_recorded_and_others_are_deleted(tmp_path):
    worker, gate = ThreadWorker(large_bytes=0), threading.Event()
    stage = Stage(tmp_path, worker=worker)
    depot = stage.store.blob_store
    left, found = depot.store_bytes(b"nobody's"), depot.store_bytes(b"found")
    stored = chunks.ref_from_bytes(b"stored")

    def item():
        return depot.has_blob(found) and depot.store_bytes(b"stored") == stored and gate.wait(60)

    stage.server._context.start_work(item, lambda result, now_s: None)
    wait_until(lambda: depot.pinned_blobs() >= {found.sha256, stored.sha256}, "the work item has stored its blob")
    stage.hand("a")
    stage.play()
    assert [depot.has_blob(ref) for ref in (left, found, stored)] == [False, True, True]
    gate.set()
    while not worker.is_idle:
        select.select(worker.fds(), (), (), 60)
        stage.server.step(stage.broker.now_s)
    stage.server._context.garbage.add_all_blobs()
    stage.play()
    assert [depot.has_blob(ref) for ref in (left, found, stored)] == [False, False, False]
    worker.close()

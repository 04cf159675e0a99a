"""Work beside the coordinator's loop: pieces in order, and what follows from them."""

import select
import threading

import pytest
from by_hand import Stage
from waiting import until

from fedquilt.blobs import chunks
from fedquilt.coordinator.background_worker import ThreadWorker
from fedquilt.core import StoreError


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
    until(lambda: worker._closed, "the worker is told to end")
    gate.set()
    closing.join()
    assert ran == []


def test_blobs_of_a_work_item_are_kept_until_its_result_is_recorded_and_others_are_deleted(tmp_path):
    worker, gate = ThreadWorker(large_bytes=0), threading.Event()
    stage = Stage(tmp_path, worker=worker)
    depot = stage.store.depot
    left, found = depot.store_bytes(b"nobody's"), depot.store_bytes(b"found")
    stored = chunks.ref_from_bytes(b"stored")

    def item():
        return depot.has_blob(found) and depot.store_bytes(b"stored") == stored and gate.wait(60)

    stage.server._desk.start_work(item, lambda result, now_s: None)
    until(lambda: depot.pinned_blobs() >= {found.sha256, stored.sha256}, "the work item has stored its blob")
    stage.hand("a")
    stage.play()
    assert [depot.has_blob(ref) for ref in (left, found, stored)] == [False, True, True]
    gate.set()
    while not worker.is_idle:
        select.select(worker.fds(), (), (), 60)
        stage.server.step(stage.broker.now_s)
    stage.server._desk.garbage.add_all_blobs()
    stage.play()
    assert [depot.has_blob(ref) for ref in (left, found, stored)] == [False, False, False]
    worker.close()

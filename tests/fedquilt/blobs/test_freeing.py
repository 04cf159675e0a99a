"""Large blobs that are dropped: they are gone at once, and their blocks are freed by another thread."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from fedquilt.blobs import store
from fedquilt.blobs.store import BlobStore


class Held:
    def __init__(self) -> None:
        self.may, self.closed = threading.Event(), list[str]()
        self.close = os.close

    def __call__(self, file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.closed.append(os.readlink(f"/proc/self/fd/{file}"))
            self.may.wait()
        self.close(file)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held()
    monkeypatch.setattr(store, "MIN_LARGE_BYTES", 1000)
    monkeypatch.setattr(os, "close", made)
    yield made
    made.may.set()  # a thread that waits would keep the process from ending


def test_a_large_blob_is_gone_while_its_blocks_are_still_to_be_freed(tmp_path, held):
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(bytes(1000))
    depot.remove_blob(ref.sha256)
    assert not depot.has_blob(ref)
    assert not list(tmp_path.iterdir())
    wait_until(lambda: held.closed, "a close")
    assert held.closed == [f"{tmp_path / ref.sha256} (deleted)"]
    depot.store_bytes(bytes(1000))
    held.may.set()
    assert depot.load(ref.sha256) == bytes(1000)


def test_leftovers_are_freed_there_too(tmp_path, held):
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(bytes(1000))
    depot.remove_all_but(set())
    assert not depot.has_blob(ref)
    wait_until(lambda: held.closed, "a close")


def test_without_a_free_thread_a_large_blob_is_freed_at_once(tmp_path, held, monkeypatch):
    depot = BlobStore(tmp_path)
    ref = depot.store_bytes(bytes(1000))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
    depot.remove_blob(ref.sha256)
    open_files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any(each.startswith(str(tmp_path)) for each in open_files)
    assert not list(tmp_path.iterdir())

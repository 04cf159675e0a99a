"""A home that is opened for reading alone."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import dashes
import pytest

from fedquilt.coordinator.rounds.events import JobEnded
from fedquilt.coordinator.storage.reader import ChangeDetector, StoreReader
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import StoreError

FACTS = dashes.facts(dashes.names(6), 4)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A coordinator's folder with one run."""
    dashes.add_run(tmp_path, FACTS)
    return tmp_path


def test_it_reads_what_a_store_reads_and_writes_nothing(home):
    with StoreReader(home) as reader, Store(home) as store:
        (row,) = reader.all_jobs()
        assert row == store.find_job("digits")
        assert list(reader.read_events(row.id)) == list(store.read_events(row.id))
        for act in (
            lambda: reader.set_status(row.id, "done"),
            lambda: reader.append_event(row.id, JobEnded("done")),
            lambda: reader.delete_runs([row.id]),
            lambda: reader.mark_running(row.id),
        ):
            with pytest.raises(StoreError):
                act()
        assert store.stored_status(row.id) == "running"


def test_facts_come_piece_by_piece(home):
    with StoreReader(home) as reader:
        id = reader.all_jobs()[0].id
        found, seq = [], 0
        while piece := list(reader.read_events(id, seq, 4)):
            assert len(piece) <= 4
            found += [fact for _, _, fact in piece]
            seq = piece[-1][0]
        assert found == FACTS
        with sqlite3.connect(home / "fedquilt.db") as db:
            db.execute("delete from facts where seq = ?", (seq,))
        db.close()
        list(reader.read_events(id, 0, 4))
        with pytest.raises(Exception, match="last facts are missing"):
            list(reader.read_events(id, seq - 3, 4))


def test_it_sees_who_serves_without_making_a_lock(home):
    with StoreReader(home) as reader:
        assert not reader.is_served()
        assert not (home / "lock").exists()
        with Store(home) as store:
            assert store.acquire_lock()
            assert reader.is_served()
        assert not reader.is_served()


def test_a_home_of_another_version_is_not_read(home):
    with sqlite3.connect(home / "fedquilt.db") as db:
        db.execute("pragma user_version = 1")
    db.close()
    with pytest.raises(StoreError, match=r"tables of version 1, .* use the fedquilt that wrote it"):
        StoreReader(home)
    (home / "fedquilt.db").unlink()
    with pytest.raises(StoreError):
        StoreReader(home)


def test_what_a_killed_coordinator_left_in_its_log_is_read(home):
    code = (
        "import os, signal, sys; from pathlib import Path; from fedquilt.coordinator.storage.store import Store; "
        "from fedquilt.coordinator.rounds.events import JobEnded; store = Store(Path(sys.argv[1])); "
        "store.append_event(store.all_jobs()[0].id, JobEnded('failed', 'killed')); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(home)], check=False)
    assert (home / "fedquilt.db-wal").stat().st_size
    with StoreReader(home) as reader:
        assert [fact for _, _, fact in reader.read_events(reader.all_jobs()[0].id)] == [
            *FACTS,
            JobEnded("failed", "killed"),
        ]


def test_a_mark_differs_after_every_change_and_only_then(home):
    mark = ChangeDetector(home / "fedquilt.db")
    first = mark.read_version()
    assert first == mark.read_version()
    assert first is not None
    with Store(home) as store:
        store.set_status(store.all_jobs()[0].id, "stopping")
        second = mark.read_version()
    assert second != first
    (home / "fedquilt.db").rename(home / "aside")
    assert mark.read_version() is None
    (home / "fedquilt.db").write_bytes((home / "aside").read_bytes())
    assert mark.read_version() not in (None, first, second)
    mark.close()

"""A damaged write-ahead log takes facts back; that is said, and what was in it is kept."""

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stored_job import JOB

from fedquilt.coordinator.rounds.events import CohortSelected, JobStarted
from fedquilt.coordinator.storage import write_ahead_log
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef
from fedquilt.host.disk import REAL, Disk, StrPath


def killed(folder: Path) -> tuple[Path, str]:
    """A home as SIGKILL leaves it, with a run of eleven facts whose last ones are in the log alone."""
    with Store(folder / "alive") as store:
        run = store.add_job(JOB, folder)
        store.append_event(run, JobStarted(BlobRef(sha256="a" * 64, size=3)))
        for attempt in range(10):
            store.append_event(run, CohortSelected(0, attempt, ("x",)))
        shutil.copytree(folder / "alive", folder / "killed")
    return folder / "killed", run


def test_a_log_that_is_whole_is_taken_up_without_a_word(tmp_path, caplog):
    home, run = killed(tmp_path)
    log = home / "fedquilt.db-wal"
    log.write_bytes(log.read_bytes() + bytes(1000))
    with Store(home) as store:
        assert len(list(store.read_events(run))) == 11
    assert caplog.text == ""
    assert not list(home.glob("*.damaged"))


ANEW = """
import fcntl, sys
with open(sys.argv[1], "r+b") as index:
    fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)
"""


def test_nobody_can_make_the_index_anew_while_a_killed_home_is_open_again(tmp_path):
    home, _ = killed(tmp_path)
    with Store(home):
        tried = subprocess.run([sys.executable, "-c", ANEW, home / "fedquilt.db-shm"], capture_output=True, text=True)
        assert "BlockingIOError" in tried.stderr


@pytest.mark.parametrize("where", [0.0, 0.5, 0.9])
def test_a_damaged_log_is_named_and_kept(tmp_path, caplog, where):
    home, _ = killed(tmp_path)
    log = home / "fedquilt.db-wal"
    payload = bytearray(log.read_bytes())
    payload[int(where * len(payload)) + 20] ^= 1
    log.write_bytes(payload)
    with Store(home):
        assert (home / "fedquilt.db-wal.damaged").read_bytes() == payload
    assert f"{log} is damaged: its last" in caplog.text


def test_a_log_that_another_process_is_writing_is_no_damaged_one(tmp_path, caplog):
    with Store(tmp_path) as writer:
        run = writer.add_job(JOB, tmp_path)
        before = write_ahead_log.read_log(REAL, tmp_path / "fedquilt.db")
        assert before.committed_frames > 0
        writer.append_event(run, JobStarted(BlobRef(sha256="a" * 64, size=3)))
        before.report_damage(REAL, writer._db)
        writer._db.execute("pragma wal_checkpoint(restart)")
        writer.append_event(run, CohortSelected(0, 0, ("x",)))
        before.report_damage(REAL, writer._db)
    assert caplog.text == ""


class Full(sqlite3.Connection):
    """Stand-in for a connection to a database on a full disk, where SQLite 3.40 fails a checkpoint for want of room."""

    def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in sql:
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *given)


class FullDisk(Disk):
    """A disk without room."""

    def connect(self, path: StrPath) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, factory=Full)


def test_runs_can_be_looked_at_on_a_full_disk(tmp_path):
    home, run = killed(tmp_path)
    with Store(home, disk=FullDisk()) as store:
        assert len(list(store.read_events(run))) == 11


def test_what_another_process_is_just_committing_is_not_lost(tmp_path):
    home, path = tmp_path / "home", tmp_path / "committing" / "fedquilt.db"
    with Store(home) as writer:
        run = writer.add_job(JOB, tmp_path)
        taken = write_ahead_log.read_log(REAL, home / "fedquilt.db").committed_frames
        writer.append_event(run, JobStarted(BlobRef(sha256="a" * 64, size=3)))
        shutil.copytree(home, path.parent)
    found = write_ahead_log.read_log(REAL, path)
    assert found.committed_frames > taken > 0
    assert found.count_lost_frames(REAL, taken) == 0
    log = path.with_name("fedquilt.db-wal")
    payload = bytearray(log.read_bytes())
    payload[-1] ^= 1
    log.write_bytes(payload)
    assert found.count_lost_frames(REAL, taken) == found.committed_frames - taken


def test_a_log_that_has_a_new_head_and_no_frame_yet_has_lost_nothing(tmp_path, caplog):
    home, log = tmp_path / "home", tmp_path / "home" / "fedquilt.db-wal"
    with Store(tmp_path / "first") as writer:
        run = writer.add_job(JOB, tmp_path)
        writer._db.execute("pragma wal_checkpoint(passive)")
        shutil.copytree(tmp_path / "first", home)
        writer.append_event(run, JobStarted(BlobRef(sha256="a" * 64, size=3)))
        head = (tmp_path / "first" / "fedquilt.db-wal").read_bytes()[:32]
    before = log.read_bytes()
    assert head[:16] == before[:12] + head[12:16]
    assert head[16:24] != before[16:24]
    log.write_bytes(head + before[32:])
    (home / "fedquilt.db-shm").unlink()
    assert write_ahead_log.read_log(REAL, home / "fedquilt.db").committed_frames == 0
    with Store(home) as store:
        assert [row.id for row in store.readable_jobs()] == [run]
    assert caplog.text == ""


@pytest.mark.parametrize("at", [16, 20])
def test_a_first_frame_whose_salt_is_damaged_is_one_of_this_log(tmp_path, at):
    home, _ = killed(tmp_path)
    log = home / "fedquilt.db-wal"
    page = int.from_bytes(log.read_bytes()[8:12], "big")
    payload = bytearray(log.read_bytes()[: 32 + 24 + page])
    payload[32 + 4 : 32 + 8] = (1).to_bytes(4, "big")  # a commit
    payload[32 + 8 + at - 16] ^= 1
    log.write_bytes(payload)
    found = write_ahead_log.read_log(REAL, home / "fedquilt.db")
    assert found.committed_frames == 1
    assert found.count_lost_frames(REAL, 0) == 1


def test_a_log_that_is_gone_once_it_was_seen_has_lost_nothing(tmp_path):
    class Closing(Disk):
        def read(self, path, offset=0, size=None):
            Path(path).unlink(missing_ok=True)
            return super().read(path, offset, size)

    (tmp_path / "fedquilt.db-wal").write_bytes(bytes(100))
    found = write_ahead_log.read_log(Closing(), tmp_path / "fedquilt.db")
    assert (found.head, found.committed_frames) == (b"", 0)

"""What is damaged in a home is named, hides no more than itself, and is never written over."""

import contextlib
import math
import re
import sqlite3
from pathlib import Path

import pytest
from stored_job import JOB

from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundCommitted,
)
from fedquilt.coordinator.storage.rows import DamagedRunError, UnreadableRow
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.views import event_messages
from fedquilt.core import BlobRef, JobError, StoreError


def test_a_damaged_database_is_an_error_not_a_crash(tmp_path):
    (tmp_path / "fedquilt.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="is damaged"):
        Store(tmp_path)


def test_a_row_of_another_version_is_named_and_hides_no_other(tmp_path, opened):
    store = opened()
    run, other = store.add_job(JOB, tmp_path), store.add_job(JOB, tmp_path)
    with store.open_transaction():
        store._rows.update_job(run, settings="{}")
    with pytest.raises(StoreError, match=f"{run} was written by another version"):
        store.find_job(run)
    assert [row.id for row in store.readable_jobs()] == [other]
    assert store.find_job("digits").id == other
    odd, fine = store.all_jobs()
    assert isinstance(odd, UnreadableRow)
    assert isinstance(fine, StoredJob)
    rows = [event_messages.summarise_run(row, store) for row in store.all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, True]
    assert f"{run} was written by another version" in event_messages.format_runs(rows)[2]


BLOB = BlobRef(sha256="a" * 64, size=3)


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (RoundCommitted(0, BLOB, False, {"loss": math.inf}), "cannot be encoded: .*float"),
        (RoundCommitted(0, BLOB, False, {}, (), math.nan), "cannot be encoded: .*float"),
        (EligibilityRecorded(0, (), {}, {"a": math.inf}), "cannot be encoded: .*float"),
        (
            CohortSelected(0, 0, ("a",), {}, math.inf),
            "contains a number that is not finite",
        ),  # it would come back as None
        (JobEnded("failed", "no file \udcff"), "cannot be encoded: .*surrogates"),
    ],
)
def test_what_could_not_be_read_back_is_never_written(tmp_path, opened, fact, said):
    store = opened()
    run = store.add_job(JOB, tmp_path)
    store.append_event(run, JobStarted(BLOB))
    with pytest.raises(JobError, match=said):
        store.append_event(run, fact)
    assert [fact for _, _, fact in store.read_events(run)] == [JobStarted(BLOB)]


def test_a_damaged_fact_hides_its_run_alone(tmp_path, opened):
    store = opened()
    runs = [store.add_job(JOB, tmp_path) for _ in range(3)]
    for run, letter in zip(runs, "abc", strict=True):
        store.append_event(run, JobStarted(BlobRef(sha256=letter * 64, size=3)))
    null = (
        b'{"type":"RoundCommitted","round":0,"state":{"sha256":"%s","size":3},"finished":false,"metrics":{"loss":null}}'
    )
    for run, body in ((runs[0], (null % (b"d" * 64)).decode()), (runs[1], '{"type":"Comm')):
        with store.open_transaction():
            store._rows.append_events([(run, 0.0, body)])
    rows = [event_messages.summarise_run(row, store) for row in store.all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, False, True]
    assert [row["rounds"] for row in rows] == [None, None, 0]
    assert "cannot be read by this version" in event_messages.format_runs(rows)[2]
    assert store.latest_state_hashes() == {"d" * 64, "b" * 64, "c" * 64}
    assert store.referenced_blobs() == store.latest_state_hashes()


def flipped(home: Path, find: bytes) -> None:
    """Flip the lowest bit of the last byte of a text in the database, wherever it is in its files."""
    for name in ("fedquilt.db", "fedquilt.db-wal"):
        path = home / name
        payload = path.read_bytes() if path.exists() else b""
        if find in payload:
            at = payload.rindex(find) + len(find) - 1
            path.write_bytes(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
            return
    raise AssertionError(f"{find!r} is nowhere in {home}")


def three_runs(home: Path) -> list[str]:
    """Three runs with two facts each, in a home that is closed."""
    with Store(home) as store:
        runs = [store.add_job(JOB, home / "bundle") for _ in range(3)]
        for run in runs:
            store.append_event(run, JobStarted(BLOB))
            store.append_event(run, JobEnded("stopped", f"reason of {run}"))
    return runs


def test_a_changed_fact_is_found_and_hides_its_run_alone(tmp_path, opened):
    runs = three_runs(tmp_path)
    flipped(tmp_path, f"reason of {runs[1]}".encode())
    store = opened()
    assert [len(list(store.read_events(run))) for run in (runs[0], runs[2])] == [2, 2]
    with pytest.raises(
        DamagedRunError, match=rf"the event log of {runs[1]} in .* is damaged: event 4 .* Restore a backup"
    ):
        list(store.read_events(runs[1]))
    assert [event_messages.summarise_run(row, store)["problem"] is None for row in store.all_jobs()] == [
        True,
        False,
        True,
    ]
    assert store.find_damaged_ids() == [runs[1]]
    assert store.end_inactive_job(runs[1], JobEnded("failed")) == "failed"
    assert (store.stored_status(runs[1]), store.find_damaged_ids()) == ("failed", [runs[1]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("delete from facts where seq = 3", "event 4 or the event before it"),
        ("delete from facts where seq = 4", "its last events are missing"),
        ("update facts set seq = 100 where seq = 3", "event 4 or the event before it"),
        ("update facts set at = at + 1 where seq = 4", "event 4 or the event before it"),
        ("insert into facts (job, at, body, sum) select job, at, body, sum from facts where seq = 4", "event 7"),
        ("update facts set job = (select job from facts where seq = 1) where seq = 4", "its last events are missing"),
    ],
)
def test_a_lost_moved_or_added_fact_is_found(tmp_path, opened, change, said):
    runs = three_runs(tmp_path)
    store = opened()
    store._db.execute(change)
    with pytest.raises(DamagedRunError, match=said):
        list(store.read_events(runs[1]))
    with pytest.raises(DamagedRunError, match=said):
        list(opened().read_events(runs[1], after=3))
    assert len(list(store.read_events(runs[2]))) == 2


@pytest.mark.parametrize("text", ["/bundle", "stopped", "digits-"])
def test_a_changed_row_of_a_run_is_named_and_hides_no_other(tmp_path, opened, text):
    runs = three_runs(tmp_path)
    store = opened()
    column = {"/bundle": "bundle", "stopped": "status", "digits-": "id"}[text]
    store._db.execute(f"update jobs set {column} = {column} || 'x' where id = ?", (runs[1],))
    found = store.all_jobs()
    assert [isinstance(row, StoredJob) for row in found] == [True, False, True]
    assert "its row in the table of jobs does not match its checksum" in found[1].reason
    if column != "id":
        with pytest.raises(StoreError, match="is damaged"):
            store.set_status(runs[1], "running")
        assert store.stored_status(runs[1]) == "damaged"


def test_text_that_is_no_text_any_more_hides_its_run_alone(tmp_path, opened):
    runs = three_runs(tmp_path)
    store = opened()
    store._db.execute("update jobs set settings = cast(x'7bff' as text) where id = ?", (runs[0],))
    store._db.execute("update facts set body = cast(x'7bff' as text) where job = ?", (runs[1],))
    rows = [event_messages.summarise_run(row, store) for row in opened().all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, False, True]
    assert "is damaged" in event_messages.format_runs(rows)[2]


def test_a_number_of_starts_that_is_damaged_is_made_of_the_runs(tmp_path, opened):
    store = opened()
    run = store.add_job(JOB, tmp_path)
    for _ in range(3):
        store.begin_epoch()
    store.mark_running(run)
    store._db.execute("update counters set value = 0")
    assert opened().begin_epoch() == 4
    assert store.begin_epoch(min_epoch=9) == 10


def test_an_index_that_is_wrong_is_made_anew(tmp_path, opened):
    (run, *_) = three_runs(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "fedquilt.db", isolation_level=None)) as db:
        db.execute("pragma writable_schema = on")
        db.execute("update sqlite_master set sql = sql || ' where seq > 1' where name = 'facts_by_job'")
        db.execute("pragma writable_schema = reset")
        db.execute("reindex")
        db.execute("pragma writable_schema = on")
        db.execute("update sqlite_master set sql = replace(sql, ' where seq > 1', '') where name = 'facts_by_job'")
        db.execute("pragma writable_schema = reset")
    store = opened()
    assert store.damage == ""
    assert len(list(store.read_events(run))) == 2


def test_a_database_that_is_damaged_as_a_whole_is_read_and_never_written(tmp_path, opened):
    runs = three_runs(tmp_path)
    path = tmp_path / "fedquilt.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("select rootpage from sqlite_master where name = 'counters'").fetchone()
        (size,) = db.execute("pragma page_size").fetchone()
    payload = bytearray(path.read_bytes())
    payload[(page - 1) * size + 3] ^= 0xFF  # number of cells in the page
    path.write_bytes(payload)
    store = opened()
    assert re.fullmatch(r"[^*\n]{5,400}", store.damage), store.damage  # one sentence of SQLite's many lines
    assert [len(list(store.read_events(run))) for run in runs] == [2, 2, 2]
    for write in (lambda: store.set_status(runs[0], "done"), store.acquire_lock, store.begin_epoch):
        with pytest.raises(StoreError, match=r"fedquilt.db is damaged .* restore a backup of the whole home"):
            write()


@pytest.mark.parametrize("damage", ["cut", "no database"])
def test_a_database_that_cannot_be_opened_is_told_to_be_damaged(tmp_path, opened, damage):
    three_runs(tmp_path)
    path = tmp_path / "fedquilt.db"
    payload = path.read_bytes()
    path.write_bytes(payload[: len(payload) // 3] if damage == "cut" else b"x" * len(payload))
    with pytest.raises(StoreError, match=r"fedquilt.db is damaged \(.*restore a backup of the whole home$"):
        opened()

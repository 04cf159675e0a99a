"""What the coordinator has written is there after any crash."""

import contextlib
import os
import re
import sqlite3
import threading
import time

import msgspec
import pytest
from stored_job import JOB

from fedquilt.coordinator.fleet.device_status import TelemetryStore
from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, JobStarted, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import VERSION, Store
from fedquilt.coordinator.views import scores
from fedquilt.core import BlobRef, JobError, StoreError, Update, Usage


def test_facts_come_back_in_order_from_another_process_of_the_same_folder(tmp_path, opened):
    store = opened()
    id = store.add_job(JOB, tmp_path / "bundle")
    facts = [JobStarted(BlobRef(sha256="a" * 64, size=3)), CohortSelected(0, 0, ("x", "y")), JobEnded("done")]
    for fact in facts:
        store.append_event(id, fact)
    again = opened()
    assert [fact for _, _, fact in again.read_events(id)] == facts
    assert again.find_job(id).job == JOB


def append_and_fail(store: Store, id: str) -> None:
    """One fact that can be kept, and one that cannot."""
    store.append_event(id, JobEnded("done"))
    store.append_event(id, RoundCommitted(0, BlobRef(sha256="c" * 64, size=3), False, {}, took_s=float("nan")))


def test_facts_that_are_written_together_are_there_all_at_once_or_not_at_all(tmp_path, opened):
    """One transaction; until then nobody else finds the database busy, and an error on the way leaves none of them."""
    store, other = opened(), opened()
    id = store.add_job(JOB, tmp_path / "bundle")
    said = []
    store._db.set_trace_callback(said.append)
    with store.batch_events():
        for round in range(3):
            store.append_event(id, CohortSelected(round, 0, ("x",)))
        assert list(other.read_events(id)) == []
        other.set_status(id, "running")
    assert [fact.round for _, _, fact in other.read_events(id) if isinstance(fact, CohortSelected)] == [0, 1, 2]
    assert [line.lower() for line in said].count("commit") == 1
    with pytest.raises(JobError, match="cannot be kept"), store.batch_events():
        append_and_fail(store, id)
    assert len(list(other.read_events(id))) == 3
    store.append_event(id, JobEnded("done"))
    assert len(list(other.read_events(id))) == 4


def test_every_run_has_an_id_of_its_own_and_the_name_means_the_latest(tmp_path, opened):
    store = opened()
    first, second = store.add_job(JOB, tmp_path), store.add_job(JOB, tmp_path)
    assert first != second
    assert first.startswith("digits-20")
    assert store.find_job("digits").id == second
    assert store.find_job(first).id == first
    assert [row.status for row in store.readable_jobs()] == ["queued", "queued"]


def test_only_one_coordinator_holds_a_folder(opened):
    """And the next may once it is gone."""
    first, second = opened(), opened()
    assert first.acquire_lock()
    assert not second.acquire_lock()
    first.close()
    assert second.acquire_lock()


def test_the_latest_state_of_every_job_is_known(tmp_path, opened):
    """Older states may go."""
    store = opened()
    for letter in "ab":
        id = store.add_job(JOB, tmp_path)
        store.append_event(id, JobStarted(BlobRef(sha256=letter * 64, size=3)))
    store.append_event(id, RoundCommitted(0, BlobRef(sha256="c" * 64, size=3), False, {}))
    store.append_event(id, JobEnded("done"))
    assert store.latest_state_hashes() == {"a" * 64, "c" * 64}


def test_epochs_grow(opened):
    assert [opened().begin_epoch() for _ in range(3)] == [1, 2, 3]


def test_an_unknown_run_names_those_there_are(tmp_path, opened):
    """So that a typing error is seen."""
    store = opened()
    store.add_job(JOB, tmp_path)
    with pytest.raises(StoreError, match=r"no run 'digit'.*; did you mean 'digits'\? There are: digits, digits-20"):
        store.find_job("digit")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="cannot use the store"):
        Store(tmp_path / "home")


def test_a_folder_knows_whether_a_coordinator_holds_it(opened):
    """So that nobody waits for one that is gone."""
    holder, asker = opened(), opened()
    assert not asker.is_served()
    assert holder.acquire_lock()
    assert asker.is_served()
    assert holder.is_served()
    holder.close()
    assert not asker.is_served()


def test_a_job_that_two_processes_submit_at_once_becomes_one_run(tmp_path, opened, monkeypatch):
    first, found = opened(), list[tuple[str, bool]]()
    add = first.add_job

    def submit():
        with Store(first.home) as second:
            found.append(second.find_or_add_job(JOB, tmp_path / "bundle"))

    other = threading.Thread(target=submit)

    def add_late(*args):
        other.start()
        other.join(0.5)
        return add(*args)

    monkeypatch.setattr(first, "add_job", add_late)
    run, continued = first.find_or_add_job(JOB, tmp_path / "bundle")
    other.join()
    assert not continued
    assert found == [(run, True)]
    assert [row.id for row in first.readable_jobs()] == [run]


def test_the_unfinished_run_of_the_very_same_job_is_found(tmp_path, opened):
    store = opened()
    run = store.add_job(JOB, tmp_path / "bundle")
    assert store.find_unfinished(JOB, tmp_path / "bundle") == run
    assert store.find_unfinished(JOB, tmp_path / "other") is None
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text("prepared from other data")
    assert store.find_unfinished(JOB, tmp_path / "bundle") is None
    later = store.add_job(JOB, tmp_path / "bundle")
    assert store.find_unfinished(JOB, tmp_path / "bundle") == later
    (tmp_path / "bundle" / "bundle.json").unlink()
    store.set_status(run, "done")
    assert store.find_unfinished(JOB, tmp_path / "bundle") is None


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_a_home_of_another_version_is_refused_with_the_mend(tmp_path, opened, monkeypatch, version):
    opened()._db.execute(f"pragma user_version = {version}")
    connect, made = sqlite3.connect, []
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: made.append(connect(*given, **named)) or made[-1])
    with pytest.raises(StoreError, match=rf"tables of version {version}, .* use the fedquilt that wrote it"):
        Store(tmp_path)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].execute("select 1")


def test_homes_that_begin_a_run_in_the_same_second_give_it_different_ids(tmp_path, monkeypatch):
    """A board that serves two coordinators would take one's run for the other's; the longest name fits a topic."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    long = msgspec.structs.replace(JOB, name="n" * 40)
    ids = set()
    for folder in ("one", "two"):
        with Store(tmp_path / folder) as store:
            ids |= {store.add_job(JOB, tmp_path), store.add_job(long, tmp_path)}
    assert len(ids) == 4
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", id) for id in ids)


def test_a_run_is_running_only_while_somebody_is_at_it(tmp_path, opened):
    store, asker = opened(), opened()
    runs = [store.add_job(JOB, tmp_path) for _ in range(3)]
    for run in runs[:2]:
        store.set_status(run, "running")

    def told():
        return [asker.current_status(row) for row in asker.readable_jobs()]

    assert told() == ["interrupted", "interrupted", "queued"]
    assert store.acquire_lock()
    store.begin_epoch()
    assert told() == ["waiting", "waiting", "queued"]
    store.mark_running(runs[1])
    assert told() == ["waiting", "running", "queued"]
    store.close()
    assert told() == ["interrupted", "interrupted", "queued"]


def test_facts_are_on_disk_before_they_are_acted_on(opened):
    """SQLite's FULL (2): also a power cut loses none. A killed process alone would not show it."""
    store = opened()
    assert store._db.execute("pragma synchronous").fetchone() == (2,)
    assert store._db.execute("pragma journal_mode").fetchone() == ("wal",)


def test_what_a_jobs_log_has_counted_is_known_when_the_job_is_not_under_way(tmp_path, opened):
    """By job, round and device, and by nothing else."""
    store = opened()
    id, other = store.add_job(JOB, tmp_path / "bundle"), store.add_job(JOB, tmp_path / "bundle")
    update = Update(job=id, round=1, attempt=0, device="a", weight=1.0, bundles={}, metrics={}, usage=Usage(wall_s=1.0))
    store.append_event(id, UpdateAccepted(1, update))
    assert store.is_update_counted(update)
    for change in ({"job": other}, {"job": "none"}, {"round": 0}, {"device": "b"}):
        assert not store.is_update_counted(msgspec.structs.replace(update, **change))


def test_a_new_home_is_for_its_owner_alone(tmp_path):
    """Folders 0700, files 0600, whatever the umask; what its owner has opened to others since stays open."""
    home = tmp_path / "home"
    before = os.umask(0o022)
    try:
        with Store(home) as store, TelemetryStore(home, writes=True):
            assert store.acquire_lock()
            store.depot.store_bytes(b"a model")
            store.begin_epoch()
            scores.write_scores(scores.scores_path(home, "run"), scores.RunScores({}))
            modes = {path.name: path.stat().st_mode & 0o777 for path in (home, *home.rglob("*"))}
        assert {"fedquilt.db-wal", "boards.db-shm", "lock", "blobs"} < modes.keys()
        folders = {path.name for path in (home, *home.rglob("*")) if path.is_dir()}
        assert {name: mode for name, mode in modes.items() if mode != (0o700 if name in folders else 0o600)} == {}
        home.chmod(0o750)
        Store(home).close()
        assert home.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_the_list_of_runs_follows_every_change_and_no_change_that_was_undone(tmp_path, opened):
    store, other = opened(), opened()
    first = store.add_job(JOB, tmp_path / "bundle")
    assert [row.id for row in store.readable_jobs()] == [row.id for row in other.readable_jobs()] == [first]
    second = other.add_job(JOB, tmp_path / "bundle")
    assert [row.id for row in store.readable_jobs()] == [first, second]
    other.set_status(second, "stopped")
    assert [row.status for row in store.readable_jobs()] == ["queued", "stopped"]
    with contextlib.suppress(ZeroDivisionError), store._write_transaction():
        store._rows.update_job(first, status="running")
        assert [row.status for row in store.readable_jobs()] == ["running", "stopped"]
        raise ZeroDivisionError
    assert [row.status for row in store.readable_jobs()] == ["queued", "stopped"]

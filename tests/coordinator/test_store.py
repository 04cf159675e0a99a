"""The store: runs, facts, and who may read them."""

import contextlib
import io
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dashes
import msgspec
import plain
import pytest
from job_facts import BLOB
from ordinary import User
from stored_job import JOB
from stored_runs import Run, blob_of, of, state

from fedquilt import cli
from fedquilt.coordinator.fleet.device_status import TelemetryStore
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
    UpdatesAggregated,
)
from fedquilt.coordinator.storage.rows import encode_lossless
from fedquilt.coordinator.storage.store import VERSION, ChangeDetector, Store, StoreReader
from fedquilt.coordinator.views import scores
from fedquilt.core import BlobRef, JobError, StoreError, Usage


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
    with pytest.raises(JobError, match="cannot be encoded"), store.batch_events():
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
    first, second = opened(), opened()
    assert first.acquire_lock()
    assert not second.acquire_lock()
    first.close()
    assert second.acquire_lock()


def test_the_latest_state_of_every_job_is_known(tmp_path, opened):
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
    store = opened()
    store.add_job(JOB, tmp_path)
    with pytest.raises(StoreError, match=r"no run 'digit'.*; did you mean 'digits'\? There are: digits, digits-20"):
        store.find_job("digit")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "home")


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
    with pytest.raises(StoreError, match=rf"tables of version {version}, .* use the fedquilt version that wrote"):
        Store(tmp_path)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].execute("select 1")


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
    store = opened()
    assert store._db.execute("pragma synchronous").fetchone() == (2,)
    assert store._db.execute("pragma journal_mode").fetchone() == ("wal",)


def test_what_a_jobs_log_has_counted_is_known_when_the_job_is_not_under_way(tmp_path, opened):
    store = opened()
    id, other = store.add_job(JOB, tmp_path / "bundle"), store.add_job(JOB, tmp_path / "bundle")
    update = plain.update(job=id, round=1, usage=Usage(wall_s=1.0))
    store.append_event(id, UpdateAccepted(1, update))
    assert store.is_update_counted(update)
    for change in ({"job": other}, {"job": "none"}, {"round": 0}, {"device": "b"}):
        assert not store.is_update_counted(msgspec.structs.replace(update, **change))


def test_a_new_home_is_for_its_owner_alone(tmp_path):
    home = tmp_path / "home"
    before = os.umask(0o022)
    try:
        with Store(home) as store, TelemetryStore(home, writes=True):
            assert store.acquire_lock()
            store.blob_store.store_bytes(b"a model")
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
    with contextlib.suppress(ZeroDivisionError), store.open_transaction():
        store._rows.update_job(first, status="running")
        assert [row.status for row in store.readable_jobs()] == ["running", "stopped"]
        raise ZeroDivisionError
    assert [row.status for row in store.readable_jobs()] == ["queued", "stopped"]


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
        with pytest.raises(Exception, match="last events are missing"):
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
    with pytest.raises(StoreError, match=r"tables of version 1, .* use the fedquilt version that wrote"):
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


def command(*words: str) -> Any:
    """Exit code, output and error of a command."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.main([*words])
    return [code, out.getvalue(), error.getvalue()]


def lend(home: Path, to: Path) -> Path:
    """A copy of a home, which everybody can read and only its owner can write."""
    shutil.copytree(home, to)
    for path in (to, *to.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return to


@pytest.mark.parametrize("state", ["closed", "open"])
def test_who_may_only_read_a_home_sees_its_runs(home: Path, user: User, state: str) -> None:
    with Store(home) as store:
        store.set_status(store.all_jobs()[0].id, "failed")
        if state == "open":
            lent = lend(home, user.folder / "lent")
    if state == "closed":
        lent = lend(home, user.folder / "lent")
    assert (lent / "fedquilt.db-wal").exists() is (state == "open")
    names = sorted(path.name for path in lent.iterdir())
    try:
        for words in (["ls"], ["why", "digits"], ["logs", "digits"]):
            code, out, error = user.does(command, *words, "--home", str(lent))
            assert (code, error) == (0, ""), words
            assert words != ["ls"] or " failed " in out
        assert sorted(path.name for path in lent.iterdir()) == names
        for words, says in (
            (["prune", "digits", "--yes"], "Permission denied"),
            (["serve"], "(no permission to write)"),
        ):
            code, _, error = user.does(command, *words, "--home", str(lent))
            assert (code, f"{says}; change the owner or the permissions" in error) == (6, True), error
    finally:
        lent.chmod(0o755)


def test_a_log_without_an_index_is_read_in_a_copy(home: Path, user: User) -> None:
    with Store(home) as store:
        store.set_status(store.all_jobs()[0].id, "failed")
        lent = lend(home, user.folder / "lent")
    lent.chmod(0o755)
    (lent / "fedquilt.db-shm").unlink()
    lent.chmod(0o555)
    try:
        code, _, error = user.does(command, "ls", "--home", str(lent))
        assert code == 6
        assert "unable to open database file (no permission to write)" in error
    finally:
        lent.chmod(0o755)
    shutil.copytree(lent, home / "copy")
    for path in (home / "copy").glob("fedquilt.db*"):
        path.chmod(0o600)
    assert " failed " in command("ls", "--home", str(home / "copy"))[1]


def test_the_blobs_of_runs_are_known_from_what_has_come_since_the_last_look(run):
    other = Run(run.store)
    other.record(JobStarted(state(77)))
    assert run.store.referenced_blobs() == {state(2).sha256, *blob_of(run.id, "a", 3), state(77).sha256}
    said = []
    run.store._db.set_trace_callback(said.append)
    run.record(UpdateAccepted(3, of(run.id, "b", 3)))
    of_run = {state(2).sha256, *blob_of(run.id, "a", 3), *blob_of(run.id, "b", 3)}
    assert run.store.referenced_blobs() == {*of_run, state(77).sha256}
    assert not [line for line in said if "order by seq" in line]
    with Store(run.store.home) as another:
        another.append_event(run.id, UpdateAccepted(3, of(run.id, "c", 3)))
    assert blob_of(run.id, "c", 3) < run.store.referenced_blobs()
    assert len([line for line in said if "order by seq" in line]) == 1
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    assert run.store.referenced_blobs() == {state(3).sha256, state(77).sha256}


def test_a_stored_sum_is_needed_in_place_of_the_updates_in_it_until_their_round_ends(run, often):
    run.record(UpdateAccepted(3, of(run.id, "b", 3)), UpdatesAggregated(3, ("a",), state(88)))
    for store in (run.store, often()):
        assert store.referenced_blobs() == {state(2).sha256, state(88).sha256, *blob_of(run.id, "b", 3)}
    run.record(RoundClosed(3), RoundCommitted(3, state(3), False, {}))
    for store in (run.store, often()):
        assert store.referenced_blobs() == {state(3).sha256}


def test_what_another_process_has_written_between_two_facts_of_this_one_is_needed_too(run, often):
    before = run.store.referenced_blobs()
    often().append_event(run.id, UpdateAccepted(3, of(run.id, "c", 3)))
    run.store.append_event(run.id, UpdateAccepted(3, of(run.id, "b", 3)))
    assert run.store.referenced_blobs() == before | blob_of(run.id, "b", 3) | blob_of(run.id, "c", 3)


def append_and_fail_logs(made: Run) -> None:
    """Append an event in a transaction that is rolled back."""
    with made.store.open_transaction():
        made.store._rows.append_events(
            [(made.id, 1.0, encode_lossless(made.id, UpdateAccepted(3, of(made.id, "b", 3))))]
        )
        raise RuntimeError


def test_a_fact_whose_transaction_fails_is_not_taken_for_written(run):
    before = run.store.referenced_blobs()
    with pytest.raises(RuntimeError):
        append_and_fail_logs(run)
    assert run.store.referenced_blobs() == before
    assert run.store.find_damaged_ids() == []


def test_a_run_that_is_done_has_its_blobs_without_its_facts(often):
    made = Run(often())
    made.record(JobStarted(BLOB))
    made.round(0, "a")
    made.record(JobEnded("done"))
    later, said = often(), list[str]()
    later._db.set_trace_callback(said.append)
    assert (later.referenced_blobs(), later.find_damaged_ids()) == ({state(0).sha256}, [])
    assert not [line for line in said if "order by seq" in line]
    assert made.store._db.execute("select length(body) from snapshots").fetchall() == [(0,)]


def test_a_removed_run_takes_its_snapshot_with_it(run):
    run.store.delete_runs([run.id])
    assert run.store._db.execute("select count(*) from snapshots").fetchone() == (0,)
    assert run.store.referenced_blobs() == set()

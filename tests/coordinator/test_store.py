"""What the coordinator has written is there after any crash."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.boards_store import BoardStore
from fedquilt.coordinator.facts import Answered, AnyFact, Asked, Committed, Ended, Started, Surveyed
from fedquilt.coordinator.store import Row, Store, Unreadable
from fedquilt.coordinator.store_rows import DamagedRunError
from fedquilt.coordinator.store_tables import VERSION
from fedquilt.coordinator.views import log, scores
from fedquilt.core import BlobRef, JobError, StoreError, Update, Usage


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder, as so many processes would; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Store(tmp_path))


JOB = settings.parse({"name": "digits", "method": "fedavg"})


def test_facts_come_back_in_order_from_another_process_of_the_same_folder(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """A second store on the folder stands for the process after a kill -9."""
    store = opened()
    id = store.add(JOB, tmp_path / "bundle")
    facts = [Started(BlobRef(sha256="a" * 64, size=3)), Asked(0, 0, ("x", "y")), Ended("done")]
    for fact in facts:
        store.append(id, fact)
    again = opened()
    assert [fact for _, _, fact in again.facts(id)] == facts
    assert again.job(id).job == JOB


def append_and_fail(store: Store, id: str) -> None:
    """One fact that can be kept, and one that cannot."""
    store.append(id, Ended("done"))
    store.append(id, Committed(0, BlobRef(sha256="c" * 64, size=3), False, {}, took_s=float("nan")))


def test_facts_that_are_written_together_are_there_all_at_once_or_not_at_all(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """One transaction; until then nobody else finds the database busy, and an error on the way leaves none of them."""
    store, other = opened(), opened()
    id = store.add(JOB, tmp_path / "bundle")
    said: list[str] = []
    store._db.set_trace_callback(said.append)
    with store.together():
        for round in range(3):
            store.append(id, Asked(round, 0, ("x",)))
        assert list(other.facts(id)) == []
        other.set_status(id, "running")
    assert [fact.round for _, _, fact in other.facts(id) if isinstance(fact, Asked)] == [0, 1, 2]
    assert [line.lower() for line in said].count("commit") == 1
    with pytest.raises(JobError, match="cannot be kept"), store.together():
        append_and_fail(store, id)
    assert len(list(other.facts(id))) == 3
    store.append(id, Ended("done"))
    assert len(list(other.facts(id))) == 4


def test_every_run_has_an_id_of_its_own_and_the_name_means_the_latest(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """Two runs in the same second, too."""
    store = opened()
    first, second = store.add(JOB, tmp_path), store.add(JOB, tmp_path)
    assert first != second
    assert first.startswith("digits-20")
    assert store.job("digits").id == second
    assert store.job(first).id == first
    assert [row.status for row in store.jobs()] == ["queued", "queued"]


def test_only_one_coordinator_holds_a_folder(opened: Callable[[], Store]) -> None:
    """And the next may once it is gone."""
    first, second = opened(), opened()
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()


def test_the_latest_state_of_every_job_is_known(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Older states may go."""
    store = opened()
    for letter in "ab":
        id = store.add(JOB, tmp_path)
        store.append(id, Started(BlobRef(sha256=letter * 64, size=3)))
    store.append(id, Committed(0, BlobRef(sha256="c" * 64, size=3), False, {}))
    store.append(id, Ended("done"))
    assert store.states() == {"a" * 64, "c" * 64}


def test_epochs_grow(opened: Callable[[], Store]) -> None:
    """Each start of a coordinator is told apart."""
    assert [opened().next_epoch() for _ in range(3)] == [1, 2, 3]


def test_an_unknown_run_names_those_there_are(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """So that a typing error is seen."""
    store = opened()
    store.add(JOB, tmp_path)
    with pytest.raises(StoreError, match=r"no run 'digit'.*there are: digits-20"):
        store.job("digit")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="cannot use the store"):
        Store(tmp_path / "home")


def test_a_damaged_database_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Garbage in place of SQLite."""
    (tmp_path / "fedquilt.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="is damaged"):
        Store(tmp_path)


def test_a_folder_knows_whether_a_coordinator_holds_it(opened: Callable[[], Store]) -> None:
    """So that nobody waits for one that is gone."""
    holder, asker = opened(), opened()
    assert not asker.served()
    assert holder.lock()
    assert asker.served()
    assert holder.served()
    holder.close()
    assert not asker.served()


def test_the_unfinished_run_of_the_very_same_job_is_found(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Another bundle is another job; what has ended for good is not taken up again."""
    store = opened()
    run = store.add(JOB, tmp_path / "bundle")
    assert store.unfinished(JOB, tmp_path / "bundle") == run
    assert store.unfinished(JOB, tmp_path / "other") is None
    store.set_status(run, "done")
    assert store.unfinished(JOB, tmp_path / "bundle") is None


def test_a_row_of_another_version_is_named_and_hides_no_other(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Whoever asks for it is told why it cannot be read; the others are there as ever."""
    store = opened()
    run, other = store.add(JOB, tmp_path), store.add(JOB, tmp_path)
    with store._writing():
        store._rows.change(run, settings="{}")
    with pytest.raises(StoreError, match=f"{run} was made by another version"):
        store.job(run)
    assert [row.id for row in store.jobs()] == [other]
    assert store.job("digits").id == other
    odd, fine = store.all_jobs()
    assert isinstance(odd, Unreadable)
    assert isinstance(fine, Row)
    rows = [log.summary(row, store) for row in store.all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, True]
    assert f"{run} was made by another version" in log.lines(rows)[0]


BLOB = BlobRef(sha256="a" * 64, size=3)


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (Committed(0, BLOB, False, {"loss": math.inf}), "cannot be kept: .*float"),
        (Committed(0, BLOB, False, {}, (), math.nan), "cannot be kept: .*float"),
        (Surveyed(0, (), {}, {"a": math.inf}), "cannot be kept: .*float"),
        (Asked(0, 0, ("a",), {}, math.inf), "holds a number that is not finite"),  # it would come back as None
        (Ended("failed", "no file \udcff"), "cannot be kept: .*surrogates"),
    ],
)
def test_what_could_not_be_read_back_is_never_written(
    tmp_path: Path, opened: Callable[[], Store], fact: AnyFact, said: str
) -> None:
    """The job is told, and its log is as it was."""
    store = opened()
    run = store.add(JOB, tmp_path)
    store.append(run, Started(BLOB))
    with pytest.raises(JobError, match=said):
        store.append(run, fact)
    assert [fact for _, _, fact in store.facts(run)] == [Started(BLOB)]


def test_a_damaged_fact_hides_its_run_alone(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """As an earlier version wrote it, or a failing disk: the others list, and what they need is known."""
    store = opened()
    runs = [store.add(JOB, tmp_path) for _ in range(3)]
    for run, letter in zip(runs, "abc", strict=True):
        store.append(run, Started(BlobRef(sha256=letter * 64, size=3)))
    null = b'{"type":"Committed","round":0,"state":{"sha256":"%s","size":3},"finished":false,"metrics":{"loss":null}}'
    for run, body in ((runs[0], (null % (b"d" * 64)).decode()), (runs[1], '{"type":"Comm')):
        with store._writing():
            store._rows.append([(run, 0.0, body)])
    rows = [log.summary(row, store) for row in store.all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, False, True]
    assert [row["rounds"] for row in rows] == [None, None, 0]
    assert "cannot be read by this version" in log.lines(rows)[0]
    assert store.states() == {"d" * 64, "b" * 64, "c" * 64}
    assert store.held() == store.states()


OLD_SCHEMA = """
create table jobs (
    id text primary key, settings text not null, bundle text not null, status text not null, created real not null);
create table facts (
    seq integer primary key, job text not null references jobs(id), at real not null, body text not null);
create index facts_by_job on facts(job, seq);
create table counters (name text primary key, value integer not null);
"""


def test_a_home_of_the_version_before_is_read_and_brought_up_to_date(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """Its tables had no version; runs of simulated fleets are known by the folders of their boards."""
    settings_then = '{"name":"digits","method":"fedavg","cohort":{"size":0,"min_devices":1}}'
    with contextlib.closing(sqlite3.connect(tmp_path / "fedquilt.db")) as db:
        db.executescript(OLD_SCHEMA)
        for id in ("digits-20260101-000000", "digits-20260101-000001"):
            db.execute("insert into jobs values (?, ?, '/b', 'running', 5.0)", (id, settings_then))
        db.execute("insert into facts (job, at, body) values (?, 6.0, ?)", (id, '{"type":"Ended","status":"stopped"}'))
        db.commit()
    (tmp_path / "agents" / "digits-20260101-000001" / "x86-host-00").mkdir(parents=True)
    store = opened()
    assert [(row.id[-1], row.origin, row.status) for row in store.jobs()] == [
        ("0", "run", "running"),
        ("1", "fleet", "running"),
    ]
    assert [fact for _, _, fact in store.facts(id)] == [Ended("stopped")]
    assert store.add(JOB, tmp_path) in {row.id for row in opened().jobs()}
    assert store._db.execute("pragma user_version").fetchone() == (VERSION,)


def test_a_home_of_a_later_version_is_refused_with_the_mend(
    tmp_path: Path, opened: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into tables that are not understood, and the database is closed again."""
    opened()._db.execute(f"pragma user_version = {VERSION + 1}")
    connect, made = sqlite3.connect, []
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: made.append(connect(*given, **named)) or made[-1])
    with pytest.raises(StoreError, match=r"newer fedquilt .* install that version"):
        Store(tmp_path)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].execute("select 1")


def test_homes_that_begin_a_run_in_the_same_second_give_it_different_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board that serves two coordinators would take one's run for the other's; the longest name fits a topic."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    long = msgspec.structs.replace(JOB, name="n" * 40)
    ids = set()
    for folder in ("one", "two"):
        with Store(tmp_path / folder) as store:
            ids |= {store.add(JOB, tmp_path), store.add(long, tmp_path)}
    assert len(ids) == 4
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", id) for id in ids)


def test_a_run_is_running_only_while_somebody_is_at_it(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Of two that are noted as running one is at work, and none once the coordinator has been killed."""
    store, asker = opened(), opened()
    runs = [store.add(JOB, tmp_path) for _ in range(3)]
    for run in runs[:2]:
        store.set_status(run, "running")

    def told() -> list[str]:
        return [asker.standing(row) for row in asker.jobs()]

    assert told() == ["interrupted", "interrupted", "queued"]
    assert store.lock()
    store.next_epoch()
    assert told() == ["waiting", "waiting", "queued"]
    store.begin(runs[1])
    assert told() == ["waiting", "running", "queued"]
    store.close()
    assert told() == ["interrupted", "interrupted", "queued"]


def test_facts_are_on_disk_before_they_are_acted_on(opened: Callable[[], Store]) -> None:
    """SQLite's FULL (2): also a power cut loses none. A killed process alone would not show it."""
    store = opened()
    assert store._db.execute("pragma synchronous").fetchone() == (2,)
    assert store._db.execute("pragma journal_mode").fetchone() == ("wal",)


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
        runs = [store.add(JOB, home / "bundle") for _ in range(3)]
        for run in runs:
            store.append(run, Started(BLOB))
            store.append(run, Ended("stopped", f"reason of {run}"))
    return runs


def test_a_changed_fact_is_found_and_hides_its_run_alone(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """One bit of a text that can be read all the same; nothing is added to such a log, and its blobs are kept."""
    runs = three_runs(tmp_path)
    flipped(tmp_path, f"reason of {runs[1]}".encode())
    store = opened()
    assert [len(list(store.facts(run))) for run in (runs[0], runs[2])] == [2, 2]
    with pytest.raises(DamagedRunError, match=rf"the log of {runs[1]} in .* is damaged: fact 4, .* put back a copy"):
        list(store.facts(runs[1]))
    assert [log.summary(row, store)["problem"] is None for row in store.all_jobs()] == [True, False, True]
    assert store.unsound() == [runs[1]]
    assert store.end(runs[1], Ended("failed")) == "failed"
    assert (store.status(runs[1]), store.unsound()) == ("failed", [runs[1]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("delete from facts where seq = 3", "fact 4, or the one before it"),
        ("delete from facts where seq = 4", "its last facts are missing"),
        ("update facts set seq = 100 where seq = 3", "fact 4, or the one before it"),
        ("update facts set at = at + 1 where seq = 4", "fact 4, or the one before it"),
        ("insert into facts (job, at, body, sum) select job, at, body, sum from facts where seq = 4", "fact 7"),
        ("update facts set job = (select job from facts where seq = 1) where seq = 4", "its last facts are missing"),
    ],
)
def test_a_lost_moved_or_added_fact_is_found(
    tmp_path: Path, opened: Callable[[], Store], change: str, said: str
) -> None:
    """Each fact's checksum covers the one before it, and the run's row has that of the last one."""
    runs = three_runs(tmp_path)
    store = opened()
    store._db.execute(change)
    with pytest.raises(DamagedRunError, match=said):
        list(store.facts(runs[1]))
    with pytest.raises(DamagedRunError, match=said):
        list(opened().facts(runs[1], after=3))
    assert len(list(store.facts(runs[2]))) == 2


@pytest.mark.parametrize("text", ["/bundle", "stopped", "digits-"])
def test_a_changed_row_of_a_run_is_named_and_hides_no_other(
    tmp_path: Path, opened: Callable[[], Store], text: str
) -> None:
    """Its bundle, its status or its id; nobody writes to it, as that would give it a checksum that fits."""
    runs = three_runs(tmp_path)
    store = opened()
    column = {"/bundle": "bundle", "stopped": "status", "digits-": "id"}[text]
    store._db.execute(f"update jobs set {column} = {column} || 'x' where id = ?", (runs[1],))
    found = store.all_jobs()
    assert [isinstance(row, Row) for row in found] == [True, False, True]
    assert "its row in the list of runs is not what was written" in found[1].reason  # type: ignore[union-attr]
    if column != "id":
        with pytest.raises(StoreError, match="is damaged"):
            store.set_status(runs[1], "running")
        assert store.status(runs[1]) == "damaged"


def test_text_that_is_no_text_any_more_hides_its_run_alone(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """SQLite gives back bytes that are no UTF-8."""
    runs = three_runs(tmp_path)
    store = opened()
    store._db.execute("update jobs set settings = cast(x'7bff' as text) where id = ?", (runs[0],))
    store._db.execute("update facts set body = cast(x'7bff' as text) where job = ?", (runs[1],))
    rows = [log.summary(row, store) for row in opened().all_jobs()]
    assert [row["problem"] is None for row in rows] == [False, False, True]
    assert "is damaged" in log.lines(rows)[0]


def test_a_number_of_starts_that_is_damaged_is_made_of_the_runs(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """It must not fall behind: devices would take the coordinator's tasks for old messages."""
    store = opened()
    run = store.add(JOB, tmp_path)
    for _ in range(3):
        store.next_epoch()
    store.begin(run)
    store._db.execute("update counters set value = 0")
    assert opened().next_epoch() == 4
    assert store.next_epoch(above=9) == 10


def test_an_index_that_is_wrong_is_made_anew(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """By it, facts would seem to be missing."""
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
    assert len(list(store.facts(run))) == 2


def test_a_database_that_is_damaged_as_a_whole_is_read_and_never_written(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """Runs that are sound can be read, and exported; a coordinator refuses the home, by name and with the mend."""
    runs = three_runs(tmp_path)
    path = tmp_path / "fedquilt.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("select rootpage from sqlite_master where name = 'counters'").fetchone()
        (size,) = db.execute("pragma page_size").fetchone()
    payload = bytearray(path.read_bytes())
    payload[(page - 1) * size + 3] ^= 0xFF  # number of cells in the page
    path.write_bytes(payload)
    store = opened()
    assert store.damage
    assert [len(list(store.facts(run))) for run in runs] == [2, 2, 2]
    for write in (lambda: store.set_status(runs[0], "done"), store.lock, store.next_epoch):
        with pytest.raises(StoreError, match=r"fedquilt.db is damaged .* put back a copy of the whole home"):
            write()


@pytest.mark.parametrize("damage", ["cut", "no database"])
def test_a_database_that_cannot_be_opened_is_told_to_be_damaged(
    tmp_path: Path, opened: Callable[[], Store], damage: str
) -> None:
    """It is not taken for a full disk or a folder of somebody else's."""
    three_runs(tmp_path)
    path = tmp_path / "fedquilt.db"
    payload = path.read_bytes()
    path.write_bytes(payload[: len(payload) // 3] if damage == "cut" else b"x" * len(payload))
    with pytest.raises(StoreError, match=r"fedquilt.db is damaged \(.*put back a copy of the whole home$"):
        opened()


def test_a_home_without_checksums_is_given_them(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """As version 1 of the tables wrote it: what is there is taken for right."""
    runs = three_runs(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "fedquilt.db")) as db:
        for table, column in (("facts", "sum"), ("jobs", "sum"), ("jobs", "head"), ("counters", "sum")):
            db.execute(f"alter table {table} drop column {column}")
        db.execute("pragma user_version = 1")
    store = opened()
    assert [len(list(store.facts(run))) for run in runs] == [2, 2, 2]
    assert store.unsound() == []
    store.append(runs[0], Ended("failed"))
    assert len(list(opened().facts(runs[0]))) == 3


def test_what_a_jobs_log_has_counted_is_known_when_the_job_is_not_under_way(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """By job, round and device, and by nothing else."""
    store = opened()
    id, other = store.add(JOB, tmp_path / "bundle"), store.add(JOB, tmp_path / "bundle")
    update = Update(job=id, round=1, attempt=0, device="a", weight=1.0, bundles={}, metrics={}, usage=Usage(wall_s=1.0))
    store.append(id, Answered(1, update))
    assert store.counted(update)
    for change in ({"job": other}, {"job": "none"}, {"round": 0}, {"device": "b"}):
        assert not store.counted(msgspec.structs.replace(update, **change))


def test_a_new_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Folders 0700, files 0600, whatever the umask; what its owner has opened to others since stays open."""
    home = tmp_path / "home"
    before = os.umask(0o022)
    try:
        with Store(home) as store, BoardStore(home, writes=True):
            assert store.lock()
            store.depot.put(b"a model")
            store.next_epoch()
            scores.write(scores.file(home, "run"), scores.Scores({}))
            modes = {path.name: path.stat().st_mode & 0o777 for path in (home, *home.rglob("*"))}
        assert {"fedquilt.db-wal", "boards.db-shm", "lock", "blobs"} < modes.keys()
        folders = {path.name for path in (home, *home.rglob("*")) if path.is_dir()}
        assert {name: mode for name, mode in modes.items() if mode != (0o700 if name in folders else 0o600)} == {}
        home.chmod(0o750)
        Store(home).close()
        assert home.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)

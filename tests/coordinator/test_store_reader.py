"""A home that is opened for reading alone."""

import contextlib
import io
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import dashes
import pytest
from ordinary import User

from fedquilt import cli
from fedquilt.coordinator.rounds.events import JobEnded
from fedquilt.coordinator.storage.store import ChangeDetector, Store, StoreReader
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
    """Also what is in the write-ahead log alone, as in the home of a coordinator that runs."""
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
            assert (code, f"{says}; change the owner or the rights" in error) == (6, True), error
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


@pytest.mark.skipif(os.geteuid() != 0, reason="root mounts")
def test_a_home_on_a_read_only_file_system_is_read(home: Path) -> None:
    mount = f"mount --bind {home} {home} && mount -o remount,bind,ro {home}"
    verbs = "ls", "prune digits --yes", "serve"
    script = [f"{sys.executable} -m fedquilt.cli {verb} --home {home}; echo code $?" for verb in verbs]
    with Store(home) as store:
        store.set_status(store.all_jobs()[0].id, "failed")
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} || exit 77; {'; '.join(script)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode == 77 or not found.stdout:
        pytest.skip(f"no mounts here: {found.stderr}")
    assert " failed " in found.stdout
    assert [line for line in found.stdout.splitlines() if line.startswith("code")] == ["code 0", "code 6", "code 6"]
    assert "Read-only file system; use a folder that is not mounted read-only" in found.stderr
    assert "(read-only file system); use a copy of the folder where you can write" in found.stderr

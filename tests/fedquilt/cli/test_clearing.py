"""`prune`: what goes, what stays, who is asked, and a kill at any moment."""

import os
import shutil
import threading
import time
from pathlib import Path

import plain
import pytest

from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.rounds.events import (
    ENDED_PHASES,
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef, Usage


def begun(home: Path, name: str, status: str = "done", state: bytes = b"") -> str:
    with Store(home) as store:
        run = store.add_job(settings.parse_job({"name": name, "method": "fedavg"}), home)
        ref = store.blob_store.store_bytes(state or name.encode() * 100)
        update = plain.update(job=run, usage=Usage(wall_s=1.0))
        for fact in (
            JobStarted(ref),
            CohortSelected(0, 0, ("a",)),
            UpdateAccepted(0, update),
            RoundCommitted(0, ref, True, {}),
        ):
            store.append_event(run, fact)
        if status in ENDED_PHASES:
            store.append_event(run, JobEnded(status, ""))
        store.set_status(run, status)
    agent = home / "agents" / run / "a"
    agent.mkdir(parents=True)
    (agent / "agent.log").write_text("x" * 1000)
    (home / "evaluations").mkdir(exist_ok=True)
    (home / "evaluations" / f"{run}.json").write_text("[]")
    return run


def test_runs_are_measured_while_their_boards_write_and_remove_files(tmp_path):
    run = begun(tmp_path, "job")
    measured = threading.Event()

    def work():
        while not measured.is_set():
            folder = tmp_path / "agents" / run / "a" / "task"
            folder.mkdir()
            for number in range(20):
                (folder / f"{number}.part").write_bytes(b"x")
            shutil.rmtree(folder)

    writer = threading.Thread(target=work)
    with Store(tmp_path) as store:
        writer.start()
        try:
            assert all(retention.exclusive_bytes(store)[run] >= 1000 for _ in range(200))
        finally:
            measured.set()
            writer.join()


def ids(home: Path) -> list[str]:
    with Store(home) as store:
        return [row.id for row in store.all_jobs()]


def files(home: Path) -> set[str]:
    return {
        str(path.relative_to(home))
        for folder in ("blobs", "agents", "evaluations")
        for path in (home / folder).rglob("*")
        if path.is_file()
    }


def test_a_deleted_run_is_gone_with_all_that_only_it_needed(tmp_path, capsys):
    other = begun(tmp_path, "other", state=b"shared")
    before = files(tmp_path)
    doomed, same = begun(tmp_path, "doomed"), begun(tmp_path, "same", state=b"shared")
    assert main(["prune", doomed, "same", "--yes", "--home", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        f"to delete {doomed}\nto delete {same}\ndeleted 2 runs: 2.6" in shown
    )  # two logs of 1000 bytes, 600 of a state, 4 of evaluations
    assert "kB freed" in shown
    assert ids(tmp_path) == [other]
    assert files(tmp_path) == before
    with Store(tmp_path) as store:
        assert len(list(store.read_events(other))) == 5
        assert not list(store.read_events(doomed))


def test_a_run_that_a_coordinator_may_be_at_is_refused(tmp_path, capsys):
    busy, ended = begun(tmp_path, "busy", "running"), begun(tmp_path, "ended")
    before = files(tmp_path)
    with Store(tmp_path) as coordinator:
        assert coordinator.acquire_lock()
        assert main(["prune", ended, busy, "--yes", "--home", str(tmp_path)]) == 2
        assert f"{busy} is running: stop it first: `fedquilt stop {busy}" in capsys.readouterr().err
        assert (ids(tmp_path), files(tmp_path)) == ([busy, ended], before)
        coordinator.set_status(busy, "stopping")
        assert main(["prune", busy, "--yes", "--home", str(tmp_path)]) == 2
        coordinator.set_status(busy, "running")
        assert main(["prune", ended, "--yes", "--home", str(tmp_path)]) == 0
        assert "the coordinator deletes blobs" in capsys.readouterr().out
    assert ids(tmp_path) == [busy]
    assert {path for path in before if path.startswith("blobs")} <= files(tmp_path)
    assert main(["prune", busy, "--yes", "--home", str(tmp_path)]) == 0  # interrupted: nobody is at it
    assert not files(tmp_path)


def test_whoever_is_not_asked_says_yes(tmp_path, capsys):
    run = begun(tmp_path, "one")
    assert main(["prune", run, "--home", str(tmp_path)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["prune", "--keep", "0", "--home", str(tmp_path)]) == 2
    assert ids(tmp_path) == [run]


def test_a_run_that_cannot_be_read_can_be_deleted(tmp_path):
    run = begun(tmp_path, "odd")
    with Store(tmp_path) as store:
        store._db.execute("update jobs set settings = '{}'")
    assert main(["prune", run, "--yes", "--home", str(tmp_path)]) == 0
    assert not ids(tmp_path)


def test_deleting_what_is_not_there_names_what_is(tmp_path, capsys):
    run = begun(tmp_path, "one")
    assert main(["prune", "two", "--yes", "--home", str(tmp_path)]) == 6
    assert f"there are: one, {run}" in capsys.readouterr().err


def test_old_runs_are_those_that_both_options_name(tmp_path, monkeypatch):
    day, now = 86400.0, time.time()
    runs = {}
    with Store(tmp_path) as store:
        for name, began, over in (("waits", 20, 20), ("4", 11, 4), ("3", 3, 3), ("2", 2, 2), ("1", 1, 1)):
            monkeypatch.setattr(time, "time", lambda began=began: now - began * day)
            id = store.add_job(settings.parse_job({"name": name, "method": "fedavg"}), tmp_path)
            monkeypatch.setattr(time, "time", lambda over=over: now - over * day)
            store.append_event(
                id, JobStarted(BlobRef(sha256="a" * 64, size=1)) if name == "waits" else JobEnded("done")
            )
            store.set_status(id, "running" if name == "waits" else "done")
            runs[id] = name

        def old(keep, older_s):
            return [runs[id] for id in retention.select_expired_runs(store, now, keep, older_s)]

        assert old(1, None) == ["4", "3", "2"]
        assert old(None, 2.5 * day) == ["4", "3"]
        assert old(3, 2.5 * day) == ["4"]
        assert old(9, None) == []
        assert old(0, None) == ["4", "3", "2", "1"]


def test_pruning_keeps_the_latest_and_whatever_has_not_ended(tmp_path, capsys):
    waits, *ended = (begun(tmp_path, f"r{n}", "running" if not n else "done") for n in range(4))
    home = ["--home", str(tmp_path)]
    assert main(["prune", "--keep", "1", "--dry-run", *home]) == 0
    assert capsys.readouterr().out == f"would delete {ended[0]}\nwould delete {ended[1]}\n"
    assert len(ids(tmp_path)) == 4
    assert main(["prune", "--older-than", "1d", "--yes", *home]) == 0
    assert len(ids(tmp_path)) == 4
    assert main(["prune", "--keep", "1", "--yes", *home]) == 0
    assert ids(tmp_path) == [waits, ended[2]]


def test_a_folder_of_no_run_stays(tmp_path):
    begun(tmp_path, "one")
    (tmp_path / "agents" / "device-3").mkdir()
    assert main(["prune", "--keep", "0", "--yes", "--home", str(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "agents").iterdir()] == ["device-3"]


class KilledError(BaseException):
    """Kill of the process: no `except Exception` catches it."""


class Countdown:
    def __init__(self, left: int) -> None:
        self.left = left

    def wrap(self, function):
        def called(*words, **more):
            self.left -= 1
            if self.left < 0:
                raise KilledError
            return function(*words, **more)

        return called


class DyingConnection:
    """Connection to a database on which statements that change it may be the last."""

    def __init__(self, real, countdown: Countdown) -> None:
        self.real, self.countdown = real, countdown

    def __getattr__(self, name):
        return getattr(self.real, name)

    def execute(self, statement, *words):
        changes = statement.split()[0] in ("begin", "delete", "commit")
        return (self.countdown.wrap(self.real.execute) if changes else self.real.execute)(statement, *words)


def remove_and_die(home: Path, run: str, calls: int) -> bool:
    """Remove a run, with a kill after so many calls. Return whether the removal was complete before that."""
    countdown, store = Countdown(calls), Store(home)
    real = store._db
    store._db = store._rows._db = DyingConnection(real, countdown)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "unlink"), (shutil, "rmtree"), (Path, "unlink")):
            patch.setattr(owner, name, countdown.wrap(getattr(owner, name)))
        try:
            retention.remove_runs(store, [run])
        except KilledError:
            return False
        finally:
            store._db = store._rows._db = real
            if real.in_transaction:  # the end of a process rolls it back
                real.rollback()
            store.close()
    return True


def test_a_kill_at_any_moment_leaves_a_home_that_lists_and_can_be_pruned_again(tmp_path):
    home = tmp_path / "home"
    other = begun(home, "other")
    kept = files(home)
    doomed = begun(home, "doomed")
    whole = files(home)
    ends = set()
    for step in range(50):
        copy = tmp_path / str(step)
        shutil.copytree(home, copy)
        if remove_and_die(copy, doomed, step):
            break
        there = ids(copy)
        ends.add(doomed in there)
        assert there in ([other, doomed], [other])
        assert doomed not in there or files(copy) == whole
        assert main(["ls", "--home", str(copy)]) == 0
        assert main(["prune", "--home", str(copy)]) == 0
        assert files(copy) == (whole if doomed in there else kept)
    assert ends == {True, False}
    assert 5 < step < 49


@pytest.mark.parametrize("age", ["30", "d", "1y", "-3d", "3d 2h"])
def test_an_age_has_a_unit(age, tmp_path):
    """A number alone could be days or seconds."""
    with pytest.raises(SystemExit):
        main(["prune", "--older-than", age, "--home", str(tmp_path)])

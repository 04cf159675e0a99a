"""Backups of a home, and homes from them."""

import hashlib
import os
import resource
import shutil
import signal
import sqlite3
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forks import CONTEXT
from homes import Federation, is_commit_of
from saved_homes import contents, saved
from waiting import wait_until

from fedquilt.blobs.store import BlobStore
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    JobEnded,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.storage import backup
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, StoreError


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The states of an undisturbed run of scaffold, whose boards have private state."""
    federation = Federation(tmp_path_factory.mktemp("calm")).create()
    federation.run()
    return federation.states()


@pytest.mark.parametrize("moment", [CohortSelected, UpdateAccepted, RoundCommitted])
def test_a_home_that_is_restored_from_a_backup_of_its_live_run_gives_the_same_result(tmp_path, calm, moment):
    federation = Federation(tmp_path).create()
    home, file = federation.folder / "coordinator", tmp_path / "backup.tar"

    def at(fact):
        if isinstance(fact, moment) and fact.round == 3 and not file.exists():
            saved(home, file)
        return isinstance(fact, RoundCommitted) and fact.round == 3

    federation.run(at)
    home.rename(tmp_path / "lost")
    backup.restore_backup(file, home)
    federation.run()
    assert isinstance(federation.facts()[-1], JobEnded)
    assert federation.states() == calm
    assert federation.notes() == []


def runs_beside(home: Path, backups: Path) -> None:
    """Go on with a job, and wait for one more backup after each of its rounds."""

    def at(fact: AnyEvent) -> bool:
        if isinstance(fact, RoundCommitted):
            before = len(list(backups.glob("*.tar")))
            wait_until(lambda: len(list(backups.glob("*.tar"))) > before, "one more backup")
        return False

    Federation(home).run(at)


def test_backups_made_all_the_time_while_another_process_runs_the_job_all_go_on_to_its_result(tmp_path):
    federation = Federation(tmp_path / "run", "fedavg", rounds=12).create()
    child = CONTEXT.Process(target=runs_beside, args=(federation.folder, tmp_path))
    child.start()
    files = []
    while child.is_alive():
        files.append(saved(federation.folder / "coordinator", tmp_path / f"{len(files)}.tar"))
    states, last = federation.states(), federation.facts()[-1]
    assert isinstance(last, JobEnded)
    assert last.status == "done"
    rounds = set()
    for file in [*files[: -1 : max(1, len(files) // 5)], files[-1]]:
        shutil.rmtree(federation.folder / "coordinator")
        backup.restore_backup(file, federation.folder / "coordinator")
        rounds.add(len(federation.states()))
        federation.run()
        assert federation.states() == states
    assert len(rounds) > 1, "every backup is of the same round"


def test_a_backup_writes_nothing_into_the_home(tmp_path):
    federation = Federation(tmp_path / "run", "fedavg").create()
    federation.run(lambda fact: isinstance(fact, RoundClosed) and fact.round == 1)
    home = federation.folder / "coordinator"
    before = contents(home / "blobs")
    with tarfile.open(saved(home, tmp_path / "backup.tar")) as archive:
        held = {name.removeprefix("blobs/") for name in archive.getnames() if name.startswith("blobs/")}
    assert len(held - before.keys()) == 3, "the updates lie in the shared file"
    assert contents(home / "blobs") == before


def test_both_are_for_their_owner_alone_and_hold_only_what_is_needed(home, tmp_path):
    (home / "limits.toml").write_text("running = 2\n")
    file = saved(home, tmp_path / "backup.tar")
    assert main(["backup", "restore", str(file), str(tmp_path / "again")]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "again").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in (tmp_path / "again").rglob("*"))
    with Store(tmp_path / "again") as store, Store(home) as before:
        assert (
            {path.name for path in (tmp_path / "again" / "blobs").iterdir()}
            == store.referenced_blobs()
            == before.referenced_blobs()
        )
        assert store.all_jobs() == before.all_jobs()
    assert settings.load_limits(tmp_path / "again").running == 2
    assert not [each for each in contents(tmp_path) if ".part" in each]


def test_a_blob_that_is_dropped_while_it_is_saved_is_taken_from_a_later_moment(home, tmp_path, monkeypatch):
    later = []
    real = backup._copy_database

    def snapshot(store, target):
        needed = real(store, target)
        while later:
            later.pop()()
        return needed

    def go_on():
        federation = Federation(home.parent, "fedavg")
        federation.run(is_commit_of(2))

    later.append(go_on)
    monkeypatch.setattr(backup, "_copy_database", snapshot)
    file = saved(home, tmp_path / "backup.tar")
    backup.restore_backup(file, tmp_path / "again")
    with Store(tmp_path / "again") as store:
        assert all(store.blob_store.blob_path(sha256) for sha256 in store.referenced_blobs())
        assert any(
            isinstance(fact, RoundCommitted) and fact.round == 2
            for _, _, fact in store.read_events(store.readable_jobs()[0].id)
        )


def test_a_needed_blob_that_is_damaged_is_named_and_no_backup_is_left(home, tmp_path):
    with Store(home) as store:
        state = min(store.latest_state_hashes())
    path = home / "blobs" / state
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    with pytest.raises(StoreError, match=f"blob {state[:12]} of .* is missing or damaged"):
        saved(home, tmp_path / "backup.tar")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_blob_that_is_damaged_after_it_was_looked_at_is_not_saved(home, tmp_path, monkeypatch):
    with Store(home) as store:
        state = min(store.latest_state_hashes())
    (home / "blobs" / state).write_bytes(b"x")
    monkeypatch.setattr(BlobStore, "blob_path", lambda depot, sha256: depot.folder / sha256)
    with pytest.raises(StoreError, match=f"{state} is damaged: its content does not match its name"):
        saved(home, tmp_path / "backup.tar")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_neither_overwrites_anything(home, tmp_path):
    file = saved(home, tmp_path / "backup.tar")
    before = file.read_bytes()
    with pytest.raises(JobError, match="exists already: choose a new file name"):
        saved(home, file)
    assert file.read_bytes() == before
    kept = contents(home)
    with pytest.raises(JobError, match="exists already"):
        backup.restore_backup(file, home)
    assert contents(home) == kept
    (tmp_path / "again.part").mkdir()
    (tmp_path / "again.part" / "mine").write_text("mine")
    with pytest.raises(JobError, match="is needed for the restoration"):
        backup.restore_backup(file, tmp_path / "again")
    assert contents(tmp_path / "again.part") == {"mine": b"mine"}
    (tmp_path / "empty").mkdir()
    backup.restore_backup(file, tmp_path / "empty")
    assert (tmp_path / "empty" / "fedquilt.db").is_file()


def test_no_two_write_to_one_name(home, tmp_path):
    file = tmp_path / "backup.tar"
    with backup._open_part_file(file), pytest.raises(JobError, match="is being written by another backup"):
        saved(home, file)
    saved(home, file)
    with (
        backup._open_part_folder(tmp_path / "again.part"),
        pytest.raises(JobError, match="is in use by another restoration"),
    ):
        backup.restore_backup(file, tmp_path / "again")
    backup.restore_backup(file, tmp_path / "again")


def in_child(act: Callable[..., Any], *given: Any, die_at: int) -> bool:
    """Do something in a process that ends at its `die_at`th step on the disk; whether it came to its end."""
    child = CONTEXT.Process(target=dies, args=(die_at, act, given))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0


def dies(at: int, act: Callable[..., Any], given: Sequence[Any]) -> None:
    left = [at]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        return step

    for name in ("fsync", "replace", "unlink", "open", "mkdir", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    act(*given)
    os._exit(0)  # the interpreter's own end takes steps too


def test_a_kill_at_any_step_leaves_the_whole_or_nothing(home, tmp_path):
    sound = contents_of(saved(home, tmp_path / "sound.tar"), tmp_path / "sound")
    for die_at in range(100):
        file, again = tmp_path / f"{die_at}.tar", tmp_path / f"home-{die_at}"
        over = in_child(saved, home, file, die_at=die_at)
        if not file.exists():
            saved(home, file)
        assert contents_of(file, tmp_path / f"checked-{die_at}") == sound
        over &= in_child(backup.restore_backup, file, again, die_at=die_at)
        if not again.exists():
            backup.restore_backup(file, again)
        assert {key: value for key, value in contents(again).items() if not key.startswith(".")} == sound
        assert not [each.name for each in tmp_path.iterdir() if ".part" in each.name]
        if over:
            return
    raise AssertionError("it takes more than 100 steps")


def contents_of(file: Path, home: Path) -> dict[str, bytes]:
    backup.restore_backup(file, home)
    return contents(home)


@contextmanager
def files_of(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_is_told_and_nothing_is_left(home, tmp_path):
    file = saved(home, tmp_path / "backup.tar")
    for limit_bytes in (0, 5_000, file.stat().st_size - 1):
        with files_of(limit_bytes), pytest.raises(StoreError, match="cannot"):
            saved(home, tmp_path / "more.tar")
    with files_of(5_000), pytest.raises(StoreError, match="cannot restore"):
        backup.restore_backup(file, tmp_path / "again")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup.tar", "run"]


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_a_simulated_fleet_at_work_is_refused_and_its_boards_are_saved_when_it_rests(home, tmp_path, status):
    with Store(home) as store:
        run = store.readable_jobs()[0].id
        store.set_status(run, status)
    (home / "agents" / run / "board-0").mkdir(parents=True)
    (home / "agents" / run / "board-0" / "state").write_bytes(b"its own")
    with Store(home) as serving:
        assert serving.acquire_lock()
        with pytest.raises(JobError, match=f"{run} is running in"):
            saved(home, tmp_path / "backup.tar")
    found = contents_of(saved(home, tmp_path / "backup.tar"), tmp_path / "again")
    assert found[f"agents/{run}/board-0/state"] == b"its own"


def test_a_damaged_home_is_not_saved(home, tmp_path):
    db = sqlite3.connect(home / "fedquilt.db")
    db.execute("update facts set body = replace(body, 'round', 'ruond') where seq = 2")
    db.commit()
    db.close()
    with pytest.raises(JobError, match=r"the event log of .* is damaged"):
        saved(home, tmp_path / "backup.tar")
    assert not list(tmp_path.glob("backup*"))


def saves_and_restores(folder: Path) -> None:
    federation = Federation(folder / "run", "fedavg").create()
    federation.run(is_commit_of(1))
    home = federation.folder / "coordinator"
    assert main(["backup", "save", str(home), str(folder / "b.tar")]) == 0
    assert main(["backup", "restore", str(folder / "b.tar"), str(folder / "again")]) == 0
    assert main(["backup", "save", str(home), "/proc/b.tar"]) == 6


def test_an_ordinary_user_saves_and_restores(user):
    user.does(saves_and_restores, user.home)


def refusal(file: Path, home: Path) -> str | None:
    """Why a backup is not restored; None: it is."""
    try:
        backup.restore_backup(file, home)
    except StoreError as error:
        return str(error)
    return None


def test_every_flipped_bit_and_every_cut_is_named_and_leaves_no_home(home, tmp_path):
    whole = saved(home, tmp_path / "backup.tar").read_bytes()
    backup.restore_backup(tmp_path / "backup.tar", tmp_path / "sound")
    sound = contents(tmp_path / "sound")
    damaged = tmp_path / "damaged.tar"
    refused = 0
    cuts = [whole[:length] for length in range(0, len(whole) - 10_240, len(whole) // 40)]
    step = len(whole) // 150
    flips = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(0, len(whole), step)]
    for payload in cuts + flips:
        damaged.write_bytes(payload)
        if (said := refusal(damaged, tmp_path / "again")) is not None:
            refused += 1
            assert str(damaged) in said
            assert not (tmp_path / "again").exists()
        else:
            assert payload not in cuts
            assert contents(tmp_path / "again") == sound
            os.rename(tmp_path / "again", tmp_path / f"fine-{refused}-{len(list(tmp_path.iterdir()))}")
    assert refused > len(cuts + flips) * 0.7


def test_what_is_no_backup_is_refused(tmp_path, home):
    file = tmp_path / "some.tar"
    (tmp_path / "passwd").write_text("x")
    for name in ("passwd", "agents/../../passwd", "/etc/passwd"):
        with tarfile.open(file, "w") as archive:
            archive.add(tmp_path / "passwd", name)
        with pytest.raises(StoreError, match=r"not a backup of fedquilt|truncated"):
            backup.restore_backup(file, tmp_path / "again")
    text = b'{"format": 2}'
    with tarfile.open(file, "w") as archive:
        (tmp_path / "passwd").write_bytes(text)
        archive.add(tmp_path / "passwd", f"manifest-{hashlib.sha256(text).hexdigest()}.json")
    with pytest.raises(StoreError, match="this fedquilt reads"):
        backup.restore_backup(file, tmp_path / "again")
    for headers in ({"GNU.sparse.map": "0,x"}, {"comment": "a" * 30}):
        with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
            entry = tarfile.TarInfo("manifest")
            entry.pax_headers = headers
            archive.addfile(entry)
        content = file.read_bytes().replace(b"42 comment=" + b"a" * 30, b"9" * 30 + b" comment=aa")
        file.write_bytes(content)
        with pytest.raises(StoreError, match="is not a complete backup"):
            backup.restore_backup(file, tmp_path / "again")
    assert main(["backup", "restore", str(tmp_path / "none.tar"), str(tmp_path / "again")]) == 6
    assert main(["backup", "save", str(tmp_path / "nowhere"), str(tmp_path / "b.tar")]) == 6


def test_a_backup_that_lacks_a_file_of_its_manifest_is_refused(home, tmp_path):
    file = saved(home, tmp_path / "backup.tar")
    with tarfile.open(file) as whole, tarfile.open(tmp_path / "less.tar", "w") as less:
        blob, *_ = [member for member in whole if member.name.startswith("blobs/")]
        for member in whole:
            if member is not blob:
                less.addfile(member, whole.extractfile(member))
    with pytest.raises(StoreError, match=f"{blob.name} differs from the manifest"):
        backup.restore_backup(tmp_path / "less.tar", tmp_path / "again")
    assert not (tmp_path / "again").exists()

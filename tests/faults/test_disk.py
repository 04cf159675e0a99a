"""A disk that lies: what survives a power failure, a full disk, and a process that ends in the middle of a call."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fedquilt.blobs.store import BlobStore
from fedquilt.coordinator.settings import parse_job
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.host.disk import Disk
from tests.faults.disk import SimDisk, SimulatedCrash, SimulatedFileSystem, StoredFile

ROLLS = range(60)


@pytest.fixture
def platter(tmp_path: Path) -> SimulatedFileSystem:
    return SimulatedFileSystem("/home", tmp_path)


def names(platter: SimulatedFileSystem, folder: str = "/home") -> set[str]:
    return {entry.name for entry in SimDisk(platter).entries(folder)}


def test_it_does_what_the_real_one_does(platter: SimulatedFileSystem, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    told = [use(SimDisk(platter), "/home"), use(Disk(), str(tmp_path / "real"))]
    assert told[0] == told[1]


def use(disk: Disk, home: str) -> list[object]:
    found: list[object] = []

    def errors(*calls: tuple[object, ...]) -> None:
        for call, *given in calls:
            with contextlib.suppress(OSError):
                call(*given)  # type: ignore[operator]
                found.append("no error")
                continue
            found.append("error")

    disk.make_folder(f"{home}/a/b")
    disk.make_durable_folder(f"{home}/a/c")
    disk.write(f"{home}/a/one", b"0123456789")
    disk.write_at(f"{home}/a/one", b"xyz", 8)
    disk.resize(f"{home}/a/two", 5)
    disk.hard_link(f"{home}/a/one", f"{home}/a/three")
    disk.replace(f"{home}/a/three", f"{home}/a/b/three")
    disk.write_atomically(f"{home}/a/four", b"four")
    disk.copy(f"{home}/a/four", f"{home}/a/five")
    disk.sync(f"{home}/a/one")
    disk.repoint_link(f"{home}/a/current", "b")
    disk.repoint_link(f"{home}/a/previous", "none")
    found += [disk.read_link(f"{home}/a/current"), disk.read_link(f"{home}/a/one"), disk.read_link(f"{home}/a/nothing")]
    found += [disk.is_dir(f"{home}/a/current"), disk.is_file(f"{home}/a/previous"), disk.is_dir(f"{home}/a/previous")]
    found += [disk.read(f"{home}/a/current/three"), sorted(each.name for each in disk.entries(f"{home}/a"))]
    disk.repoint_link(f"{home}/a/current", "c")
    errors((disk.read, f"{home}/a/current/three"), (disk.symlink, "c", f"{home}/a/current"))
    disk.set_mode(f"{home}/a/one", 0o640)
    disk.unlink(f"{home}/a/current")
    disk.unlink(f"{home}/a/previous")
    found += [disk.read_link(f"{home}/a/current"), disk.is_dir(f"{home}/a/c")]
    buffer = bytearray(4)
    found += [disk.read_into(f"{home}/a/one", buffer, 9), bytes(buffer)]
    found += [disk.read(f"{home}/a/{name}") for name in ("one", "two", "b/three", "four", "five")]
    found += [
        disk.read(f"{home}/a/one", 3, 4),
        disk.hash_file(f"{home}/a/one"),
        disk.is_file(f"{home}/a"),
        disk.is_dir(f"{home}/a"),
    ]
    errors(
        (disk.read, f"{home}/a/none"),
        (disk.write, f"{home}/none/one", b""),
        (disk.hard_link, f"{home}/a/one", f"{home}/a/four"),
        (disk.replace, f"{home}/a/none", f"{home}/a/six"),
        (disk.replace, f"{home}/a/c", f"{home}/a/b"),
        (disk.sync, f"{home}/a/none"),
        (disk.unlink, f"{home}/a/none"),
        (disk.remove, f"{home}/a/none"),
        (lambda path: disk.write(path, b"", new=True), f"{home}/a/one"),
    )
    lock = disk.lock(f"{home}/a/lock")
    found += [lock is None, disk.lock(f"{home}/a/lock") is None, disk.is_locked(f"{home}/a/lock")]
    assert lock is not None
    lock.release()
    found += [disk.is_locked(f"{home}/a/lock"), disk.is_locked(f"{home}/a/none")]
    found.append(disk.lock(f"{home}/a/lock") is None)
    disk.remove(f"{home}/a/b")
    kept = [each for each in disk.entries(f"{home}/a") if each.name != "lock"]
    found.append(sorted((each.name, each.is_dir, each.is_dir or each.size) for each in kept))
    return found


def test_synced_bytes_survive_a_change_in_place_that_does_not_touch_them() -> None:
    seen = set()
    for seed in ROLLS:
        for cut in (False, True):
            computer = SimulatedFileSystem("/home", Path())
            disk = SimDisk(computer)
            disk.write("/home/a", b"a" * 128)
            disk.sync("/home/a")
            disk.sync("/home")
            if cut:
                disk.resize("/home/a", 0)
            disk.write_at("/home/a", b"a" * 128 + b"b" * 64, 0)
            computer.fail_power(random.Random(seed))
            seen.add((cut, disk.read("/home/a")[:128]))
    assert {left for cut, left in seen if not cut} == {b"a" * 128}
    assert (True, b"") in seen


def test_a_renamed_file_is_in_one_place(platter: SimulatedFileSystem) -> None:
    for seed in ROLLS:
        computer = SimulatedFileSystem("/home", Path())
        disk = SimDisk(computer)
        disk.make_folder("/home/x")
        disk.write("/home/x/a", b"1")
        for path in ("/home/x/a", "/home/x", "/home"):
            disk.sync(path)
        disk.make_durable_folder("/home/y")
        disk.replace("/home/x", "/home/y/x")
        if seed % 2:
            disk.sync("/home/y")
        computer.fail_power(random.Random(seed))
        there = [disk.is_file("/home/x/a"), disk.is_dir("/home/y") and disk.is_file("/home/y/x/a")]
        assert sum(there) == 1


def test_what_coordinator_and_agent_have_stored_survives_from_the_first_moment(tmp_path: Path) -> None:
    for seed in ROLLS:
        computer = SimulatedFileSystem("/home", tmp_path / str(seed))
        (tmp_path / str(seed)).mkdir()
        disk = SimDisk(computer)
        store = Store(Path("/home/coordinator"), disk=disk)
        id = store.add_job(parse_job({"method": "fedavg", "rounds": 1, "name": "a"}), Path("/bundle"))
        kept = store.blob_store.store_bytes(b"state")
        sent = AgentState(Path("/home/board"), disk=disk).blob_store.store_bytes(b"update")
        computer.fail_power(random.Random(seed))
        assert disk.is_dir("/home/board/outbox")
        assert BlobStore(Path("/home/board/blobs"), disk=disk).load(sent.sha256) == b"update"
        with Store(Path("/home/coordinator"), disk=disk) as again:
            assert again.blob_store.load(kept.sha256) == b"state"
            assert [row.id for row in again.readable_jobs()] == [id]


def test_a_full_disk_takes_a_part_and_says_so(platter: SimulatedFileSystem) -> None:
    def gate(what: str, where: object) -> OSError | None:
        return OSError(errno.ENOSPC, "No space left on device") if what == "write" else None

    disk = SimDisk(platter, gate)
    with pytest.raises(OSError, match="No space left"):
        disk.write("/home/a", b"1234")
    assert SimDisk(platter).read("/home/a") == b"12"


def test_a_bit_that_flips_is_flipped_for_good(platter: SimulatedFileSystem) -> None:
    disk = SimDisk(platter)
    for name in "ab":
        disk.write(f"/home/{name}", bytes(8))
        disk.sync(f"/home/{name}")
    disk.sync("/home")
    assert platter.flip_bit(0.75)
    platter.fail_power(random.Random(0))
    assert [sum(disk.read(f"/home/{name}")) for name in "ab"] == [0, 1]
    assert isinstance(platter.top.names["a"], StoredFile)
    assert not SimulatedFileSystem("/home", Path()).flip_bit(0.5)


def test_a_link_leads_to_the_old_or_the_new_whenever_the_power_fails(tmp_path: Path) -> None:
    seen = set()
    for roll in ROLLS:
        platter = SimulatedFileSystem("/home", tmp_path / str(roll))
        disk = SimDisk(platter)
        for name in ("old", "new"):
            disk.make_durable_folder(f"/home/{name}")
        disk.repoint_link("/home/current", "old")
        with contextlib.suppress(SimulatedCrash):
            gate = _crash_at(roll % 5)
            SimDisk(platter, gate).repoint_link("/home/current", "new")
        platter.fail_power(random.Random(roll))
        seen.add(SimDisk(platter).read_link("/home/current"))
    assert seen == {"old", "new"}


def _crash_at(call: int) -> Callable[[str, object], None]:
    left = iter(range(call))

    def gate(what: str, where: object) -> None:
        if next(left, None) is None:
            raise SimulatedCrash

    return gate

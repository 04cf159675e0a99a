"""Persistent state of a device: unacknowledged results, private state, and blobs. All survive kill -9.

    <home>/blobs/                     every blob, by content (`fedquilt.blobs.store`)
    <home>/task/out/                  output of the current task
    <home>/task/cache/<job>@<boot>/   files of a job's tasks for later ones; may vanish at any time between tasks
    <home>/task/tmp/, libraries/      temporary files of the task's process, and caches of CUDA and other libraries;
                                      `make_room` drops them and other jobs' caches as it drops blobs
    <home>/scratch/                   outbox entry in the making; removed at every start
    <home>/outbox/<job>@<round>/      update.json, and the private state the round leaves: <sha256>.private
    <home>/private/                   private states of jobs (`fedquilt.edge_agent.remembered`); never sent
    <home>/counted.json               job -> last round that was counted, and the private state it left
    <home>/releases/                  what is to be exchanged, and how far that is (`fedquilt.edge_agent.releases`)
    <home>/learned.json               speed and power of each engine and workload, as tasks have shown them

A confined task may write the folders in task/ and no others (`fedquilt.edge_agent.task.confine`). The agent follows no
link there, and copies a result from there before it compares the result with its hash: the task's process, or one that
it has started, may still have the file open.

A result becomes durable in one step: its blobs are stored by content, where nothing refers to them yet;
update.json and the private state are completed in scratch/, and the folder is renamed into outbox/.
Before that rename the task is worked for again, from the same private state and hence with the same
result; after it, the update is there to be delivered. The private state moves to its place when the
coordinator has counted the contribution, and is deleted when that is refused: a device never
builds on work that the federation did not take.

Everything has a checksum, and is compared with it when it is read. Private state that is damaged, or not of the round
that the coordinator has counted last, is never used: the task is told why, and begins anew or is declined, as its
method allows.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from fedquilt import wire
from fedquilt.blobs.shared_store import Lodger, Shared
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, JobError, Label, StoreError, Update, Wired, WireError
from fedquilt.disk import REAL, Disk, Lock, Place, doing
from fedquilt.edge_agent.power.learned import Learned
from fedquilt.edge_agent.remembered import Counted, Key, Private, Remembered
from fedquilt.edge_agent.task import confine
from fedquilt.edge_agent.task.outputs import PRIVATE

log = logging.getLogger("fedquilt.agent")

UPDATE: Final = "update.json"
LEARNED: Final = "learned.json"
KEPT: Final = ".private"  # ending of its name in the outbox
SPARE_BYTES: Final = 1 << 20  # disk space left for small files


class Lessons(Wired, frozen=True):
    """Content of learned.json: what earlier tasks of each workload have taught about speed and power."""

    workloads: dict[Label, Learned]


class Local:
    """Folder of one device.

    Args:
        durable: wait for the disk at each step, as `blobs.store.Depot`. If not, a result without private state is
            kept in memory: lost with the process, it is worked for again with the same outcome. Folders are then
            made on first use.
        shared: store of small blobs that other devices of this process have as well; not with `durable`.
        disk: where the folder is.

    Raises, from every method:
        StoreError: it cannot be read or written; says what, where and the mend.
    """

    def __init__(self, home: Path, *, durable: bool = True, shared: Shared | None = None, disk: Disk = REAL) -> None:
        self.home, self.durable, self._disk = home.absolute(), durable, disk
        self._outbox, self._private = self.home / "outbox", self.home / "private"
        self._scratch, self._probe = self.home / "scratch", f"{self.home}/probe"
        self.task = self.home / "task"  # private folders of the task's process
        self._out, self._caches = self.task / confine.OUT, self.task / confine.CACHE
        if durable:
            self._make_folders()
        self._cache: Path | None = None  # folder of the latest `cache_folder`
        self._light: set[Key] = set()  # results that are in memory only
        self._remembered = Remembered(self.home, disk, durable=durable)
        self._there = self.home if shared is None else shared.depot.folder  # a folder that exists
        blobs = self.home / "blobs"
        self.depot = Depot(blobs, durable=durable, disk=disk) if shared is None else Lodger(blobs, shared)

    def _make_folders(self) -> None:
        with doing(f"make the folder {self.home}"):
            for folder in (self._outbox, self._private):
                (self._disk.settle if self.durable else self._disk.make)(folder)

    def lock(self) -> Lock:
        """Claim the folder for this process, until the returned lock is closed.

        Raises:
            JobError: another agent has it.
        """
        with doing(f"lock {self.home}"):
            lock = self._disk.lock(self.home / "lock")
        if lock is None:
            raise JobError(f"another agent runs in {self.home}: stop it, or give this one a home of its own")
        return lock

    # -- starting --

    def load_outbox(self) -> tuple[dict[Key, tuple[Update, bool]], dict[str, Counted]]:
        """Return updates to deliver, and whether each has private state, and the last counted round of each job."""
        if self.durable:
            self.depot.open_as_owner()
        if not self._disk.is_dir(self._outbox):
            return {}, {}
        updates: dict[Key, tuple[Update, bool]] = {}
        with doing(f"read {self.home}"):
            counted = self._remembered.recover()
            self._remove_quietly(self._scratch)
            self._remove_quietly(self._out)
            for entry in sorted(self._disk.entries(self._outbox)):
                folder = f"{self._outbox}/{entry.name}"
                update = self._stored(folder)
                last = counted.get(update.job) if update is not None else None
                if update is None or (last and update.round <= last.round and update.epoch <= last.epoch):
                    self._remove(folder)
                else:
                    key = (update.job, update.round)
                    updates[key] = (update, self._left_in(folder) is not None or self._remembered.moved(key))
        return updates, counted

    def _stored(self, folder: str) -> Update | None:
        """Update in an outbox folder; None: it was being removed, or its bytes have decayed."""
        try:
            update = wire.decode(self._disk.read(f"{folder}/{UPDATE}"), Update)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WireError as error:
            log.warning("%s/%s is damaged (%s); its task will be worked for again", folder, UPDATE, error)
            return None
        lost = [name for name, ref in update.bundles.items() if not self.depot.has(ref)]
        if lost:
            log.warning("%s: bundle %s is gone; its task will be worked for again", folder, ", ".join(lost))
        return None if lost else update

    def _left_in(self, folder: str) -> str | None:
        """Hash (sha256) of the private state in an outbox folder, by its name; None: there is none."""
        entries = self._disk.entries(folder) if self._disk.is_dir(folder) else []
        names = [entry.name for entry in entries if entry.name.endswith(KEPT)]
        return names[0].removesuffix(KEPT) if names else None

    # -- one task --

    def empty_output(self) -> Path:
        """Empty the folder for the next task's output and return it. If not durable, it may not exist yet."""
        if not self.durable:
            self._remove_quietly(self._out)
            return self._out
        with doing(f"empty {self._out}"):  # a process that waits for the next task may write this very folder
            self._disk.clear(self._out)
        return self._out

    def cache_folder(self, job: str) -> Path:
        """Return the folder of files that a job's tasks leave for later ones, after deleting other jobs'.

        It belongs to this boot of the machine: files there are whole unless the power has failed, and are not
        worth a sync.
        """
        folder = self._caches / f"{job}@{_boot()}"
        if self._cache == folder and (not self.durable or self._disk.is_dir(folder)):
            return folder
        if not self.durable and not self._disk.is_dir(self._caches):
            self._cache = folder
            return folder
        with doing(f"make {folder}"):
            self._disk.make(self._caches)
            for entry in self._disk.entries(self._caches):
                if entry.name != folder.name:
                    self._remove_quietly(self._caches / entry.name)
            if self._disk.target(folder) is not None:  # a link that an earlier job's task has put there
                self._disk.unlink(folder)
            self._disk.make(folder)
        self._cache = folder
        return folder

    def private(self, job: str, counted: int | None) -> Private:
        """The private state of a job to work from, as `Remembered.private`."""
        with doing(f"read {self._private}"):
            return self._remembered.private(job, counted)

    def latest(self, job: str) -> Private:
        """Private state of a job after the last round that was counted, as `Remembered.latest`."""
        with doing(f"read {self._private}"):
            return self._remembered.latest(job)

    def commit_update(self, update: Update, blobs: Mapping[str, bytes] = {}, private: BlobRef | None = None) -> bool:
        """Make the task's output durable as this update. Return whether it has private state.

        The output folder holds each bundle in a file named by its sha256, and the private state if there is one.

        Args:
            update: manifest of the output.
            blobs: bundles that the task did not write there, by sha256.
            private: the private state that it wrote there.
        """
        scratch = self._scratch
        for ref in set(update.bundles.values()):
            if ref.sha256 in blobs:
                self.depot.stow(blobs[ref.sha256], ref)
            elif self.durable:
                self.depot.put_untrusted(f"{self._out}/{ref.sha256}", ref)
            else:  # on virtual time no process of its own carries out the task
                self.depot.put_file(f"{self._out}/{ref.sha256}", ref, move=True)
        if not self.durable and private is None:
            self._light.add((update.job, update.round))
            return False
        if not self.durable:
            self._make_folders()
        target = self._folder((update.job, update.round))
        with doing(f"keep the result of {update.job}, round {update.round}, in {self._outbox}"):
            self._disk.clear(scratch)
            if private is not None:
                kept = f"{scratch}/{private.sha256}{KEPT}"
                if self._disk.copy_untrusted(f"{self._out}/{PRIVATE}", kept, private.size) != private.sha256:
                    raise StoreError(f"the private state in {self._out} is not what the task's process says it wrote")
            self._disk.write(f"{scratch}/{UPDATE}", wire.encode(update))
            if self.durable:
                for entry in self._disk.entries(scratch):
                    self._disk.sync(f"{scratch}/{entry.name}")
            self._sync(scratch)
            self._remove(target)
            self._disk.replace(scratch, target)
            self._sync(self._outbox)
        self._remove_quietly(self._out)
        return private is not None

    def settle(self, key: Key, accepted: bool, counted: Mapping[str, Counted]) -> None:
        """Apply the coordinator's answer to an update: keep its private state if it counted, delete it if not.

        `counted` is remembered from now on; private states of other jobs are deleted.
        """
        if key in self._light:
            self._light.remove(key)
            return self._remembered.note(key) if accepted else None
        with doing(f"settle {key[0]}, round {key[1]}, in {self.home}"):
            folder = self._folder(key)
            if accepted:
                made = self._left_in(folder)
                moves = None if made is None else (f"{folder}/{made}{KEPT}", made)
                waiting = {entry.name.rpartition("@")[0] for entry in self._disk.entries(self._outbox)}
                self._remembered.count(key, moves, counted, waiting)
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        """Remove an outbox entry; without its update.json it is no entry, so that file goes first."""
        if self._disk.is_dir(folder):
            self._disk.unlink(f"{folder}/{UPDATE}")
            self._sync(folder)
            self._disk.remove(folder)
        else:
            self._disk.unlink(folder)

    def _remove_quietly(self, place: Path) -> None:
        """Remove a file or folder as far as possible. The output folder itself stays."""
        with suppress(OSError):
            if place == self._out and self._disk.is_dir(place):
                self._disk.clear(place)
            else:
                self._disk.remove(place)

    def _folder(self, key: Key) -> str:
        return f"{self._outbox}/{key[0]}@{key[1]}"

    # -- what the board has learned --

    def learned(self) -> dict[str, Learned]:
        """What an earlier process has learned, by workload; what is damaged or of another version is learned anew."""
        return learned(self.home, self._disk) if self.durable else {}

    def remember(self, learned: Mapping[str, Learned]) -> None:
        """Keep what the board has learned. Without a sync: after a power failure it may be what it was before."""
        if self.durable:
            with doing(f"write {self.home / LEARNED}"):
                lessons = Lessons(workloads={workload[:200]: known for workload, known in learned.items()})
                self._disk.put(self.home / LEARNED, wire.encode(lessons), durable=False)

    # -- small files of others --

    def note(self, name: str, payload: bytes) -> None:
        """Write a small file, `name` below the home; it is on the disk when this returns, if the home is durable."""
        file = self.home / name
        with doing(f"write {file}"):
            (self._disk.settle if self.durable else self._disk.make)(file.parent)
            self._disk.put(file, payload, durable=self.durable)

    def noted(self, name: str) -> bytes | None:
        """What `note` has written; None: nothing yet."""
        file = self.home / name
        with doing(f"read {file}"):
            return self._disk.read(file) if self._disk.is_file(file) else None

    # -- room --

    def require_room(self, size: int) -> None:
        """Raise StoreError unless `size` more bytes can be written."""
        with doing(f"write to {self.home}"):
            free = self.free_bytes()
            if free < size + SPARE_BYTES:
                wanted = (size + SPARE_BYTES) / 1e6
                raise OSError(errno.ENOSPC, f"{free / 1e6:.1f} MB are free, {wanted:.1f} MB are wanted, some to spare")
            if self.durable:
                self._disk.put(self._probe, b"\0")
                self._disk.unlink(self._probe)

    def make_room(self, size: int, limit_bytes: int, needed: Collection[str], *, idle: bool = False) -> None:
        """Drop blobs and caches, longest unused first, until `size` more bytes fit the limit and the disk.

        Args:
            size: Bytes that are to come.
            limit_bytes: Most bytes of blobs and caches.
            needed: Blobs that are not dropped. `require_room` reports where the rest is not enough.
            idle: Whether no process of a task or a check runs, whose caches may be dropped only then.
        """
        caches = self._measure_caches(remove=idle)
        both: list[tuple[int, str | Path, int]] = [*self.depot.unused(), *caches]
        unused = sorted(both, key=lambda each: each[0])
        with doing(f"look at {self.home}"):
            free = self.free_bytes()
        over = max(sum(kept for _, _, kept in unused) + size - limit_bytes, size + SPARE_BYTES - free)
        for _, place, kept in unused:
            if over <= 0:
                break
            if isinstance(place, Path):
                if not idle:
                    continue
                self._remove_quietly(place)
            elif len(place) == 64 and place not in needed:
                self.depot.drop(place)
            else:
                continue
            over -= kept

    def _measure_caches(self, *, remove: bool) -> list[tuple[int, Path, int]]:
        """Return (time of last change in ns, place, size) of the files and folders that tasks and checks have left.

        Args:
            remove: Remove what cannot be measured, such as folders nested too deep. Otherwise its size is unknown.
        """
        found = []
        for private in (self.task, self.home / confine.CHECK):
            for folder in (private / name for name in (confine.CACHE, confine.TEMPORARY, confine.LIBRARIES)):
                with doing(f"look at {folder}"):
                    names = [each.name for each in self._disk.entries(folder)] if self._disk.is_dir(folder) else []
                for name in names:
                    try:
                        latest_ns, size = self._disk.usage(folder / name)
                    except OSError:
                        if remove:
                            self._remove_quietly(folder / name)
                        continue
                    found.append((latest_ns, folder / name, size))
        return found

    def free_bytes(self) -> int:
        """Return the bytes that can still be written to the home's disk."""
        with doing(f"look at {self.home}"):
            return self._disk.free_bytes(self._there)

    def used(self, refs: Collection[BlobRef]) -> None:
        """Note that blobs are in use now."""
        for ref in refs:
            self.depot.touch(ref.sha256)

    def _sync(self, path: Place) -> None:
        """Wait until a file or a folder's entries are on the disk, if the home is durable."""
        if self.durable:
            self._disk.sync(path)


def learned(home: Path, disk: Disk = REAL) -> dict[str, Learned]:
    """What the agent of a home has learned, by workload; what is damaged or of another version is left out.

    Raises:
        StoreError: it cannot be read.
    """
    file = home / LEARNED
    with doing(f"read {file}"):
        if disk.stat(file) is None:
            return {}
        payload = disk.read(file)
    try:
        found = wire.decode(payload, Lessons).workloads
    except WireError as error:
        log.warning("%s is damaged (%s); speed and power of tasks are learned anew", file, error)
        return {}
    return {workload: known for workload, known in found.items() if known.sound}


@cache
def _boot() -> str:
    """Id of this boot of the machine; "unknown" if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"

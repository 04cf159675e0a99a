"""Persistent state of a device: unacknowledged updates, records of jobs, private states and blobs.

    <home>/blobs/                     all blobs, by content (`fedquilt.blobs.store`)
    <home>/task/out/                  output of the current task
    <home>/task/cache/<job>@<boot>/   files that tasks of a job leave for later tasks
    <home>/task/tmp/, libraries/      temporary files of the task's process, and caches of CUDA and other libraries
    <home>/scratch/                   incomplete outbox entry, removed at every start
    <home>/outbox/<job>@<round>/      update.json, and the private state that the round leaves: <sha256>.private
    <home>/private/                   private states of jobs, never sent
    <home>/counted.json               last counted round and private state of each job
    <home>/releases/                  releases and their progress (`fedquilt.edge_agent.releases`)
    <home>/learned.json               measured speed and power of each engine and workload

`make_room` deletes unused blobs and caches. A sandboxed task can write only the folders in task/. The agent follows no
link there. The agent copies a result out of that folder before it checks the hash, because a process of the task may
still have the file open.

A result becomes durable in one step. The blobs are stored by content, where nothing refers to them yet. update.json and
the private state are completed in scratch/, and the folder is then renamed into outbox/. After a crash before this
rename the task runs again from the same private state, with the same result. After the rename, the update is
submitted. Its private state is moved to private/ when the coordinator counts the update, and deleted when the update is
rejected.

Every file has a checksum, which is verified on each read. Damaged private state, or private state of a round other than
the last counted one, is never used: the task is told the reason, and starts without state or is declined.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.blobs.shared_store import SharedBlobStore, SharedBlobView
from fedquilt.blobs.store import BlobStore
from fedquilt.core import (
    BlobRef,
    Count,
    JobError,
    Name,
    OptionalDigest,
    ShortText,
    StoreError,
    Update,
    WireError,
    WireMessage,
)
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.state_machine import CountedRound, Key
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.protocol import PRIVATE
from fedquilt.host.disk import REAL, Disk, Lock, Place, disk_errors

log = logging.getLogger("fedquilt.agent")

UPDATE: Final = "update.json"
LEARNED: Final = "learned.json"
KEPT: Final = ".private"  # ending of its name in the outbox
SPARE_BYTES: Final = 1 << 20  # disk space left for small files


class LearnedCosts(WireMessage, frozen=True):
    workloads: dict[ShortText, LearnedModel]


class AgentState:
    """Home folder of one device.

    Args:
        durable: Whether to sync each step to the disk. If not, results without private state stay in memory. They are
            lost with the process, and their tasks run again with the same result. Folders are then created on first
            use.
        shared: Store of small blobs shared with other devices of this process, not with `durable`.
        disk: Disk of the folder.

    Raises, from every method:
        StoreError: If the folder cannot be read or written.
    """

    def __init__(
        self, home: Path, *, durable: bool = True, shared: SharedBlobStore | None = None, disk: Disk = REAL
    ) -> None:
        self.home, self.durable, self._disk = home.absolute(), durable, disk
        self._outbox, self._private = self.home / "outbox", self.home / "private"
        self._scratch, self._probe = self.home / "scratch", f"{self.home}/probe"
        self.task = self.home / "task"  # private folders of the task's process
        self._out, self._caches = self.task / sandbox.OUT, self.task / sandbox.CACHE
        if durable:
            self._make_folders()
        self._cache: Path | None = None  # folder of the latest `cache_folder`
        self._light: set[Key] = set()  # results that are in memory only
        self._remembered = JobRecords(self.home, disk, durable=durable)
        self._there = self.home if shared is None else shared.blob_store.folder  # a folder that exists
        blobs = self.home / "blobs"
        self.depot = BlobStore(blobs, durable=durable, disk=disk) if shared is None else SharedBlobView(blobs, shared)

    def _make_folders(self) -> None:
        with disk_errors(f"make the folder {self.home}"):
            for folder in (self._outbox, self._private):
                (self._disk.make_durable_folder if self.durable else self._disk.make_folder)(folder)

    def lock_home(self) -> Lock:
        with disk_errors(f"lock {self.home}"):
            lock = self._disk.lock(self.home / "lock")
        if lock is None:
            raise JobError(f"another agent runs in {self.home}: stop it, or give this one a home of its own")
        return lock

    # -- starting --

    def load_outbox(self) -> tuple[dict[Key, tuple[Update, bool]], dict[str, CountedRound]]:
        """Load the updates to submit and the last counted round of each job.

        Damaged and counted entries are deleted, and so is the output of an interrupted task.

        Returns:
            Updates by job and round, each with whether it has private state, and counted rounds by job.
        """
        if self.durable:
            self.depot.open_as_owner()
        if not self._disk.is_dir(self._outbox):
            return {}, {}
        updates: dict[Key, tuple[Update, bool]] = {}
        with disk_errors(f"read {self.home}"):
            counted = self._remembered.load_counted()
            self._remove_quietly(self._scratch)
            self._remove_quietly(self._out)
            for entry in sorted(self._disk.entries(self._outbox)):
                folder = f"{self._outbox}/{entry.name}"
                update = self._load_update(folder)
                last = counted.get(update.job) if update is not None else None
                if update is None or (last and update.round <= last.round and update.epoch <= last.epoch):
                    self._remove_outbox_entry(folder)
                else:
                    key = (update.job, update.round)
                    updates[key] = (
                        update,
                        self._find_private_state_hash(folder) is not None or self._remembered.has_private_state(key),
                    )
        return updates, counted

    def _load_update(self, folder: str) -> Update | None:
        try:
            update = wire.decode(self._disk.read(f"{folder}/{UPDATE}"), Update)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WireError as error:
            log.warning("%s/%s is damaged (%s); its task will be worked for again", folder, UPDATE, error)
            return None
        lost = [name for name, ref in update.bundles.items() if not self.depot.has_blob(ref)]
        if lost:
            log.warning("%s: bundle %s is gone; its task will be worked for again", folder, ", ".join(lost))
        return None if lost else update

    def _find_private_state_hash(self, folder: str) -> str | None:
        entries = self._disk.entries(folder) if self._disk.is_dir(folder) else []
        names = [entry.name for entry in entries if entry.name.endswith(KEPT)]
        return names[0].removesuffix(KEPT) if names else None

    # -- one task --

    def empty_output(self) -> Path:
        """Empty the output folder for the next task and return the folder, which may not exist yet."""
        if not self.durable:
            self._remove_quietly(self._out)
            return self._out
        with disk_errors(f"empty {self._out}"):  # a process that waits for the next task may write this very folder
            self._disk.clear_folder(self._out)
        return self._out

    def cache_folder(self, job: str) -> Path:
        """Return the cache folder of a job, after deleting those of other jobs.

        The folder is valid for this boot of the machine only, so that its files need no sync.
        """
        folder = self._caches / f"{job}@{_boot_id()}"
        if self._cache == folder and (not self.durable or self._disk.is_dir(folder)):
            return folder
        if not self.durable and not self._disk.is_dir(self._caches):
            self._cache = folder
            return folder
        with disk_errors(f"make {folder}"):
            self._disk.make_folder(self._caches)
            for entry in self._disk.entries(self._caches):
                if entry.name != folder.name:
                    self._remove_quietly(self._caches / entry.name)
            if self._disk.read_link(folder) is not None:  # a link that an earlier job's task has put there
                self._disk.unlink(folder)
            self._disk.make_folder(folder)
        self._cache = folder
        return folder

    def find_private_state(self, job: str, counted: int | None) -> PrivateState:
        with disk_errors(f"read {self._private}"):
            return self._remembered.find_private_state(job, counted)

    def latest_private_state(self, job: str) -> PrivateState:
        with disk_errors(f"read {self._private}"):
            return self._remembered.latest_private_state(job)

    def commit_update(self, update: Update, blobs: Mapping[str, bytes] = {}, private: BlobRef | None = None) -> bool:
        """Make the task's output durable as this update. Return whether the update has private state.

        The output folder holds each bundle in a file named by its sha256, and the private state if there is one.
        """
        scratch = self._scratch
        for ref in set(update.bundles.values()):
            if ref.sha256 in blobs:
                self.depot.store_small(blobs[ref.sha256], ref)
            elif self.durable:
                self.depot.store_untrusted_file(f"{self._out}/{ref.sha256}", ref)
            else:  # on virtual time no process of its own carries out the task
                self.depot.store_file(f"{self._out}/{ref.sha256}", ref, move=True)
        if not self.durable and private is None:
            self._light.add((update.job, update.round))
            return False
        if not self.durable:
            self._make_folders()
        target = self._entry_folder((update.job, update.round))
        with disk_errors(f"keep the result of {update.job}, round {update.round + 1}, in {self._outbox}"):
            self._disk.clear_folder(scratch)
            if private is not None:
                kept = f"{scratch}/{private.sha256}{KEPT}"
                if self._disk.copy_untrusted(f"{self._out}/{PRIVATE}", kept, private.size) != private.sha256:
                    raise StoreError(f"the private state in {self._out} is not what the task's process says it wrote")
            self._disk.write(f"{scratch}/{UPDATE}", wire.encode(update))
            if self.durable:
                for entry in self._disk.entries(scratch):
                    self._disk.sync(f"{scratch}/{entry.name}")
            self._sync(scratch)
            self._remove_outbox_entry(target)
            self._disk.replace(scratch, target)
            self._sync(self._outbox)
        self._remove_quietly(self._out)
        return private is not None

    def record_ack(self, key: Key, accepted: bool, counted: Mapping[str, CountedRound]) -> None:
        """Record the answer to an update, and keep its private state if accepted, else delete the state."""
        if key in self._light:
            self._light.remove(key)
            return self._remembered.record_counted_in_memory(key) if accepted else None
        with disk_errors(f"settle {key[0]}, round {key[1] + 1}, in {self.home}"):
            folder = self._entry_folder(key)
            if accepted:
                made = self._find_private_state_hash(folder)
                moves = None if made is None else (f"{folder}/{made}{KEPT}", made)
                waiting = {entry.name.rpartition("@")[0] for entry in self._disk.entries(self._outbox)}
                self._remembered.record_counted(key, moves, counted, waiting)
            self._remove_outbox_entry(folder)

    def _remove_outbox_entry(self, folder: str) -> None:
        # update.json goes first, because a folder without that file is no entry.
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
                self._disk.clear_folder(place)
            else:
                self._disk.remove(place)

    def _entry_folder(self, key: Key) -> str:
        return f"{self._outbox}/{key[0]}@{key[1]}"

    # -- what the board has learned --

    def load_learned_costs(self) -> dict[str, LearnedModel]:
        return read_learned_costs(self.home, self._disk) if self.durable else {}

    def store_learned_costs(self, learned: Mapping[str, LearnedModel]) -> None:
        """Store the learned costs without a sync. A power failure may restore an older version."""
        if self.durable:
            with disk_errors(f"write {self.home / LEARNED}"):
                lessons = LearnedCosts(workloads={workload[:200]: known for workload, known in learned.items()})
                self._disk.write_atomically(self.home / LEARNED, wire.encode(lessons), durable=False)

    # -- small files of others --

    def write_file(self, name: str, payload: bytes) -> None:
        file = self.home / name
        with disk_errors(f"write {file}"):
            (self._disk.make_durable_folder if self.durable else self._disk.make_folder)(file.parent)
            self._disk.write_atomically(file, payload, durable=self.durable)

    def read_file(self, name: str) -> bytes | None:
        file = self.home / name
        with disk_errors(f"read {file}"):
            return self._disk.read(file) if self._disk.is_file(file) else None

    # -- room --

    def require_room(self, size: int) -> None:
        with disk_errors(f"write to {self.home}"):
            free = self.free_bytes()
            if free < size + SPARE_BYTES:
                wanted = (size + SPARE_BYTES) / 1e6
                raise OSError(errno.ENOSPC, f"{free / 1e6:.1f} MB are free, {wanted:.1f} MB are wanted, some to spare")
            if self.durable:
                self._disk.write_atomically(self._probe, b"\0")
                self._disk.unlink(self._probe)

    def make_room(self, size_bytes: int, limit_bytes: int, needed: Collection[str], *, idle: bool = False) -> None:
        """Delete unused blobs and caches until `size_bytes` more bytes fit the limit and the disk.

        The longest unused are deleted first.

        Args:
            size_bytes: Bytes about to be written.
            limit_bytes: Most bytes of blobs and caches.
            needed: Blobs to keep. `require_room` reports if the rest is not enough.
            idle: Whether no process of a task or check runs. Caches may be deleted only then.
        """
        caches = self._list_cache_entries(remove=idle)
        both: list[tuple[int, str | Path, int]] = [*self.depot.files_by_last_use(), *caches]
        unused = sorted(both, key=lambda each: each[0])
        with disk_errors(f"look at {self.home}"):
            free = self.free_bytes()
        over = max(sum(kept for _, _, kept in unused) + size_bytes - limit_bytes, size_bytes + SPARE_BYTES - free)
        for _, place, kept in unused:
            if over <= 0:
                break
            if isinstance(place, Path):
                if not idle:
                    continue
                self._remove_quietly(place)
            elif len(place) == 64 and place not in needed:
                self.depot.remove_blob(place)
            else:
                continue
            over -= kept

    def _list_cache_entries(self, *, remove: bool) -> list[tuple[int, Path, int]]:
        """Return last use, path and size of each cache entry. With `remove`, delete unreadable entries."""
        found = []
        for private in (self.task, self.home / sandbox.CHECK):
            for folder in (private / name for name in (sandbox.CACHE, sandbox.TEMPORARY, sandbox.LIBRARIES)):
                with disk_errors(f"look at {folder}"):
                    names = [each.name for each in self._disk.entries(folder)] if self._disk.is_dir(folder) else []
                for name in names:
                    try:
                        latest_ns, size = self._disk.measure_usage(folder / name)
                    except OSError:
                        if remove:
                            self._remove_quietly(folder / name)
                        continue
                    found.append((latest_ns, folder / name, size))
        return found

    def free_bytes(self) -> int:
        with disk_errors(f"look at {self.home}"):
            return self._disk.free_bytes(self._there)

    def touch_blobs(self, refs: Collection[BlobRef]) -> None:
        for ref in refs:
            self.depot.record_use(ref.sha256)

    def _sync(self, path: Place) -> None:
        if self.durable:
            self._disk.sync(path)


def read_learned_costs(home: Path, disk: Disk = REAL) -> dict[str, LearnedModel]:
    """Return the learned costs in an agent's home, by workload. Damaged entries are left out."""
    file = home / LEARNED
    with disk_errors(f"read {file}"):
        if disk.stat(file) is None:
            return {}
        payload = disk.read(file)
    try:
        found = wire.decode(payload, LearnedCosts).workloads
    except WireError as error:
        log.warning("%s is damaged (%s); speed and power of tasks are learned anew", file, error)
        return {}
    return {workload: known for workload, known in found.items() if known.is_valid}


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


STATES_MOST: Final = 2  # private states of a job
_PRIVATE: Final = re.compile(r"([a-z0-9][a-z0-9._-]*)@(\d{1,16})\.([0-9a-f]{64})")


class PrivateState(NamedTuple):
    path: str | None = None
    sha256: str = ""
    lost: str = ""  # there was one, and it cannot be used
    forgotten: str = ""  # there may have been one: nothing is known here of a round that was counted


class JobRecord(WireMessage, frozen=True):
    round: Count  # the last one that was counted
    epoch: Count  # start of the coordinator that said so
    private: OptionalDigest = ""  # private state after that round; "": it has none
    left: Count = 0  # the round that has left it


class JobRecordFile(WireMessage, frozen=True):
    jobs: dict[Name, JobRecord]


class StoredPrivateState(NamedTuple):
    job: str
    round: int  # that left it
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.job}@{self.round}.{self.sha256}"


class JobRecords:
    """Counted rounds and private states of a device's jobs.

    Raises, from every method:
        OSError: If the home cannot be read or written.
    """

    def __init__(self, home: Path, disk: Disk, *, durable: bool) -> None:
        self._file, self._folder, self._disk, self._durable = home / "counted.json", home / "private", disk, durable
        self._jobs: dict[str, JobRecord] = {}

    def load_counted(self) -> dict[str, CountedRound]:
        self._jobs = self._read_records()
        return {job: CountedRound(entry.round, entry.epoch) for job, entry in self._jobs.items()}

    def find_private_state(self, job: str, counted: int | None) -> PrivateState:
        """Return the private state from which a task of a job starts.

        Returns:
            The state. If a state existed and is unusable, `lost` holds the reason. If nothing is known about a counted
            round, `forgotten` does.
        """
        entry = self._jobs.get(job)
        if entry is None:
            if counted is None or not self._durable:  # on virtual time, not all is written down
                return PrivateState()
            return PrivateState(
                forgotten=f"this device knows nothing of round {counted + 1} of {job}, which has been counted"
            )
        if not entry.private:
            return PrivateState()
        kept = {each.round: each for each in self._stored_states() if each.job == job}
        rounds = [round for round in kept if counted is not None and round <= counted <= entry.round]
        wanted = entry.left if counted == entry.round else max(rounds, default=-1)
        if wanted in kept:
            return PrivateState(str(self._folder / kept[wanted].file_name), kept[wanted].sha256)
        after = "before its first round" if counted is None else f"after round {counted + 1}"
        return PrivateState(lost=f"the private state of {job} {after} is not here, only that of round {entry.left + 1}")

    def latest_private_state(self, job: str) -> PrivateState:
        entry = self._jobs.get(job)
        return PrivateState() if entry is None else self.find_private_state(job, entry.round)

    def record_counted(
        self, key: Key, made: tuple[str, str] | None, counted: Mapping[str, CountedRound], waiting: Collection[str]
    ) -> None:
        """Record that a round was counted, and store the private state of that round.

        The state is moved before the record is written. After a crash in between, the coordinator's answer arrives
        again.
        """
        job, round = key
        entry = self._jobs.get(job, JobRecord(round=0, epoch=0))
        sha256, left = entry.private, entry.left
        if made is not None:
            for each in self._stored_states():
                if (each.job, each.round) == key:  # of a coordinator that has been replaced by an older copy of itself
                    self._disk.unlink(f"{self._folder}/{each.file_name}")
            self._disk.replace(made[0], f"{self._folder}/{StoredPrivateState(job, round, made[1]).file_name}")
            self._sync_folder()
        for each in self._stored_states():
            if (each.job, each.round) == key:
                sha256, left = each.sha256, round
        others = {name: JobRecord(round=last.round, epoch=last.epoch) for name, last in counted.items()}
        this = JobRecord(round=counted[job].round, epoch=counted[job].epoch, private=sha256, left=left)
        jobs = {name: this if name == job else self._jobs.get(name, other) for name, other in others.items()}
        half = {name: entry for name, entry in self._jobs.items() if name in waiting and name not in jobs}
        self._jobs = {**half, **jobs}
        self._disk.write_atomically(self._file, wire.encode(JobRecordFile(jobs=self._jobs)), durable=self._durable)
        self._delete_unused_states(job, left, waiting)

    def has_private_state(self, key: Key) -> bool:
        """Return whether the private state left by a round is stored, even if the round is not counted."""
        return any((each.job, each.round) == key for each in self._stored_states())

    def record_counted_in_memory(self, key: Key) -> None:
        """Record a counted round without private state, in this process only."""
        if (entry := self._jobs.get(key[0])) is not None:
            self._jobs[key[0]] = msgspec.structs.replace(entry, round=key[1])

    # -- within --

    def _read_records(self) -> dict[str, JobRecord]:
        try:
            payload = self._disk.read(self._file)
        except FileNotFoundError:
            return {}
        try:
            return wire.decode(payload, JobRecordFile).jobs
        except WireError as error:
            log.warning("%s is damaged (%s); at worst a round is worked for in vain", self._file, error)
            return self._records_from_file_names()

    def _records_from_file_names(self) -> dict[str, JobRecord]:
        last = {each.job: each for each in sorted(self._stored_states())}
        return {job: JobRecord(round=k.round, epoch=0, private=k.sha256, left=k.round) for job, k in last.items()}

    def _stored_states(self) -> list[StoredPrivateState]:
        if not self._disk.is_dir(self._folder):
            return []
        named = [_PRIVATE.fullmatch(entry.name) for entry in self._disk.entries(self._folder)]
        return [StoredPrivateState(each[1], int(each[2]), each[3]) for each in named if each is not None]

    def _delete_unused_states(self, job: str, last_round: int, jobs_in_outbox: Collection[str]) -> None:
        """Delete the private states of unknown jobs, and those of `job` that no task can start from."""
        kept = self._stored_states()
        rounds = sorted(each.round for each in kept if each.job == job and each.round <= last_round)[-STATES_MOST:]
        for each in kept:
            if each.job not in {*self._jobs, *jobs_in_outbox} or (each.job == job and each.round not in rounds):
                self._disk.unlink(f"{self._folder}/{each.file_name}")

    def _sync_folder(self) -> None:
        if self._durable:
            self._disk.sync(self._folder)

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
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE
from fedquilt.host.disk import REAL, Disk, Lock, StrPath, disk_errors

log = logging.getLogger("fedquilt.agent")

UPDATE_FILE: Final = "update.json"
LEARNED_FILE: Final = "learned.json"
PRIVATE_SUFFIX: Final = ".private"  # suffix of private state in the outbox
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
        self._outbox_folder, self._private_folder = self.home / "outbox", self.home / "private"
        self._scratch, self._probe = self.home / "scratch", f"{self.home}/probe"
        self.task_folder = self.home / "task"  # private folders of the task's process
        self._output_folder, self._cache_root = self.task_folder / sandbox.OUT, self.task_folder / sandbox.CACHE
        if durable:
            self._make_folders()
        self._current_cache: Path | None = None  # folder of the latest `cache_folder`
        self._in_memory_updates: set[Key] = set()  # not written to the disk
        self._job_records = JobRecords(self.home, disk, durable=durable)
        self._existing_folder = self.home if shared is None else shared.blob_store.folder  # a folder that exists
        blobs = self.home / "blobs"
        self.blob_store = (
            BlobStore(blobs, durable=durable, disk=disk) if shared is None else SharedBlobView(blobs, shared)
        )

    def _make_folders(self) -> None:
        with disk_errors(f"make the folder {self.home}"):
            for folder in (self._outbox_folder, self._private_folder):
                (self._disk.make_durable_folder if self.durable else self._disk.make_folder)(folder)

    def lock_home(self) -> Lock:
        with disk_errors(f"lock {self.home}"):
            lock = self._disk.lock(self.home / "lock")
        if lock is None:
            raise JobError(f"home {self.home} is in use by another agent: stop that agent, or set another `home`")
        return lock

    # -- starting --

    def load_outbox(self) -> tuple[dict[Key, tuple[Update, bool]], dict[str, CountedRound]]:
        """Load the updates to submit and the last counted round of each job.

        Entries that are damaged or already counted are deleted, and so is the output of an interrupted task.

        Returns:
            (update, whether it has private state) by job and round, and the last counted round by job.
        """
        if self.durable:
            self.blob_store.open_as_owner()
        if not self._disk.is_dir(self._outbox_folder):
            return {}, {}
        updates: dict[Key, tuple[Update, bool]] = {}
        with disk_errors(f"read {self.home}"):
            counted_rounds = self._job_records.load_counted()
            self._remove_quietly(self._scratch)
            self._remove_quietly(self._output_folder)
            for entry in sorted(self._disk.entries(self._outbox_folder)):
                folder = f"{self._outbox_folder}/{entry.name}"
                update = self._load_update(folder)
                counted_round = counted_rounds.get(update.job) if update is not None else None
                if update is None or (
                    counted_round and update.round <= counted_round.round and update.epoch <= counted_round.epoch
                ):
                    self._remove_outbox_entry(folder)
                else:
                    key = (update.job, update.round)
                    updates[key] = (
                        update,
                        self._find_private_state_hash(folder) is not None or self._job_records.has_private_state(key),
                    )
        return updates, counted_rounds

    def _load_update(self, folder: str) -> Update | None:
        try:
            update = wire.decode(self._disk.read(f"{folder}/{UPDATE_FILE}"), Update)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WireError as error:
            log.warning("%s/%s is damaged (%s): the task must run again", folder, UPDATE_FILE, error)
            return None
        missing_bundles = [name for name, ref in update.bundles.items() if not self.blob_store.claim_blob(ref)]
        if missing_bundles:
            log.warning("%s: bundle %s is missing: the task must run again", folder, ", ".join(missing_bundles))
        return None if missing_bundles else update

    def _find_private_state_hash(self, folder: str) -> str | None:
        entries = self._disk.entries(folder) if self._disk.is_dir(folder) else []
        names = [entry.name for entry in entries if entry.name.endswith(PRIVATE_SUFFIX)]
        return names[0].removesuffix(PRIVATE_SUFFIX) if names else None

    # -- one task --

    def empty_output(self) -> Path:
        """Empty the output folder for the next task and return its path. The folder may not exist yet."""
        if not self.durable:
            self._remove_quietly(self._output_folder)
            return self._output_folder
        # An idle task process may still write this folder.
        with disk_errors(f"empty {self._output_folder}"):
            self._disk.clear_folder(self._output_folder)
        return self._output_folder

    def cache_folder(self, job: str) -> Path:
        """Return the cache folder of a job, after deleting those of other jobs.

        The folder is not used after a reboot of the machine, so its files need no sync.
        """
        folder = self._cache_root / f"{job}@{_boot_id()}"
        if self._current_cache == folder and (not self.durable or self._disk.is_dir(folder)):
            return folder
        if not self.durable and not self._disk.is_dir(self._cache_root):
            self._current_cache = folder
            return folder
        with disk_errors(f"make {folder}"):
            self._disk.make_folder(self._cache_root)
            for entry in self._disk.entries(self._cache_root):
                if entry.name != folder.name:
                    self._remove_quietly(self._cache_root / entry.name)
            if self._disk.read_link(folder) is not None:  # a link that an earlier job's task has put there
                self._disk.unlink(folder)
            self._disk.make_folder(folder)
        self._current_cache = folder
        return folder

    def find_private_state(self, job: str, counted_round: int | None) -> PrivateState:
        with disk_errors(f"read {self._private_folder}"):
            return self._job_records.find_private_state(job, counted_round)

    def latest_private_state(self, job: str) -> PrivateState:
        with disk_errors(f"read {self._private_folder}"):
            return self._job_records.latest_private_state(job)

    def commit_update(self, update: Update, blobs: Mapping[str, bytes] = {}, private: BlobRef | None = None) -> bool:
        """Make the task's output durable as this update. Return whether the update has private state.

        The output folder holds each bundle in a file named by its sha256, and the private state if there is one.
        """
        scratch = self._scratch
        for ref in set(update.bundles.values()):
            if ref.sha256 in blobs:
                self.blob_store.store_small(blobs[ref.sha256], ref)
            elif self.durable:
                self.blob_store.store_untrusted_file(f"{self._output_folder}/{ref.sha256}", ref)
            else:  # on virtual time no process of its own carries out the task
                self.blob_store.store_file(f"{self._output_folder}/{ref.sha256}", ref, move=True)
        if not self.durable and private is None:
            self._in_memory_updates.add((update.job, update.round))
            return False
        if not self.durable:
            self._make_folders()
        target = self._entry_folder((update.job, update.round))
        with disk_errors(f"store the result of {update.job}, round {update.round + 1}, in {self._outbox_folder}"):
            self._disk.clear_folder(scratch)
            if private is not None:
                private_file = f"{scratch}/{private.sha256}{PRIVATE_SUFFIX}"
                written_file = f"{self._output_folder}/{PRIVATE_FILE}"
                if self._disk.copy_untrusted(written_file, private_file, private.size) != private.sha256:
                    raise StoreError(f"{written_file} differs from the hash that the task's process reported")
            self._disk.write(f"{scratch}/{UPDATE_FILE}", wire.encode(update))
            if self.durable:
                for entry in self._disk.entries(scratch):
                    self._disk.sync(f"{scratch}/{entry.name}")
            self._sync(scratch)
            self._remove_outbox_entry(target)
            self._disk.replace(scratch, target)
            self._sync(self._outbox_folder)
        self._remove_quietly(self._output_folder)
        return private is not None

    def record_ack(self, key: Key, accepted: bool, counted_rounds: Mapping[str, CountedRound]) -> None:
        """Record the ack of an update and delete the update. Keep the update's private state if accepted."""
        if key in self._in_memory_updates:
            self._in_memory_updates.remove(key)
            return self._job_records.record_counted_in_memory(key) if accepted else None
        with disk_errors(f"record the ack of {key[0]}, round {key[1] + 1}, in {self.home}"):
            folder = self._entry_folder(key)
            if accepted:
                private_sha256 = self._find_private_state_hash(folder)
                private_file = (
                    None if private_sha256 is None else (f"{folder}/{private_sha256}{PRIVATE_SUFFIX}", private_sha256)
                )
                jobs_in_outbox = {entry.name.rpartition("@")[0] for entry in self._disk.entries(self._outbox_folder)}
                self._job_records.record_counted(key, private_file, counted_rounds, jobs_in_outbox)
            self._remove_outbox_entry(folder)

    def _remove_outbox_entry(self, folder: str) -> None:
        # update.json goes first, because a folder without that file is no entry.
        if self._disk.is_dir(folder):
            self._disk.unlink(f"{folder}/{UPDATE_FILE}")
            self._sync(folder)
            self._disk.remove(folder)
        else:
            self._disk.unlink(folder)

    def _remove_quietly(self, path: Path) -> None:
        """Remove a file or folder, and ignore errors. The output folder is only emptied."""
        with suppress(OSError):
            if path == self._output_folder and self._disk.is_dir(path):
                self._disk.clear_folder(path)
            else:
                self._disk.remove(path)

    def _entry_folder(self, key: Key) -> str:
        return f"{self._outbox_folder}/{key[0]}@{key[1]}"

    # -- learned costs --

    def load_learned_costs(self) -> dict[str, LearnedModel]:
        return read_learned_costs(self.home, self._disk) if self.durable else {}

    def store_learned_costs(self, learned_models: Mapping[str, LearnedModel]) -> None:
        """Store the learned costs without a sync. A power failure may restore an older version."""
        if self.durable:
            with disk_errors(f"write {self.home / LEARNED_FILE}"):
                stored = LearnedCosts(workloads={workload[:200]: model for workload, model in learned_models.items()})
                self._disk.write_atomically(self.home / LEARNED_FILE, wire.encode(stored), durable=False)

    # -- files of other modules --

    def write_file(self, name: str, payload: bytes) -> None:
        file = self.home / name
        with disk_errors(f"write {file}"):
            (self._disk.make_durable_folder if self.durable else self._disk.make_folder)(file.parent)
            self._disk.write_atomically(file, payload, durable=self.durable)

    def read_file(self, name: str) -> bytes | None:
        file = self.home / name
        with disk_errors(f"read {file}"):
            return self._disk.read(file) if self._disk.is_file(file) else None

    # -- disk space --

    def require_room(self, size: int) -> None:
        """Raise StoreError unless `size` bytes and a reserve are free and the home folder can be written."""
        with disk_errors(f"write to {self.home}"):
            free = self.free_bytes()
            if free < size + SPARE_BYTES:
                required = (size + SPARE_BYTES) / 1e6
                raise OSError(errno.ENOSPC, f"{free / 1e6:.1f} MB are free, {required:.1f} MB are required")
            if self.durable:
                self._disk.write_atomically(self._probe, b"\0")
                self._disk.unlink(self._probe)

    def make_room(
        self, size_bytes: int, limit_bytes: int, needed_hashes: Collection[str], *, is_idle: bool = False
    ) -> None:
        """Delete unused blobs and caches until `size_bytes` more bytes fit the limit and the disk.

        The longest unused are deleted first.

        Args:
            size_bytes: Bytes about to be written.
            limit_bytes: Most bytes of blobs and caches.
            needed_hashes: Blobs to keep. `require_room` reports if the rest is not enough.
            is_idle: Whether no process of a task or check runs. Caches may be deleted only then.
        """
        caches = self._list_cache_entries(remove=is_idle)
        candidates: list[tuple[int, str | Path, int]] = [*self.blob_store.files_by_last_use(), *caches]
        unused = sorted(candidates, key=lambda candidate: candidate[0])
        used_bytes = sum(size for _, _, size in unused)
        excess_bytes = size_bytes + max(used_bytes - limit_bytes, SPARE_BYTES - self.free_bytes())
        for _, location, size in unused:
            if excess_bytes <= 0:
                break
            if isinstance(location, Path):
                if not is_idle:
                    continue
                self._remove_quietly(location)
            elif len(location) == 64 and location not in needed_hashes:
                self.blob_store.remove_blob(location)
            else:
                continue
            excess_bytes -= size

    def _list_cache_entries(self, *, remove: bool) -> list[tuple[int, Path, int]]:
        """Return last use, path and size of each cache entry. With `remove`, delete unreadable entries."""
        cache_entries = []
        for private_folder in (self.task_folder, self.home / sandbox.CHECK):
            for folder in (private_folder / name for name in (sandbox.CACHE, sandbox.TEMPORARY, sandbox.LIBRARIES)):
                with disk_errors(f"look at {folder}"):
                    names = [entry.name for entry in self._disk.entries(folder)] if self._disk.is_dir(folder) else []
                for name in names:
                    try:
                        latest_ns, size = self._disk.measure_usage(folder / name)
                    except OSError:
                        if remove:
                            self._remove_quietly(folder / name)
                        continue
                    cache_entries.append((latest_ns, folder / name, size))
        return cache_entries

    def free_bytes(self) -> int:
        with disk_errors(f"look at {self.home}"):
            return self._disk.free_bytes(self._existing_folder)

    def touch_blobs(self, refs: Collection[BlobRef]) -> None:
        for ref in refs:
            self.blob_store.record_use(ref.sha256)

    def _sync(self, path: StrPath) -> None:
        if self.durable:
            self._disk.sync(path)


def read_learned_costs(home: Path, disk: Disk = REAL) -> dict[str, LearnedModel]:
    """Return the learned costs by workload, or {} if missing or damaged. Raise StoreError if unreadable."""
    file = home / LEARNED_FILE
    with disk_errors(f"read {file}"):
        if disk.stat(file) is None:
            return {}
        payload = disk.read(file)
    try:
        models = wire.decode(payload, LearnedCosts).workloads
    except WireError as error:
        log.warning("%s is damaged (%s): speed and power of tasks are measured again", file, error)
        return {}
    return {workload: model for workload, model in models.items() if model.is_valid}


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


MAX_PRIVATE_STATES: Final = 2  # private states of a job
_PRIVATE_FILE_NAME: Final = re.compile(r"([a-z0-9][a-z0-9._-]*)@(\d{1,16})\.([0-9a-f]{64})")


class PrivateState(NamedTuple):
    path: str | None = None
    sha256: str = ""
    lost_reason: str = ""  # why existing state is unusable
    unknown_reason: str = ""  # why the device cannot know whether state exists


class JobRecord(WireMessage, frozen=True):
    round: Count  # last counted round
    epoch: Count  # epoch of the coordinator that counted the round
    private: OptionalDigest = ""  # sha256 of the private state after that round, or ""
    private_round: Count = 0  # round that left the private state


class JobRecordFile(WireMessage, frozen=True):
    jobs: dict[Name, JobRecord]


class StoredPrivateState(NamedTuple):
    job: str
    round: int  # round that left the state
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

    def find_private_state(self, job: str, counted_round: int | None) -> PrivateState:
        """Return the private state after the counted round, from which a task of a job starts.

        The result is empty if the job has none. `lost_reason` is set if that state is missing, and `unknown_reason` if
        this device has no record of the counted round.
        """
        entry = self._jobs.get(job)
        if entry is None:
            if counted_round is None or not self._durable:  # on virtual time, not all is written down
                return PrivateState()
            return PrivateState(unknown_reason=f"counted round {counted_round + 1} of {job} is unknown on this device")
        if not entry.private:
            return PrivateState()
        stored_by_round = {stored.round: stored for stored in self._stored_states() if stored.job == job}
        rounds = [
            round for round in stored_by_round if counted_round is not None and round <= counted_round <= entry.round
        ]
        wanted_round = entry.private_round if counted_round == entry.round else max(rounds, default=-1)
        if wanted_round in stored_by_round:
            return PrivateState(
                str(self._folder / stored_by_round[wanted_round].file_name), stored_by_round[wanted_round].sha256
            )
        position = "before its first round" if counted_round is None else f"after round {counted_round + 1}"
        stored_round = entry.private_round + 1
        return PrivateState(
            lost_reason=f"the private state of {job} {position} is missing, only that of round {stored_round} exists"
        )

    def latest_private_state(self, job: str) -> PrivateState:
        entry = self._jobs.get(job)
        return PrivateState() if entry is None else self.find_private_state(job, entry.round)

    def record_counted(
        self,
        key: Key,
        private_file: tuple[str, str] | None,
        counted_rounds: Mapping[str, CountedRound],
        jobs_in_outbox: Collection[str],
    ) -> None:
        """Record that a round was counted, and store the round's private state.

        `private_file` is the path and sha256 of the private state, or None. The file is moved before the record is
        written. After a crash in between, the coordinator sends the ack again.
        """
        job, round = key
        entry = self._jobs.get(job, JobRecord(round=0, epoch=0))
        sha256, private_round = entry.private, entry.private_round
        if private_file is not None:
            for stored in self._stored_states():
                if (stored.job, stored.round) == key:  # of the coordinator that a restored copy has replaced
                    self._disk.unlink(f"{self._folder}/{stored.file_name}")
            self._disk.replace(
                private_file[0], f"{self._folder}/{StoredPrivateState(job, round, private_file[1]).file_name}"
            )
            self._sync_folder()
        for stored in self._stored_states():
            if (stored.job, stored.round) == key:
                sha256, private_round = stored.sha256, round
        new_records = {
            name: JobRecord(round=counted_round.round, epoch=counted_round.epoch)
            for name, counted_round in counted_rounds.items()
        }
        record = JobRecord(
            round=counted_rounds[job].round,
            epoch=counted_rounds[job].epoch,
            private=sha256,
            private_round=private_round,
        )
        jobs = {
            name: record if name == job else self._jobs.get(name, new_record)
            for name, new_record in new_records.items()
        }
        uncounted = {name: entry for name, entry in self._jobs.items() if name in jobs_in_outbox and name not in jobs}
        self._jobs = {**uncounted, **jobs}
        self._disk.write_atomically(self._file, wire.encode(JobRecordFile(jobs=self._jobs)), durable=self._durable)
        self._delete_unused_states(job, private_round, jobs_in_outbox)

    def has_private_state(self, key: Key) -> bool:
        """Return whether the private state left by a round is stored, even if the round is not counted."""
        return any((stored.job, stored.round) == key for stored in self._stored_states())

    def record_counted_in_memory(self, key: Key) -> None:
        if (entry := self._jobs.get(key[0])) is not None:
            self._jobs[key[0]] = msgspec.structs.replace(entry, round=key[1])

    # -- internals --

    def _read_records(self) -> dict[str, JobRecord]:
        try:
            payload = self._disk.read(self._file)
        except FileNotFoundError:
            return {}
        try:
            return wire.decode(payload, JobRecordFile).jobs
        except WireError as error:
            log.warning("%s is damaged (%s): a round that was counted may run again", self._file, error)
            return self._records_from_file_names()

    def _records_from_file_names(self) -> dict[str, JobRecord]:
        last_stored = {stored.job: stored for stored in sorted(self._stored_states())}
        return {
            job: JobRecord(round=stored.round, epoch=0, private=stored.sha256, private_round=stored.round)
            for job, stored in last_stored.items()
        }

    def _stored_states(self) -> list[StoredPrivateState]:
        if not self._disk.is_dir(self._folder):
            return []
        matches = [_PRIVATE_FILE_NAME.fullmatch(entry.name) for entry in self._disk.entries(self._folder)]
        return [StoredPrivateState(match[1], int(match[2]), match[3]) for match in matches if match is not None]

    def _delete_unused_states(self, job: str, last_round: int, jobs_in_outbox: Collection[str]) -> None:
        stored_states = self._stored_states()
        rounds = sorted(stored.round for stored in stored_states if stored.job == job and stored.round <= last_round)[
            -MAX_PRIVATE_STATES:
        ]
        for stored in stored_states:
            if stored.job not in {*self._jobs, *jobs_in_outbox} or (stored.job == job and stored.round not in rounds):
                self._disk.unlink(f"{self._folder}/{stored.file_name}")

    def _sync_folder(self) -> None:
        if self._durable:
            self._disk.sync(self._folder)

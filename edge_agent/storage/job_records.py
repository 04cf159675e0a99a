"""Records of a device's jobs: last counted rounds and private states.

    <home>/counted.json                    records of all jobs, with a checksum
    <home>/private/<job>@<round>.<sha256>  private states of the last two rounds that left any

A task names the last round of this device that the coordinator has counted. The task starts from the private state of
that round. The state before is kept too: a coordinator that lost the last update, or was restored from a copy one round
older, gets the same result.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.core import AnyDigest, Count, Name, WireError, WireMessage
from fedquilt.host.disk import Disk

log = logging.getLogger("fedquilt.agent")

Key = tuple[str, int]  # job, round

KEPT: Final = 2  # private states of a job
_PRIVATE: Final = re.compile(r"([a-z0-9][a-z0-9._-]*)@(\d{1,16})\.([0-9a-f]{64})")


class CountedRound(msgspec.Struct, frozen=True):
    round: int
    epoch: int = 0  # start of the coordinator that said so


class PrivateState(NamedTuple):
    """Private state of a device for one job, or the reason why the state is missing."""

    path: str | None = None
    sha256: str = ""
    lost: str = ""  # there was one, and it cannot be used
    forgotten: str = ""  # there may have been one: nothing is known here of a round that was counted


class JobRecord(WireMessage, frozen=True):
    round: Count  # the last one that was counted
    epoch: Count  # start of the coordinator that said so
    private: AnyDigest = ""  # private state after that round; "": it has none
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

    Args:
        home: Home folder of the agent.
        disk: Disk of the home folder.
        durable: Whether to wait until writes are on the disk.

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

        Args:
            job: Id of the job.
            counted: Last round of this device that the coordinator has counted, or None.

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
        """Return the private state after the last counted round, without a path if there is none."""
        entry = self._jobs.get(job)
        return PrivateState() if entry is None else self.find_private_state(job, entry.round)

    def record_counted(
        self, key: Key, made: tuple[str, str] | None, counted: Mapping[str, CountedRound], waiting: Collection[str]
    ) -> None:
        """Record that a round was counted, and store the private state of that round.

        The state is moved before the record is written. After a crash in between, the coordinator's answer arrives
        again.

        Args:
            key: Job and round.
            made: File and sha256 of the private state, or None if the round left none or the state was moved already.
            counted: Last counted round of each job. Records and private states of other jobs are deleted.
            waiting: Jobs with updates in the outbox. Their records stay, because an interrupted answer arrives again.
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
        """Return the stored records or, if damaged, records rebuilt from the files of private states."""
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
        """Delete the private states of unknown jobs, and those of `job` that no task can start from.

        Tasks of `job` can start from the last KEPT states of rounds up to `last_round`. Jobs in `jobs_in_outbox` count
        as known.
        """
        kept = self._stored_states()
        rounds = sorted(each.round for each in kept if each.job == job and each.round <= last_round)[-KEPT:]
        for each in kept:
            if each.job not in {*self._jobs, *jobs_in_outbox} or (each.job == job and each.round not in rounds):
                self._disk.unlink(f"{self._folder}/{each.file_name}")

    def _sync_folder(self) -> None:
        if self._durable:
            self._disk.sync(self._folder)

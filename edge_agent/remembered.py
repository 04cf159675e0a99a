"""What a device remembers of jobs: the last round that was counted of each, and the private state that it left.

    <home>/counted.json                    both, with a checksum
    <home>/private/<job>@<round>.<sha256>  private state, as the last two rounds that left any have left it

A task says which round of this device the coordinator has counted last; it is worked for from the private state that
this round has left. The one before is kept too: if the coordinator has lost the last update, or was restored from a
copy that is one round older, the work is the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.core import UNDECODABLE, AnyDigest, Count, Name, Wired, WireError
from fedquilt.disk import Disk

log = logging.getLogger("fedquilt.agent")

Key = tuple[str, int]  # job, round

KEPT: Final = 2  # private states of a job
_PRIVATE: Final = re.compile(r"([a-z0-9][a-z0-9._-]*)@(\d{1,16})\.([0-9a-f]{64})")


class Counted(msgspec.Struct, frozen=True):
    """Last round of a job that the coordinator has counted of this device."""

    round: int
    epoch: int = 0  # start of the coordinator that said so


class Private(NamedTuple):
    """Private state to work from; without a file, why there is none."""

    path: str | None = None
    sha256: str = ""
    lost: str = ""  # there was one, and it cannot be used
    forgotten: str = ""  # there may have been one: nothing is known here of a round that was counted


class Entry(Wired, frozen=True):
    """What is remembered of a job."""

    round: Count  # the last one that was counted
    epoch: Count  # start of the coordinator that said so
    private: AnyDigest = ""  # private state after that round; "": it has none
    left: Count = 0  # the round that has left it


class Ledger(Wired, frozen=True):
    """Content of counted.json: what is remembered of each job."""

    jobs: dict[Name, Entry]


class Kept(NamedTuple):
    """A private state in its place."""

    job: str
    round: int  # that left it
    sha256: str

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.job}@{self.round}.{self.sha256}"


class Remembered:
    """Jobs of one device.

    Args:
        home: the agent's.
        disk: where it is.
        durable: wait for the disk.

    Raises, from every method:
        OSError: the home cannot be read or written.
    """

    def __init__(self, home: Path, disk: Disk, *, durable: bool) -> None:
        self._file, self._folder, self._disk, self._durable = home / "counted.json", home / "private", disk, durable
        self._jobs: dict[str, Entry] = {}

    def recover(self) -> dict[str, Counted]:
        """Read what an earlier process has written."""
        self._jobs = self._read()
        return {job: Counted(entry.round, entry.epoch) for job, entry in self._jobs.items()}

    def private(self, job: str, counted: int | None) -> Private:
        """The private state of a job to work from.

        Args:
            job: id.
            counted: last round of this device that the coordinator has counted; None: none.
        """
        entry = self._jobs.get(job)
        if entry is None:
            if counted is None or not self._durable:  # on virtual time, not all is written down
                return Private()
            return Private(forgotten=f"this device knows nothing of round {counted} of {job}, which has been counted")
        if not entry.private:
            return Private()
        kept = {each.round: each for each in self._kept() if each.job == job}
        rounds = [round for round in kept if counted is not None and round <= counted <= entry.round]
        wanted = entry.left if counted == entry.round else max(rounds, default=-1)
        if wanted in kept:
            return Private(str(self._folder / kept[wanted].name), kept[wanted].sha256)
        after = "before its first round" if counted is None else f"after round {counted}"
        return Private(lost=f"the private state of {job} {after} is not here, only that of round {entry.left}")

    def latest(self, job: str) -> Private:
        """The private state of a job after the last round of it that was counted here; without a file: there is none.

        Args:
            job: id.
        """
        entry = self._jobs.get(job)
        return Private() if entry is None else self.private(job, entry.round)

    def count(
        self, key: Key, made: tuple[str, str] | None, counted: Mapping[str, Counted], waiting: Collection[str]
    ) -> None:
        """Remember that a round was counted, and the private state that it left.

        The state is moved before anything says that it is there. After a crash in between, the answer comes again.

        Args:
            key: job and round.
            made: the private state's file, and its sha256; None: the round has left none, or it was moved already.
            counted: of all jobs; others are forgotten, and their private states deleted.
            waiting: jobs with updates in the outbox, which are not forgotten: where the disk failed in the middle of an
                answer, it comes again.
        """
        job, round = key
        entry = self._jobs.get(job, Entry(round=0, epoch=0))
        sha256, left = entry.private, entry.left
        if made is not None:
            for each in self._kept():
                if (each.job, each.round) == key:  # of a coordinator that has been replaced by an older copy of itself
                    self._disk.unlink(f"{self._folder}/{each.name}")
            self._disk.replace(made[0], f"{self._folder}/{Kept(job, round, made[1]).name}")
            self._sync()
        for each in self._kept():
            if (each.job, each.round) == key:
                sha256, left = each.sha256, round
        others = {name: Entry(round=last.round, epoch=last.epoch) for name, last in counted.items()}
        this = Entry(round=counted[job].round, epoch=counted[job].epoch, private=sha256, left=left)
        jobs = {name: this if name == job else self._jobs.get(name, other) for name, other in others.items()}
        half = {name: entry for name, entry in self._jobs.items() if name in waiting and name not in jobs}
        self._jobs = {**half, **jobs}
        self._disk.put(self._file, wire.encode(Ledger(jobs=self._jobs)), durable=self._durable)
        self._clear(job, left, waiting)

    def moved(self, key: Key) -> bool:
        """Whether the private state that a round has left is in its place, be the round counted or not."""
        return any((each.job, each.round) == key for each in self._kept())

    def note(self, key: Key) -> None:
        """Remember in this process alone that a round was counted which has left no private state."""
        if (entry := self._jobs.get(key[0])) is not None:
            self._jobs[key[0]] = msgspec.structs.replace(entry, round=key[1])

    # -- within --

    def _read(self) -> dict[str, Entry]:
        try:
            payload = self._disk.read(self._file)
        except FileNotFoundError:
            return {}
        try:
            return wire.decode(payload, Ledger).jobs
        except WireError as error:
            damage = error
        try:
            return self._taken_over(msgspec.json.decode(payload, type=dict[Name, Count]))
        except UNDECODABLE:
            log.warning("%s is damaged (%s); at worst a round is worked for in vain", self._file, damage)
            return self._by_names()

    def _taken_over(self, counted: dict[str, int]) -> dict[str, Entry]:
        """Entries of a home of an earlier version, whose private states have other names and no checksums."""
        found: dict[str, Entry] = {}
        for job, round in counted.items():
            old, entry = self._folder / f"{job}.safetensors", Entry(round=round, epoch=0)
            if self._disk.is_file(old):
                sha256 = self._disk.digest(old)
                self._disk.replace(old, self._folder / Kept(job, round, sha256).name)
            kept = [each for each in self._kept() if (each.job, each.round) == (job, round)]
            found[job] = Entry(round=round, epoch=0, private=kept[0].sha256, left=round) if kept else entry
        return found

    def _by_names(self) -> dict[str, Entry]:
        """Entries as far as the names of private states say them."""
        last = {each.job: each for each in sorted(self._kept())}
        return {job: Entry(round=k.round, epoch=0, private=k.sha256, left=k.round) for job, k in last.items()}

    def _kept(self) -> list[Kept]:
        if not self._disk.is_dir(self._folder):
            return []
        named = [_PRIVATE.fullmatch(entry.name) for entry in self._disk.entries(self._folder)]
        return [Kept(each[1], int(each[2]), each[3]) for each in named if each is not None]

    def _clear(self, job: str, left: int, waiting: Collection[str]) -> None:
        """Delete private states that are of no use: of other jobs, and of rounds long before or after `left`."""
        kept = self._kept()
        rounds = sorted(each.round for each in kept if each.job == job and each.round <= left)[-KEPT:]
        for each in kept:
            if each.job not in {*self._jobs, *waiting} or (each.job == job and each.round not in rounds):
                self._disk.unlink(f"{self._folder}/{each.name}")

    def _sync(self) -> None:
        if self._durable:
            self._disk.sync(self._folder)

"""Persistent state of a device: unacknowledged results, private state, and blobs. All survive kill -9.

    <home>/blobs/                     every blob, by content (`fedquilt.blobs.store`)
    <home>/scratch/                   output of the task in hand; emptied at every start
    <home>/cache/<boot>/<job>/        files of a job's tasks for later ones; may vanish at any time between tasks
    <home>/outbox/<job>@<round>/      update.json, and the private state the round leaves: <sha256>.private
    <home>/private/<job>@<round>.<sha256>  private state of a job, as two rounds have left it; never sent
    <home>/counted.json               job -> last round that was counted, and the private state it left

A result becomes durable in one step: its blobs are stored by content, where nothing refers to them yet;
update.json and the private state are completed in scratch/, and the folder is renamed into outbox/.
Before that rename the task is worked for again, from the same private state and hence with the same
result; after it, the update is there to be delivered. The private state moves to its place when the
coordinator has counted the contribution, and is deleted when that is refused: a device never
builds on work that the federation did not take.

Everything has a checksum, and is compared with it when it is read. A task says which round of this device the
coordinator counted last, and is worked for from the private state that this round has left. The one before is kept too:
if the coordinator has lost the last update, or is restored from a copy that is one round older, the work is the same.
Where neither is the one wanted, or it is damaged, the task is told why, and begins anew or is declined, as its method
allows.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from fedquilt import wire
from fedquilt.blobs.shared_store import Lodger, Shared
from fedquilt.blobs.store import Depot
from fedquilt.core import BlobRef, Count, Digest, JobError, Name, Update, Wired, WireError
from fedquilt.disk import REAL, Disk, Lock, doing
from fedquilt.edge_agent.events import Counted

if TYPE_CHECKING:
    from fedquilt.core import Tensors

log = logging.getLogger("fedquilt.agent")

Key = tuple[str, int]  # job, round


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
    private: Digest | Literal[""] = ""  # private state that the round has left, or one before it
    left: Count = 0  # the round that has left it


class Ledger(Wired, frozen=True):
    """Content of counted.json, with a checksum as messages have it."""

    jobs: dict[Name, Entry]


UPDATE: Final = "update.json"
PRIVATE: Final = "private.safetensors"  # in scratch
KEPT: Final = ".private"  # ending of its name in the outbox
PRIVATES: Final = 2  # private states of a job that are kept
SPARE_BYTES: Final = 1 << 20  # disk space left for small files
SMALL_BYTES: Final = 1 << 20  # bytes of tensors encoded as a whole before they are written


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
        self.home, self._durable, self._disk = home.absolute(), durable, disk
        self._outbox, self._private = self.home / "outbox", self.home / "private"
        self._scratch = self.home / "scratch"
        if durable:
            self._make_folders()
        self._cache: Path | None = None  # folder of the latest `cache`
        self._light: set[Key] = set()  # results that are in memory only
        self._jobs: dict[str, Entry] = {}
        self._there = self.home if shared is None else shared.depot.folder  # a folder that exists
        blobs = self.home / "blobs"
        self.depot = Depot(blobs, durable=durable, disk=disk) if shared is None else Lodger(blobs, shared)

    def _make_folders(self) -> None:
        with doing(f"make the folder {self.home}"):
            for folder in (self._outbox, self._private):
                self._disk.make(folder)

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

    def recover(self) -> tuple[dict[Key, tuple[Update, bool]], dict[str, Counted]]:
        """Leftovers of an earlier process: updates to deliver (and whether with private state), and rounds counted."""
        if not self._disk.is_dir(self._outbox):
            return {}, {}
        self._jobs = self._remembered()
        counted = {job: Counted(entry.round, entry.epoch) for job, entry in self._jobs.items()}
        updates: dict[Key, tuple[Update, bool]] = {}
        with doing(f"read {self._outbox}"):
            self._clear(self._scratch)
            for entry in sorted(self._disk.entries(self._outbox)):
                folder = self._outbox / entry.name
                update = self._stored(folder)
                last = counted.get(update.job) if update is not None else None
                if update is None or (last and update.round <= last.round and update.epoch <= last.epoch):
                    self._remove(folder)
                else:
                    updates[update.job, update.round] = (update, self._left_in(folder) is not None)
        return updates, counted

    def _stored(self, folder: Path) -> Update | None:
        """Update in an outbox folder; None: it was being removed, or its bytes have decayed."""
        try:
            update = wire.decode(self._disk.read(folder / UPDATE), Update)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WireError as error:
            log.warning("%s is damaged (%s); its task will be worked for again", folder / UPDATE, error)
            return None
        lost = [name for name, ref in update.bundles.items() if not self.depot.has(ref)]
        if lost:
            log.warning("%s: bundle %s is gone; its task will be worked for again", folder, ", ".join(lost))
        return None if lost else update

    def _remembered(self) -> dict[str, Entry]:
        """Entries of counted.json; of a damaged one, as far as the names of private states say them."""
        file = self.home / "counted.json"
        try:
            payload = self._disk.read(file)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("%s cannot be read (%s)", file, error)
            return self._by_names()
        try:
            return wire.decode(payload, Ledger).jobs
        except WireError as error:
            damage = error
        try:  # as an earlier version wrote it
            return self._taken_over(msgspec.json.decode(payload, type=dict[Name, Count]))
        except msgspec.MsgspecError:
            log.warning("%s is damaged (%s); at worst a round is worked for in vain", file, damage)
            return self._by_names()

    def _by_names(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for job in {job for job, _, _ in self._privates()}:
            round, sha256 = max((round, sha256) for name, round, sha256 in self._privates() if name == job)
            found[job] = Entry(round=round, epoch=0, private=sha256, left=round)
        return found

    def _taken_over(self, counted: dict[str, int]) -> dict[str, Entry]:
        """Entries of a home of an earlier version, whose private states have other names and no checksums."""
        found: dict[str, Entry] = {}
        for job, round in counted.items():
            old, sha256 = self._private / f"{job}.safetensors", ""
            if self._disk.is_file(old):
                sha256 = self._disk.digest(old)
                self._disk.replace(old, self._private / f"{job}@{round}.{sha256}")
            found[job] = Entry(round=round, epoch=0, private=sha256, left=round if sha256 else 0)
        return found

    def _privates(self) -> list[tuple[str, int, str]]:
        """(job, round that left it, sha256) of every private state here, by their names."""
        named = [_PRIVATE.fullmatch(entry.name) for entry in self._disk.entries(self._private)]
        return [(each[1], int(each[2]), each[3]) for each in named if each is not None]

    def _left_in(self, folder: Path) -> str | None:
        """Hash (sha256) of the private state in an outbox folder, by its name; None: there is none."""
        names = [entry.name for entry in self._disk.entries(folder) if entry.name.endswith(KEPT)]
        return names[0].removesuffix(KEPT) if names else None

    # -- one task --

    def scratch(self) -> Path:
        """Empty folder for the output of the task in hand; without `durable` it may not exist yet."""
        folder = self._scratch
        if not self._durable:
            self._clear(folder)
            return folder
        with doing(f"make {folder}"):
            self._disk.remove(folder)
            self._disk.make(folder)
        return folder

    def cache(self, job: str) -> Path:
        """Folder of the files that a job's tasks leave for later ones; those of other jobs are deleted.

        It belongs to this boot of the machine: files there are whole unless the power has failed, and are not
        worth a sync.
        """
        folder = self.home / "cache" / _boot() / job
        if folder == self._cache and (not self._durable or self._disk.is_dir(folder)):
            return folder
        if not self._durable and not self._disk.is_dir(self.home / "cache"):
            self._cache = folder
            return folder
        with doing(f"make {folder}"):
            self._disk.make(folder)
            for within, kept in ((folder.parent.parent, folder.parent), (folder.parent, folder)):
                for entry in self._disk.entries(within):
                    if within / entry.name != kept:
                        self._clear(within / entry.name)
        self._cache = folder
        return folder

    def private(self, job: str, counted: int | None) -> Private:
        """The private state of a job to work from.

        Args:
            job: id.
            counted: last round of this device that the coordinator has counted; None: none.
        """
        entry = self._jobs.get(job)
        kept = (
            {}
            if not self._disk.is_dir(self._private)
            else {round: sha256 for name, round, sha256 in self._privates() if name == job}
        )
        if entry is not None and entry.round == counted and entry.private:
            wanted = entry.left
        else:
            wanted = max((round for round in kept if counted is not None and round <= counted), default=-1)
        if wanted in kept:
            return Private(str(self._private / f"{job}@{wanted}.{kept[wanted]}"), kept[wanted])
        if entry is not None and entry.private:
            after = "no round" if counted is None else f"round {counted}"
            return Private(
                lost=f"the private state of {job} after {after} is not here: the last that was kept is of round {entry.left}"
            )
        if entry is None and counted is not None:
            return Private(forgotten=f"this device's home knows nothing of round {counted} of {job}, which was counted")
        return Private()

    def commit(self, update: Update, blobs: Mapping[str, bytes] = {}, private: BlobRef | None = None) -> bool:
        """Make the task's output in scratch durable as this update; returns whether it has private state.

        The folder holds each bundle in a file named by its sha256, and the private state if there is one.

        Args:
            update: manifest of the output.
            blobs: bundles that the task did not write there, by sha256.
            private: the private state that it wrote there.
        """
        scratch = self._scratch
        if not self._durable and private is None:
            for ref in set(update.bundles.values()):
                if ref.sha256 in blobs:
                    self.depot.stow(blobs[ref.sha256])
                else:
                    self.depot.put_file(scratch / ref.sha256, ref, move=True)
            self._light.add((update.job, update.round))
            return False
        if not self._durable:
            self._make_folders()
        with doing(f"write to {scratch}"):
            for sha256, payload in blobs.items():
                self._disk.write(scratch / sha256, payload)
        for ref in set(update.bundles.values()):
            self.depot.put_file(scratch / ref.sha256, ref, move=True)
        target = self._folder((update.job, update.round))
        with doing(f"keep the result of {update.job}, round {update.round}, in {self._outbox}"):
            for ref in update.bundles.values():  # a blob that was in the depot already is still there
                self._disk.unlink(scratch / ref.sha256)
            if private is not None:
                self._disk.replace(scratch / PRIVATE, scratch / f"{private.sha256}{KEPT}")
            self._disk.write(scratch / UPDATE, wire.encode(update))
            if self._durable:
                for entry in self._disk.entries(scratch):
                    self._disk.sync(scratch / entry.name)
            self._sync(scratch)
            self._remove(target)
            self._disk.replace(scratch, target)
            self._sync(self._outbox)
            return private is not None

    def settle(self, key: Key, accepted: bool, counted: Mapping[str, Counted]) -> None:
        """Apply the coordinator's answer to an update: keep its private state if it counted, delete it if not.

        `counted` is remembered from now on; private states of other jobs are deleted.
        """
        if key in self._light:
            self._light.remove(key)
            return
        with doing(f"settle {key[0]}, round {key[1]}, in {self.home}"):
            if accepted:
                self._count(key, counted)
            self._remove(self._folder(key))

    def _count(self, key: Key, counted: Mapping[str, Counted]) -> None:
        """Move the private state that a round has left to its place, then remember the round.

        The state is moved before anything says that it is there; after a crash in between the answer comes again.
        """
        (job, round), folder = key, self._folder(key)
        entry = self._jobs.get(job)
        sha256, left = (entry.private, entry.left) if entry is not None else ("", 0)
        if (made := self._left_in(folder)) is not None:
            self._disk.replace(folder / f"{made}{KEPT}", self._private / f"{job}@{round}.{made}")
            self._sync(self._private)
        moved = [digest for name, number, digest in self._privates() if (name, number) == (job, round)]
        if made or moved:
            sha256, left = made or moved[0], round
        self._jobs = {
            name: Entry(round=last.round, epoch=last.epoch, private=sha256, left=left)
            if name == job
            else self._jobs.get(name, Entry(round=last.round, epoch=last.epoch))
            for name, last in counted.items()
        }
        self._disk.put(self.home / "counted.json", wire.encode(Ledger(jobs=self._jobs)), durable=self._durable)
        before = [number for name, number, _ in self._privates() if name == job and number < left]
        kept = {left, *sorted(before)[1 - PRIVATES :]}
        for name, number, digest in self._privates():
            if name not in counted or (name == job and (number not in kept or (number == left and digest != sha256))):
                self._disk.unlink(self._private / f"{name}@{number}.{digest}")

    def _remove(self, folder: Path) -> None:
        """Remove an outbox entry; without its update.json it is no entry, so that file goes first."""
        if self._disk.is_dir(folder):
            self._disk.unlink(folder / UPDATE)
            self._sync(folder)
            self._disk.remove(folder)
        else:
            self._disk.unlink(folder)

    def _clear(self, place: Path) -> None:
        """Remove a folder of no value, as far as that can be done."""
        with suppress(OSError):
            self._disk.remove(place)

    def _folder(self, key: Key) -> Path:
        return self._outbox / f"{key[0]}@{key[1]}"

    # -- room --

    def require_room(self, size: int) -> None:
        """Raises StoreError unless `size` more bytes can be written."""
        with doing(f"write to {self.home}"):
            free = self._free_bytes()
            if free < size + SPARE_BYTES:
                wanted = (size + SPARE_BYTES) / 1e6
                raise OSError(errno.ENOSPC, f"{free / 1e6:.1f} MB are free, {wanted:.1f} MB are wanted, some to spare")
            if self._durable:
                self._disk.put(self.home / "probe", b"\0")
                self._disk.unlink(self.home / "probe")

    def make_room(self, size: int, limit_bytes: int, needed: Collection[str]) -> None:
        """Drop blobs, the longest unused first, so that `size` more bytes keep within the limit and fit on the disk.

        Needed blobs are never dropped; `require_room` reports when that is not enough.
        """
        unused = self.depot.unused()
        with doing(f"look at {self.home}"):
            free = self._free_bytes()
        over = max(sum(kept for _, kept in unused) + size - limit_bytes, size + SPARE_BYTES - free)
        for sha256, kept in unused:
            if over <= 0:
                break
            if len(sha256) == 64 and sha256 not in needed:
                self.depot.drop(sha256)
                over -= kept

    def _free_bytes(self) -> int:
        return self._disk.free_bytes(self._there)

    def used(self, refs: Collection[BlobRef]) -> None:
        """Note that blobs are in use now."""
        for ref in refs:
            self.depot.touch(ref.sha256)

    def _sync(self, path: Path) -> None:
        """Wait until a file or a folder's entries are on the disk, if the home is durable."""
        if self._durable:
            self._disk.sync(path)


_PRIVATE: Final = re.compile(r"([a-z0-9][a-z0-9._-]*)@(\d{1,16})\.([0-9a-f]{64})")


def write_tensors(path: Path | str, tensors: Tensors) -> BlobRef:
    """Write a safetensors file and return its reference. For the task's process: this imports numpy.

    Large ones are written piece by piece: beside the tensors, the whole would be a second copy in memory.

    Raises:
        StoreError: it cannot be written.
    """
    from fedquilt.tensors import encode, total_bytes, write

    if total_bytes([tensors]) <= SMALL_BYTES:
        payload = encode(tensors)
        with doing(f"write {path}"):
            REAL.write(path, payload)
        return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    write(Path(path), tensors)
    with doing(f"read {path}"):
        return BlobRef(sha256=REAL.digest(path), size=os.stat(path).st_size)


@cache
def _boot() -> str:
    """Id of this boot of the machine; "unknown" if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"

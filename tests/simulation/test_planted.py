"""Bugs planted on purpose: each is found within 200 seeds, and shrunk to a schedule that finds it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fedquilt.blobs import chunks
from fedquilt.blobs.store import Depot
from fedquilt.coordinator import admission
from fedquilt.coordinator.encoding import Done
from fedquilt.coordinator.facts import AnyFact, Committed, Rounds
from fedquilt.coordinator.folding import Folding
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.outgoing import Issues
from fedquilt.coordinator.serving import Serving
from fedquilt.core import BlobRef
from fedquilt.disk import Place
from fedquilt.testing.faults import search
from fedquilt.testing.faults.database import Connection
from fedquilt.testing.faults.disk import SimDisk
from fedquilt.testing.faults.schedule import drawn, parse
from fedquilt.testing.faults.world import Theatre

SEEDS = 200
METHODS = ("fedavg", "ditto", "scaffold", "fedrep", "local", "genefl")  # sums of the last one depend on their order
Patch = pytest.MonkeyPatch


def no_sync(patch: Patch) -> None:
    """Nothing is ever waited for: no file, no folder, no commit of the database."""
    patch.setattr(SimDisk, "sync", lambda self, path: None)
    no_sync_of_the_log(patch)


def no_sync_of_the_log(patch: Patch) -> None:
    """The database does not wait for the disk."""
    patch.setattr(Connection, "synchronous", property(lambda self: False, lambda self, value: None))


def no_sync_of_files(patch: Patch) -> None:
    """Folders are waited for, files are not."""
    plain = SimDisk.sync
    patch.setattr(SimDisk, "sync", lambda self, path: plain(self, path) if self.is_dir(path) else None)


def no_sync_of_folders(patch: Patch) -> None:
    """Files are waited for, their names are not."""
    plain = SimDisk.sync
    patch.setattr(SimDisk, "sync", lambda self, path: None if self.is_dir(path) else plain(self, path))


def a_state_after_its_fact(patch: Patch) -> None:
    """A round's state is stored once the fact that names it is written."""
    commit, record, held = Running._commit, Running.record, []

    def early(self: Running, rounds: Rounds, now_s: float) -> Done:
        done, depot = commit(self, rounds, now_s), self._store.depot
        held[:] = [depot.load(done.fact.state.sha256)]
        depot.drop(done.fact.state.sha256)
        return done

    def late(self: Running, fact: AnyFact, now_s: float) -> None:
        record(self, fact, now_s)
        if isinstance(fact, Committed):
            for payload in held:
                self._store.depot.put(payload)

    patch.setattr(Running, "_commit", early)
    patch.setattr(Running, "record", late)


def a_torn_private_file(patch: Patch) -> None:
    """Private state is written over the old one, not renamed to it."""
    plain = SimDisk.replace

    def torn(self: SimDisk, source: Place, target: Place) -> None:
        if Path(target).parent.name != "private":
            return plain(self, source, target)
        self.write(target, self.read(source))
        return self.unlink(source)

    patch.setattr(SimDisk, "replace", torn)


def an_update_folded_twice(patch: Patch) -> None:
    """A commit folds all updates, those too that are folded already."""
    patch.setattr(Folding, "left", lambda self, updates: sorted(updates))


def another_order(patch: Patch) -> None:
    """A commit folds what is left from the last device on; where a method's sums are exact, that is no bug."""
    plain = Folding.left
    patch.setattr(Folding, "left", lambda self, updates: plain(self, updates)[::-1])


def no_round_check(patch: Patch) -> None:
    """An update counts in whatever round it arrives."""
    plain = admission._offered

    def offered(job: str, state: Any, arriving: Any, event: admission.Offered) -> admission.Step:
        if state is not None and event.update.job == job and event.device in state.asked:
            event = replace(event, update=replace(event.update, round=state.round))
        return plain(job, state, arriving, event)

    patch.setattr(admission, "_offered", offered)


def no_chunk_hash(patch: Patch) -> None:
    """A chunk of the right size is right."""
    patch.setattr(
        chunks, "is_chunk", lambda manifest, index, payload: len(payload) == chunks.extent(manifest, index)[1]
    )


def no_blob_hash(patch: Patch) -> None:
    """Nor is a blob hashed when it is stored."""
    no_chunk_hash(patch)

    def put(self: Depot, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        ref = expected or BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
        if not self.has(ref):
            self._store(payload, ref.sha256)
        return ref

    def finish(self: Depot, ref: BlobRef) -> None:
        self.disk.sync(self._part(ref.sha256))
        self._place(self._part(ref.sha256), ref.sha256)

    patch.setattr(Depot, "put", put)
    patch.setattr(Depot, "finish", finish)


def an_acknowledgement_before_the_record(patch: Patch) -> None:
    """What follows from a fact is done before the facts of a step are written."""
    patch.setattr(Serving, "_act", lambda self, action, now_s: self.do(action, now_s))


def a_task_that_stays_due(patch: Patch) -> None:
    """A task that nobody sends again is due until somebody does."""
    plain = Issues.due

    def due(self: Issues, now_s: float) -> list[str]:
        sent = {device: issue.sent_s for device, issue in self._open.items()}
        found = plain(self, now_s)
        for device in found:
            self._open[device].sent_s = sent[device]
            self._list(device, self._open[device].due_s)
        return found

    patch.setattr(Issues, "due", due)


PLANTS: tuple[Callable[[Patch], None], ...] = (
    no_sync,
    no_sync_of_the_log,
    no_sync_of_files,
    no_sync_of_folders,
    a_state_after_its_fact,
    a_torn_private_file,
    an_update_folded_twice,
    another_order,
    no_round_check,
    no_chunk_hash,
    no_blob_hash,
    an_acknowledgement_before_the_record,
)
ALL_AWAY = "devices=2 rounds=2 deadline_s=15.0 cut:dev-0,1.5,90.0,1 cut:dev-1,1.5,90.0,1"  # longer than cuts are drawn


@pytest.fixture(scope="module")
def theatre() -> Iterator[Theatre]:
    """Where all schedules of this file are played."""
    with Theatre() as made:
        yield made


def first(theatre: Theatre) -> search.Failure | None:
    """The failure of the first seed that fails."""
    for seed in range(SEEDS):
        found = search.attempt(theatre, drawn(seed, METHODS))
        if isinstance(found, search.Failure):
            return found
    return None


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(theatre: Theatre, plant: Callable[[Patch], None]) -> None:
    """By a schedule that holds without the bug."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = first(theatre)
    assert found is not None, f"{plant.__name__} is not found within {SEEDS} seeds"
    sound = search.attempt(theatre, found.plan)
    assert not isinstance(sound, search.Failure), sound.why


@pytest.mark.parametrize("plant", [no_sync_of_folders, no_round_check], ids=lambda plant: plant.__name__)
def test_what_is_found_is_found_again_by_the_text_of_its_shortest_schedule(
    theatre: Theatre, plant: Callable[[Patch], None]
) -> None:
    """And that too holds without the bug."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = first(theatre)
        assert found is not None
        short = search.shrunk(theatre, found)
        assert len(short.plan.text()) < len(found.plan.text())
        assert isinstance(search.attempt(theatre, parse(short.plan.text())), search.Failure)
    sound = search.attempt(theatre, short.plan)
    assert not isinstance(sound, search.Failure), sound.why


def test_a_process_that_keeps_its_processor_busy_is_named(theatre: Theatre) -> None:
    """A coordinator whose boards are all away, and which takes a task that it does not send for one that is due."""
    with pytest.MonkeyPatch.context() as patch:
        a_task_that_stays_due(patch)
        found = search.attempt(theatre, parse(ALL_AWAY))
    assert isinstance(found, search.Failure)
    assert found.why.startswith("coordinator spins: 21 steps at virtual second ")
    sound = search.attempt(theatre, parse(ALL_AWAY))
    assert not isinstance(sound, search.Failure), sound.why

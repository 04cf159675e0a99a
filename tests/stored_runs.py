"""Runs in a store, written as their coordinator writes them, and what their facts come to."""

from __future__ import annotations

import random

from job_facts import BLOB
from stored_job import JOB

from fedquilt.coordinator.rounds.deadline import MemoryShortage
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    AttemptResumed,
    CohortSelected,
    DeadlineExtended,
    EligibilityRecorded,
    JobConstants,
    JobEnded,
    JobResumed,
    JobStarted,
    JobState,
    NoteRecorded,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
    apply_event,
)
from fedquilt.coordinator.storage.snapshots import Snapshot
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef, Update, Usage

NOW_S = 7.0
DEVICES = tuple("abcdef")


class Run:
    """A run in a store, written as its coordinator writes it."""

    def __init__(self, store: Store) -> None:
        self.store, self.id = store, store.add_job(JOB, store.home / "bundle")
        self.plan = JobConstants.from_job(JOB)
        self.standing = Snapshot(JobState(self.plan))

    def record(self, *facts: AnyEvent) -> None:
        for fact in facts:
            after = apply_event(self.standing.job_state, fact, NOW_S)
            self.store.append_event(self.id, fact)
            self.standing.apply_event(fact, after)
            if isinstance(fact, RoundCommitted | JobEnded):
                self.store.snapshots.save_if_due(self.id, self.standing)

    def round(self, number: int, *devices: str) -> None:
        answers = [UpdateAccepted(number, of(self.id, device, number)) for device in devices]
        self.record(
            CohortSelected(number, 0, devices),
            *answers,
            RoundClosed(number),
            RoundCommitted(number, state(number), False, {}),
        )


def of(run: str, device: str, round: int) -> Update:
    """An update with a blob of its own."""
    blob = BlobRef(sha256=f"{round:02x}{ord(device):02x}" * 16, size=1)
    usage = Usage(wall_s=1.5, examples=40 + round, energy_j=0.25 if device < "c" else None, up_bytes=9)
    return Update(run, round, 0, device, 1.0, {"model": blob}, {"loss": 0.5}, usage)


def state(round: int) -> BlobRef:
    return BlobRef(sha256=f"{round:04x}" * 16, size=5)


def taken_up(store: Store, run: str, plan: JobConstants, now_s: float = NOW_S) -> tuple[Snapshot, int]:
    """As a coordinator takes a run up: its snapshot, and the facts behind it; and where the snapshot ended."""
    standing, upto = store.snapshots.load_state(run, plan, now_s)
    for _, _, fact in store.read_events(run, upto):
        standing.apply_event(fact, apply_event(standing.job_state, fact, now_s))
    return standing, upto


def whole(store: Store, run: str, plan: JobConstants, now_s: float = NOW_S) -> Snapshot:
    """What all facts of a run come to."""
    standing = Snapshot(JobState(plan))
    for _, _, fact in store.read_events(run):
        standing.apply_event(fact, apply_event(standing.job_state, fact, now_s))
    return standing


def blob_of(run: str, device: str, round: int) -> set[str]:
    return {ref.sha256 for ref in of(run, device, round).bundles.values()}


def any_fact(roll: random.Random, run: str, now: JobState) -> AnyEvent:
    """A fact that may come next, of any kind that there is."""
    one = roll.choice(DEVICES)
    asked = sorted(now.pending_devices)
    if now.phase == "new":
        return roll.choice([JobStarted(BLOB, has_evaluation_rounds=roll.random() < 0.3), NoteRecorded("by [trigger]")])
    if now.phase in ("stopped", "failed"):
        return JobResumed()
    if now.phase == "closing":
        if now.accepted_updates and roll.random() < 0.2:
            return UpdateLost(now.round, min(now.accepted_updates), "it is gone")
        return RoundCommitted(
            now.round, state(now.round), False, {}, (), 2.5, is_evaluation_round=now.is_evaluation_round
        )
    if roll.random() < 0.05:
        return JobEnded(roll.choice(["stopped", "failed"]), "by request")
    if now.phase == "selecting":
        some = tuple(sorted(roll.sample(DEVICES, 3)))
        survey = EligibilityRecorded(
            now.round, some, {"hot": tuple(sorted(set(DEVICES) - set(some)))}, {one: roll.random()}
        )
        epochs = {some[0]: 2} if roll.random() < 0.3 else {}
        return roll.choice(
            [survey, CohortSelected(now.round, now.attempt, some, dict.fromkeys(some, 2.0), 9.0, epochs=epochs)]
        )
    if not asked:
        return roll.choice(
            [RoundClosed(now.round), RoundRetried(now.round, now.attempt + 1), CohortSelected(now.round, 0, (one,))]
        )
    code = roll.choice(["memory", "data", "none", "failed"])
    return roll.choice(
        [
            UpdateAccepted(now.round, of(run, asked[0], now.round), 3.5, roll.choice([None, 1.25])),
            UpdateAccepted(now.round, of(run, asked[-1], now.round), 0.1),
            TaskDeclined(
                now.round, asked[0], code, "x", MemoryShortage(5, 1.5, None) if code == "memory" else None, "boot 1"
            ),
            UpdateRejected(now.round, asked[0], "not finite"),
            DeadlineExtended(now.round),
            AttemptResumed(now.round, 4.5),
            RoundRetried(now.round, now.attempt + 1),
        ]
    )

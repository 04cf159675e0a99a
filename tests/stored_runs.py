"""Stored runs, written like by a coordinator, and the job states that follow from their events."""

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
    JobEnded,
    JobResumed,
    JobStarted,
    NoteRecorded,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateLost,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.storage.snapshots import Snapshot
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef, Update, Usage

NOW_S = 7.0
DEVICES = tuple("abcdef")


class Run:
    """Run in a store, written like by a coordinator."""

    def __init__(self, store: Store) -> None:
        self.store, self.id = store, store.add_job(JOB, store.home / "bundle")
        self.plan = JobConstants.from_job(JOB)
        self.standing = Snapshot(JobState(self.plan))

    def record(self, *events: AnyEvent) -> None:
        for event in events:
            after = apply_event(self.standing.job_state, event, NOW_S)
            self.store.append_event(self.id, event)
            self.standing.apply_event(event, after)
            if isinstance(event, RoundCommitted | JobEnded):
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
    """Return an update whose blob is unique for run, device and round."""
    blob = BlobRef(sha256=f"{round:02x}{ord(device):02x}" * 16, size=1)
    usage = Usage(wall_s=1.5, examples=40 + round, energy_j=0.25 if device < "c" else None, up_bytes=9)
    return Update(run, round, 0, device, 1.0, {"model": blob}, {"loss": 0.5}, usage)


def state(round: int) -> BlobRef:
    return BlobRef(sha256=f"{round:04x}" * 16, size=5)


def load_job_state(store: Store, run: str, plan: JobConstants, now_s: float = NOW_S) -> tuple[Snapshot, int]:
    """Return the state from the stored snapshot and later events, and the position of the snapshot in the log."""
    snapshot, upto = store.snapshots.load_state(run, plan, now_s)
    for _, _, event in store.read_events(run, upto):
        snapshot.apply_event(event, apply_event(snapshot.job_state, event, now_s))
    return snapshot, upto


def replay_events(store: Store, run: str, plan: JobConstants, now_s: float = NOW_S) -> Snapshot:
    """Return the state from all events of a run."""
    snapshot = Snapshot(JobState(plan))
    for _, _, event in store.read_events(run):
        snapshot.apply_event(event, apply_event(snapshot.job_state, event, now_s))
    return snapshot


def blob_of(run: str, device: str, round: int) -> set[str]:
    return {ref.sha256 for ref in of(run, device, round).bundles.values()}


def random_event(rng: random.Random, run: str, job_state: JobState) -> AnyEvent:
    """Return a random event that may follow this job state."""
    one = rng.choice(DEVICES)
    asked = sorted(job_state.pending_devices)
    if job_state.phase == "new":
        return rng.choice([JobStarted(BLOB, has_evaluation_rounds=rng.random() < 0.3), NoteRecorded("by [trigger]")])
    if job_state.phase in ("stopped", "failed"):
        return JobResumed()
    if job_state.phase == "closing":
        if job_state.accepted_updates and rng.random() < 0.2:
            return UpdateLost(job_state.round, min(job_state.accepted_updates), "it is gone")
        return RoundCommitted(
            job_state.round,
            state(job_state.round),
            False,
            {},
            (),
            2.5,
            is_evaluation_round=job_state.is_evaluation_round,
        )
    if rng.random() < 0.05:
        return JobEnded(rng.choice(["stopped", "failed"]), "by request")
    if job_state.phase == "selecting":
        some = tuple(sorted(rng.sample(DEVICES, 3)))
        survey = EligibilityRecorded(
            job_state.round, some, {"hot": tuple(sorted(set(DEVICES) - set(some)))}, {one: rng.random()}
        )
        epochs = {some[0]: 2} if rng.random() < 0.3 else {}
        return rng.choice(
            [
                survey,
                CohortSelected(job_state.round, job_state.attempt, some, dict.fromkeys(some, 2.0), 9.0, epochs=epochs),
            ]
        )
    if not asked:
        return rng.choice(
            [
                RoundClosed(job_state.round),
                RoundRetried(job_state.round, job_state.attempt + 1),
                CohortSelected(job_state.round, 0, (one,)),
            ]
        )
    code = rng.choice(["memory", "data", "none", "failed"])
    return rng.choice(
        [
            UpdateAccepted(job_state.round, of(run, asked[0], job_state.round), 3.5, rng.choice([None, 1.25])),
            UpdateAccepted(job_state.round, of(run, asked[-1], job_state.round), 0.1),
            TaskDeclined(
                job_state.round,
                asked[0],
                code,
                "x",
                MemoryShortage(5, 1.5, None) if code == "memory" else None,
                "boot 1",
            ),
            UpdateRejected(job_state.round, asked[0], "not finite"),
            DeadlineExtended(job_state.round),
            AttemptResumed(job_state.round, 4.5),
            RoundRetried(job_state.round, job_state.attempt + 1),
        ]
    )

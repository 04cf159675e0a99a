"""Requests of users to a coordinator: stop or resume runs, start, abort or roll back rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from fedquilt.coordinator.fleet.telemetry_store import TelemetryStore
from fedquilt.coordinator.rounds.events import JobEnded, NoteRecorded
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.coordinator.storage.rows import current_user
from fedquilt.coordinator.storage.store import ARMED, UNAPPROVED, UNENDED, Store, StoredJob
from fedquilt.core import JobError


def stop_run(store: Store, run: str) -> str:
    """Stop a run, at once or through its coordinator. Return a message for the user.

    Raises:
        JobError: If the run has ended.
        StoreError: If the run does not exist, or the home cannot be written.
    """
    row = store.find_job(run)
    if row.status not in UNENDED:
        raise JobError(f"{row.id} is {row.status} already")
    if store.is_served():
        store.set_status(row.id, "stopping")
        return f"{row.id} stops at the coordinator's next look at its store (within a second or so)"
    return (
        f"{row.id} is {store.end_inactive_job(row.id, JobEnded('stopped', 'by request'))}; no coordinator was "
        "running it"
    )


def resume_run(store: Store, run: str) -> StoredJob:
    """Mark a run for its coordinator to resume, or as armed if the run has a trigger. Return its row from before.

    Raises:
        JobError: If the run is done, or belongs to a simulation.
        StoreError: If the run does not exist, or the home cannot be written.
    """
    row = store.find_job(run)
    if row.status == "done":
        export = f"fedquilt model export {row.id} --home {store.home} --out FILE"
        raise JobError(f"{row.id} is done; `{export}` writes its result")
    if row.origin != "run":
        raise JobError(f"{row.id} is a simulation's: {store.describe_resume(row)}")
    store.set_status(row.id, ARMED if row.job.trigger is not None else "running")
    return row


def approve_run(store: Store, run: str) -> str:
    """Queue a run that a [trigger] started and that waits for approval. Return a message.

    Raises:
        JobError: If the run does not wait for approval.
        StoreError: If the run does not exist, or the home cannot be written.
    """
    row = store.find_job(run)
    if row.status != UNAPPROVED:
        raise JobError(f"{row.id} is {row.status}: only a run that is {UNAPPROVED} can be approved")
    store.append_event(row.id, NoteRecorded(f"approved by {current_user()}"))
    store.set_status(row.id, "queued")
    return f"{row.id} begins at the coordinator's next look at its store"


def remove_devices(store: Store, devices: Sequence[str], *, force: bool = False) -> str:
    """Queue devices for removal by the coordinator. Return a message for the user.

    Raises:
        JobError: If a device is unknown, or has a task and `force` is not set.
        StoreError: If the stored device data cannot be read or written.
    """
    with TelemetryStore(store.home, writes=True) as boards:
        known = {each.device: each for each in boards.load_statuses()}
        for device in devices:
            if device not in known:
                raise JobError(f"no coordinator of {store.home} has heard of a board {device!r}")
            if (doing := known[device].doing) is not None and not force and store.is_served():
                raise JobError(
                    f"{device} has a task of {doing.job}, round {doing.round + 1}: wait until it has answered, or take "
                    "the task back with --force"
                )
        boards.request_removal(devices)
    return (
        f"{', '.join(devices)}: removed {_describe_when(store)}. An agent that still runs brings its device "
        "back with its next "
        "message. A certificate is not revoked by this: `fedquilt identity revoke NAME`"
    )


def queue_rollout(store: Store, plan: RolloutPlan, payload: bytes | None) -> str:
    """Store the payload of a rollout, if any, queue the rollout, and return its id.

    Raises:
        JobError: If the plan is invalid, or another rollout of its kind is under way.
        StoreError: If the home cannot be written.
    """
    plan.require_valid()
    if payload is None:
        return store.rollouts.add_rollout(plan)
    ref = store.depot.store_bytes(payload)
    with store.open_transaction():
        store.depot.store_bytes(payload, ref)  # again if a coordinator has collected garbage since
        return store.rollouts.add_rollout(replace(plan, blob=ref))


def revert_rollout(store: Store, rollout: str = "") -> str:
    """Request the end of a rollout under way, or the roll-back of a completed one. Return a message for the user.

    Devices with its release return to what they ran before.

    Raises:
        JobError: If the rollout was reverted already, or a later rollout has reached its devices.
        StoreError: If the rollout does not exist, or the home cannot be written.
    """
    kept = store.rollouts.find_rollout(rollout)
    state = kept.state
    if state.is_reverted:
        raise JobError(f"{state.id} is {state.status}: boards have returned from it, or return when they come")
    known = [each.state for each in store.rollouts.readable_rollouts()]
    for later in itertools.dropwhile(lambda each: each.id != state.id, known):
        if later.id == state.id or later.plan.kind != state.plan.kind or later.offered.keys().isdisjoint(state.offered):
            continue
        raise JobError(
            f"boards {'were offered' if later.is_reverted else 'have'} {later.id} of {later.plan.name} since, "
            f"and keep one former state alone: roll out again what they ran before {state.id}"
        )
    store.rollouts.request_revert(state.id)
    how = "is ended" if state.is_under_way else "is taken back"
    return f"{state.id} of {state.plan.name} {how} {_describe_when(store)}: boards return to what they ran before"


def _describe_when(store: Store) -> str:
    if store.is_served():
        return "at the coordinator's next look at its store (within a second or so)"
    return f"as soon as a coordinator serves {store.home}"

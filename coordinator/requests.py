"""Requests of people to a coordinator: to stop a run or go on with it, to begin a rollout, end it or take it back."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fedquilt.coordinator.boards_store import BoardStore
from fedquilt.coordinator.facts import Ended, Noted
from fedquilt.coordinator.rollouts import Plan
from fedquilt.coordinator.store import ARMED, UNAPPROVED, UNENDED, Row, Store
from fedquilt.coordinator.store_rows import user
from fedquilt.core import JobError


def stop(store: Store, run: str) -> str:
    """Stop a run, at once or at its coordinator's next look at the store; returns what comes of it, as a sentence.

    Raises:
        JobError: it has ended already.
        StoreError: there is no such run, or the home cannot be written.
    """
    row = store.job(run)
    if row.status not in UNENDED:
        raise JobError(f"{row.id} is {row.status} already")
    if store.served():
        store.set_status(row.id, "stopping")
        return f"{row.id} stops at the coordinator's next look at its store (within a second or so)"
    return f"{row.id} is {store.end(row.id, Ended('stopped', 'by request'))}; no coordinator was running it"


def resume(store: Store, run: str) -> Row:
    """Let a stopped, failed or interrupted run go on, as soon as a coordinator looks at the store; returns its row.

    Raises:
        JobError: it is done, or a simulation's.
        StoreError: there is no such run, or the home cannot be written.
    """
    row = store.job(run)
    if row.status == "done":
        export = f"fedquilt export {row.id} --home {store.home} --out FILE"
        raise JobError(f"{row.id} is done; `{export}` writes its result")
    if row.origin == "fleet":
        raise JobError(f"{row.id} is a simulated fleet's: `fedquilt fleet JOB --home {store.home}` goes on with it")
    if row.origin == "simulation":
        raise JobError(f"{row.id} is a simulation's: `fedquilt.simulate` with this job and home goes on with it")
    store.set_status(row.id, ARMED if row.job.trigger is not None else "running")
    return row


def approve(store: Store, run: str) -> str:
    """Let a run begin that its job's [trigger] has started and that waits for its owner; returns what comes of it.

    Raises:
        JobError: it does not wait for that.
        StoreError: there is no such run, or the home cannot be written.
    """
    row = store.job(run)
    if row.status != UNAPPROVED:
        raise JobError(f"{row.id} is {row.status}: only a run that is {UNAPPROVED} can be approved")
    store.append(row.id, Noted(f"approved by {user()}"))
    store.set_status(row.id, "queued")
    return f"{row.id} begins at the coordinator's next look at its store"


def remove_devices(store: Store, devices: Sequence[str], *, force: bool = False) -> str:
    """Queue devices for removal by the coordinator, and return a message for the user.

    Raises:
        JobError: a device is not known, or has a task and `force` is not given.
        StoreError: what is kept of devices cannot be read or written.
    """
    with BoardStore(store.home, writes=True) as boards:
        known = {each.device: each for each in boards.boards()}
        for device in devices:
            if device not in known:
                raise JobError(f"no coordinator of {store.home} has heard of a board {device!r}")
            if (doing := known[device].doing) is not None and not force and store.served():
                raise JobError(
                    f"{device} has a task of {doing.job}, round {doing.round}: wait until it has answered, or take the "
                    "task back with --force"
                )
        boards.request_removal(devices)
    return (
        f"{', '.join(devices)}: removed {_when(store)}. An agent that still runs brings its device back with its next "
        "message. A certificate is not revoked by this: `fedquilt ca revoke NAME`"
    )


def queue_rollout(store: Store, plan: Plan, payload: bytes | None) -> str:
    """Store the payload of a rollout, if any, queue the rollout, and return its id.

    Raises:
        JobError: it cannot be carried out, or one of its kind is under way.
        StoreError: the home cannot be written.
    """
    plan.require()
    if payload is None:
        return store.rollouts.add(plan)
    ref = store.depot.put(payload)
    with store.transaction():
        store.depot.put(payload, ref)  # again if a coordinator has collected garbage since
        return store.rollouts.add(replace(plan, blob=ref))


def abort(store: Store, rollout: str = "") -> str:
    """End a rollout that is under way: boards that have it return; says what comes of it.

    Raises:
        JobError: it has ended.
        StoreError: there is no such rollout, or the home cannot be written.
    """
    kept = store.rollouts.find(rollout)
    if not kept.state.under_way:
        status = kept.state.status
        mend = f"; `fedquilt deploy --rollback {kept.state.id}` takes it back" if status == "done" else ""
        raise JobError(f"{kept.state.id} is {status}{mend}")
    store.rollouts.wish(kept.state.id, "abort")
    return f"{kept.state.id} of {kept.state.plan.name} is ended {_when(store)}: boards that have it return"


def roll_back(store: Store, rollout: str = "") -> str:
    """Take a rollout back that is done; says what comes of it.

    Raises:
        JobError: it is not done, has been taken back already, or boards have or had a later one.
        StoreError: there is no such rollout, or the home cannot be written.
    """
    kept = store.rollouts.find(rollout)
    state = kept.state
    if state.status != "done":
        mend = f"; `fedquilt deploy --abort {state.id}` ends it" if state.under_way else ""
        raise JobError(f"{state.id} is {state.status}{mend}")
    known = [each.state for each in store.rollouts.all()]
    for later in known[known.index(state) + 1 :]:
        if later.plan.kind != state.plan.kind or later.offered.keys().isdisjoint(state.offered):
            continue
        raise JobError(
            f"boards {'were offered' if later.over else 'have'} {later.id} of {later.plan.name} since, and keep one "
            f"former state alone: deploy anew what they ran before {state.id}"
        )
    store.rollouts.wish(state.id, "roll back")
    return f"{state.id} of {state.plan.name} is taken back {_when(store)}: boards return to what they ran before"


def _when(store: Store) -> str:
    if store.served():
        return "at the coordinator's next look at its store (within a second or so)"
    return f"as soon as a coordinator serves {store.home}"

"""Requests of people to a coordinator about a run: to stop it, and to go on with it."""

from __future__ import annotations

from fedquilt.coordinator.facts import Ended
from fedquilt.coordinator.store import UNENDED, Row, Store
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
    store.set_status(row.id, "running")
    return row

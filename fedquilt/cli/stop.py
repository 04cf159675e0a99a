"""`fedquilt stop`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb
from fedquilt.core import JobError


@verb()
@options.run_argument
@options.home
def stop(run: str, home: Path) -> None:
    """Stop a run at the coordinator's next look at its store; `resume` continues it."""
    from fedquilt.coordinator.facts import Ended

    with homes.existing(home) as store:
        row = store.job(run)
        if row.status not in ("queued", "running", "stopping"):
            raise JobError(f"{row.id} is {row.status} already")
        if store.served():
            store.set_status(row.id, "stopping")
            print(f"{row.id} stops at the coordinator's next look at its store (within a second or so)")
        else:
            status = store.end(row.id, Ended("stopped", "by request"))
            print(f"{row.id} is {status}; no coordinator was running it")

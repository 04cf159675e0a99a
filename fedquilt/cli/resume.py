"""`fedquilt resume`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb
from fedquilt.core import JobError


@verb()
@options.run_argument
@options.home
@options.broker()
def resume(run: str, home: Path, broker: options.Broker) -> int:
    """Continue a stopped, failed or interrupted run where it was."""
    with homes.existing(home) as store:
        row = store.job(run)
        if row.status == "done":
            raise JobError(f"{row.id} is done; `{homes.export_command(home, row.id)}` writes its result")
        if row.origin == "fleet":
            raise JobError(f"{row.id} is a simulated fleet's: `fedquilt fleet JOB --home {home}` goes on with it")
        if row.origin == "simulation":
            raise JobError(f"{row.id} is a simulation's: `fedquilt.simulate` with this job and home goes on with it")
        store.set_status(row.id, "running")
        return homes.follow(home, broker, store, row.id)

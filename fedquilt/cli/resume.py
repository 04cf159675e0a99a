"""`fedquilt resume`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
@options.blob_options
@options.broker_options()
def resume(run: str, home: Path, blobs: options.BlobOptions, broker: options.BrokerOptions) -> int:
    """Resume a stopped, failed or interrupted run, or approve one that a [trigger] started."""
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.storage.store import UNAPPROVED

    with home_access.open_existing_home(home) as store:
        if store.find_job(run).status == UNAPPROVED:
            print(run_control.approve_run(store, run))
            return 0
        return home_access.run_to_end(home, broker, blobs, store, lambda: run_control.resume_run(store, run).id)

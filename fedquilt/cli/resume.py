"""`fedquilt resume`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
@options.blob_options
@options.broker_options()
def resume(run: str, home: Path, blobs: options.Blobs, broker: options.Broker) -> int:
    """Resume a stopped, failed or interrupted run."""
    from fedquilt.coordinator import requests

    with homes.open_existing_home(home) as store:
        return homes.run_to_end(home, broker, blobs, store, lambda: requests.resume_run(store, run).id)

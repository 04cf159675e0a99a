"""`fedquilt resume`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home
@options.blobs
@options.broker()
def resume(run: str, home: Path, blobs: options.Blobs, broker: options.Broker) -> int:
    """Continue a stopped, failed or interrupted run where it was."""
    from fedquilt.coordinator import requests

    with homes.existing(home) as store:
        return homes.follow(home, broker, blobs, store, lambda: requests.resume(store, run).id)

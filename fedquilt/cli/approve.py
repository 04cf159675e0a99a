"""`fedquilt approve`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
def approve(run: str, home: Path) -> None:
    """Approve a run that was started by a job's [trigger] and waits for approval."""
    from fedquilt.coordinator import requests

    with homes.open_existing_home(home) as store:
        print(requests.approve_run(store, run))

"""`fedquilt approve`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
def approve(run: str, home: Path) -> None:
    """Approve a run that was started by a job's [trigger] and waits for approval."""
    from fedquilt.coordinator import control_requests

    with home_access.open_existing_home(home) as store:
        print(control_requests.approve_run(store, run))

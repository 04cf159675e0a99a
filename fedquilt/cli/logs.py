"""`fedquilt logs`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Go on until the run has ended.")
@options.home
@options.format
def logs(run: str, follow: bool, home: Path, format: str) -> None:
    """Show what happened in a run, round by round."""
    from fedquilt.coordinator.views import terminal

    with homes.existing(home) as store:
        terminal.tell(store, store.job(run).id, follow=follow, json=format == "json")

"""`fedquilt logs`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb, verbosity


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Show the rounds of the run until it has ended; with -v, every event.")
@options.home_option
@options.format_option
def logs(run: str, follow: bool, home: Path, format: str) -> None:
    """Show the events of a run, round by round."""
    from fedquilt.coordinator.views import terminal

    with home_access.open_existing_home(home) as store:
        terminal.print_log(store, store.find_job(run).id, follow=follow, json=format == "json", wordy=verbosity() > 0)

"""`fedquilt ls`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.home_option
@options.format_option
def ls(home: Path, format: str) -> None:
    """List the runs in --home with status, rounds, energy and exclusive disk space."""
    from fedquilt.coordinator import housekeeping
    from fedquilt.coordinator.views import log
    from fedquilt.transport import sealed

    with homes.open_existing_home(home) as store:
        own = housekeeping.exclusive_bytes(store)
        rows = [log.summarise_run(row, store, own) for row in store.all_jobs()]
        told = [sealed.UNSIGNED] if store.signed() is False else []
    homes.print_rows(format, rows, [*(log.format_runs(rows) or [homes.no_runs_message(home)]), *told])

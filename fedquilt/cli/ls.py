"""`fedquilt ls`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import verb


@verb()
@options.home_option
@options.format_option
def ls(home: Path, format: str) -> None:
    """List the runs in --home with status, rounds, result and exclusive disk space."""
    from fedquilt.coordinator.jobs import retention
    from fedquilt.coordinator.views import event_messages
    from fedquilt.security import authenticated_link

    with home_access.open_existing_home(home) as store:
        own = retention.exclusive_bytes(store)
        rows = [event_messages.summarise_run(row, store, own) for row in store.all_jobs()]
        told = [authenticated_link.UNSIGNED] if store.was_authenticated() is False else []
    home_access.print_rows(
        format, rows, [*(event_messages.format_runs(rows) or [home_access.no_runs_message(home)]), *told]
    )

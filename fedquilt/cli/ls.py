"""`fedquilt ls`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.home
@options.format
def ls(home: Path, format: str) -> None:
    """List the runs in --home: status, rounds, joules, and the bytes that each alone takes on the disk."""
    from fedquilt.coordinator import housekeeping
    from fedquilt.coordinator.views import log
    from fedquilt.transport import sealed

    with homes.existing(home) as store:
        own = housekeeping.own(store)
        rows = [log.summary(row, store, own) for row in store.all_jobs()]
        told = [sealed.UNSIGNED] if store.signed() is False else []
    homes.show(format, rows, [*(log.lines(rows) or [homes.empty(home)]), *told])

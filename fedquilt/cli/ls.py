"""`fedquilt ls`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.home
@options.format
def ls(home: Path, format: str) -> None:
    """List the runs in --home."""
    from fedquilt.coordinator.views import log
    from fedquilt.transport import sealed

    with homes.existing(home) as store:
        rows = [log.summary(row, store) for row in store.all_jobs()]
        told = [sealed.UNSIGNED] if store.signed() is False else []
    homes.show(format, rows, [*(log.lines(rows) or [homes.empty(home)]), *told])

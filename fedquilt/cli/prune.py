"""`fedquilt prune`."""

from __future__ import annotations

import time
from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@option("--keep", type=options.COUNT, metavar="N", help="Delete all runs that have ended but the N latest.")
@option(
    "--older-than", type=options.TIME, metavar="AGE", help="Delete runs that ended longer ago than this: 30d, 12h, 2w."
)
@option("--dry-run", is_flag=True, help="List the runs that would be deleted, and delete nothing.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.home_option
def prune(keep: int | None, older_than: float | None, dry_run: bool, yes: bool, home: Path) -> int:
    """Delete old runs that have ended, by age or number.

    With both --keep and --older-than, a run must match both. Queued, running and interrupted runs are not deleted.
    Without either option, only leftover files of interrupted deletions are removed.
    """
    from fedquilt.coordinator.jobs import retention

    with home_access.open_existing_home(home) as store:
        named = keep is not None or older_than is not None
        ids = retention.select_expired_runs(store, time.time(), keep, older_than) if named else []
        for id in ids:
            print(f"{'would delete' if dry_run else 'to delete'} {id}")
        if dry_run:
            return 0
        if ids and not home_access.confirm(f"delete {len(ids)} runs for good?", yes):
            return 130
        found = retention.remove_runs(store, ids)
    print(f"deleted {len(ids)} runs: {home_access.format_freed_space(found)}")
    return 0

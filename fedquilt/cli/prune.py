"""`fedquilt prune`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument(
    "runs",
    "Ids of runs to delete; a job's name stands for its latest run.",
    nargs=-1,
    metavar="[RUN]...",
    shell_complete=options.complete_runs,
)
@option("--keep", type=options.COUNT, metavar="N", help="Delete all runs that have ended but the N latest.")
@option(
    "--older-than", type=options.TIME, metavar="AGE", help="Delete runs that ended longer ago than this: 30d, 12h, 2w."
)
@option("--dry-run", is_flag=True, help="List the runs that would be deleted, and delete nothing.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.home_option
def prune(
    runs: tuple[str, ...], keep: int | None, older_than: float | None, dry_run: bool, yes: bool, home: Path
) -> int:
    """Delete named runs, or ended runs by age or number.

    With both --keep and --older-than, a run must match both. Queued, running and interrupted runs are deleted only by
    name. Without any of these, only leftover files of interrupted deletions are removed.
    """
    from fedquilt.coordinator.jobs import retention

    ends = keep is not None or older_than is not None
    if runs and ends:
        raise click.UsageError("name runs, or give --keep and --older-than: one of them", click.get_current_context())
    with home_access.open_existing_home(home) as store:
        ids = retention.select_expired_runs(store, time.time(), keep, older_than) if ends else []
        if runs:
            ids = list(dict.fromkeys(retention.find_run(store, run).id for run in runs))
            store.require_inactive(ids)
        for id in ids:
            print(f"{'would delete' if dry_run else 'to delete'} {id}")
        if dry_run:
            return 0
        if ids and not home_access.confirm(f"delete {len(ids)} runs for good?", yes):
            return 130
        found = retention.remove_runs(store, ids)
    print(f"deleted {len(ids)} runs: {home_access.format_freed_space(found)}")
    return 0

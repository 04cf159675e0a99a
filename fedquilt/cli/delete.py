"""`fedquilt delete`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument(
    "runs", "Ids of runs; a job's name stands for its latest run.", nargs=-1, required=True, shell_complete=options.runs
)
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.home
def delete(runs: tuple[str, ...], yes: bool, home: Path) -> int:
    """Delete runs for good: their log, results and what simulated boards kept; a running one is refused."""
    from fedquilt.coordinator import housekeeping

    with homes.existing(home) as store:
        ids = list(dict.fromkeys(housekeeping.find(store, run).id for run in runs))
        store.require_idle(ids)
        if not homes.agreed(f"delete {', '.join(ids)} for good?", yes):
            return 130
        found = housekeeping.remove_runs(store, ids)
    print(f"deleted {', '.join(ids)}: {homes.swept(found)}")
    return 0

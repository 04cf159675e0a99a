"""`fedquilt delete`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument(
    "runs",
    "Ids of runs; a job's name stands for its latest run.",
    nargs=-1,
    required=True,
    shell_complete=options.complete_runs,
)
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.home_option
def delete(runs: tuple[str, ...], yes: bool, home: Path) -> int:
    """Delete runs permanently: event logs, results and the state of simulated devices."""
    from fedquilt.coordinator.jobs import retention

    with home_access.open_existing_home(home) as store:
        ids = list(dict.fromkeys(retention.find_run(store, run).id for run in runs))
        store.require_inactive(ids)
        if not home_access.confirm(f"delete {', '.join(ids)} for good?", yes):
            return 130
        found = retention.remove_runs(store, ids)
    print(f"deleted {', '.join(ids)}: {home_access.format_freed_space(found)}")
    return 0

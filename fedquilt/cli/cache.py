"""`fedquilt cache`: list, drop."""

from __future__ import annotations

import time
from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import F, argument, option, verb_group


def folder_option(function: F) -> F:
    return option(
        "--out",
        type=options.FOLDER,
        default=Path("fedquilt-compare"),
        help="Folder of runs: the --out of `compare`, the --kept of `reproduce`.",
    )(function)


@verb_group()
def cache() -> None:
    """Manage the completed runs that `compare` reuses."""


@cache.command(name="list")
@folder_option
@options.format_option
def list_runs(out: Path, format: str) -> None:
    """List the runs in --out: key, age, size and content."""
    from fedquilt.tools.experiments import run_cache

    found = run_cache.list_runs(out)
    home_access.print_rows(format, found, run_cache.format_entries(found, time.time()))


@cache.command()
@argument("keys", "Keys of runs as `cache list` shows them, or their beginnings.", nargs=-1)
@option("--all", "everything", is_flag=True, help="Drop every run in --out.")
@option("--method", metavar="METHOD", shell_complete=options.complete_methods, help="Drop the runs of this method.")
@option("--older-than", type=options.TIME, metavar="AGE", help="Drop runs older than this age: 30d, 12h, 2w.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@folder_option
def drop(
    keys: tuple[str, ...], everything: bool, method: str | None, older_than: float | None, yes: bool, out: Path
) -> int:
    """Delete runs from --out, which the next `compare` repeats if needed."""
    from fedquilt.console import units
    from fedquilt.tools.experiments import run_cache

    found = run_cache.select_entries(
        run_cache.list_runs(out), keys, time.time(), everything=everything, method=method, older_s=older_than
    )
    if found and not home_access.confirm(f"drop {len(found)} kept runs from {out}?", yes):
        return 130
    run_cache.delete_entries(out, found)
    print(f"dropped {len(found)} kept runs: {units.format_bytes(sum(each.bytes for each in found))} freed")
    return 0

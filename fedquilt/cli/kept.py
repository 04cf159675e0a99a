"""`fedquilt kept`: list, drop."""

from __future__ import annotations

import time
from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import F, argument, family, option


def folder(function: F) -> F:
    """--out: the folder that `compare` or `bench stitch --ablate` wrote into."""
    return option(
        "--out",
        type=options.FOLDER,
        default=Path("fedquilt-compare"),
        help="Folder of runs: the --out of `compare` or `bench stitch --ablate`.",
    )(function)


@family()
def kept() -> None:
    """List or drop the finished runs that `compare` keeps so as not to repeat them."""


@kept.command(name="list")
@folder
@options.format
def listing(out: Path, format: str) -> None:
    """List the runs in --out: key, age, size and what was run."""
    from fedquilt.tools.experiments import run_cache

    found = run_cache.entries(out)
    homes.show(format, found, run_cache.lines(found, time.time()))


@kept.command()
@argument("keys", "Keys of runs as `kept list` shows them, or their beginnings.", nargs=-1)
@option("--all", "everything", is_flag=True, help="Drop every run in --out.")
@option("--method", metavar="METHOD", shell_complete=options.methods, help="Drop the runs of this method.")
@option("--older-than", type=options.TIME, metavar="AGE", help="Drop runs older than this age: 30d, 12h, 2w.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@folder
def drop(
    keys: tuple[str, ...], everything: bool, method: str | None, older_than: float | None, yes: bool, out: Path
) -> int:
    """Drop runs from --out; the next `compare` repeats those that it needs."""
    from fedquilt import units
    from fedquilt.tools.experiments import run_cache

    found = run_cache.choose(
        run_cache.entries(out), keys, time.time(), everything=everything, method=method, older_s=older_than
    )
    if found and not homes.agreed(f"drop {len(found)} kept runs from {out}?", yes):
        return 130
    run_cache.drop(out, found)
    print(f"dropped {len(found)} kept runs: {units.size(sum(each.bytes for each in found))} freed")
    return 0

"""`fedquilt init`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fedquilt.cli import job_files, options
from fedquilt.cli.commands import option, verb
from fedquilt.core import StoreError


@verb()
@option(
    "--method",
    metavar="METHOD",
    help="Method of the job (default: ask, or fedavg where nobody can be asked).",
    shell_complete=options.complete_methods,
)
@option("--data", metavar="DATA", help="Examples, as `simulate` takes them (default: ask, or digits).")
@option("--label", default="", show_default=False, metavar="COLUMN", help="Column or array to predict (default: y).")
@option("--devices", type=options.POSITIVE, help="Number of devices (default: ask, or 10).")
@option(
    "--rounds",
    type=options.POSITIVE,
    help="Number of rounds (default: ask, or 30; at most 200 for a method that ends by itself).",
)
@option("--out", type=options.NEW_JOB, default=Path("job.toml"), help="The job file to write.")
@option("--force", is_flag=True, help="Overwrite the job file.")
def init(
    method: str | None,
    data: str | None,
    label: str,
    devices: int | None,
    rounds: int | None,
    out: Path,
    force: bool,
) -> None:
    """Write a commented job file, from questions or from options.

    On a terminal, `init` asks for missing options. Data and network are chosen as by `simulate`. For a method with
    donors, the donors are two of torchvision's image networks.
    """
    from fedquilt.tools.lab import new_job

    if out.exists() and not force:
        raise StoreError(f"{out} exists already: --force overwrites it, --out names another file")
    method = method or str(_ask("method (`fedquilt methods` lists them)", "fedavg"))
    usual = new_job.choose_rounds(method)
    found = new_job.inspect_source(data or _ask(f"data: a path, or {new_job.DIGITS}", new_job.DIGITS), label)
    devices = devices or int(_ask("devices", new_job.choose_devices(found), options.POSITIVE))
    rounds = rounds or int(_ask("rounds", usual, options.POSITIVE))
    job_files.write_job(new_job.NewJob(out, found, method, devices, rounds), force=force)
    print(f"next: `fedquilt simulate {out}`")


def _ask(question: str, default: Any, kind: options.ParsedType | None = None) -> Any:
    return click.prompt(question, default=default, type=kind, err=True) if sys.stdin.isatty() else default

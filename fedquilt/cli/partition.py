"""`fedquilt partition`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@option("--devices", type=options.POSITIVE, help="Number of devices (default: the job's fleet.devices).")
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing with a dot for each device and class.")
@options.format_option
def partition(job: Path, devices: int | None, out: Path | None, format: str) -> int:
    """Show the partition of a job's examples among its devices."""
    from fedquilt.console import progress
    from fedquilt.tools.report import partition as tool

    with progress.show_progress(f"sharing out the examples of {job}"):
        return tool.main(home_access.load_job(job), devices, out, format)

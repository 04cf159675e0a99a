"""`fedquilt front`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@option("--bundle", type=options.FOLDER, help="The bundle that `prepare` made (default: JOB.bundle).")
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing of the front.")
@options.format_option
def front(job: Path, bundle: Path | None, out: Path | None, format: str) -> int:
    """Show the trade-off between round duration and energy."""
    from fedquilt.console import progress
    from fedquilt.tools.experiments import energy_front as tool

    with progress.show_progress(f"planning rounds of {job}"):
        return tool.main(home_access.load_job(job), home_access.bundle_folder(job, bundle), out, format)

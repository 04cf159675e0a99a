"""`fedquilt front`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@option("--bundle", type=options.FOLDER, help="The bundle that `prepare` made (default: JOB.bundle).")
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing of the front.")
@options.format
def front(job: Path, bundle: Path | None, out: Path | None, format: str) -> int:
    """Show how long and how dear rounds of a job can be on its [fleet], as rounds planned for energy are."""
    from fedquilt import progress
    from fedquilt.tools.experiments import energy_front as tool

    with progress.during(f"planning rounds of {job}"):
        return tool.main(homes.load_job(job), homes.bundle_of(job, bundle), out, format)

"""`fedquilt prepare`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, job_files, options
from fedquilt.cli.commands import verb


@verb()
@options.job_argument
def prepare(job: Path) -> None:
    """Create JOB.bundle beside a job file: donors split into blocks, or a network's initial weights.

    `run` and `simulate` do this where the job, or a file that it names, has changed.
    """
    job_files.prepare_bundle(job, home_access.load_job(job))

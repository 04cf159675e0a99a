"""`fedquilt prepare`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@option("--out", type=options.FOLDER, help="The bundle's folder (default: JOB.bundle beside the job file).")
def prepare(job: Path, out: Path | None) -> None:
    """Make a job's bundle: donors split into blocks, or a network's first weights."""
    from fedquilt import config, progress, units
    from fedquilt.tools.artefacts import prepare as tool

    read, folder = homes.load_job(job), homes.bundle_of(job, out)
    with config.naming(str(job)), progress.during(f"preparing {folder}"):
        made = tool.prepare_and_check(read, folder, progress.LINE.aside)
    size = sum(ref.size for ref in made.files.values())
    print(f"{folder}: {len(made.files)} files, {units.size(size)}")

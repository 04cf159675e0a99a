"""`fedquilt prepare`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import verb


@verb()
@options.job_argument
def prepare(job: Path) -> None:
    """Create JOB.bundle beside a job file: donors split into blocks, or a network's initial weights."""
    from fedquilt.console import progress, units
    from fedquilt.formats import toml
    from fedquilt.tools.artefacts import prepare as tool

    read, folder = home_access.load_job(job), home_access.bundle_folder(job)
    with toml.prefix_errors(str(job)), progress.show_progress(f"preparing {folder}"):
        made = tool.prepare_and_check(read, folder, progress.LINE.print_to_stdout)
    size = sum(ref.size for ref in made.files.values())
    print(f"{folder}: {len(made.files)} files, {units.format_bytes(size)}")

"""Steps of several verbs before a run: writing a job file, and preparing its bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.cli import home_access
from fedquilt.console import table

if TYPE_CHECKING:
    from fedquilt.coordinator import settings
    from fedquilt.tools.lab import new_job


def write_job(job: new_job.NewJob, *, force: bool) -> None:
    """Write a first job file, and print what was found and chosen.

    Raises:
        JobError: If the method does not fit the data.
        StoreError: If the file exists with another content, or cannot be written.
    """
    job.write(force=force)
    for line in (*job.list_notes(), f"wrote {job.out}"):
        print("\n".join(table.fold_line(line)), flush=True)


def prepare_if_changed(path: Path, job: settings.JobSettings) -> Path:
    """Prepare a job if the job file or its data have changed, and return the folder of the bundle.

    Raises:
        FedquiltError: If the job cannot be prepared.
    """
    from fedquilt.formats import job_bundle

    folder = home_access.bundle_folder(path)
    return folder if job_bundle.is_current(path, folder) else prepare_bundle(path, job)


def prepare_bundle(path: Path, job: settings.JobSettings) -> Path:
    """Write the bundle of a job, and return its folder.

    Raises:
        FedquiltError: If the job cannot be prepared.
    """
    import msgspec

    from fedquilt.console import progress, units
    from fedquilt.formats import job_bundle, toml
    from fedquilt.tools.artefacts import prepare

    folder = home_access.bundle_folder(path)
    with toml.prefix_errors(str(path)), progress.show_progress(f"preparing {folder}"):
        given = job_bundle.stamp_inputs(path, msgspec.to_builtins(job))
        made = prepare.prepare_and_check(job, folder, progress.LINE.print_to_stdout)
        job_bundle.record_inputs(given, folder)
    size = sum(ref.size for ref in made.files.values())
    print(f"{folder}: {len(made.files)} files, {units.format_bytes(size)}", flush=True)
    return folder

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
    import msgspec

    from fedquilt import config, units
    from fedquilt.coordinator import job as running
    from fedquilt.tools.artefacts import prepare as tool

    read, folder = homes.load_job(job), homes.bundle_of(job, out)
    with config.naming(str(job)):
        made = tool.prepare(msgspec.to_builtins(read), folder, print)
    size = sum(ref.size for ref in made.files.values())
    print(f"{folder}: {len(made.files)} files, {units.size(size)}")
    with config.naming(str(job)):
        running.first_state(read, made)
    if read.data:
        from fedquilt.data import fitting
        from fedquilt.data.spec import DataSpec

        spec = DataSpec.parse(read.data)
        if spec.synthetic or all(
            Path(each.path).exists() for each in spec.sources or (spec,)
        ):  # else only boards have it
            fitting.require_fit(made.meta, spec)

"""`fedquilt compare`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@option(
    "--methods",
    many=True,
    metavar="METHOD",
    help="Methods to compare (default: the job's own and those of its [compare] tables).",
    shell_complete=options.complete_methods,
)
@option("--seeds", type=options.WHOLE, many=True, default=(0, 1, 2), help="Seeds; every method is run once with each.")
@option("--rounds", type=options.POSITIVE, help="Number of rounds of every run (default: the job's).")
@option("--target", type=options.ABOVE_0, metavar="A", help="Count costs up to this accuracy, 0 to 1, or this RMSE.")
@option(
    "--set",
    "changes",
    many=True,
    commas=False,
    metavar="METHOD.PARAM=VALUE",
    help="Parameters of methods; they override those in [compare.METHOD].",
)
@option(
    "--out", type=options.FOLDER, default=Path("fedquilt-compare"), help="Folder for finished runs, plots and the page."
)
@options.format_option
@options.worker_options
def compare(
    job: Path,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    rounds: int | None,
    target: float | None,
    changes: tuple[str, ...],
    out: Path,
    format: str,
    workers: options.WorkerOptions,
) -> int:
    """Compare methods with several seeds on the same simulated fleet."""
    from fedquilt.tools.experiments import comparison as tool

    return tool.compare_and_print(
        home_access.load_job(job),
        home_access.bundle_folder(job),
        out,
        names=methods,
        seeds=list(seeds),
        rounds=rounds,
        target=target,
        changes=tool.parse_changes(list(changes)),
        format=format,
        **workers.to_keywords(),
    )

"""`fedquilt compare`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.job_argument
@options.bundle
@option(
    "--methods",
    many=True,
    metavar="METHOD",
    help="Which (default: the job's own and those of its [compare] tables).",
    shell_complete=options.methods,
)
@option("--seeds", type=options.WHOLE, many=True, default=(0, 1, 2), help="One run of each method with each.")
@option("--rounds", type=options.POSITIVE, help="Of every run (default: the job's).")
@option("--target", type=options.ABOVE_0, metavar="A", help="Accuracy, 0 to 1, or RMSE, to which costs are counted.")
@option(
    "--on",
    type=options.OneOf(("test", "held")),
    default="test",
    help="Accuracy on the test set, or on held-out shares, for methods that leave each device its own network.",
)
@option(
    "--set",
    "changes",
    many=True,
    commas=False,
    metavar="METHOD.PARAM=VALUE",
    help="Parameters, over [compare.METHOD].",
)
@option("--workers", type=options.POSITIVE, help="Processes (default: one for each core).")
@option("--out", type=options.FOLDER, default=Path("fedquilt-compare"), help="Finished runs, plots, page.")
@options.format
def compare(
    job: Path,
    bundle: Path | None,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    rounds: int | None,
    target: float | None,
    on: str,
    changes: tuple[str, ...],
    workers: int | None,
    out: Path,
    format: str,
) -> int:
    """Run several methods with several seeds on a simulated fleet, beside each other."""
    from fedquilt.tools.experiments import compare as tool

    return tool.main(
        homes.load_job(job),
        homes.bundle_of(job, bundle),
        out,
        names=methods,
        seeds=list(seeds),
        rounds=rounds,
        target=target,
        on=on,
        changes=tool.parse_changes(list(changes)),
        workers=workers,
        format=format,
    )

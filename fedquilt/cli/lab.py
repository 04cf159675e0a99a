"""Commands for a first job, and for studies: `demo`, `init` and `lab`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from fedquilt.cli import home_access, jobs, options
from fedquilt.cli.commands import argument, option, verb, verb_group, verbosity
from fedquilt.console import progress
from fedquilt.core import JobError, StoreError


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-demo"), help="Folder for what it makes.")
@option("--open", "show", is_flag=True, help="Open the report in a browser at the end.")
@options.format_option
def demo(out: Path, show: bool, format: str) -> int:
    """Run a demo: simulated devices stitch a network for handwritten digits."""
    from fedquilt.tools.lab import demo as tool

    return tool.run_demo(out, format, verbosity() > 0, show)


@verb()
@option(
    "--method",
    metavar="METHOD",
    help="Method of the job (default: ask, or fedavg where nobody can be asked).",
    shell_complete=options.complete_methods,
)
@option("--data", metavar="DATA", help="Examples, as `simulate` takes them (default: ask, or digits).")
@option("--label", default="", show_default=False, metavar="COLUMN", help="Column or array to predict (default: y).")
@option("--devices", type=options.POSITIVE, help="Number of devices (default: ask, or 10).")
@option(
    "--rounds",
    type=options.POSITIVE,
    help="Number of rounds (default: ask, or 30; at most 200 for a method that ends by itself).",
)
@option("--out", type=options.NEW_JOB, default=Path("job.toml"), help="The job file to write.")
@option("--force", is_flag=True, help="Overwrite the job file.")
def init(
    method: str | None, data: str | None, label: str, devices: int | None, rounds: int | None, out: Path, force: bool
) -> None:
    """Write a commented job file, from questions or from options.

    On a terminal, `init` asks for missing options. Data and network are chosen as by `simulate`. For a method with
    donors, the donors are two of torchvision's image networks.
    """
    from fedquilt.tools.lab import new_job

    if out.exists() and not force:
        raise StoreError(f"{out} exists already: --force overwrites it, --out names another file")
    method = method or str(_ask("method (`fedquilt methods` lists them)", "fedavg"))
    default_rounds = new_job.choose_rounds(method)
    source = data or str(_ask(f"data: a path, or {new_job.DIGITS}", new_job.DIGITS))
    with progress.show_progress(f"inspecting {source}"):
        inspection = new_job.inspect_source(source, label)
    devices = devices or int(_ask("devices", new_job.choose_devices(inspection), options.POSITIVE))
    rounds = rounds or int(_ask("rounds", default_rounds, options.POSITIVE))
    jobs.write_job(new_job.NewJob(out, inspection, method, devices, rounds), force=force)
    print(f"next: `fedquilt simulate {out}`")


def _ask(question: str, default: Any, kind: options.ParsedType | None = None) -> Any:
    return click.prompt(question, default=default, type=kind, err=True) if sys.stdin.isatty() else default


@verb_group()
def lab() -> None:
    """Study a job, a method or its privacy, and reproduce papers."""


@lab.command()
@options.source_argument
@options.label_column_option
@option("--devices", type=options.POSITIVE, help="Number of devices (default: the job's fleet.devices).")
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing with a dot for each device and class.")
@options.format_option
def partition(source: str, label: str, devices: int | None, out: Path | None, format: str) -> int:
    """Show the partition of examples among devices, of a job or of data as `simulate` has it."""
    from fedquilt.tools.report import partition as tool

    with progress.show_progress(f"partitioning the examples of {source}"):
        if source.endswith(".toml"):
            if label:
                raise JobError(f"--label requires data, but {source} is a job file: leave it out")
            return tool.print_counts(home_access.load_job(Path(source)), devices, out, format)
        from fedquilt.tools.lab import new_job

        return tool.print_counts(new_job.make_simulation_settings(source, label, devices), devices, out, format)


@lab.command()
@options.job_argument
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing of the front.")
@options.format_option
def front(job: Path, out: Path | None, format: str) -> int:
    """Show the trade-off between round duration and energy."""
    from fedquilt.tools.experiments import energy_front as tool

    settings = home_access.load_job(job)
    bundle = jobs.prepare_if_changed(job, settings, progress.LINE.print_lines)
    with progress.show_progress(f"planning rounds of {job}"):
        return tool.print_fronts(settings, bundle, out, format)


@lab.command()
@argument("name", "Name of a method, module:name, or an installed package.")
def conformance(name: str) -> int:
    """Check a method, or all plug-ins of a package, against fedquilt's rules."""
    from fedquilt.testing import conformance as tool

    if not verbosity():  # the line of a check reports its failure
        logging.getLogger("fedquilt").setLevel(logging.CRITICAL)
    failed = 0
    with progress.show_progress(f"checking {name}"):
        for passed, line in tool.check_package(name):
            failed += not passed
            progress.LINE.print_to_stdout(line)
    print(f"{failed} failed" if failed else "it conforms")
    return 8 if failed else 0


@lab.command()
@option("--data", type=options.PATH, required=True, help="Images: a folder, .npz or IDX files.")
@option("--images", type=options.POSITIVE, default=4, help="Number of images to reconstruct.")
@option("--size", type=options.POSITIVE, help="Width and height in pixels to scale images to (default: their own).")
@option(
    "--out",
    type=options.PATH,
    default=Path("fedquilt-audit.svg"),
    metavar="FILE.svg",
    help="File for a drawing of original and reconstructed images.",
)
@options.format_option
def audit(data: Path, images: int, size: int | None, out: Path, format: str) -> None:
    """Measure how well images can be reconstructed from a device's uploads."""
    from fedquilt.tools.lab import audit as tool

    with progress.show_progress("reconstructing images"):
        tool.audit_and_print(data, out, format, {"count": images, "size": size or 0})


def complete_tables(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from fedquilt.tools.lab import papers

    found = [CompletionItem(each) for each in papers.load_tables() if each.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


@lab.command()
@argument(
    "table", "A paper's table, or FILE.toml with a grid of your own.", required=False, shell_complete=complete_tables
)
@option("--data", type=options.FOLDER, metavar="FOLDER", help="Folder with the real data that some tables need.")
@option(
    "--seeds",
    type=options.INTEGER,
    variadic=True,
    help="Seeds; every job is run once with each (default: the table's).",
)
@option(
    "--rounds", type=options.POSITIVE, help="Number of rounds in place of the table's; claims are then not checked."
)
@option("--columns", variadic=True, metavar="NAME", help="Run only these columns of the table.")
@option("--rows", variadic=True, metavar="NAME", help="Run only these rows; claims that compare others are left out.")
@option("--out", type=options.PATH, metavar="FILE", help="File for the result as JSON, with every curve.")
@option(
    "--kept",
    type=options.FOLDER,
    default=Path("fedquilt-compare"),
    help="Folder of finished runs, which are not repeated.",
)
@options.format_option
def reproduce(
    table: str | None,
    data: Path | None,
    seeds: tuple[int, ...],
    rounds: int | None,
    columns: tuple[str, ...],
    rows: tuple[str, ...],
    out: Path | None,
    kept: Path,
    format: str,
) -> int:
    """Reproduce a table of a paper, or run a grid. Without TABLE, list the tables."""
    from fedquilt.tools.lab import papers as tool

    return tool.list_or_run_tables(
        table,
        seeds=list(seeds) or None,
        rounds=rounds,
        folder=None if data is None else data.absolute(),  # other relative paths are of the table's folder
        columns=list(columns) or None,
        rows=list(rows) or None,
        out=out,
        cache_folder=kept,
        format=format,
    )

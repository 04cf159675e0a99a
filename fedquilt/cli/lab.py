"""`fedquilt lab`: partition, front, conformance, audit, reproduce, bench."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.bench import bench
from fedquilt.cli.commands import argument, option, verb_group, verbosity
from fedquilt.cli.reproduce import reproduce


@verb_group()
def lab() -> None:
    """Study a job, a method or its privacy, reproduce papers and run benches."""


lab.add_command(reproduce)
lab.add_command(bench)


@lab.command()
@options.job_argument
@option("--devices", type=options.POSITIVE, help="Number of devices (default: the job's fleet.devices).")
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing with a dot for each device and class.")
@options.format_option
def partition(job: Path, devices: int | None, out: Path | None, format: str) -> int:
    """Show the partition of a job's examples among its devices."""
    from fedquilt.console import progress
    from fedquilt.tools.report import partition as tool

    with progress.show_progress(f"sharing out the examples of {job}"):
        return tool.print_counts(home_access.load_job(job), devices, out, format)


@lab.command()
@options.job_argument
@option("--out", type=options.PATH, metavar="FILE.svg", help="File for a drawing of the front.")
@options.format_option
def front(job: Path, out: Path | None, format: str) -> int:
    """Show the trade-off between round duration and energy."""
    from fedquilt.console import progress
    from fedquilt.tools.experiments import energy_front as tool

    with progress.show_progress(f"planning rounds of {job}"):
        return tool.print_fronts(home_access.load_job(job), home_access.bundle_folder(job), out, format)


@lab.command()
@argument("name", "Name of a method, module:name, or an installed package.")
def conformance(name: str) -> int:
    """Check that a method, or all plug-ins of a package, follow fedquilt's rules."""
    from fedquilt.console import progress
    from fedquilt.testing import package_checks

    if not verbosity():  # a check that fails is told in its line
        logging.getLogger("fedquilt").setLevel(logging.CRITICAL)
    failed = 0
    with progress.show_progress(f"checking {name}"):
        for good, line in package_checks.check_package(name):
            failed += not good
            progress.LINE.print_to_stdout(line)
    print(f"{failed} failed" if failed else "it conforms")
    return 8 if failed else 0


@lab.command()
@option("--data", type=options.PATH, required=True, help="Images: a folder, .npz or IDX files.")
@option("--images", type=options.POSITIVE, default=4, help="Number of images to rebuild.")
@option("--size", type=options.POSITIVE, help="Width and height in pixels to scale images to (default: their own).")
@option(
    "--out",
    type=options.PATH,
    default=Path("fedquilt-audit.svg"),
    metavar="FILE.svg",
    help="File for a drawing of the original and rebuilt pictures.",
)
@options.format_option
def audit(data: Path, images: int, size: int | None, out: Path, format: str) -> int:
    """Measure how well images can be reconstructed from a device's uploads."""
    from fedquilt.console import progress
    from fedquilt.tools.lab import audit as tool

    with progress.show_progress("rebuilding pictures"):
        return tool.audit_and_print(data, out, format, {"count": images, "size": size or 0})

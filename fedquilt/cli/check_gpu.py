"""`fedquilt board check-gpu`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.PATH, help="File for the report as JSON.")
@option("--show", type=options.PATH, metavar="FILE", help="Show a report that exists, and check nothing.")
@option("--minutes", type=options.SECONDS, default=10.0, metavar="M", help="Time for all parts together, in minutes.")
@option("--set-clocks", is_flag=True, help="Pin the lowest and the highest operating point, and restore them.")
@option("--root", type=options.PATH, default=Path("/"), help="Folder that has proc, sys and run/fedquilt.")
@options.format_option
def check_gpu(out: Path | None, show: Path | None, minutes: float, set_clocks: bool, root: Path, format: str) -> int:
    """Check this machine's GPU through the agent's code, within 10 minutes."""
    import msgspec

    from fedquilt.console import progress
    from fedquilt.tools.boards.gpu_check import check, report

    if show is not None:
        found = report.read_report(show)
    else:
        with progress.show_progress("checking the GPU"):
            found = check.check_gpu(out, minutes, root=root, set_clocks=set_clocks, say=progress.LINE.set_part)
    print(msgspec.json.encode(found).decode() if format == "json" else "\n".join(report.format_report(found)))
    return report.exit_code(found)

"""`fedquilt board check-gpu`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.PATH, help="File for the report as JSON.")
@option("--minutes", type=options.SECONDS, default=10.0, metavar="M", help="Time for all parts together, in minutes.")
@options.format_option
def check_gpu(out: Path | None, minutes: float, format: str) -> int:
    """Check this machine's GPU through the agent's code, within 10 minutes."""
    import msgspec

    from fedquilt.console import progress
    from fedquilt.host import disk
    from fedquilt.tools.boards import gpu_check

    with progress.show_progress("checking the GPU"):
        found = gpu_check.GpuCheck().run(60 * minutes)
    text = msgspec.json.format(msgspec.json.encode(found)).decode()
    if out is not None:
        disk.write_output(out, text + "\n")
    print(text if format == "json" else "\n".join(gpu_check.format_report(found)))
    return gpu_check.exit_code(found)

"""`fedquilt export`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--out", type=options.PATH, required=True, help="The file to write.")
@options.home_option
def export(run: str, out: Path, home: Path) -> None:
    """Write a run's result: a stitched network as ONNX, or weights as safetensors."""
    from fedquilt.console import progress
    from fedquilt.tools.artefacts import export as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"exporting {run}"):
        progress.LINE.print_to_stdout(tool.export_result(store, run, out))

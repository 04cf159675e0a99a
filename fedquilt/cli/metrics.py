"""`fedquilt metrics`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-metrics"), help="Folder for the files.")
@option(
    "--target",
    default="127.0.0.1:9464",
    metavar="HOST:PORT",
    help="Where `fedquilt serve --metrics` serves, as Prometheus reaches it.",
)
def metrics(out: Path, target: str) -> None:
    """Write a Grafana dashboard, Prometheus alert rules and configuration."""
    from fedquilt.tools.operations import metrics as tool

    print("\n".join(map(str, tool.write_monitoring_files(out, target))))

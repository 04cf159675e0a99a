"""`fedquilt doctor`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb
from fedquilt.core import JobError


@verb()
@argument(
    "settings", "A board's agent.toml; its agent, broker and machine are checked.", type=options.PATH, required=False
)
@option("--home", type=options.FOLDER, help="Folder of a coordinator to check.")
@option("--root", type=options.PATH, default=Path("/"), help="Folder that has etc, proc and sys.")
@options.broker_options(default=None)
@options.format_option
def doctor(settings: Path | None, home: Path | None, root: Path, broker: options.BrokerOptions, format: str) -> int:
    """Find problems of a device, coordinator or machine, and show their fixes."""
    from fedquilt.tools.boards import doctor as tool

    if broker.url is None and broker.files:
        raise JobError("--ca, --cert, --key and --password-file go with --broker URL")
    wanted = tool.ExaminationTarget(
        settings=settings,
        home=home,
        broker=None if broker.url is None else broker.to_table(),
        fleet=broker.fleet,
        root=root,
    )
    return tool.print_findings(wanted, format)

"""`fedquilt agent`."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option(
    "--credentials",
    type=options.FOLDER,
    metavar="DIR",
    help="Folder with the broker's certificates and keys by their names, as systemd passes them.",
)
@options.log_format
def agent(settings: Path, credentials: Path | None, log_format: str) -> None:
    """Run the agent of this board, with the settings in agent.toml."""
    from fedquilt.edge_agent import credentials as files
    from fedquilt.edge_agent import daemon
    from fedquilt.edge_agent.settings import load

    logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))  # a log that tells when all is well
    found = files.taken(load(settings), credentials)
    if log_format == "json":
        from fedquilt import logs

        logs.as_json(device=found.device)
    daemon.run_agent(found)

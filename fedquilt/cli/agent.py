"""`fedquilt agent`."""

from __future__ import annotations

import logging
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option("--check", is_flag=True, help="Check whether this version could run here, with one small task, and end.")
@options.format_option
def agent(settings: Path, check: bool, format: str) -> None:
    """Run the agent of this device with its agent.toml, or with --check only run a small task to test this version."""
    from fedquilt.host import process_memory

    # paho imports it for web sockets behind a proxy only, and with it come http and email: 1.3 MB
    process_memory.import_on_use("urllib", "request")
    from fedquilt.edge_agent import daemon
    from fedquilt.edge_agent import settings as files
    from fedquilt.edge_agent.settings import load_settings

    logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))  # a log that tells when all is well
    found = files.apply_systemd_credentials(load_settings(settings))
    if check:
        from fedquilt.tools.boards.doctor.checks import version

        return version.check_version(found, settings)
    if format == "json":
        from fedquilt.host import logs

        logs.use_json_logs(device=found.device)
    return daemon.run_agent(found)

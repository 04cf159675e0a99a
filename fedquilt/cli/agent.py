"""`fedquilt agent`."""

from __future__ import annotations

import logging
from pathlib import Path

import fedquilt
from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument("settings", "The board's agent.toml.", type=options.PATH)
@option("--check", is_flag=True, help="Only run one small task to test this version.")
@options.format_option
def agent(settings: Path, check: bool, format: str) -> None:
    """Run the agent of this device with its agent.toml, or with --check only run a small task to test this version."""
    if not check:
        from fedquilt.cli import entry

        return entry.run_agent(settings, json_logs=format == "json")
    from fedquilt.edge_agent.settings import apply_systemd_credentials, load_settings
    from fedquilt.tools.boards.doctor import version

    logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))
    version.check_version(apply_systemd_credentials(load_settings(settings)), settings)
    print('{"ok": true}' if format == "json" else f"{settings}: fedquilt {fedquilt.__version__} can run here")

"""Process of an agent, without the command line's libraries and without modules that an idle agent does not use."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from fedquilt.host import logs, process_resources

# imported when used: by tasks, by errors, and urllib.request by paho for web sockets behind a proxy
DEFERRED: Final = ("json", "shutil", "subprocess", "tempfile", "traceback", "urllib.request")


def run_agent(settings: Path, *, verbose: bool = False, json_logs: bool = False) -> None:
    """Run the agent of a device until SIGTERM or SIGINT.

    Raises:
        JobError: If a setting is unusable or another agent runs in the same home.
        StoreError: If the home cannot be read or written.
    """
    for name in DEFERRED:
        process_resources.import_on_use(name)
    from fedquilt.edge_agent import daemon
    from fedquilt.edge_agent import settings as files

    logging.basicConfig(format=logs.PLAIN, stream=sys.stderr)
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if verbose else min(logging.INFO, root.level))  # a log that tells when all is well
    found = files.apply_systemd_credentials(files.load_settings(settings))
    if json_logs:
        logs.use_json_logs(device=found.device)
    daemon.run_agent(found)

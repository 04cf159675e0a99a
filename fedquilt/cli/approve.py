"""`fedquilt approve`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home
def approve(run: str, home: Path) -> None:
    """Let a run begin that its job's [trigger] has started, and that waits for its owner."""
    from fedquilt.coordinator import requests

    with homes.existing(home) as store:
        print(requests.approve(store, run))

"""`fedquilt stop`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home
def stop(run: str, home: Path) -> None:
    """Stop a run at the coordinator's next look at its store; `resume` continues it."""
    from fedquilt.coordinator import requests

    with homes.existing(home) as store:
        print(requests.stop(store, run))

"""`fedquilt stop`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
def stop(run: str, home: Path) -> None:
    """Stop a run, which `resume` can continue."""
    from fedquilt.coordinator import requests

    with homes.open_existing_home(home) as store:
        print(requests.stop_run(store, run))

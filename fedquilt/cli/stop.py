"""`fedquilt stop`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import verb


@verb()
@options.run_argument
@options.home_option
def stop(run: str, home: Path) -> None:
    """Stop a run, which `resume` can continue."""
    from fedquilt.coordinator import run_control

    with home_access.open_existing_home(home) as store:
        print(run_control.stop_run(store, run))

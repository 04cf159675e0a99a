"""`fedquilt logs`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Print what happens from now on too, until the run has ended.")
@option(
    "--track",
    many=True,
    metavar="TRACKER[:WHERE]",
    help="Also report every finished round to a tracker: tensorboard:FOLDER, mlflow:EXPERIMENT or wandb:PROJECT.",
)
@options.home_option
@options.format_option
def logs(run: str, follow: bool, track: tuple[str, ...], home: Path, format: str) -> None:
    """Show the events of a run, round by round."""
    from fedquilt.coordinator.views import terminal

    with home_access.open_existing_home(home) as store, contextlib.ExitStack() as stack:
        id, watch = store.find_job(run).id, {}
        if track:
            from fedquilt.api import experiment_tracking

            told = experiment_tracking.TrackerGroup([experiment_tracking.tracker_from_text(each) for each in track])
            watch = {"watch": stack.enter_context(experiment_tracking.follow_run(home, id, told))}
        terminal.print_log(store, id, follow=follow, json=format == "json", **watch)

"""`fedquilt devices`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb

if TYPE_CHECKING:
    from fedquilt.coordinator.views.devices import DeviceRow


@verb()
@argument("names", "Names of boards; without one, all.", nargs=-1, metavar="[NAME]...")
@options.label_option("label")
@option(
    "--state",
    type=options.WordChoice(("online", "offline", "silent", "working", "idle", "refused")),
    help="Only boards in this state; refused: that have declined a task, or had an update refused.",
)
@option("--remove", is_flag=True, help="Remove the named boards, until their next message.")
@option("--force", is_flag=True, help="With --remove: also boards that have a task.")
@option("--watch", is_flag=True, help="Stay, and show every change.")
@options.home_option
@options.format_option
def devices(
    names: tuple[str, ...],
    label: tuple[str, ...],
    state: str | None,
    remove: bool,
    force: bool,
    watch: bool,
    home: Path,
    format: str,
) -> None:
    """Show each device's state, task, power, memory, refusals and labels, or remove devices."""
    from fedquilt.console import table
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.storage.rows import is_served
    from fedquilt.coordinator.views import devices as view
    from fedquilt.core import JobError
    from fedquilt.formats import labels

    labels.require_valid_selection(label)
    home_access.require_home(home)
    if remove:
        if not names or label or state or watch:
            raise JobError("--remove takes the NAMEs of the boards to remove, and neither --label, --state nor --watch")
        with home_access.open_existing_home(home) as store:
            print("\n".join(table.fold_line(run_control.remove_devices(store, names, force=force), 0)))
        return None
    if force:
        raise JobError("--force has a meaning only with --remove")

    def read_devices() -> list[DeviceRow]:
        known = view.load_devices(home)
        if odd := set(names) - {each.board.device for each in known}:
            raise JobError(f"no coordinator of {home} has heard of a board {min(odd)!r}")
        found = view.filter_devices(known, label, state)
        return [each for each in found if not names or each.board.device in names]

    def print_devices(found: list[DeviceRow]) -> None:
        now = time.time()
        told = (
            []
            if format == "json"
            else view.format_devices(found, now, served=is_served(home), away=view.describe_outage(home, now))
        )
        if watch and format == "text" and sys.stdout.isatty():
            most = shutil.get_terminal_size().lines - 2
            hidden = ["... and more: --label, --state or a NAME shows fewer"] if len(told) > most else []
            print("\x1b[H\x1b[2J", end="")
            told = [*told[: most - len(hidden)], *hidden]
        home_access.print_rows(format, [each.to_dict() for each in found], told)
        sys.stdout.flush()

    if not watch:
        return print_devices(read_devices())
    view.watch_devices(print_devices, read_devices)

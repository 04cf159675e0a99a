"""`fedquilt devices`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.cli import homes, options
from fedquilt.cli.commands import argument, option, verb

if TYPE_CHECKING:
    from fedquilt.coordinator.views.devices import Device


@verb()
@argument("names", "Names of boards; without one, all.", nargs=-1, metavar="[NAME]...")
@option("--label", many=True, metavar="WORD", help="Only boards with this label or group; !WORD: without it.")
@option(
    "--state",
    type=options.OneOf(("online", "offline", "silent", "working", "idle", "refused")),
    help="Only boards in this state; refused: that have declined a task, or had an update refused.",
)
@option("--remove", is_flag=True, help="Remove the named boards, until their next message.")
@option("--force", is_flag=True, help="With --remove: also boards that have a task.")
@option("--watch", is_flag=True, help="Stay, and show every change.")
@options.home
@options.format
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
    from fedquilt import columns, labels
    from fedquilt.coordinator import requests
    from fedquilt.coordinator.store_rows import served
    from fedquilt.coordinator.views import devices as view
    from fedquilt.core import JobError

    labels.require_selection(label)
    homes.require(home)
    if remove:
        if not names or label or state or watch:
            raise JobError("--remove takes the NAMEs of the boards to remove, and neither --label, --state nor --watch")
        with homes.existing(home) as store:
            print("\n".join(columns.fold(requests.remove_devices(store, names, force=force), 0)))
        return None
    if force:
        raise JobError("--force has a meaning only with --remove")

    def look() -> list[Device]:
        known = view.look(home)
        if odd := set(names) - {each.board.device for each in known}:
            raise JobError(f"no coordinator of {home} has heard of a board {min(odd)!r}")
        found = view.chosen(known, label, state)
        return [each for each in found if not names or each.board.device in names]

    def show(found: list[Device]) -> None:
        now = time.time()
        told = (
            [] if format == "json" else view.format_devices(found, now, served=served(home), away=view.away(home, now))
        )
        if watch and format == "text" and sys.stdout.isatty():
            most = shutil.get_terminal_size().lines - 2
            hidden = ["... and more: --label, --state or a NAME shows fewer"] if len(told) > most else []
            print("\x1b[H\x1b[2J", end="")
            told = [*told[: most - len(hidden)], *hidden]
        homes.show(format, [each.row() for each in found], told)
        sys.stdout.flush()

    if not watch:
        return show(look())
    view.watch(show, look)

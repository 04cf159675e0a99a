"""`fedquilt board`: flash, uninstall, record, clocks."""

from __future__ import annotations

from fedquilt.cli.clocks import clocks
from fedquilt.cli.commands import verb_group
from fedquilt.cli.flash import flash, uninstall
from fedquilt.cli.record import record


@verb_group()
def board() -> None:
    """Install agents on boards, record a board's profile and pin its clocks."""


for each in (flash, uninstall, record, clocks):
    board.add_command(each)

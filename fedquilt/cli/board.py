"""`fedquilt board`: flash, uninstall, record, clocks, check-gpu."""

from __future__ import annotations

import contextlib

from fedquilt.cli.clocks import clocks
from fedquilt.cli.commands import verb_group
from fedquilt.cli.record import record


@verb_group()
def board() -> None:
    """Install agents on boards, record a board's profile, pin its clocks and check its GPU."""


with contextlib.suppress(ModuleNotFoundError):  # the wheel for boards has neither
    from fedquilt.cli.check_gpu import check_gpu
    from fedquilt.cli.flash import flash, uninstall

    board.add_command(flash)
    board.add_command(uninstall)
    board.add_command(check_gpu)
board.add_command(record)
board.add_command(clocks)

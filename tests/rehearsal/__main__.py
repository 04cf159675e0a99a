"""Rehearsal of a flashed board's first day under systemd, as root (docs/boards.md).

    python -m tests.rehearsal
    python -m tests.rehearsal --boards jetson-tx2 jetson-agx-orin:6

The board is a Debian for this machine's architecture in a folder. `board flash` installs an agent, and systemd-
nspawn boots the folder with systemd as its first process and a Jetson's files as its /sys. The agent runs by its own
units, as its own user, with systemd's limits. Each check reports its observation. Not rehearsed: a board's own
processor and kernel, a GPU, and meters and clocks that are more than files.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fedquilt.core import FedquiltError, JobError
from tests.rehearsal import enclosure, host, layouts
from tests.rehearsal.board import FIRST, MADE, Rehearsal
from tests.rehearsal.checks import CheckLog
from tests.rehearsal.layouts import Layout

OUT: Final = Path("fedquilt-rehearsed")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the system and logs")
    parser.add_argument("--mirror", metavar="URL", help="mirror of Debian (default: the one that apt uses here)")
    parser.add_argument(
        "--boards",
        nargs="+",
        default=[],
        metavar="BOARD[:JETPACK]",
        help="boards to boot as; all else is tried on the first of them (default: every board)",
    )
    parser.add_argument("--enclosed", action="store_true", help=argparse.SUPPRESS)  # the call of itself
    given = parser.parse_args(words)
    try:
        boards, out = select_layouts(given.boards), given.out.resolve()
        if given.enclosed:
            return rehearse(out, given.mirror, boards)
        if why := hindrance(out):
            raise JobError(why)
        with host.hold_lock():
            return enclosure.run_enclosed([sys.executable, "-m", "tests.rehearsal", "--enclosed", *words])
    except FedquiltError as error:
        print(error, file=sys.stderr)
        return 2


def hindrance(out: Path) -> str:
    return host.HostMachine.detect(out).hindrance(host.base_root(out))


def select_layouts(named: Sequence[str]) -> list[Layout]:
    if not named:
        return [FIRST, *(layout for layout in layouts.EVERY if layout != FIRST)]
    found: list[Layout] = []
    for name in named:
        board, _, jetpack = name.partition(":")
        fit = [one for one in layouts.EVERY if one[0] == board and jetpack in ("", str(one[1]))]
        if not fit:
            known = ", ".join(f"{board}:{jetpack}" for board, jetpack in layouts.EVERY)
            raise JobError(f"no board {name!r} to rehearse; there are: {known}")
        found += [layout for layout in fit if layout not in found]
    return found


def rehearse(out: Path, mirror: str | None, boards: Sequence[Layout]) -> int:
    folder = out / time.strftime("rehearsal-%Y%m%d-%H%M%S")
    for name in MADE:  # by a rehearsal that was killed
        for path in out.glob(f"rehearsal-*/{name}"):
            shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True)
    checks = CheckLog()
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.interrupt_on_signals())
        host.run_program("sh", "-c", "mkdir -p /run/systemd/nspawn && mount -t tmpfs tmpfs /run/systemd/nspawn")
        rehearsal = Rehearsal(folder, checks, stack)
        stack.callback(rehearsal.clean_up)
        rehearsal.prepare_fleet(out, mirror)
        rehearsal.check_board(boards[0])
        for layout in boards[1:]:
            rehearsal.check_start(layout)
    print("\n".join(checks.format_summary(str(folder))))
    return 0 if checks.all_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

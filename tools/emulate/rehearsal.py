"""`fedquilt emulate --systemd`: a flashed board's first day, on this machine and under its systemd.

A Debian for this machine's architecture in a folder; `fedquilt flash` puts an agent into it, and systemd-nspawn boots
it with systemd as its first process and a Jetson's files as its /sys. The agent runs by its own units, as its own
user, with what systemd gives and takes. Each check says what was seen. Not rehearsed: a board's own processor and
kernel (`fedquilt emulate` without --systemd has its instructions), a GPU, meters and clocks that are more than files.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedquilt.core import JobError
from fedquilt.disk import doing
from fedquilt.tools.emulate import enclosure, host, layouts
from fedquilt.tools.emulate.checks import Checks
from fedquilt.tools.emulate.layouts import Layout
from fedquilt.tools.emulate.rehearsed import FIRST, MADE, Rehearsal, base_folder
from fedquilt.tools.flash import own_python


def chosen(named: Sequence[str]) -> list[Layout]:
    """Boards by name, or all: "jetson-tx2" with each JetPack that runs on it, "jetson-orin-nx:6" with that one.

    Raises:
        JobError: no such board.
    """
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


def required(out: Path) -> host.Machine:
    """Look at this machine; returned where it has everything that a rehearsal needs.

    Args:
        out: for the base system and the rehearsals; need not be there yet.

    Raises:
        JobError: something is missing; says what, and the command that mends it.
    """
    here = host.Machine.here(out)
    host.require(here, base_folder(out.resolve()).exists(), host.BOOTED)
    return here


def enclosed(out: Path, mirror: str | None, boards: Sequence[str], format: str) -> int:
    """Run the rehearsal in an enclosure that nothing of it outlives (`enclosure`). See `main`; also its exit code."""
    here = required(out)
    words = [sys.executable, "-m", "fedquilt.cli", "emulate", "--systemd", "--enclosed", "--out", str(out)]
    words += [] if mirror is None else ["--mirror", mirror]
    words += ["--boards", *boards] if boards else []
    with host.alone(Path(here.programs["systemd-nspawn"])):
        return enclosure.run([*words, "--format", format])


def main(out: Path, mirror: str | None, boards: Sequence[Layout], format: str) -> int:
    """Rehearse, in an enclosure; 0 when every check held, else 1.

    Args:
        out: folder of the base system, which a later call reuses, and of each rehearsal.
        mirror: of Debian; None: the one that apt uses here.
        boards: boards to boot; everything else is tried on the first of them.
        format: "text", or "json" for the result as one line.

    Raises:
        JobError: a requirement is missing here; a step before the first check failed.
        StoreError: the folder cannot be used.
    """
    out = out.resolve()
    folder = out / time.strftime("rehearsal-%Y%m%d-%H%M%S")
    with doing(f"make {folder}"):
        for name in MADE:  # by a rehearsal that was killed
            for path in out.glob(f"rehearsal-*/{name}"):
                shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(parents=True)
    checks = Checks(quiet=format == "json")
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.interruptible())
        own_python.run(["sh", "-c", "mkdir -p /run/systemd/nspawn && mount -t tmpfs tmpfs /run/systemd/nspawn"])
        rehearsal = Rehearsal(folder, checks, stack)
        stack.callback(rehearsal.clean)
        rehearsal.prepare(out, mirror)
        rehearsal.whole(boards[0])
        for layout in boards[1:]:
            rehearsal.comes_up(layout)
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(checks.table())))
    print(msgspec.json.encode(checks.table()).decode() if format == "json" else "\n".join(checks.lines(str(folder))))
    return 0 if checks.held else 1

"""Rehearsal of a flashed board's first day under systemd (`fedquilt emulate --systemd`).

The board is a Debian for this machine's architecture in a folder. `board flash` installs an agent, and systemd-
nspawn boots the folder with systemd as its first process and a Jetson's files as its /sys. The agent runs by its own
units, as its own user, with systemd's limits. Each check reports its observation. Not rehearsed: a board's own
processor (`fedquilt emulate` without --systemd has its instructions) and kernel, a GPU, and meters and clocks that
are more than files.
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
from fedquilt.host.disk import disk_errors
from fedquilt.tools.emulate import enclosure, host, layouts, programs
from fedquilt.tools.emulate.checks import CheckLog
from fedquilt.tools.emulate.layouts import Layout
from fedquilt.tools.emulate.rehearsal_checks import FIRST, MADE, Rehearsal, base_folder


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


def check_machine(out: Path) -> host.HostMachine:
    here = host.HostMachine.detect(out)
    host.require_all(here, base_folder(out.resolve()).exists(), host.BOOTED)
    return here


def rehearse_enclosed(out: Path, mirror: str | None, boards: Sequence[str], format: str) -> int:
    here = check_machine(out)
    words = [sys.executable, "-m", "fedquilt.cli", "emulate", "--systemd", "--enclosed", "--out", str(out)]
    words += [] if mirror is None else ["--mirror", mirror]
    words += ["--boards", *boards] if boards else []
    with host.hold_lock(Path(here.programs["systemd-nspawn"])):
        return enclosure.run_enclosed([*words, "--format", format])


def main(out: Path, mirror: str | None, boards: Sequence[Layout], format: str) -> int:
    out = out.resolve()
    folder = out / time.strftime("rehearsal-%Y%m%d-%H%M%S")
    with disk_errors(f"make {folder}"):
        for name in MADE:  # by a rehearsal that was killed
            for path in out.glob(f"rehearsal-*/{name}"):
                shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(parents=True)
    checks = CheckLog(quiet=format == "json")
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.interrupt_on_signals())
        programs.run(["sh", "-c", "mkdir -p /run/systemd/nspawn && mount -t tmpfs tmpfs /run/systemd/nspawn"])
        rehearsal = Rehearsal(folder, checks, stack)
        stack.callback(rehearsal.clean_up)
        rehearsal.prepare_fleet(out, mirror)
        rehearsal.check_board(boards[0])
        for layout in boards[1:]:
            rehearsal.check_start(layout)
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(checks.to_report())))
    print(
        msgspec.json.encode(checks.to_report()).decode()
        if format == "json"
        else "\n".join(checks.format_summary(str(folder)))
    )
    return 0 if checks.all_passed else 1

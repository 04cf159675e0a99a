"""A process that looks at a coordinator's home again and again, as people and cron do, while the coordinator dies.

    python tests/onlookers.py HOME RUN SEED

Each command is carried out in this process, after a pause that is drawn from the seed. The first one that fails is
printed with its words, and the process ends with exit code 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from fedquilt.cli import main
from fedquilt.tools.boards.doctor import coordinator
from fedquilt.tools.boards.doctor.findings import to_finding

PAUSE_S: Final = 2.0  # at most; a coordinator that was killed is often back before the next command
LOOKED: Final = "an onlooker is content:"
FAILED: Final = "an onlooker failed:"
DISK: Final = "FQ505"  # the finding of a disk with little room


def look(home: Path, run: str, number: int) -> str:
    """Carry out one of the commands; what it said if it has failed, else ""."""
    file = home.with_name(f"{home.name}-{os.getpid()}-{number}.tar")
    every: tuple[tuple[str, ...], ...] = (
        ("ls", "--home", str(home)),
        ("why", run, "--home", str(home)),
        ("backup", "save", str(home), str(file)),
        ("logs", run, "--home", str(home)),
        ("devices", "--home", str(home)),
        ("doctor", "--home", str(home)),
    )
    arguments, said = every[number % len(every)], io.StringIO()
    if arguments[0] == "doctor":  # its look at a home; the rest is about this machine
        told = [to_finding(number, verdict) for number, verdict in coordinator.check_coordinator(home)]
        found = [each for each in told if each.severity == "error" and each.number != DISK]
        return f"{FAILED} {found}" if found else ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    file.unlink(missing_ok=True)
    return f"{FAILED} {' '.join(arguments)}: exit code {code}: {said.getvalue()}" if code else ""


def watch(home: Path, run: str, roll: random.Random) -> str:
    """Look until a command fails; returns what it said."""
    number = roll.randrange(100)
    while not (failed := look(home, run, number)):
        print(LOOKED, number, flush=True)
        number += 1
        time.sleep(roll.uniform(0.0, PAUSE_S))
    return failed


if __name__ == "__main__":
    home, run, seed = sys.argv[1:]
    print(watch(Path(home), run, random.Random(seed)), flush=True)
    sys.exit(1)

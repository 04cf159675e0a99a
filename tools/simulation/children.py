"""Processes of this program's own commands, which do not outlive the process that starts them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ENDING_S: Final = 10.0  # for which a process that was told to stop is waited for
RUN: Final = (
    "import sys; from fedquilt.edge_agent.task.process import die_with; die_with(int(sys.argv[1])); "
    "from fedquilt.cli import main; sys.exit(main(sys.argv[2:]))"
)


class Command(NamedTuple):
    """A command to run."""

    words: Sequence[str]  # after `fedquilt`
    log: Path  # what it prints is added there
    folder: Path | None = None  # it works in; None: this process's


def start(command: Command) -> subprocess.Popen[bytes]:
    """Start a process; it ends with the thread that calls this, however that ends, and not by its Ctrl-C."""
    with command.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(os.getpid()), *command.words],
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@contextlib.contextmanager
def running(wanted: Mapping[str, Command]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes by their names, while the body runs; they are told to stop at its end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in wanted.items():
            started[name] = start(command)
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            try:
                process.wait(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_words(log: Path) -> str:
    """The last line of a log."""
    return (log.read_text(errors="replace").strip().splitlines() or ["(nothing)"])[-1]

"""Child processes that run `fedquilt` commands and end with this process."""

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
    "import sys; from fedquilt.edge_agent.task.process import exit_with_parent; exit_with_parent(int(sys.argv[1])); "
    "from fedquilt.cli import main; sys.exit(main(sys.argv[2:]))"
)


class ChildCommand(NamedTuple):
    words: Sequence[str]  # after `fedquilt`
    log: Path  # what it prints is added there
    folder: Path | None = None  # it works in; None: this process's


def start_process(command: ChildCommand) -> subprocess.Popen[bytes]:
    """Start a command as a process in its own session.

    The process ends with the calling thread and ignores Ctrl-C in the terminal.
    """
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
def start_processes(wanted: Mapping[str, ChildCommand]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start processes by name in a context, and terminate them at its end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in wanted.items():
            started[name] = start_process(command)
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


def read_last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["(nothing)"])[-1]

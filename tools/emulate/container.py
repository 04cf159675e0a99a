"""A flashed root file system, booted by systemd-nspawn on this machine's own kernel, its systemd as process 1."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fedquilt.core import JobError, LinkError
from fedquilt.tools.emulate.site import last

BOOT_S: Final = 90.0
STOP_S: Final = 60.0  # services are given 30 s of it
RUN_S: Final = 60.0
LOOK_S: Final = 0.2
BOARD: Final = "/run/board/sys"  # where the container finds the files that are to be its /sys
# Before systemd starts, as a kernel's own /sys would be there. Control groups are this kernel's all the same.
LAID: Final = f"""mount --rbind /sys/fs/cgroup {BOARD}/fs/cgroup
mount --rbind {BOARD} /sys
"""
INIT: Final = "exec /lib/systemd/systemd"


def words(root: Path, tree: Path | None, name: str, groups: tuple[Path, ...] = ()) -> list[str]:
    """Command that boots a root file system.

    Args:
        root: the root file system.
        tree: folder whose files are the container's /sys; its writes are visible here. None: as nspawn makes it.
        name: of the container.
        groups: `cgroup.procs` files of the groups that it is to join.
    """
    nspawn = [
        *("systemd-nspawn", "--quiet", "--directory", str(root), "--machine", name),
        *("--register=no", "--keep-unit", "--settings=no", "--link-journal=no", "--console=read-only"),
        *("--resolv-conf=off", "--timezone=off", "--kill-signal=SIGRTMIN+3"),
        *([] if tree is None else [f"--bind={tree}:{BOARD}"]),
        *("/bin/sh", "-ec", INIT if tree is None else LAID + INIT),
    ]
    enter = "".join(f"echo 0 > {shlex.quote(str(group))} || true\n" for group in groups)
    return ["sh", "-c", f'{enter}exec "$@"', "sh", *nspawn]


@dataclass
class Container:
    """One boot of a root file system.

    Args:
        log: file of the console's output.
    """

    root: Path
    tree: Path | None
    log: Path
    name: str = "fedquilt-board"
    groups: tuple[Path, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    leader: int = field(default=0, init=False)  # first process of the container, by this machine's number

    def boot(self) -> None:
        """Boot the container; returns when its systemd has reached basic.target.

        Raises:
            LinkError: the container does not come up in time; quotes the end of the console's output.
        """
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                words(self.root, self.tree, self.name, self.groups),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        if not until(self._basic, BOOT_S, lambda: self.process is not None and self.process.poll() is None):
            raise LinkError(f"{self.root} has not booted within {BOOT_S:g} s: {last(self.log)} ({self.log})")

    def _basic(self) -> bool:
        assert self.process is not None
        self.leader = self.leader or child_of(self.process.pid)
        if not self.leader:
            return False
        return self._done("systemctl", "is-active", "basic.target").stdout.strip() == "active"

    def inside(self, *command: str) -> list[str]:
        """Words that run a command in the container as root, from outside."""
        return ["nsenter", "--target", str(self.leader), "--all", "--wd=/", *command]

    def run(self, *command: str) -> str:
        """Standard output of a command in the container.

        Raises:
            JobError: the command fails; quotes the end of its output.
        """
        done = self._done(*command)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
            raise JobError(f"{' '.join(command[:3])} in {self.root} ended with {done.returncode}: {said[-1]}")
        return done.stdout

    def _done(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                self.inside(*command), capture_output=True, text=True, check=False, timeout=RUN_S, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise JobError(f"{command[0]} in {self.root} has not ended after {RUN_S:g} s") from None

    def fails(self, *command: str) -> str | None:
        """Error output of a command in the container; None: the command succeeds."""
        done = self._done(*command)
        return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None

    def unit(self, name: str) -> Mapping[str, str]:
        """Properties of a unit in systemd, such as MainPID, NRestarts and Result."""
        return properties(self.run("systemctl", "show", name))

    def journal(self, unit: str | None = None) -> str:
        """Journal of this boot, of one unit or all."""
        of = [] if unit is None else ["--unit", unit]
        return self.run("journalctl", "--no-pager", "--boot", "--output=short-precise", *of)

    def kill(self, number: signal.Signals, unit: str) -> int:
        """Send a signal to a unit's main process from outside; the process's number inside.

        Raises:
            JobError: the unit has no main process.
        """
        pid = self.unit(unit)["MainPID"]
        if pid == "0":
            raise JobError(f"{unit} has no process to be sent {number.name}")
        self.run("sh", "-c", 'kill "-$0" "$1"', str(number.value), pid)
        return int(pid)

    def stop(self) -> None:
        """Shut the container down as a board is, or kill it after STOP_S."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):  # SIGTERM makes nspawn ask its systemd to halt
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                break
        self.process, self.leader = None, 0


def until(reached: Callable[[], bool], limit_s: float, alive: Callable[[], bool] = lambda: True) -> bool:
    """Wait for a condition; returns whether it held in time and while the process lived."""
    end_s = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() >= end_s or not alive():
            return False
        time.sleep(LOOK_S)
    return True


def properties(shown: str) -> dict[str, str]:
    """Output of `systemctl show`, one KEY=VALUE in a line."""
    return {key: value for key, equals, value in (line.partition("=") for line in shown.splitlines()) if equals}


def child_of(parent: int, proc: Path = Path("/proc")) -> int:
    """First child process that has a namespace of process ids of its own; 0: there is none."""
    own = _space(proc / str(parent))
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent and _space(folder) not in (None, own):
            return int(folder.name)
    return 0


def _space(process: Path) -> str | None:
    """Kernel's name of a process's namespace of process ids."""
    try:
        return os.readlink(process / "ns/pid")
    except OSError:
        return None

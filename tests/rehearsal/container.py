"""Container of a flashed root file system, booted by systemd-nspawn."""

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
from tests.rehearsal.fleet import last

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


def boot_command(root: Path, tree: Path | None, name: str, groups: tuple[Path, ...] = ()) -> list[str]:
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
    root: Path
    tree: Path | None
    log: Path
    name: str = "fedquilt-board"
    groups: tuple[Path, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    leader: int = field(default=0, init=False)  # first process of the container, by this machine's number

    def boot(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                boot_command(self.root, self.tree, self.name, self.groups),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        if not wait_until(
            self._has_basic_target, BOOT_S, lambda: self.process is not None and self.process.poll() is None
        ):
            raise LinkError(f"{self.root} has not booted within {BOOT_S:g} s: {last(self.log)} ({self.log})")

    def _has_basic_target(self) -> bool:
        assert self.process is not None
        self.leader = self.leader or find_container_process(self.process.pid)
        if not self.leader:
            return False
        return self._run_process("systemctl", "is-active", "basic.target").stdout.strip() == "active"

    def command_inside(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.leader), "--all", "--wd=/", *command]

    def run(self, *command: str) -> str:
        done = self._run_process(*command)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
            raise JobError(f"{' '.join(command[:3])} in {self.root} ended with {done.returncode}: {said[-1]}")
        return done.stdout

    def _run_process(self, *command: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                self.command_inside(*command),
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_S,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise JobError(f"{command[0]} in {self.root} has not ended after {RUN_S:g} s") from None

    def error_of(self, *command: str) -> str | None:
        done = self._run_process(*command)
        return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None

    def unit_properties(self, name: str) -> Mapping[str, str]:
        return parse_properties(self.run("systemctl", "show", name))

    def read_journal(self, unit: str | None = None) -> str:
        of = [] if unit is None else ["--unit", unit]
        return self.run("journalctl", "--no-pager", "--boot", "--output=short-precise", *of)

    def kill_unit(self, number: signal.Signals, unit: str) -> int:
        pid = self.unit_properties(unit)["MainPID"]
        if pid == "0":
            raise JobError(f"{unit} has no process to be sent {number.name}")
        self.run("sh", "-c", 'kill "-$0" "$1"', str(number.value), pid)
        return int(pid)

    def stop(self) -> None:
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):  # SIGTERM makes nspawn ask its systemd to halt
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                break
        self.process, self.leader = None, 0


def wait_until(reached: Callable[[], bool], limit_s: float, alive: Callable[[], bool] = lambda: True) -> bool:
    end_s = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() >= end_s or not alive():
            return False
        time.sleep(LOOK_S)
    return True


def parse_properties(shown: str) -> dict[str, str]:
    return {key: value for key, equals, value in (line.partition("=") for line in shown.splitlines()) if equals}


def find_container_process(parent: int, proc: Path = Path("/proc")) -> int:
    own = _pid_namespace(proc / str(parent))
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent and _pid_namespace(folder) not in (None, own):
            return int(folder.name)
    return 0


def _pid_namespace(process: Path) -> str | None:
    try:
        return os.readlink(process / "ns/pid")
    except OSError:
        return None

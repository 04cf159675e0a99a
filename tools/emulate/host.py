"""What an emulation needs of this machine, and where Debian comes from: as apt here has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import JobError

SYSTEM_BYTES: Final = 1_000_000_000  # a root file system, the wheels and what flash unpacks
PATHS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
PROGRAMS: Final = {  # program -> Debian's package of it
    "debootstrap": "debootstrap",
    "qemu-aarch64-static": "qemu-user-static",
    "mosquitto": "mosquitto",
    "unshare": "util-linux",
}
BOOTED: Final = {  # likewise, for what systemd-nspawn boots
    "debootstrap": "debootstrap",
    "systemd-nspawn": "systemd-container",
    "mosquitto": "mosquitto",
    "unshare": "util-linux",
}
TARGETS: Final = ("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)")

Run = Callable[[Sequence[str]], str]


def run(words: Sequence[str], given: str = "") -> str:
    """What a program says on standard output.

    Raises:
        JobError: it is not there or fails; with its last words.
    """
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise JobError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {said[-1]}")
    return done.stdout


@dataclass(frozen=True)
class Machine:
    """Facts of this machine that matter for the emulation."""

    name: str  # as `uname -m` says
    user: int
    programs: Mapping[str, str]  # name -> path of those that are there
    free_bytes: int  # where the root file system would be

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """`folder` need not be there yet."""
        while not folder.exists():
            folder = folder.parent
        search = os.pathsep.join((os.environ.get("PATH", ""), *PATHS))
        paths = {name: shutil.which(name, path=search) for name in {**PROGRAMS, **BOOTED}}
        found = {name: path for name, path in paths.items() if path is not None}
        return cls(os.uname().machine, os.geteuid(), found, shutil.disk_usage(folder).free)


def require(machine: Machine, made: bool, programs: Mapping[str, str] = PROGRAMS) -> None:
    """Check all requirements, with one error for everything that is missing.

    Args:
        machine: facts of this machine.
        made: whether the root file system exists already.
        programs: required programs -> Debian's packages of them.

    Raises:
        JobError: something is missing; gives the command that installs it.
    """
    missing = []
    emulated = "qemu-aarch64-static" in programs
    if machine.name == "aarch64" and emulated:
        missing.append("another machine than an aarch64: here an agent runs without emulation (fedquilt flash --tar)")
    if machine.user != 0:
        does = "registers the emulator" if emulated else "boots it"
        command = "sudo fedquilt emulate" + ("" if emulated else " --systemd")
        missing.append(f"root, as it makes a root file system and {does}: {command}")
    packages = [package for name, package in programs.items() if name not in machine.programs]
    if packages:
        missing.append(f"programs: sudo apt install {' '.join(packages)}")
    if not made and machine.free_bytes < SYSTEM_BYTES:
        free, wanted = machine.free_bytes / 1e6, SYSTEM_BYTES / 1e6
        missing.append(f"{wanted:.0f} MB of disk, and {free:.0f} MB are free: make room, or name another --out")
    if missing:
        raise JobError("emulate needs " + "; and ".join(missing))


def mirror(suite: str, listed: Run = run) -> str:
    """The Debian archive that apt uses here; the one with this suite if there are several.

    Raises:
        JobError: apt knows none.
    """
    try:
        rows = [line.split("|") for line in listed([*TARGETS, "Created-By: Packages"]).splitlines()]
    except JobError as error:
        rows, why = [], f"apt does not say where Debian is ({error})"
    else:
        why = "apt knows no archive of Debian's here"
    theirs = [row for row in rows if row[2:] == ["main", "Debian", "Debian"]]
    # another release's will do: an archive holds them all
    for row in sorted(theirs, key=lambda row: row[1] != suite):
        return row[0].rstrip("/")
    raise JobError(f"{why}: name one with --mirror URL, or run `apt-get update` if its lists are missing")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end what follows in the same good order as Ctrl-C."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def alone(program: Path) -> Iterator[None]:
    """One emulation at a time, as they share what the kernel has once. The lock is on a program of theirs.

    Raises:
        JobError: another one runs.
    """
    with program.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError("another `fedquilt emulate` runs on this machine: wait for it, or stop it") from None
        yield

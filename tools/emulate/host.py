"""What an emulation needs of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
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

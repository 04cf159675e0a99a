"""Requirements of an emulation on this machine, and its Debian archive."""

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
class HostMachine:
    name: str  # as `uname -m` says
    user: int
    programs: Mapping[str, str]  # name -> path of those that are there
    free_bytes: int  # where the root file system would be

    @classmethod
    def detect(cls, folder: Path) -> HostMachine:
        while not folder.exists():
            folder = folder.parent
        search = os.pathsep.join((os.environ.get("PATH", ""), *PATHS))
        paths = {name: shutil.which(name, path=search) for name in {**PROGRAMS, **BOOTED}}
        found = {name: path for name, path in paths.items() if path is not None}
        return cls(os.uname().machine, os.geteuid(), found, shutil.disk_usage(folder).free)


def require_all(machine: HostMachine, made: bool, programs: Mapping[str, str] = PROGRAMS) -> None:
    missing = []
    emulated = "qemu-aarch64-static" in programs
    if machine.name == "aarch64" and emulated:
        missing.append("another machine than an aarch64: here an agent runs without emulation (fedquilt board flash)")
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
def interrupt_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as KeyboardInterrupt in the body."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_lock(program: Path) -> Iterator[None]:
    """Hold the machine-wide lock of emulations in the body.

    Raises:
        JobError: If another emulation runs.
    """
    with program.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError("another `fedquilt emulate` runs on this machine: wait for it, or stop it") from None
        yield

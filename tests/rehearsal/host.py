"""Machine of a rehearsal: what it needs there, and a Debian root file system in a folder."""

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
    "systemd-nspawn": "systemd-container",
    "mosquitto": "mosquitto",
    "unshare": "util-linux",
}
LOCK: Final = Path("/run/fedquilt-rehearsal.lock")
SUITE: Final = "bookworm"
PYTHON: Final = "3.11"  # of that suite
# of a system that boots and whose users systemd-sysusers makes, beside the least that Debian is
PACKAGES: Final = ("python3", "systemd", "systemd-sysv", "dbus")
MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # the kernel's name -> Debian's and flash's
ARCHIVES: Final = (
    *("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)"),
    "Created-By: Packages",
)


@dataclass(frozen=True)
class HostMachine:
    user: int
    programs: Mapping[str, str]  # name -> path of those that are there
    free_bytes: int  # where the root file system would be

    @classmethod
    def detect(cls, folder: Path) -> HostMachine:
        while not folder.exists():
            folder = folder.parent
        search = os.pathsep.join((os.environ.get("PATH", ""), *PATHS))
        paths = {name: shutil.which(name, path=search) for name in PROGRAMS}
        found = {name: path for name, path in paths.items() if path is not None}
        return cls(os.geteuid(), found, shutil.disk_usage(folder).free)

    def hindrance(self, root: Path) -> str:
        missing = []
        if self.user != 0:
            missing.append("root, as it makes a root file system and boots it: sudo make rehearsal")
        if packages := [package for name, package in PROGRAMS.items() if name not in self.programs]:
            missing.append(f"programs: sudo apt install {' '.join(packages)}")
        if not root.exists() and self.free_bytes < SYSTEM_BYTES:
            free, wanted = self.free_bytes / 1e6, SYSTEM_BYTES / 1e6
            missing.append(f"{wanted:.0f} MB of disk, and {free:.0f} MB are free: make room, or name another --out")
        return f"a rehearsal needs {'; and '.join(missing)}" if missing else ""


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_lock(path: Path = LOCK) -> Iterator[None]:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError("another rehearsal runs on this machine: wait for it, or stop it") from None
        yield


def run_program(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise JobError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {said[-1]}")
    return done.stdout


# -- Debian ---------------------------------------------------------------------------------------


def debian_architecture() -> str:
    name = os.uname().machine
    if name not in MACHINES:
        raise JobError(f"a board is rehearsed on {' or '.join(MACHINES)}, and this machine is {name}")
    return MACHINES[name]


def base_root(out: Path) -> Path:
    return out / f"{SUITE}-{os.uname().machine}"


def debian_mirror(run: Callable[..., str] = run_program) -> str:
    try:
        rows, why = [line.split("|") for line in run(*ARCHIVES).splitlines()], "apt knows no archive of Debian's here"
    except JobError as error:
        rows, why = [], f"apt does not say where Debian is ({error})"
    theirs = [row for row in rows if row[2:] == ["main", "Debian", "Debian"]]
    for row in sorted(theirs, key=lambda row: row[1] != SUITE):
        return row[0].rstrip("/")
    raise JobError(f"{why}: name one with --mirror URL, or run `apt-get update` if its lists are missing")


def create_root(root: Path, mirror: str, log: Path, packages: Sequence[str] = PACKAGES) -> None:
    new = root.with_name(root.name + ".new")
    if new.exists():  # of one that was killed; its mounts went with it
        shutil.rmtree(new)
    new.mkdir(parents=True)
    options = [f"--arch={debian_architecture()}", "--variant=minbase", f"--include={','.join(packages)}"]
    words = ["unshare", "--mount", "debootstrap", *options, SUITE, str(new), mirror]
    with log.open("ab") as out:
        done = subprocess.run(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"debootstrap with {mirror} ended with {done.returncode}: {last[-1]} ({log})")
    new.replace(root)

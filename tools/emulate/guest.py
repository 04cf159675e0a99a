"""Debian root file system in a folder, and programs in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedquilt.core import JobError
from fedquilt.host.disk import disk_errors

SUITE: Final = "bookworm"
PYTHON: Final = "3.11"  # of that suite
PACKAGES: Final = ("python3", "systemd")  # beside the least that Debian is: systemd-sysusers makes the agent's user
# Cores as a Raspberry Pi 5 has, and much like an Orin's. The emulator's own choice is a core with SVE and SME, which no
# board has; by its SME OpenBLAS's products come out wrong there (numpy 2.4.6, qemu 7.2).
CPU: Final = "cortex-a76"
ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "QEMU_CPU": CPU}

SPACES: Final = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
MOUNT: Final = 'mount -t proc proc "$0/proc" && mount -t sysfs -o ro sysfs "$0/sys" && exec "$@"'


@dataclass(frozen=True)
class Guest:
    root: Path

    def command_inside(self, command: Sequence[str], user: int = 0, group: int = 0, folder: str = "/") -> list[str]:
        root = str(self.root)
        enter = ["unshare", "--root", root, "--wd", folder, "--setgid", str(group), "--setuid", str(user)]
        return [*SPACES, "sh", "-c", MOUNT, root, *enter, *command]

    def run(self, *command: str) -> str:
        """Return the standard output of a command that runs as root in the root file system.

        Raises:
            JobError: If the command failed.
        """
        done = subprocess.run(
            self.command_inside(command), env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
            raise JobError(f"{command[0]} in {self.root} ended with {done.returncode}: {said[-1]}")
        return done.stdout

    def read_ids(self, name: str) -> tuple[int, int]:
        for line in (self.root / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[0] == name:
                return int(fields[2]), int(fields[3])
        raise JobError(f"{self.root} has no user {name}: fedquilt-setup.service makes it")


def bootstrap_command(root: Path, mirror: str, machine: str = "arm64", packages: Sequence[str] = PACKAGES) -> list[str]:
    options = [f"--arch={machine}", "--variant=minbase", f"--include={','.join(packages)}"]
    return ["unshare", "--mount", "debootstrap", *options, SUITE, str(root), mirror]


def create_root(
    root: Path, mirror: str, log: Path, machine: str = "arm64", packages: Sequence[str] = PACKAGES
) -> Guest:
    """Create a root file system with debootstrap.

    Raises:
        JobError: If debootstrap failed.
        StoreError: If the folder is unusable.
    """
    new = root.with_name(root.name + ".new")
    with disk_errors(f"make {new}"):
        if new.exists():  # of one that was killed; its mounts went with it
            shutil.rmtree(new)
        new.mkdir(parents=True)
    with log.open("ab") as out:
        done = subprocess.run(
            bootstrap_command(new, mirror, machine, packages),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"debootstrap with {mirror} ended with {done.returncode}: {last[-1]} ({log})")
    new.replace(root)
    return Guest(root)

"""Installation on a running board through the ssh program."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from fedquilt.core import LinkError
from fedquilt.tools.boards.flash.install import InstallRefusedError

PROBE: Final = 'uname -m; id -u; test -x "$1" && echo python; for f in /usr/bin/python3.*; do echo "has $f"; done'
TOP: Final = "fedquilt-bundle"
# a folder of root's own making would need root for the copy as well; of the user's, nobody else reads it
UNPACK: Final = f'umask 077; d=$(mktemp -d) && tar -x -C "$d" && mv "$d/{TOP}" "$d/b" && echo "$d"'


class SshHost:
    """A board that is reached by ssh.

    Args:
        name: Host as on ssh's command line, "user@host" or a name of ~/.ssh/config.

    Raises:
        LinkError: If ssh would read the name as an option.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][^\s]*", name):
            raise LinkError(f"--ssh {name!r} is no host: write user@host")
        self.name = name

    def check_board(self, machine: str, interpreter: str) -> bool:
        """Check machine and Python of the board. Return whether ssh logs in as root.

        Args:
            machine: Required machine, as printed by `uname -m`.
            interpreter: Path of the required Python.

        Raises:
            LinkError: If the board is unreachable.
            InstallRefusedError: If the machine is another or the Python is missing.
        """
        said = self._run_captured(f"sh -c {shlex.quote(PROBE)} sh {shlex.quote(interpreter)}").split("\n")
        found, user = said[0].strip(), said[1].strip() if len(said) > 1 else ""
        if found != machine:
            raise InstallRefusedError(
                f"{self.name} is {found or 'no Linux'}, and the target {machine}: name that board's --target"
            )
        if "python" not in said:
            others = [line.rsplit("/", 1)[-1] for line in said if re.fullmatch(r"has \S+/python3\.\d+", line)]
            has = f" but {', '.join(others)}" if others else ""
            raise InstallRefusedError(f"{self.name} has no {interpreter}{has}: name what it has with --python")
        return user == "0"

    def install_archive(self, archive: Path, root: bool, arguments: Sequence[str]) -> None:
        """Copy a bundle to the board, run its install.sh, and remove the copy in any case.

        sudo may request a password on this terminal.

        Raises:
            LinkError: If the copy or the installation failed.
        """
        with archive.open("rb") as file:
            folder = self._run_captured(f"sh -c {shlex.quote(UNPACK)}", stdin=file).strip().split("\n")[-1]
        if not re.fullmatch(r"/[A-Za-z0-9._/-]+", folder):
            raise LinkError(f"{self.name}: the bundle was not unpacked: {folder[:200]}")
        self._run_script(root, f"{folder}/b/install.sh", arguments, then=f"rm -rf {folder}")

    def uninstall(self, arguments: Sequence[str]) -> None:
        root = self._run_captured("id -u").strip() == "0"
        home = "/opt/fedquilt/current"
        self._run_interactive(f"{'' if root else 'sudo '}{home}/bin/python -B {home}/install.py {' '.join(arguments)}")

    def _run_script(self, root: bool, script: str, arguments: Sequence[str], then: str) -> None:
        sudo = "" if root else "sudo "
        command = f"{sudo}sh {script} {' '.join(arguments)}; code=$?; {then}; exit $code"
        self._run_interactive(f"sh -c {shlex.quote(command)}")

    def _run_interactive(self, command: str) -> None:
        done = subprocess.run(["ssh", "-t", self.name, command], check=False)
        if done.returncode:
            raise LinkError(f"{self.name}: it ended with {done.returncode}; what it said stands above")

    def _run_captured(self, command: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> str:
        try:
            done = subprocess.run(
                ["ssh", self.name, command],
                stdin=stdin,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise LinkError("there is no ssh program here: apt install openssh-client") from None
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().split("\n")[-1] or f"ssh ended with {done.returncode}"
            raise LinkError(f"{self.name}: {why}; does `ssh {self.name} true` work?")
        return done.stdout.decode(errors="replace")

"""Creation of virtual environments from wheels, without pip and network.

Only the standard library is used, so that an environment can be made for a device with another Python, and on a device
without pip. `fedquilt board flash` copies this file to the device beside install.py.
"""

from __future__ import annotations

import compileall
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final

PIECE_BYTES: Final = 1 << 20
# Exceptions of `zipfile` for damaged or encrypted archives.
ZIP_ERRORS: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError)
COMMAND: Final = '#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/python" -m fedquilt.cli "$@"\n'


class InvalidWheelError(Exception):
    pass


def unpack_wheels(wheels: Sequence[tuple[str, Path | IO[bytes]]], packages: Path, max_bytes: int) -> None:
    """Unpack wheels into a folder. Raise InvalidWheelError if damaged, too large or writing outside it."""
    packages.mkdir(parents=True, exist_ok=True)
    remaining_bytes = max_bytes
    for name, file in wheels:
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    relative_path = _installed_path(name, entry.filename)
                    if relative_path is None or entry.is_dir():
                        continue
                    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise InvalidWheelError(f"{name} has an unsupported compression: use deflate")
                    target = packages / relative_path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as source, target.open("wb") as out:
                        while data := source.read(PIECE_BYTES):
                            remaining_bytes -= len(data)
                            if remaining_bytes < 0:
                                raise InvalidWheelError(f"{name} exceeds the announced size of {max_bytes} bytes")
                            out.write(data)
        except ZIP_ERRORS as error:
            raise InvalidWheelError(f"{name} is not a complete wheel ({error}): download the wheel again") from None


def _installed_path(wheel: str, filename: str) -> PurePosixPath | None:
    """Return the path of a wheel's file below the packages' folder, or None for scripts, headers and data."""
    relative_path = PurePosixPath(filename)
    if relative_path.is_absolute() or ".." in relative_path.parts or not relative_path.parts:
        raise InvalidWheelError(f"{wheel} would write outside the environment, to {filename}")
    if not relative_path.parts[0].endswith(".data"):
        return relative_path
    if len(relative_path.parts) < 3 or relative_path.parts[1] not in ("purelib", "platlib"):
        return None
    return PurePosixPath(*relative_path.parts[2:])


def packages_folder(home: Path, python: str) -> Path:
    return home / "lib" / f"python{python}" / "site-packages"


def make_environment(home: Path, python: str, interpreter: str) -> None:
    """Convert a folder of packages to a virtual environment with the command `fedquilt`.

    `interpreter` is the path of Python on the machine that will use the environment.
    """
    (home / "bin").mkdir()
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(interpreter)
    bin_folder = PurePosixPath(interpreter).parent
    (home / "pyvenv.cfg").write_text(f"home = {bin_folder}\ninclude-system-site-packages = false\nversion = {python}\n")
    command = home / "bin" / "fedquilt"
    command.write_text(COMMAND)
    command.chmod(0o755)


def compile_packages(home: Path, python: str, final_home: str) -> bool:
    """Compile packages to bytecode for use at `final_home`. Return False if Python has another version."""
    if python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return False
    compileall.compile_dir(
        str(packages_folder(home, python)), quiet=2, stripdir=str(home), prependdir=final_home, workers=1
    )
    return True


def set_public_modes(home: Path) -> None:
    """Let all users read the files and run the programs of a folder, and only the owner write."""
    for folder, folders, names in os.walk(home):
        for name in (*folders, *names):
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    home.chmod(0o755)

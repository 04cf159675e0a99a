"""Virtual environments made by hand from wheels: no pip, no network. Standard library only.

A wheel is an archive, and a virtual environment a few links. So one can be made for a board whose Python does not run
here, and by a board that has neither pip nor an index. `fedquilt flash` puts this file beside its install.py.
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

PIECE: Final = 1 << 20
DAMAGED: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OverflowError, RuntimeError)
"""What `zipfile` raises for archives that are damaged or encrypted."""
COMMAND: Final = '#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/python" -m fedquilt.cli "$@"\n'


class Odd(Exception):
    """A wheel that would write outside the environment, or more than was announced; the text says which."""


def unpack(wheels: Sequence[tuple[str, Path | IO[bytes]]], packages: Path, most_bytes: int) -> None:
    """Unpack wheels into a folder of packages.

    Args:
        wheels: names and files.
        packages: the folder, made if missing.
        most_bytes: that all files together may have.

    Raises:
        Odd: a wheel is no archive, would write elsewhere, or has more bytes.
        OSError: it cannot be written.
    """
    packages.mkdir(parents=True, exist_ok=True)
    left = most_bytes
    for name, file in wheels:
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    inside = _inside(name, entry.filename)
                    if inside is None or entry.is_dir():
                        continue
                    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise Odd(f"{name} is compressed in another way than by deflate")
                    target = packages / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as source, target.open("wb") as out:
                        while piece := source.read(PIECE):
                            left -= len(piece)
                            if left < 0:
                                raise Odd(f"{name} holds more than the {most_bytes} bytes that were announced")
                            out.write(piece)
        except DAMAGED as error:
            raise Odd(f"{name} is no whole wheel ({error})") from None


def _inside(wheel: str, filename: str) -> PurePosixPath | None:
    """Where a file of a wheel goes; None: nowhere (scripts, headers)."""
    inside = PurePosixPath(filename)
    if inside.is_absolute() or ".." in inside.parts or not inside.parts:
        raise Odd(f"{wheel} would write to {filename}")
    if not inside.parts[0].endswith(".data"):
        return inside
    if len(inside.parts) < 3 or inside.parts[1] not in ("purelib", "platlib"):
        return None
    return PurePosixPath(*inside.parts[2:])


def packages(home: Path, python: str) -> Path:
    """Folder of an environment's packages; `python`: its version, such as "3.10"."""
    return home / "lib" / f"python{python}" / "site-packages"


def furnish(home: Path, python: str, interpreter: str, *, system_packages: bool) -> None:
    """Make an environment of a folder that has packages: interpreter, pyvenv.cfg and the command.

    Args:
        home: the folder.
        python: version of Python, such as "3.10".
        interpreter: its path where the environment will be used.
        system_packages: let it see the packages of that Python's own.

    Raises:
        OSError: it cannot be written.
    """
    (home / "bin").mkdir()
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(interpreter)
    see = str(system_packages).lower()
    where = PurePosixPath(interpreter).parent
    (home / "pyvenv.cfg").write_text(f"home = {where}\ninclude-system-site-packages = {see}\nversion = {python}\n")
    command = home / "bin" / "fedquilt"
    command.write_text(COMMAND)
    command.chmod(0o755)


def compiled(home: Path, python: str, seen_as: str) -> bool:
    """Compile the packages if this Python is of that version; whether it is."""
    if python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return False
    compileall.compile_dir(str(packages(home, python)), quiet=2, stripdir=str(home), prependdir=seen_as, workers=1)
    return True


def open_to_all(home: Path) -> None:
    """Let everybody read what is in a folder, whatever the mask was: files keep whether they can be executed."""
    for folder, folders, names in os.walk(home):
        for name in (*folders, *names):
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o755 | (0o755 if path.is_dir() else 0o644))
    home.chmod(0o755)

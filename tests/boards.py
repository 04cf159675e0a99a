"""Boards made of files, and bundles of packages made of one line."""

from __future__ import annotations

import platform
import re
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from fedquilt.formats import toml
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.targets import BundleTarget

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
INTERPRETER = str(Path(sys.executable).with_name(f"python{PYTHON}"))
AARCH64, X86_64, ARM = 0xB7, 0x3E, 0x28

MACHINE = {"x86_64": ("amd64", X86_64), "aarch64": ("arm64", AARCH64)}
TARGET, ELF = MACHINE.get(platform.machine(), ("", 0))


def elf(machine: int, big: bool = False) -> bytes:
    return b"\x7fELF\x02" + (b"\x02" if big else b"\x01") + bytes(12) + struct.pack(">H" if big else "<H", machine)


def plant(root: Path, machine: int = AARCH64, python: str = "/usr/bin/python3.10") -> Path:
    for name in ("bin/sh", python.lstrip("/")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(elf(machine))
    return root


def wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *requires: str,
    extras: tuple[str, ...] = (),
    tag: str = "py3-none-any",
    files: Mapping[str, str] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {each}\n" for each in requires] + [f"Provides-Extra: {each}\n" for each in extras]
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in {f"{name}.py": f"version = {version!r}\n", **(files or {})}.items():
            archive.writestr(zipfile.ZipInfo(inside), text)
        archive.writestr(
            zipfile.ZipInfo(f"{info}/METADATA"),
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}",
        )
        archive.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return path


def required() -> list[str]:
    project = toml.read_toml(Path(__file__).parents[1] / "pyproject.toml")["project"]
    lines = [*project["dependencies"], *(each for lines in project["optional-dependencies"].values() for each in lines)]
    return sorted({re.split(r"[\[;><=]", line)[0].strip() for line in lines} - {"fedquilt"})


JETSON = targets.find_target("jetpack6")
HERE = BundleTarget("here", "aarch64", PYTHON, 27, sys.executable)  # a board whose interpreter is this one


def snapshot(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): f"link to {path.readlink()}" if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }

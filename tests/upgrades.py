"""Versions of fedquilt to upgrade to, made from the running files, and bundles of them."""

from __future__ import annotations

import functools
import io
import platform
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import boards
from boards import PYTHON

import fedquilt
from fedquilt.edge_agent.upgrade import archive
from fedquilt.edge_agent.upgrade import launcher as upgrade_launcher
from fedquilt.edge_agent.upgrade.archive import UpgradeManifest
from fedquilt.host.disk import REAL
from fedquilt.tools.boards import flash
from fedquilt.tools.boards.flash import bundle, own_wheels

NEW = "9.9.9"
LAUNCHER = Path(upgrade_launcher.__file__)


def wheel(folder: Path, version: str = NEW, changes: Mapping[str, Callable[[str], str]] = {}) -> Path:
    """The wheel for boards as it is here, with another version number, and files changed by name."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"fedquilt_board-{version}-py3-none-any.whl"
    with zipfile.ZipFile(io.BytesIO(_build_own_wheel())) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            text = source.read(name)
            if name == "fedquilt/__init__.py":
                text, count = re.subn(rb"__version__ = .*", f'__version__ = "{version}"'.encode(), text)
                assert count == 1, f"{name} states no version"
            if name in changes:
                changed = changes[name](text.decode())
                assert changed != text.decode(), f"{name} has nothing to change"
                text = changed.encode()
            target.writestr(name.replace(f"-{fedquilt.__version__}.dist-info", f"-{version}.dist-info"), text)
    return made


@functools.cache
def _build_own_wheel() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return own_wheels.build_own_wheel(Path(folder)).read_bytes()


def cannot_start(text: str) -> str:
    """cli/entry.py of a version that passes its own check, and ends as soon as it is started."""
    return text.replace("daemon.run_agent(agent_settings)", "raise SystemExit('this version cannot start')")


def pack(
    out: Path,
    house: list[Path],
    sign: Callable[[bytes], bytes] | None = None,
    **changes: object,
) -> Path:
    """A bundle of these wheels for this machine, unless `changes` of its manifest say otherwise."""
    told: dict[str, object] = {
        "format": archive.FORMAT,
        "version": NEW,
        "machine": platform.machine(),
        "python": PYTHON,
        "wheels": {path.name: REAL.hash_file(path) for path in house},
        "unpacked_bytes": sum(map(bundle.unpacked_bytes, house)),
        "present": {"msgspec": metadata.version("msgspec")},  # the others are found in the same folder
    }
    flash.pack_bundle(UpgradeManifest(**{**told, **changes}), house, out, sign)  # type: ignore[arg-type]
    return out


def launcher(folder: Path, *arguments: str) -> list[str]:
    """The command that a unit has."""
    return [sys.executable, str(LAUNCHER), str(folder), *arguments]


def toy(folder: Path, says: str = "", version: str = NEW) -> Path:
    """A wheel of a fedquilt of one line: the check of that version ends well unless the line says otherwise."""
    return boards.wheel(
        folder,
        "fedquilt",
        version,
        files={"fedquilt/__init__.py": "", "fedquilt/cli.py": f"{says}\ndef main(): pass\n"},
    )

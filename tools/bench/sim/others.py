"""Other simulators' environments: made once, in a cache folder, from the package index."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from fedquilt.core import FedquiltError, JobError


class Other(NamedTuple):
    """A simulator that somebody else makes."""

    package: str
    requirement: str
    script: str
    title: str


OTHERS = {
    "flower": Other("flwr", "flwr[simulation]", "flower_app.py", "Flower"),
    "pfl": Other("pfl", "pfl[pytorch]", "pfl_app.py", "pfl-research"),
}


class AbsentError(FedquiltError):
    """A simulator that cannot be installed here."""


def cache() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "bench"


def named(name: str) -> Other:
    """Raises JobError for one that there is not."""
    if name not in OTHERS:
        raise JobError(f"--with {name}: there are {', '.join(OTHERS)}")
    return OTHERS[name]


def environment(name: str, folder: Path | None = None) -> tuple[Path, str]:
    """The Python of its environment, with this one's torch, and its version; made if it is not there.

    Raises:
        AbsentError: it cannot be made; with pip's last words.
    """
    other = named(name)
    home = (folder or cache()) / name
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        torch = metadata.version("torch").partition("+")[0]
        _done([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], other)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _done([*pip, "install", "--quiet", f"torch=={torch}", other.requirement], other)
        ready.touch()
    shown = [str(python), "-c", f"from importlib import metadata; print(metadata.version({other.package!r}))"]
    return python, _done(shown, other).strip()


def _done(command: list[str], other: Other) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise AbsentError(f"{other.title}: {error}") from None
    if found.returncode:
        said = [line for line in (found.stderr or found.stdout).strip().splitlines() if "WARNING" not in line]
        raise AbsentError(f"{other.title} cannot be installed here: {said[-1] if said else 'pip said nothing'}")
    return found.stdout

"""Cached Python environments of the simulators to compare with."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from fedquilt.core import FedquiltError, JobError


class OtherSimulator(NamedTuple):
    """Package and script of another simulator."""

    package: str
    requirement: str
    script: str
    title: str


OTHERS = {
    "flower": OtherSimulator("flwr", "flwr[simulation]", "flower_app.py", "Flower"),
    "pfl": OtherSimulator("pfl", "pfl[pytorch]", "pfl_app.py", "pfl-research"),
}


class SimulatorMissingError(FedquiltError): ...


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "bench"


def find_simulator(name: str) -> OtherSimulator:
    """Return a simulator by name."""
    if name not in OTHERS:
        raise JobError(f"--with {name}: there are {', '.join(OTHERS)}")
    return OTHERS[name]


def prepare_environment(name: str) -> tuple[Path, str]:
    """Return a simulator's Python and version, and install the environment if missing.

    The environment gets the torch version of this Python.
    """
    other = find_simulator(name)
    home = cache_folder() / name
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        torch = metadata.version("torch").partition("+")[0]
        _run_command([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], other)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _run_command([*pip, "install", "--quiet", f"torch=={torch}", other.requirement], other)
        ready.touch()
    shown = [str(python), "-c", f"from importlib import metadata; print(metadata.version({other.package!r}))"]
    return python, _run_command(shown, other).strip()


def _run_command(command: list[str], other: OtherSimulator) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise SimulatorMissingError(f"{other.title}: {error}") from None
    if found.returncode:
        said = [line for line in (found.stderr or found.stdout).strip().splitlines() if "WARNING" not in line]
        raise SimulatorMissingError(
            f"{other.title} cannot be installed here: {said[-1] if said else 'pip said nothing'}"
        )
    return found.stdout

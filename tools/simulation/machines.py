"""What decides the last bits of a computation beside the job: processor, GPU, libraries and our own code.

A run keeps what it was computed on in HOME/machines/RUN.json, and goes on elsewhere only where that is allowed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

import fedquilt
from fedquilt import checked, plugins
from fedquilt.core import JobError
from fedquilt.disk import PRIVATE, doing

log = logging.getLogger("fedquilt.simulation")

LIBRARIES: Final = ("numpy", "torch", "torchvision", "onnxruntime")
PROCESSOR: Final = ("model name", "cpu model", "hardware", "cpu part")  # keys of /proc/cpuinfo, the best first


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine as far as results depend on it."""

    processor: str
    gpus: tuple[str, ...]  # models of those that the driver lists
    threads: str  # OMP_NUM_THREADS of the workers; "": as the libraries like
    libraries: dict[str, str]  # Python and the numerical libraries that are installed, with their versions
    code: dict[str, str]  # fedquilt and the job's plug-ins: version and sha256 of their files

    def __str__(self) -> str:
        ours = f"fedquilt {self.code['fedquilt']}" if "fedquilt" in self.code else "no fedquilt"
        versions = [f"{name} {version}" for name, version in self.libraries.items()]
        return ", ".join([self.processor, *self.gpus, *versions, ours])

    def code_differs(self, other: Machine) -> str:
        """How another machine's code differs from this one's, in words; "": it does not."""
        return _differences(other.code, self.code)

    def differs(self, other: Machine) -> str:
        """How another machine differs in anything else that results depend on, in words; "": it does not."""
        here, there = self._rest(), other._rest()
        return _differences(there, here)

    def _rest(self) -> dict[str, str]:
        return {
            "processor": self.processor,
            "GPU": ", ".join(self.gpus) or "none",
            "threads": self.threads or "any",
            **self.libraries,
        }


class Machines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines of the workers that computed a run, by name."""

    workers: dict[str, Machine]


def here(modules: Collection[str] = (), threads: str | None = None) -> Machine:
    """Describe the machine of this process.

    Args:
        modules: top-level modules of plug-ins whose code counts.
        threads: of the workers; None: as this process has.
    """
    versions = {"Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=_processor(),
        gpus=_gpus(),
        threads=os.environ.get("OMP_NUM_THREADS", "") if threads is None else threads,
        libraries=versions,
        code={
            "fedquilt": f"{fedquilt.__version__} ({_own_code()[:8]})",
            **{name: plugins.content(name)[:8] for name in sorted(modules)},
        },
    )


def name() -> str:
    """Name of this machine."""
    return platform.node() or "localhost"


def require_alike(known: Mapping[str, Machine], named: str, machine: Machine, *, mixed: bool) -> None:
    """Refuse a machine on which results would have other bits.

    Args:
        known: machines that compute the run already, by name; the first is compared.
        named: what the new one is called.
        machine: the new one.
        mixed: permit another processor, GPU or library; another code of fedquilt's or a plug-in's is never permitted.

    Raises:
        JobError: it differs; names both and what differs.
    """
    for other, first in list(known.items())[:1]:
        if code := first.code_differs(machine):
            raise JobError(f"{named} has other code than {other}: {code}; install the same on both")
        if not mixed and (rest := first.differs(machine)):
            raise JobError(
                f"{named} differs from {other}: {rest}; results would have other last bits. Leave it out, or permit it "
                "with --mixed (mixed=True)"
            )


def keep(home: Path, run: str, found: Mapping[str, Machine], *, mixed: bool) -> None:
    """Note what a run is computed on, beside what an earlier part of it was computed on.

    Raises:
        JobError: an earlier part was computed on other machines, and they may not be mixed.
        StoreError: it cannot be written.
    """
    path = home / "machines" / f"{run}.json"
    before = read(home, run)
    known = {f"{other}, where {run} began": machine for other, machine in before.items()}
    for named, machine in found.items():
        if not mixed:  # a run may go on with a newer fedquilt
            then = next((each.code for each in known.values()), machine.code)
            require_alike(known, named, msgspec.structs.replace(machine, code=then), mixed=False)
    with doing(f"write {path}"):
        PRIVATE.make(path.parent)
        PRIVATE.put(path, checked.encode(Machines({**before, **found})), durable=False)


def read(home: Path, run: str) -> dict[str, Machine]:
    """Machines that a run was computed on, by name; empty: none were noted."""
    path = home / "machines" / f"{run}.json"
    try:
        return checked.decode(path.read_bytes(), Machines).workers
    except FileNotFoundError:
        return {}
    except checked.DamagedFileError as error:
        log.warning("%s is damaged (%s): what the run was computed on is noted anew", path, error)
        return {}


def lines(found: Mapping[str, Machine]) -> list[str]:
    """A line for each kind of machine, with how many there are of it."""
    kinds: dict[str, list[str]] = {}
    for named, machine in found.items():
        kinds.setdefault(str(machine), []).append(named)
    return [f"{', '.join(names)}: {kind}" for kind, names in kinds.items()]


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    odd = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return "; ".join(f"{name} {there.get(name, 'missing')}, not {here.get(name, 'missing')}" for name in odd)


def _processor() -> str:
    told: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            told.setdefault(key.strip().lower(), " ".join(value.split()))
    except OSError:
        pass
    model = next((told[key] for key in PROCESSOR if told.get(key)), "unknown processor")
    return f"{model} ({platform.machine()})"


def _gpus() -> tuple[str, ...]:
    """Models of NVIDIA's GPUs, without loading a library for it; () where a process is to see none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ()
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        told = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
        found.append(told.get("Model", "unknown GPU").strip())
    return tuple(found)


@lru_cache(maxsize=1)
def _own_code() -> str:
    """The sha256 of fedquilt's Python files, the same in a checkout, where folders are links, and installed."""
    folder, digest, files = Path(fedquilt.__file__).parent, hashlib.sha256(), []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [each for each in folders if each != "__pycache__"]
        files += [Path(place, each) for each in names if each.endswith(".py")]
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()

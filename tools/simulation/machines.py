"""Machine properties that affect the last bits of results: processor, GPU, libraries and code.

The machines of a run are recorded in HOME/machines/RUN.json. A run resumes on different machines only if permitted.
"""

from __future__ import annotations

import contextlib
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
from fedquilt import plugins
from fedquilt.core import JobError
from fedquilt.formats import checksummed_json
from fedquilt.host.disk import PRIVATE, disk_errors

log = logging.getLogger("fedquilt.simulation")

LIBRARIES: Final = ("numpy", "torch", "torchvision", "onnxruntime")
PROCESSOR: Final = ("model name", "cpu model", "hardware", "cpu part")  # keys of /proc/cpuinfo, the best first


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processor: str
    gpus: tuple[str, ...]  # models of those that the driver lists
    threads: str  # OMP_NUM_THREADS of the workers; "": as the libraries like
    libraries: dict[str, str]  # Python and the numerical libraries that are installed, with their versions
    code: dict[str, str]  # fedquilt and the job's plug-ins: version and sha256 of their files

    def __str__(self) -> str:
        ours = f"fedquilt {self.code['fedquilt']}" if "fedquilt" in self.code else "no fedquilt"
        versions = [f"{name} {version}" for name, version in self.libraries.items()]
        return ", ".join([self.processor, *self.gpus, *versions, ours])

    def describe_code_differences(self, other: Machine) -> str:
        """Return the differences of another machine's code in words, or "" for none."""
        return _format_differences(other.code, self.code)

    def describe_platform_differences(self, other: Machine) -> str:
        """Return differences in processor, GPUs, threads and libraries in words, or "" for none."""
        here, there = (
            {"processor": each.processor, "GPU": ", ".join(each.gpus) or "none", "threads": each.threads or "any"}
            | each.libraries
            for each in (self, other)
        )
        return _format_differences(there, here)


class MachineSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: dict[str, Machine]


def describe_this_machine(modules: Collection[str] = (), threads: str | None = None) -> Machine:
    versions = {"Python": platform.python_version(), **find_library_versions()}
    return Machine(
        processor=_read_processor_model(),
        gpus=_read_gpu_models(),
        threads=os.environ.get("OMP_NUM_THREADS", "") if threads is None else threads,
        libraries=versions,
        code={
            "fedquilt": f"{fedquilt.__version__} ({compute_code_digest()[:8]})",
            **{name: plugins.module_digest(name)[:8] for name in sorted(modules)},
        },
    )


def find_library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def get_machine_name() -> str:
    return platform.node() or "localhost"


def require_same_results(known: Mapping[str, Machine], named: str, machine: Machine, *, mixed: bool) -> None:
    """Check that a machine gives bit-identical results to the machines of a run."""
    for other, first in list(known.items())[:1]:
        if code := first.describe_code_differences(machine):
            raise JobError(f"{named} has other code than {other}: {code}; install the same on both")
        if not mixed and (rest := first.describe_platform_differences(machine)):
            raise JobError(
                f"{named} differs from {other}: {rest}; results would have other last bits. Leave it out, or permit it "
                "with --mixed (mixed=True)"
            )


def record_machines(home: Path, run: str, found: Mapping[str, Machine], *, mixed: bool) -> None:
    """Record the machines of a run, in addition to those recorded earlier."""
    path = home / "machines" / f"{run}.json"
    before = read_machines(home, run)
    known = {f"{other}, where {run} began": machine for other, machine in before.items()}
    for named, machine in found.items():
        if not mixed:  # a run may go on with a newer fedquilt
            then = next((each.code for each in known.values()), machine.code)
            require_same_results(known, named, msgspec.structs.replace(machine, code=then), mixed=False)
    with disk_errors(f"write {path}"):
        PRIVATE.make_folder(path.parent)
        PRIVATE.write_atomically(
            path, checksummed_json.encode_with_checksum(MachineSet({**before, **found})), durable=False
        )


def read_machines(home: Path, run: str) -> dict[str, Machine]:
    """Return the recorded machines of a run by name, empty if the file is missing or damaged."""
    path = home / "machines" / f"{run}.json"
    try:
        return checksummed_json.decode_with_checksum(path.read_bytes(), MachineSet).workers
    except FileNotFoundError:
        return {}
    except checksummed_json.DamagedFileError as error:
        log.warning("%s is damaged (%s): what the run was computed on is noted anew", path, error)
        return {}


def format_machines(found: Mapping[str, Machine]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for named, machine in found.items():
        kinds.setdefault(str(machine), []).append(named)
    return [f"{', '.join(names)}: {kind}" for kind, names in kinds.items()]


def _format_differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    odd = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return "; ".join(f"{name} {there.get(name, 'missing')}, not {here.get(name, 'missing')}" for name in odd)


def _read_processor_model() -> str:
    told: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            told.setdefault(key.strip().lower(), " ".join(value.split()))
    except OSError:
        pass
    model = next((told[key] for key in PROCESSOR if told.get(key)), "unknown processor")
    return f"{model} ({platform.machine()})"


def _read_gpu_models() -> tuple[str, ...]:
    # read from /proc, because loading a GPU library is slow
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ()
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        told = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
        found.append(told.get("Model", "unknown GPU").strip())
    return tuple(found)


@lru_cache(maxsize=1)
def compute_code_digest() -> str:
    # the digest is equal for a checkout with symbolic links and an installed package
    folder, digest, files = Path(fedquilt.__file__).parent, hashlib.sha256(), []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [each for each in folders if each != "__pycache__"]
        files += [Path(place, each) for each in names if each.endswith((".py", ".toml"))]  # profiles are TOML
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()

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

NUMERICAL_LIBRARIES: Final = ("numpy", "torch", "torchvision", "onnxruntime")
PROCESSOR_KEYS: Final = ("model name", "cpu model", "hardware", "cpu part")  # of /proc/cpuinfo, the most precise first


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    processor: str
    gpus: tuple[str, ...]  # models
    threads: str  # OMP_NUM_THREADS of the workers, "" for the libraries' default
    libraries: dict[str, str]  # versions of Python and of the installed numerical libraries
    code: dict[str, str]  # version and digest of fedquilt and of the job's plug-ins

    def __str__(self) -> str:
        fedquilt_version = f"fedquilt {self.code['fedquilt']}" if "fedquilt" in self.code else "no fedquilt"
        library_versions = [f"{name} {version}" for name, version in self.libraries.items()]
        return ", ".join([self.processor, *self.gpus, *library_versions, fedquilt_version])

    def describe_code_differences(self, other: Machine) -> str:
        """Return the versions and plug-ins in which another machine's code differs, as text, or "" for none."""
        return _format_differences(other.code, self.code)

    def describe_platform_differences(self, other: Machine) -> str:
        """Return differences in processor, GPUs, threads and libraries, as text, or "" for none."""
        expected, actual = (
            {
                "processor": machine.processor,
                "GPU": ", ".join(machine.gpus) or "none",
                "threads": machine.threads or "any",
            }
            | machine.libraries
            for machine in (self, other)
        )
        return _format_differences(actual, expected)


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
    for name in NUMERICAL_LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def get_machine_name() -> str:
    return platform.node() or "localhost"


def require_same_results(run_machines: Mapping[str, Machine], name: str, machine: Machine, *, mixed: bool) -> None:
    """Raise JobError if the machine `name` may give other results than the machines of a run.

    With `mixed` only its code has to be the same.
    """
    for run_machine_name, run_machine in list(run_machines.items())[:1]:
        if code_differences := run_machine.describe_code_differences(machine):
            raise JobError(
                f"{name} has other code than {run_machine_name} ({code_differences}): install the same code on both"
            )
        if not mixed and (platform_differences := run_machine.describe_platform_differences(machine)):
            raise JobError(
                f"{name} differs from {run_machine_name} ({platform_differences}), so results would differ in their "
                f"last bits: leave out this machine, or permit different machines with --mixed (mixed=True)"
            )


def record_machines(home: Path, run: str, new_machines: Mapping[str, Machine], *, mixed: bool) -> None:
    """Record more machines of a run. Raise JobError if results may differ and `mixed` is false."""
    path = home / "machines" / f"{run}.json"
    recorded = read_machines(home, run)
    run_machines = {f"{old_name}, where {run} began": machine for old_name, machine in recorded.items()}
    for name, machine in new_machines.items():
        if not mixed:  # a run may resume with a newer fedquilt
            run_code = next((recorded_machine.code for recorded_machine in run_machines.values()), machine.code)
            require_same_results(run_machines, name, msgspec.structs.replace(machine, code=run_code), mixed=False)
    with disk_errors(f"write {path}"):
        PRIVATE.make_folder(path.parent)
        PRIVATE.write_atomically(
            path, checksummed_json.encode_with_checksum(MachineSet({**recorded, **new_machines})), durable=False
        )


def read_machines(home: Path, run: str) -> dict[str, Machine]:
    """Return the recorded machines of a run by name, empty if the file is missing or damaged."""
    path = home / "machines" / f"{run}.json"
    try:
        return checksummed_json.decode_with_checksum(path.read_bytes(), MachineSet).workers
    except FileNotFoundError:
        return {}
    except checksummed_json.DamagedFileError as error:
        log.warning("%s is damaged (%s): the machines of the run are recorded again", path, error)
        return {}


def format_machines(machines_by_name: Mapping[str, Machine]) -> list[str]:
    names_by_description: dict[str, list[str]] = {}
    for name, machine in machines_by_name.items():
        names_by_description.setdefault(str(machine), []).append(name)
    return [f"{', '.join(names)}: {description}" for description, names in names_by_description.items()]


def _format_differences(actual: Mapping[str, str], expected: Mapping[str, str]) -> str:
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    return "; ".join(f"{name} {actual.get(name, 'missing')}, not {expected.get(name, 'missing')}" for name in names)


def _read_processor_model() -> str:
    cpu_info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            cpu_info.setdefault(key.strip().lower(), " ".join(value.split()))
    except OSError:
        pass
    model = next((cpu_info[key] for key in PROCESSOR_KEYS if cpu_info.get(key)), "unknown processor")
    return f"{model} ({platform.machine()})"


def _read_gpu_models() -> tuple[str, ...]:
    # read from /proc, because loading a GPU library is slow
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ()
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        properties = dict(line.partition(":")[::2] for line in path.read_text(errors="replace").splitlines())
        models.append(properties.get("Model", "unknown GPU").strip())
    return tuple(models)


@lru_cache(maxsize=1)
def compute_code_digest() -> str:
    # the digest is equal for a checkout with symbolic links and an installed package
    folder, digest, files = Path(fedquilt.__file__).parent, hashlib.sha256(), []
    for folder_path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        files += [Path(folder_path, name) for name in names if name.endswith((".py", ".toml"))]  # profiles are TOML
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()

"""Checks of installed Python packages by their files, because importing torch is too slow."""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from fedquilt.tools.boards.doctor.findings import Finding, drop_missing, error, ok, warning
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from fedquilt.tools.boards.targets import NUMPY_2, NVIDIA_JP6

CUDA: Final = {4: 10, 5: 11, 6: 12, 7: 13}  # JetPack -> major version of the CUDA that its driver runs
FLASH: Final = "on the operator's machine: fedquilt board flash agent.toml --ssh USER@BOARD --target TARGET"
_LIBRARY: Final = re.compile(rb"lib(?:torch|c10)\w*\.so\b")


@dataclass(frozen=True)
class InstalledPackages:
    versions: Mapping[str, str] = field(default_factory=dict)  # name in small letters, "-" for "_" -> version
    torch_cuda: str | None = None  # CUDA that torch was built with; None: without
    onnx_cuda: bool = False  # onnxruntime has its CUDA provider
    vision_torch: str | None = None  # the one version of torch that torchvision was built with
    torch_numpy: int | None = None  # 1 or 2: NumPy with which torch was compiled; None: not known
    vision_lacks: tuple[str, ...] = ()  # libraries of torch that torchvision's operators need and torch has not


def read_packages(paths: Sequence[Path]) -> InstalledPackages:
    """Read the packages in these folders. Of two with the same name, the first counts."""
    versions: dict[str, str] = {}
    vision_torch = None
    for one in metadata.distributions(path=[str(path) for path in paths]):
        name = _package_name(one).lower().replace("_", "-")
        if not name or name in versions:
            continue
        versions[name] = one.version
        if name == "torchvision":
            vision_torch = _pinned_version("torch", one.requires or ())
    torch, vision, onnx = (_find_folder(paths, name) for name in ("torch", "torchvision", "onnxruntime"))
    return InstalledPackages(
        versions=versions,
        torch_cuda=_read_string_constant(torch / "version.py", "cuda") if torch else None,
        onnx_cuda=bool(onnx and (onnx / "capi/libonnxruntime_providers_cuda.so").is_file()),
        torch_numpy=_numpy_major_version(torch / "lib/libtorch_python.so") if torch else None,
        vision_torch=vision_torch,
        vision_lacks=_missing_libraries(vision, torch) if torch and vision else (),
    )


def _package_name(package: metadata.Distribution) -> str:
    # "" for the folder of an interrupted installation
    try:
        return package.metadata["Name"] if "Name" in package.metadata else ""  # noqa: SIM401  (it has no get)
    except OSError:  # of the importlib_metadata package, if something has imported it; Python's own tells an empty name
        return ""


def check_packages(machine: MachineFacts, packages: InstalledPackages) -> list[Finding]:
    return drop_missing(
        [
            check_onnx(machine, packages),
            check_torch(machine, packages),
            check_numpy(machine, packages),
            check_torchvision(packages),
        ]
    )


def check_onnx(machine: MachineFacts, packages: InstalledPackages) -> Finding | None:
    plain, gpu = (packages.versions.get(name) for name in ("onnxruntime", "onnxruntime-gpu"))
    if plain is not None and gpu is not None:
        return warning(
            "FQ201",
            f"onnxruntime {plain} and onnxruntime-gpu {gpu} are both installed, each with some of the other's files",
            _fix_command(machine, "gpu" if machine.gpu else "onnx", drop="onnxruntime onnxruntime-gpu"),
        )
    if plain is None and gpu is None:
        return None
    if is_gpu_expected(machine) and not packages.onnx_cuda:
        return warning(
            "FQ202",
            f"onnxruntime {plain or gpu} runs on the CPU alone, and there is a GPU: stitching is slow",
            _fix_command(machine, "gpu", drop="onnxruntime"),
        )
    return ok("FQ201", f"onnxruntime {gpu or plain}" + (", with CUDA" if packages.onnx_cuda else ", on the CPU"))


def check_torch(machine: MachineFacts, packages: InstalledPackages) -> Finding | None:
    version = packages.versions.get("torch")
    if version is None:
        return None
    if is_gpu_expected(machine) and packages.torch_cuda is None:
        return warning(
            "FQ203",
            f"torch {version} runs on the CPU alone, and there is a GPU: training is slow",
            _fix_command(machine, "train"),
        )
    driver = CUDA.get(machine.jetpack or 0)
    if driver is not None and packages.torch_cuda and packages.torch_cuda.split(".")[0] != str(driver):
        return warning(
            "FQ204",
            f"torch {version} is for CUDA {packages.torch_cuda}, and JetPack {machine.jetpack} has CUDA {driver}: "
            "it will not find the GPU",
            _fix_command(machine, "train"),
        )
    return ok(
        "FQ203", f"torch {version}" + (f", CUDA {packages.torch_cuda}" if packages.torch_cuda else ", on the CPU")
    )


def check_torchvision(packages: InstalledPackages) -> Finding | None:
    version, torch = packages.versions.get("torchvision"), packages.versions.get("torch")
    if version is None or torch is None:
        return None
    wanted = packages.vision_torch
    other = wanted is not None and wanted.split("+")[0] != torch.split("+")[0]
    if not other and not packages.vision_lacks:
        return ok("FQ205", f"torchvision {version} fits torch {torch}")
    why = f"was built for torch {wanted}" if other else f"needs {', '.join(packages.vision_lacks)}, which it has not"
    return ok(
        "FQ205",
        f"torchvision {version} does not fit torch {torch} ({why}): its own operators, for detection, do not load; "
        "fedquilt needs none of them and imports it all the same",
    )


def is_gpu_expected(machine: MachineFacts) -> bool:
    """Return whether wheels with GPU support exist for this machine (JetPack 6 or newer)."""
    return machine.gpu and (not machine.tegra or (machine.jetpack or 0) >= 6)


def check_numpy(machine: MachineFacts, packages: InstalledPackages) -> Finding | None:
    """Check that the installed NumPy is not newer than the one torch was compiled with."""
    version, torch = packages.versions.get("numpy"), packages.versions.get("torch")
    if version is None or torch is None or packages.torch_numpy != 1 or int(version.split(".")[0]) < 2:
        return None
    return error(
        "FQ206",
        f"numpy {version} is beside torch {torch}, which was compiled with NumPy 1: no tensor becomes an array, and "
        "every task with torch fails",
        f"{FLASH}, with PIP_CONSTRAINT naming a file that holds numpy<2"
        if machine.flashed
        else "pip install 'numpy<2'",
    )


def _fix_command(machine: MachineFacts, extra: str, drop: str = "") -> str:
    # a flashed board does not have pip
    jp6 = machine.jetpack == 6
    if machine.flashed:
        others = {"gpu": "gpu", "train": "gpu train" if machine.gpu else "onnx train", "onnx": "onnx"}[extra]
        if jp6:
            return f"{FLASH.replace('TARGET', 'jetpack6-gpu')} --extras {others}"
        return (
            f"{FLASH.replace('TARGET', f'jetpack{machine.jetpack}' if machine.jetpack else 'TARGET')} --extras {others}"
        )
    what = {"gpu": "onnxruntime-gpu", "train": "--force-reinstall torch torchvision", "onnx": "onnxruntime"}[extra]
    index = f" --index-url {NVIDIA_JP6}" if jp6 and extra != "onnx" else ""
    return (f"pip uninstall -y {drop} && " if drop else "") + f"pip install {what}{index}"


# -- reading --------------------------------------------------------------------------------------


def _find_folder(paths: Sequence[Path], name: str) -> Path | None:
    return next((path / name for path in paths if (path / name).is_dir()), None)


def _pinned_version(name: str, requires: Iterable[str]) -> str | None:
    """Return the version pinned by "torch (==2.13.0)" or "torch==2.13.0"."""
    for one in requires:
        found = re.match(rf"{name}\s*\(?==\s*([\w.+]+)", one)
        if found:
            return found[1]
    return None


def _read_string_constant(path: Path, name: str) -> str | None:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return None
    for one in body:
        target = (
            one.target if isinstance(one, ast.AnnAssign) else one.targets[0] if isinstance(one, ast.Assign) else None
        )
        if isinstance(target, ast.Name) and target.id == name and isinstance(one, (ast.Assign, ast.AnnAssign)):
            value = one.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _numpy_major_version(library: Path) -> int | None:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(NUMPY_2) >= 0:
                return 2
            return 1 if text.find(NUMPY_2.replace(b"_core", b"core")) >= 0 else None
    except (OSError, ValueError):
        return None


def _missing_libraries(vision: Path, torch: Path) -> tuple[str, ...]:
    wanted: set[str] = set()
    for file in sorted(vision.glob("_C*.so")):
        try:
            wanted |= {name.decode() for name in _LIBRARY.findall(file.read_bytes())}
        except OSError:
            continue
    return tuple(sorted(name for name in wanted if not (torch / "lib" / name).exists()))

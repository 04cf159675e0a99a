"""Checks of installed Python packages by their files, because importing torch is too slow."""

from __future__ import annotations

import ast
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from fedquilt.tools.boards.doctor.findings import Check, Problem, Verdict, error
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts
from fedquilt.tools.boards.targets import KNOWN, NUMPY_2, NVIDIA_JP6

CUDA: Final = {5: 11, 6: 12, 7: 13}  # JetPack -> major version of the CUDA that its driver runs
FLASH: Final = "on the operator's machine: fedquilt board flash agent.toml --ssh USER@BOARD --target TARGET"


@dataclass(frozen=True)
class InstalledPackages:
    versions: Mapping[str, str] = field(default_factory=dict)  # name in small letters, "-" for "_" -> version
    torch_cuda: str | None = None  # CUDA that torch was built with; None: without
    onnx_cuda: bool = False  # onnxruntime has its CUDA provider
    torch_numpy: int | None = None  # 1 or 2: NumPy with which torch was compiled; None: not known


def read_packages(paths: Sequence[Path]) -> InstalledPackages:
    """Read the packages in these folders. Of two with the same name, the first counts."""
    versions: dict[str, str] = {}
    for one in metadata.distributions(path=[str(path) for path in paths]):
        name = _package_name(one).lower().replace("_", "-")
        if name:
            versions.setdefault(name, one.version)
    torch, onnx = (_find_folder(paths, name) for name in ("torch", "onnxruntime"))
    return InstalledPackages(
        versions=versions,
        torch_cuda=_read_string_constant(torch / "version.py", "cuda") if torch else None,
        onnx_cuda=bool(onnx and (onnx / "capi/libonnxruntime_providers_cuda.so").is_file()),
        torch_numpy=_find_required_numpy_version(torch / "lib/libtorch_python.so") if torch else None,
    )


def _package_name(package: metadata.Distribution) -> str:
    # "" for the folder of an interrupted installation
    try:
        return package.metadata["Name"] if "Name" in package.metadata else ""  # noqa: SIM401  (it has no get)
    except OSError:  # of the importlib_metadata package, if something has imported it; Python's own tells an empty name
        return ""


def is_gpu_expected(machine: MachineFacts) -> bool:
    """Return whether wheels with GPU support exist for this machine (JetPack 6 or newer)."""
    return machine.gpu and (not machine.tegra or (machine.jetpack or 0) >= 6)


def _check_onnx(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    plain, gpu = (packages.versions.get(name) for name in ("onnxruntime", "onnxruntime-gpu"))
    if plain is not None and gpu is not None:
        return Problem(
            f"onnxruntime {plain} and onnxruntime-gpu {gpu} are both installed, each with some of the other's files",
            _installation_command(machine, "gpu" if machine.gpu else "onnx", drop="onnxruntime onnxruntime-gpu"),
        )
    if plain is None and gpu is None:
        return None
    return f"onnxruntime {gpu or plain}" + (", with CUDA" if packages.onnx_cuda else ", on the CPU")


def _check_onnx_gpu(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    found = [packages.versions[name] for name in ("onnxruntime", "onnxruntime-gpu") if name in packages.versions]
    if len(found) != 1 or packages.onnx_cuda or not is_gpu_expected(machine):
        return None
    said = f"onnxruntime {found[0]} runs on the CPU alone, and there is a GPU: stitching is slow"
    return Problem(said, _installation_command(machine, "gpu", drop="onnxruntime"))


def _check_torch(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    if (version := packages.versions.get("torch")) is None:
        return None
    if is_gpu_expected(machine) and packages.torch_cuda is None:
        said = f"torch {version} runs on the CPU alone, and there is a GPU: training is slow"
        return Problem(said, _installation_command(machine, "train"))
    return f"torch {version}" + (f", CUDA {packages.torch_cuda}" if packages.torch_cuda else ", on the CPU")


def _check_torch_cuda(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    driver, cuda = CUDA.get(machine.jetpack or 0), packages.torch_cuda
    if driver is None or not cuda or cuda.split(".")[0] == str(driver):
        return None
    return Problem(
        f"torch {packages.versions.get('torch')} is for CUDA {cuda}, and JetPack {machine.jetpack} has CUDA {driver}: "
        "it will not find the GPU",
        _installation_command(machine, "train"),
    )


def _check_numpy(machine: MachineFacts, packages: InstalledPackages) -> Verdict:
    """Check that the installed NumPy is not newer than the one torch was compiled with."""
    version, torch = packages.versions.get("numpy"), packages.versions.get("torch")
    if version is None or torch is None or packages.torch_numpy != 1 or int(version.split(".")[0]) < 2:
        return None
    return error(
        f"numpy {version} is beside torch {torch}, which was compiled with NumPy 1: no tensor becomes an array, and "
        "every task with torch fails",
        f"{FLASH}, with PIP_CONSTRAINT naming a file that holds numpy<2"
        if machine.flashed
        else "pip install 'numpy<2'",
    )


PACKAGES: Final = tuple(
    Check(number, ("machine", "packages"), find)
    for number, find in (
        ("FQ201", _check_onnx),
        ("FQ202", _check_onnx_gpu),
        ("FQ203", _check_torch),
        ("FQ204", _check_torch_cuda),
        ("FQ206", _check_numpy),
    )
)


def onnx_installation_command(machine: MachineFacts) -> str:
    return _installation_command(machine, "gpu" if is_gpu_expected(machine) else "onnx")


def _installation_command(machine: MachineFacts, extra: str, drop: str = "") -> str:
    # a flashed board does not have pip
    jp6 = machine.jetpack == 6
    if machine.flashed:
        others = {"gpu": "gpu", "train": "gpu train" if machine.gpu else "onnx train", "onnx": "onnx"}[extra]
        target = "jetpack6-gpu" if jp6 else f"jetpack{machine.jetpack}"
        known = KNOWN.get(target)
        python = "" if known is None or known.python else " --python PATH"
        return f"{FLASH.replace('TARGET', target if known else 'TARGET')}{python} --extras {others}"
    what = {"gpu": "onnxruntime-gpu", "train": "--force-reinstall torch torchvision", "onnx": "onnxruntime"}[extra]
    index = f" --index-url {NVIDIA_JP6}" if jp6 and extra != "onnx" else ""
    return (f"pip uninstall -y {drop} && " if drop else "") + f"pip install {what}{index}"


# -- reading --------------------------------------------------------------------------------------


def _find_folder(paths: Sequence[Path], name: str) -> Path | None:
    return next((path / name for path in paths if (path / name).is_dir()), None)


def _read_string_constant(path: Path, name: str) -> str | None:
    """Return the string assigned to a name at the top level of a Python file, or None without one."""
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


def _find_required_numpy_version(library: Path) -> int | None:
    """Return 2 or 1 for the NumPy that a library was built for, or None if unknown."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(NUMPY_2) >= 0:
                return 2
            return 1 if text.find(NUMPY_2.replace(b"_core", b"core")) >= 0 else None
    except (OSError, ValueError):
        return None

"""Wheels for a board, resolved on the operator's machine and locked by their hashes.

pip finds versions, but evaluates markers of a foreign target ("tomli; python_version < '3.11'") with this machine's
Python. Therefore the required packages are determined here from the metadata of the wheels.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import fedquilt
from fedquilt.core import UNDECODABLE, JobError, StoreError
from fedquilt.formats import toml
from fedquilt.host.disk import disk_errors
from fedquilt.tools.boards.flash.targets import BundleTarget

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROUNDS_MOST: Final = 6  # of finding that something more is needed
FOR_A_GPU: Final = ("onnxruntime-gpu", "torch", "torchvision")  # an index besides PyPI has its own builds of these
NUMPY_2: Final = b"numpy._core._multiarray_umath"  # is imported by what was compiled with the headers of NumPy 2
STAMP: Final = (2020, 1, 1, 0, 0, 0)  # of every file in our own wheel: the same files, the same bytes


class CachedWheels(msgspec.Struct, frozen=True):
    """List of the downloaded wheels of a folder. JSON, since a list that was cut off must not read as a shorter one."""

    asked: str  # hash of the question that the wheels answer
    sha256_by_name: dict[str, str]


@dataclass(frozen=True)
class Wheel:
    name: str  # canonical
    version: str
    requires: tuple[str, ...]
    path: Path

    @classmethod
    def from_file(cls, path: Path) -> Wheel:
        from packaging.utils import canonicalize_name

        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = [n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
                said = HeaderParser().parsestr(archive.read(name).decode())
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise StoreError(f"{path} is no wheel ({error}): delete it, and run this again") from None
        return cls(canonicalize_name(said["Name"]), said["Version"], tuple(said.get_all("Requires-Dist") or ()), path)


# -- our own --------------------------------------------------------------------------------------


def build_own_wheel(folder: Path) -> Path:
    """Build fedquilt's own wheel from the running files. Same files give same bytes.

    Raises:
        StoreError: If the folder cannot be written.
    """
    package = Path(fedquilt.__file__).parent
    info = f"fedquilt-{fedquilt.__version__}.dist-info"
    files = dict(_package_files(package))
    files[f"{info}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in _read_metadata(package.parent)).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: fedquilt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nfedquilt = fedquilt.cli:main\n"
    record = "".join(f"{name},sha256={_urlsafe_sha256(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    path = folder / f"fedquilt-{fedquilt.__version__}-py3-none-any.whl"
    with disk_errors(f"write {path}"):
        path.write_bytes(made.getvalue())
    return path


def _read_metadata(clone: Path) -> list[tuple[str, str]]:
    # pyproject.toml comes first, because the metadata of an editable installation may be outdated
    said = [("Metadata-Version", "2.1"), ("Name", "fedquilt"), ("Version", fedquilt.__version__)]
    if not (clone / "pyproject.toml").is_file():
        known = metadata.metadata("fedquilt")
        return said + [
            (key, value) for key in ("Requires-Dist", "Provides-Extra") for value in known.get_all(key) or ()
        ]
    from packaging.requirements import Requirement

    project = toml.read_toml(clone / "pyproject.toml")["project"]
    said += [("Requires-Dist", line) for line in project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        said.append(("Provides-Extra", extra))
        for one in map(Requirement, lines):
            marker = f"({one.marker}) and " if one.marker else ""
            one.marker = None
            said.append(("Requires-Dist", f'{one}; {marker}extra == "{extra}"'))
    return said


def _package_files(package: Path) -> Iterable[tuple[str, bytes]]:
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".pyc", "~", ".orig", ".rej")):
                path = Path(folder, name)
                yield f"fedquilt/{path.relative_to(package).as_posix()}", path.read_bytes()


def _urlsafe_sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# -- everything it needs --------------------------------------------------------------------------


def collect_wheels(target: BundleTarget, extras: Sequence[str]) -> tuple[list[Path], str]:
    """Return the wheels for a target, fedquilt's own first, and their lock file.

    Wheels are downloaded once into the user's cache, so that all boards of a fleet get the same versions. pip's own
    variables hold as usual: PIP_EXTRA_INDEX_URL names a further index, preferred over PyPI for packages with GPU
    builds, and PIP_CONSTRAINT a file of allowed versions.

    Args:
        target: Kind of board.
        extras: Extras of fedquilt.

    Raises:
        JobError: If an extra is unknown, wheels are missing, or the constraints file is unreadable.
        StoreError: If the cache is unusable.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "wheels"
    constraint = Path(named) if (named := os.environ.get("PIP_CONSTRAINT")) else None
    allowed, index = _read_constraints(constraint), os.environ.get("PIP_EXTRA_INDEX_URL") or target.index or None
    extras = ["gpu" if extra == "onnx" and target.index else extra for extra in extras]
    known = {value for key, value in _read_metadata(Path(fedquilt.__file__).parents[1]) if key == "Provides-Extra"}
    for extra in extras:
        if extra not in known:
            raise JobError(f"no extra {extra!r}: fedquilt has {', '.join(sorted(known))}")
    narrowed = [f"constrained.{hashlib.sha256(allowed).hexdigest()[:8]}"] if allowed else []
    what = "-".join([target.name, f"py{target.python}", *sorted(extras), *narrowed])
    with disk_errors(f"use {cache}", "free some space or name another folder with XDG_CACHE_HOME"):
        folder = cache / what
        folder.mkdir(parents=True, exist_ok=True)
        mine = build_own_wheel(folder)
        question = (Wheel.from_file(mine).requires, target, sorted(extras), index, allowed)
        asked = hashlib.sha256(repr(question).encode()).hexdigest()
        found = _load_cached_wheels(folder, asked)
        if found is None:
            found = _resolve_wheels(mine, target, extras, folder, index, constraint)
            _save_cached_wheels(folder, found, asked)
        for other in folder.glob("*.whl"):
            if other != mine and other not in found:
                other.unlink()
        return [mine, *found], format_lock([mine, *found])


def _read_constraints(constraint: Path | None) -> bytes:
    try:
        return b"" if constraint is None else constraint.read_bytes()
    except OSError as error:
        raise JobError(
            f"PIP_CONSTRAINT {constraint} cannot be read ({error.strerror}): it is a file of lines such as numpy==2.2.6"
        ) from None


def format_lock(wheels: Sequence[Path]) -> str:
    """Return a requirements file with hashes for `pip install --require-hashes`."""
    read = sorted((Wheel.from_file(path) for path in wheels), key=lambda wheel: wheel.name)
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{file_sha256(wheel.path)}\n" for wheel in read)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while some := file.read(1 << 20):
            digest.update(some)
    return digest.hexdigest()


def _load_cached_wheels(folder: Path, asked: str) -> list[Path] | None:
    try:
        kept = msgspec.json.decode((folder / "kept.json").read_bytes(), type=CachedWheels)
    except (OSError, *UNDECODABLE):
        return None
    paths = {folder / name: digest for name, digest in kept.sha256_by_name.items()}
    if kept.asked != asked or not all(path.is_file() and file_sha256(path) == digest for path, digest in paths.items()):
        return None
    return list(paths)


def _save_cached_wheels(folder: Path, wheels: Sequence[Path], asked: str) -> None:
    kept = CachedWheels(asked=asked, sha256_by_name={path.name: file_sha256(path) for path in wheels})
    (folder / "kept.json").write_bytes(msgspec.json.encode(kept))


def _resolve_wheels(
    mine: Path, target: BundleTarget, extras: Sequence[str], folder: Path, index: str | None, constraint: Path | None
) -> list[Path]:
    root = f"fedquilt[{','.join(extras)}]" if extras else "fedquilt"
    with tempfile.TemporaryDirectory(dir=folder) as built:
        more = [] if index is None else _pin_gpu_builds(root, mine, target, Path(built), index, constraint)
        return _download_closure(root, mine, target, folder, index, constraint, more)


def _pin_gpu_builds(
    root: str, mine: Path, target: BundleTarget, folder: Path, index: str, constraint: Path | None
) -> list[str]:
    # PyPI has newer builds for another CUDA. A wheel compiled with NumPy 1 does not run with NumPy 2.
    from packaging.requirements import Requirement

    _, missing = dependency_closure(root, {"fedquilt": Wheel.from_file(mine)}, target)
    alone = ["--no-deps", "--index-url", index]
    for wanted in missing:
        if Requirement(wanted).name in FOR_A_GPU:  # packages that this index lacks are resolved like all others
            _run_pip_download([wanted], folder, target, constraint, alone, local=True)
    pinned = []
    for wheel in map(Wheel.from_file, sorted(folder.glob("*.whl"))):
        pinned.append(f"{wheel.name} @ {wheel.path.resolve().as_uri()}")
        if wheel.name == "torch" and not _is_built_for_numpy_2(wheel.path):
            pinned.append("numpy<2")
    return pinned


def _is_built_for_numpy_2(torch: Path) -> bool:
    with zipfile.ZipFile(torch) as archive:
        names = [name for name in archive.namelist() if name.endswith("libtorch_python.so")]
        return not names or any(NUMPY_2 in archive.read(name) for name in names)


def _download_closure(
    root: str,
    mine: Path,
    target: BundleTarget,
    folder: Path,
    index: str | None,
    constraint: Path | None,
    more: list[str],
) -> list[Path]:
    for _ in range(ROUNDS_MOST):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _download_wheels([f"{root} @ {mine.resolve().as_uri()}", *more], Path(scratch), target, index, constraint)
            got = {wheel.name: wheel for wheel in map(Wheel.from_file, sorted(Path(scratch).glob("*.whl")))}
            needed, missing = dependency_closure(root, got, target)
            if not missing:
                kept = [got[name].path for name in sorted(needed - {"fedquilt"})]
                return [Path(shutil.copy(path, folder / path.name)) for path in kept]
            more += missing
    raise JobError(f"wheels for {target.name} cannot be resolved: {', '.join(more)} asks for more each time")


def dependency_closure(root: str, wheels: Mapping[str, Wheel], target: BundleTarget) -> tuple[set[str], list[str]]:
    """Return the names of the wheels that `root` needs on the target, and the unmet requirements."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    needed: dict[str, set[str]] = {}
    missing: list[str] = []
    waiting = [Requirement(root)]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        wheel = wheels.get(name)
        if wheel is None or not wanted.specifier.contains(wheel.version, prereleases=True):
            wanted.marker = None
            missing.append(str(wanted))
            continue
        fresh = ({"", *wanted.extras}) - needed.get(name, set())
        needed.setdefault(name, set()).update(fresh)
        for extra in sorted(fresh):
            waiting += [one for one in map(Requirement, wheel.requires) if _applies_to_extra(one, target, extra)]
    return set(needed), sorted(set(missing))


def _applies_to_extra(one: Requirement, target: BundleTarget, extra: str) -> bool:
    if one.marker is None:
        return not extra
    environment = target.marker_environment()
    if not extra:
        return one.marker.evaluate({**environment, "extra": ""})
    return one.marker.evaluate({**environment, "extra": extra}) and not one.marker.evaluate(
        {**environment, "extra": ""}
    )


def _download_wheels(
    what: Sequence[str], folder: Path, target: BundleTarget, index: str | None, constraint: Path | None
) -> None:
    besides = ["--extra-index-url", index] if index else []
    why = _run_pip_download(what, folder, target, constraint, besides, local=index is not None)
    if why is not None:
        raise JobError(
            f"no wheels for {target.name} (Python {target.python}, {target.machine}): {why}; is there a network, "
            "does this Python have pip, do these packages have wheels for that board (PIP_EXTRA_INDEX_URL adds one)"
            f"{f', does {constraint} allow versions that go together' if constraint else ''}?"
        )


def _run_pip_download(
    what: Sequence[str],
    folder: Path,
    target: BundleTarget,
    constraint: Path | None,
    where: Sequence[str],
    *,
    local: bool,
) -> str | None:
    """Download wheels with pip. Return None, or the error.

    Args:
        what: requirements.
        folder: gets the wheels.
        target: kind of board.
        constraint: pip's constraints file.
        where: pip's options that name indexes.
        local: take wheels with the board's own tag too, and rather than others of the same version.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", target.python]
    for platform in ([target.local_platform] if local else []) + list(target.platforms):
        command += ["--platform", platform]
    command += ["--constraint", str(constraint)] if constraint else []
    done = subprocess.run([*command, *where, "--dest", str(folder), *what], capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    told = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
    return "; ".join(told[-2:]) or done.stderr.strip()[-300:] or "pip said nothing"

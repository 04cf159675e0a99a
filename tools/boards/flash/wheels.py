"""Wheels for a board, resolved on the operator's machine and locked by their hashes.

pip finds versions, but evaluates markers of a foreign target ("tomli; python_version < '3.11'") with this machine's
Python. Therefore the required packages are determined here from the metadata of the wheels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fedquilt.core import DECODE_ERRORS, JobError, StoreError
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.tools.boards.flash import own_wheels
from fedquilt.tools.boards.flash.own_wheels import OwnWheel
from fedquilt.tools.boards.targets import NUMPY_2, BundleTarget

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MAX_DOWNLOADS: Final = 6  # each download may reveal missing dependencies
GPU_PACKAGES: Final = ("onnxruntime-gpu", "torch", "torchvision")  # other indexes than PyPI have GPU builds


class CachedWheels(msgspec.Struct, frozen=True):
    """Downloaded wheels of a folder, stored as JSON because a truncated text list would look complete."""

    request_sha256: str  # hash of target, extras, index and constraints
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
                (name,) = [
                    member
                    for member in archive.namelist()
                    if member.count("/") == 1 and member.endswith(".dist-info/METADATA")
                ]
                fields = HeaderParser().parsestr(archive.read(name).decode())
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise StoreError(f"{path} is not a wheel ({error}): delete it, and repeat the command") from None
        return cls(
            canonicalize_name(fields["Name"]), fields["Version"], tuple(fields.get_all("Requires-Dist") or ()), path
        )


# -- wheels of a target ---------------------------------------------------------------------------


def collect_wheels(target: BundleTarget, extras: Sequence[str], name: OwnWheel = "fedquilt-board") -> list[Path]:
    """Return the wheels for a target, fedquilt's own first.

    Wheels are downloaded once into the user's cache, so that all boards of a fleet get the same versions. pip's own
    variables hold as usual: PIP_EXTRA_INDEX_URL names a further index, preferred over PyPI for packages with GPU
    builds, and PIP_CONSTRAINT a file of allowed versions.

    Args:
        target: Kind of board.
        extras: Extras of fedquilt.
        name: Own wheel, with everything or for boards.

    Raises:
        JobError: If an extra is unknown, wheels are missing, or the constraints file is unreadable.
        StoreError: If the cache is unusable.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "wheels"
    constraint = Path(constraint_name) if (constraint_name := os.environ.get("PIP_CONSTRAINT")) else None
    constraints_text = _read_constraints(constraint)
    index = os.environ.get("PIP_EXTRA_INDEX_URL") or target.index or None
    extras = ["gpu" if extra == "onnx" and target.index else extra for extra in extras]
    known_extras = {value for key, value in own_wheels.read_metadata(name) if key == "Provides-Extra"}
    for extra in extras:
        if extra not in known_extras:
            raise JobError(f"unknown extra {extra!r}: {name} has {', '.join(sorted(known_extras))}")
    suffix = [f"constrained.{hashlib.sha256(constraints_text).hexdigest()[:8]}"] if constraints_text else []
    cache_key = "-".join([name, target.name, f"py{target.python}", *sorted(extras), *suffix])
    with disk_errors(f"use {cache}", "free some space or name another folder with XDG_CACHE_HOME"):
        folder = cache / cache_key
        folder.mkdir(parents=True, exist_ok=True)
        own_wheel = Wheel.from_file(own_wheels.build_own_wheel(folder, name))
        request = (own_wheel.requires, target, sorted(extras), index, constraints_text)
        request_sha256 = hashlib.sha256(repr(request).encode()).hexdigest()
        downloaded = _load_cached_wheels(folder, request_sha256)
        if downloaded is None:
            downloaded = WheelDownload(own_wheel, extras, target, folder, index, constraint).run()
            cached = CachedWheels(
                request_sha256=request_sha256, sha256_by_name={path.name: REAL.hash_file(path) for path in downloaded}
            )
            (folder / "kept.json").write_bytes(msgspec.json.encode(cached))
        for wheel_path in folder.glob("*.whl"):
            if wheel_path != own_wheel.path and wheel_path not in downloaded:
                wheel_path.unlink()
        return [own_wheel.path, *downloaded]


def _read_constraints(constraint: Path | None) -> bytes:
    try:
        return b"" if constraint is None else constraint.read_bytes()
    except OSError as error:
        fix = "name a file of lines such as numpy==2.2.6"
        raise JobError(f"PIP_CONSTRAINT {constraint} cannot be read ({error.strerror}): {fix}") from None


def _load_cached_wheels(folder: Path, request_sha256: str) -> list[Path] | None:
    try:
        cached = msgspec.json.decode((folder / "kept.json").read_bytes(), type=CachedWheels)
    except (OSError, *DECODE_ERRORS):
        return None
    paths = {folder / name: digest for name, digest in cached.sha256_by_name.items()}
    if cached.request_sha256 != request_sha256 or not all(
        path.is_file() and REAL.hash_file(path) == digest for path, digest in paths.items()
    ):
        return None
    return list(paths)


@dataclass(frozen=True)
class WheelDownload:
    """Download of the wheels that the own wheel needs on a target.

    Attributes:
        own_wheel: Fedquilt's own wheel.
        folder: Folder that gets the wheels.
        index: Address of an index besides PyPI, or None.
        constraint: File of allowed versions, or None.
    """

    own_wheel: Wheel
    extras: Sequence[str]
    target: BundleTarget
    folder: Path
    index: str | None
    constraint: Path | None

    def run(self) -> list[Path]:
        """Download until no dependency is missing. Return the wheels except the own one, or raise JobError."""
        root = f"{self.own_wheel.name}[{','.join(self.extras)}]" if self.extras else self.own_wheel.name
        with tempfile.TemporaryDirectory(dir=self.folder) as gpu_folder:
            more = [] if self.index is None else self._download_gpu_builds(root, Path(gpu_folder), self.index)
            for _ in range(MAX_DOWNLOADS):
                with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                    own_requirement = f"{root} @ {self.own_wheel.path.resolve().as_uri()}"
                    self._download_with_dependencies([own_requirement, *more], Path(scratch))
                    downloaded = {
                        wheel.name: wheel for wheel in map(Wheel.from_file, sorted(Path(scratch).glob("*.whl")))
                    }
                    needed_names, missing = dependency_closure(root, downloaded, self.target)
                    if not missing:
                        paths = [downloaded[name].path for name in sorted(needed_names - {self.own_wheel.name})]
                        return [Path(shutil.copy(path, self.folder / path.name)) for path in paths]
                    more += missing
        problem = f"{', '.join(more)} needed more packages in each of {MAX_DOWNLOADS} downloads"
        raise JobError(f"wheels for {self.target.name} cannot be resolved: {problem}")

    def _download_gpu_builds(self, root: str, folder: Path, index: str) -> list[str]:
        # PyPI has newer builds for another CUDA. A wheel compiled with NumPy 1 does not run with NumPy 2.
        from packaging.requirements import Requirement

        _, missing = dependency_closure(root, {self.own_wheel.name: self.own_wheel}, self.target)
        for requirement in missing:
            # packages that this index lacks are resolved like all others
            if Requirement(requirement).name in GPU_PACKAGES:
                self._run_pip([requirement], folder, ["--no-deps", "--index-url", index])
        pins = []
        for wheel in map(Wheel.from_file, sorted(folder.glob("*.whl"))):
            pins.append(f"{wheel.name} @ {wheel.path.resolve().as_uri()}")
            if wheel.name == "torch" and not _is_built_for_numpy_2(wheel.path):
                pins.append("numpy<2")
        return pins

    def _download_with_dependencies(self, requirements: Sequence[str], folder: Path) -> None:
        reason = self._run_pip(requirements, folder, ["--extra-index-url", self.index] if self.index else [])
        if reason is not None:
            raise JobError(
                f"no wheels for {self.target.name} (Python {self.target.python}, {self.target.machine}): {reason}. "
                "Check the network, pip, and whether an index (PIP_EXTRA_INDEX_URL adds one) has wheels for this target"
                f"{f', and the versions in {self.constraint}' if self.constraint else ''}"
            )

    def _run_pip(self, requirements: Sequence[str], folder: Path, index_options: Sequence[str]) -> str | None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", self.target.python]
        for platform in ([self.target.local_platform] if self.index else []) + list(self.target.platforms):
            command += ["--platform", platform]
        command += ["--constraint", str(self.constraint)] if self.constraint else []
        process = subprocess.run(
            [*command, *index_options, "--dest", str(folder), *requirements], capture_output=True, text=True
        )
        if not process.returncode:
            return None
        errors = [line.strip() for line in process.stderr.splitlines() if "error" in line.lower()]
        return "; ".join(errors[-2:]) or process.stderr.strip()[-300:] or f"pip exit code {process.returncode}"


def _is_built_for_numpy_2(torch: Path) -> bool:
    with zipfile.ZipFile(torch) as archive:
        names = [name for name in archive.namelist() if name.endswith("libtorch_python.so")]
        return not names or any(NUMPY_2 in archive.read(name) for name in names)


def dependency_closure(root: str, wheels: Mapping[str, Wheel], target: BundleTarget) -> tuple[set[str], list[str]]:
    """Return the names of the wheels that requirement `root` needs, and requirements without a wheel."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras_by_name: dict[str, set[str]] = {}
    missing: list[str] = []
    pending = [Requirement(root)]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        wheel = wheels.get(name)
        if wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            requirement.marker = None
            missing.append(str(requirement))
            continue
        new_extras = ({"", *requirement.extras}) - extras_by_name.get(name, set())
        extras_by_name.setdefault(name, set()).update(new_extras)
        for extra in sorted(new_extras):
            pending += [
                needed for needed in map(Requirement, wheel.requires) if _is_required_for_extra(needed, target, extra)
            ]
    return set(extras_by_name), sorted(set(missing))


def _is_required_for_extra(requirement: Requirement, target: BundleTarget, extra: str) -> bool:
    """Return whether a requirement applies only with this extra or, for extra "", without any."""
    if requirement.marker is None:
        return not extra
    environment = target.marker_environment()
    without_extra = requirement.marker.evaluate({**environment, "extra": ""})
    return (
        without_extra
        if not extra
        else not without_extra and requirement.marker.evaluate({**environment, "extra": extra})
    )

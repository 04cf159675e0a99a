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
from fedquilt.host.disk import disk_errors
from fedquilt.tools.boards.flash import own_wheels
from fedquilt.tools.boards.flash.own_wheels import OwnWheel
from fedquilt.tools.boards.targets import NUMPY_2, BundleTarget

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROUNDS_MOST: Final = 6  # of finding that something more is needed
FOR_A_GPU: Final = ("onnxruntime-gpu", "torch", "torchvision")  # an index besides PyPI has its own builds of these


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


# -- everything it needs --------------------------------------------------------------------------


def collect_wheels(
    target: BundleTarget, extras: Sequence[str], name: OwnWheel = "fedquilt-board"
) -> tuple[list[Path], str]:
    """Return the wheels for a target, fedquilt's own first, and their lock file.

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
    constraint = Path(named) if (named := os.environ.get("PIP_CONSTRAINT")) else None
    allowed, index = _read_constraints(constraint), os.environ.get("PIP_EXTRA_INDEX_URL") or target.index or None
    extras = ["gpu" if extra == "onnx" and target.index else extra for extra in extras]
    known = {value for key, value in own_wheels.read_metadata(name) if key == "Provides-Extra"}
    for extra in extras:
        if extra not in known:
            raise JobError(f"no extra {extra!r}: {name} has {', '.join(sorted(known))}")
    narrowed = [f"constrained.{hashlib.sha256(allowed).hexdigest()[:8]}"] if allowed else []
    what = "-".join([name, target.name, f"py{target.python}", *sorted(extras), *narrowed])
    with disk_errors(f"use {cache}", "free some space or name another folder with XDG_CACHE_HOME"):
        folder = cache / what
        folder.mkdir(parents=True, exist_ok=True)
        own = Wheel.from_file(own_wheels.build_own_wheel(folder, name))
        question = (own.requires, target, sorted(extras), index, allowed)
        asked = hashlib.sha256(repr(question).encode()).hexdigest()
        found = _load_cached_wheels(folder, asked)
        if found is None:
            found = WheelDownload(own, extras, target, folder, index, constraint).run()
            kept = CachedWheels(asked=asked, sha256_by_name={path.name: file_sha256(path) for path in found})
            (folder / "kept.json").write_bytes(msgspec.json.encode(kept))
        for other in folder.glob("*.whl"):
            if other != own.path and other not in found:
                other.unlink()
        return [own.path, *found], format_lock([own.path, *found])


def _read_constraints(constraint: Path | None) -> bytes:
    try:
        return b"" if constraint is None else constraint.read_bytes()
    except OSError as error:
        raise JobError(
            f"PIP_CONSTRAINT {constraint} cannot be read ({error.strerror}): it is a file of lines such as numpy==2.2.6"
        ) from None


def format_lock(wheels: Sequence[Path]) -> str:
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
    except (OSError, *DECODE_ERRORS):
        return None
    paths = {folder / name: digest for name, digest in kept.sha256_by_name.items()}
    if kept.asked != asked or not all(path.is_file() and file_sha256(path) == digest for path, digest in paths.items()):
        return None
    return list(paths)


@dataclass(frozen=True)
class WheelDownload:
    """Download of the wheels that the own wheel needs on a target.

    Attributes:
        own: Fedquilt's own wheel.
        folder: Folder that gets the wheels.
        index: Address of an index besides PyPI, or None.
        constraint: File of allowed versions, or None.
    """

    own: Wheel
    extras: Sequence[str]
    target: BundleTarget
    folder: Path
    index: str | None
    constraint: Path | None

    def run(self) -> list[Path]:
        """Download until no dependency is missing. Return the wheels without the own one."""
        root = f"{self.own.name}[{','.join(self.extras)}]" if self.extras else self.own.name
        with tempfile.TemporaryDirectory(dir=self.folder) as built:
            more = [] if self.index is None else self._download_gpu_builds(root, Path(built), self.index)
            for _ in range(ROUNDS_MOST):
                with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                    own = f"{root} @ {self.own.path.resolve().as_uri()}"
                    self._download_with_dependencies([own, *more], Path(scratch))
                    got = {wheel.name: wheel for wheel in map(Wheel.from_file, sorted(Path(scratch).glob("*.whl")))}
                    needed, missing = dependency_closure(root, got, self.target)
                    if not missing:
                        kept = [got[name].path for name in sorted(needed - {self.own.name})]
                        return [Path(shutil.copy(path, self.folder / path.name)) for path in kept]
                    more += missing
        raise JobError(f"wheels for {self.target.name} cannot be resolved: {', '.join(more)} asks for more each time")

    def _download_gpu_builds(self, root: str, folder: Path, index: str) -> list[str]:
        """Download packages with GPU builds from `index`, and return requirements that pin them."""
        # PyPI has newer builds for another CUDA. A wheel compiled with NumPy 1 does not run with NumPy 2.
        from packaging.requirements import Requirement

        _, missing = dependency_closure(root, {self.own.name: self.own}, self.target)
        for wanted in missing:
            if Requirement(wanted).name in FOR_A_GPU:  # packages that this index lacks are resolved like all others
                self._run_pip([wanted], folder, ["--no-deps", "--index-url", index])
        pinned = []
        for wheel in map(Wheel.from_file, sorted(folder.glob("*.whl"))):
            pinned.append(f"{wheel.name} @ {wheel.path.resolve().as_uri()}")
            if wheel.name == "torch" and not _is_built_for_numpy_2(wheel.path):
                pinned.append("numpy<2")
        return pinned

    def _download_with_dependencies(self, requirements: Sequence[str], folder: Path) -> None:
        why = self._run_pip(requirements, folder, ["--extra-index-url", self.index] if self.index else [])
        if why is not None:
            raise JobError(
                f"no wheels for {self.target.name} (Python {self.target.python}, {self.target.machine}): {why}; is "
                "there a network, does this Python have pip, do these packages have wheels for that board "
                "(PIP_EXTRA_INDEX_URL adds one)"
                f"{f', does {self.constraint} allow versions that go together' if self.constraint else ''}?"
            )

    def _run_pip(self, requirements: Sequence[str], folder: Path, index_options: Sequence[str]) -> str | None:
        """Download wheels with pip. Return None, or the error."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", self.target.python]
        for platform in ([self.target.local_platform] if self.index else []) + list(self.target.platforms):
            command += ["--platform", platform]
        command += ["--constraint", str(self.constraint)] if self.constraint else []
        done = subprocess.run(
            [*command, *index_options, "--dest", str(folder), *requirements], capture_output=True, text=True
        )
        if not done.returncode:
            return None
        told = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        return "; ".join(told[-2:]) or done.stderr.strip()[-300:] or "pip said nothing"


def _is_built_for_numpy_2(torch: Path) -> bool:
    with zipfile.ZipFile(torch) as archive:
        names = [name for name in archive.namelist() if name.endswith("libtorch_python.so")]
        return not names or any(NUMPY_2 in archive.read(name) for name in names)


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
            waiting += [one for one in map(Requirement, wheel.requires) if _is_required_for_extra(one, target, extra)]
    return set(needed), sorted(set(missing))


def _is_required_for_extra(one: Requirement, target: BundleTarget, extra: str) -> bool:
    """Return whether a requirement applies on the target with this extra alone, or without any for ""."""
    if one.marker is None:
        return not extra
    environment = target.marker_environment()
    without = one.marker.evaluate({**environment, "extra": ""})
    return without if not extra else not without and one.marker.evaluate({**environment, "extra": extra})

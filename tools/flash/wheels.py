"""The wheels a board needs: resolved for its Python and machine on the operator's, and locked by their hashes.

pip finds versions; but it reads the markers of a foreign target ("tomli; python_version < '3.11'") as this
machine's Python, so what is needed is worked out here from the wheels' own metadata.
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
from fedquilt import config
from fedquilt.core import UNDECODABLE, JobError, StoreError
from fedquilt.disk import doing
from fedquilt.tools.flash.targets import Target

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROUNDS_MOST: Final = 6  # of finding that something more is needed
FOR_A_GPU: Final = ("onnxruntime-gpu", "torch", "torchvision")  # an index besides PyPI has its own builds of these
NUMPY_2: Final = b"numpy._core._multiarray_umath"  # is imported by what was compiled with the headers of NumPy 2
STAMP: Final = (2020, 1, 1, 0, 0, 0)  # of every file in our own wheel: the same files, the same bytes


class Kept(msgspec.Struct, frozen=True):
    """List of the downloaded wheels of a folder. JSON, since a list that was cut off must not read as a shorter one."""

    asked: str  # hash of the question that the wheels answer
    sha256_by_name: dict[str, str]


@dataclass(frozen=True)
class Wheel:
    """Metadata of a wheel."""

    name: str  # canonical
    version: str
    requires: tuple[str, ...]
    path: Path

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Raises StoreError where it is no wheel."""
        from packaging.utils import canonicalize_name

        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = [n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
                said = HeaderParser().parsestr(archive.read(name).decode())
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise StoreError(f"{path} is no wheel ({error}): delete it, and run this again") from None
        return cls(canonicalize_name(said["Name"]), said["Version"], tuple(said.get_all("Requires-Dist") or ()), path)


# -- our own --------------------------------------------------------------------------------------


def own(folder: Path) -> Path:
    """Wheel of fedquilt itself, from the running files: no build tool, and the same bytes each time.

    Raises:
        StoreError: the folder cannot be written.
    """
    package = Path(fedquilt.__file__).parent
    info = f"fedquilt-{fedquilt.__version__}.dist-info"
    files = dict(_files(package))
    files[f"{info}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in _said(package.parent)).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: fedquilt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nfedquilt = fedquilt.cli:main\n"
    record = "".join(f"{name},sha256={_urlsafe(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    path = folder / f"fedquilt-{fedquilt.__version__}-py3-none-any.whl"
    with doing(f"write {path}"):
        path.write_bytes(made.getvalue())
    return path


def _said(clone: Path) -> list[tuple[str, str]]:
    """The METADATA of the wheel: in a clone from its pyproject.toml, which an editable installation may lag behind."""
    said = [("Metadata-Version", "2.1"), ("Name", "fedquilt"), ("Version", fedquilt.__version__)]
    if not (clone / "pyproject.toml").is_file():
        known = metadata.metadata("fedquilt")
        return said + [
            (key, value) for key in ("Requires-Dist", "Provides-Extra") for value in known.get_all(key) or ()
        ]
    from packaging.requirements import Requirement

    project = config.read(clone / "pyproject.toml")["project"]
    said += [("Requires-Dist", line) for line in project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        said.append(("Provides-Extra", extra))
        for one in map(Requirement, lines):
            marker = f"({one.marker}) and " if one.marker else ""
            one.marker = None
            said.append(("Requires-Dist", f'{one}; {marker}extra == "{extra}"'))
    return said


def _files(package: Path) -> Iterable[tuple[str, bytes]]:
    """The package's files by their names in a wheel. Its folders may be links, as they are in a clone."""
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".pyc", "~", ".orig", ".rej")):
                path = Path(folder, name)
                yield f"fedquilt/{path.relative_to(package).as_posix()}", path.read_bytes()


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# -- everything it needs --------------------------------------------------------------------------


def house(
    target: Target,
    extras: Sequence[str],
    cache: Path,
    index: str | None = None,
    *,
    constraint: Path | None = None,
    refresh: bool = False,
) -> tuple[list[Path], str]:
    """Collect an agent's wheels with these extras for a target, fedquilt's own first, and the lock of their hashes.

    The others are downloaded once, into `cache`, so that all boards of a fleet get the same ones.

    Args:
        target: kind of board.
        extras: of fedquilt.
        cache: folder of downloads.
        index: one more package index; wheels with a GPU in them are taken from it, whatever PyPI has under their names.
        constraint: pip's constraints file with allowed versions.
        refresh: look for newer packages.

    Raises:
        JobError: an extra that fedquilt lacks; no such wheels; no such file of constraints.
        StoreError: the cache cannot be used.
    """
    allowed, index = _allowed(constraint), index or target.index or None
    extras = ["gpu" if extra == "onnx" and target.index else extra for extra in extras]
    known = {value for key, value in _said(Path(fedquilt.__file__).parents[1]) if key == "Provides-Extra"}
    for extra in extras:
        if extra not in known:
            raise JobError(f"no extra {extra!r}: fedquilt has {', '.join(sorted(known))}")
    narrowed = [f"constrained.{hashlib.sha256(allowed).hexdigest()[:8]}"] if allowed else []
    what = "-".join([target.name, f"py{target.python}", *sorted(extras), *narrowed])
    with doing(f"use {cache}", "free some space or name another folder with --wheels"):
        folder = cache / what
        folder.mkdir(parents=True, exist_ok=True)
        mine = own(folder)
        question = (Wheel.read(mine).requires, target, sorted(extras), index, allowed)
        asked = hashlib.sha256(repr(question).encode()).hexdigest()
        found = None if refresh else _kept(folder, asked)
        if found is None:
            found = _resolved(mine, target, extras, folder, index, constraint)
            _keep(folder, found, asked)
        for other in folder.glob("*.whl"):
            if other != mine and other not in found:
                other.unlink()
        return [mine, *found], lock([mine, *found])


def _allowed(constraint: Path | None) -> bytes:
    try:
        return b"" if constraint is None else constraint.read_bytes()
    except OSError as error:
        raise JobError(
            f"--constraint {constraint} cannot be read ({error.strerror}): it is a file of lines such as numpy==2.2.6"
        ) from None


def lock(wheels: Sequence[Path]) -> str:
    """A requirements file that `pip install --require-hashes --no-index --find-links wheels -r` takes."""
    read = sorted((Wheel.read(path) for path in wheels), key=lambda wheel: wheel.name)
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{sha256(wheel.path)}\n" for wheel in read)


def sha256(path: Path) -> str:
    """Hash (sha256) of a file in hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while some := file.read(1 << 20):
            digest.update(some)
    return digest.hexdigest()


def _kept(folder: Path, asked: str) -> list[Path] | None:
    """Wheels that an earlier call downloaded for the same question, if all are there and whole."""
    try:
        kept = msgspec.json.decode((folder / "kept.json").read_bytes(), type=Kept)
    except (OSError, *UNDECODABLE):
        return None
    paths = {folder / name: digest for name, digest in kept.sha256_by_name.items()}
    if kept.asked != asked or not all(path.is_file() and sha256(path) == digest for path, digest in paths.items()):
        return None
    return list(paths)


def _keep(folder: Path, wheels: Sequence[Path], asked: str) -> None:
    kept = Kept(asked=asked, sha256_by_name={path.name: sha256(path) for path in wheels})
    (folder / "kept.json").write_bytes(msgspec.json.encode(kept))


def _resolved(
    mine: Path, target: Target, extras: Sequence[str], folder: Path, index: str | None, constraint: Path | None
) -> list[Path]:
    """Download with pip until nothing is missing; then only what the target needs is kept."""
    root = f"fedquilt[{','.join(extras)}]" if extras else "fedquilt"
    with tempfile.TemporaryDirectory(dir=folder) as built:
        more = [] if index is None else _for_a_gpu(root, mine, target, Path(built), index, constraint)
        return _complete(root, mine, target, folder, index, constraint, more)


def _for_a_gpu(root: str, mine: Path, target: Target, folder: Path, index: str, constraint: Path | None) -> list[str]:
    """Requirements that pin builds of the index: PyPI has newer ones of the same names, for a CUDA that is not there.

    A wheel compiled with NumPy 1 pins NumPy as well: it does not run beside NumPy 2.
    """
    from packaging.requirements import Requirement

    _, missing = closure(root, {"fedquilt": Wheel.read(mine)}, target)
    alone = ["--no-deps", "--index-url", index]
    for wanted in missing:
        if Requirement(wanted).name in FOR_A_GPU:  # what the index does not have is looked for like all others
            _pip([wanted], folder, target, constraint, alone, local=True)
    pinned = []
    for wheel in map(Wheel.read, sorted(folder.glob("*.whl"))):
        pinned.append(f"{wheel.name} @ {wheel.path.resolve().as_uri()}")
        if wheel.name == "torch" and not _knows_numpy_2(wheel.path):
            pinned.append("numpy<2")
    return pinned


def _knows_numpy_2(torch: Path) -> bool:
    """Whether a wheel of torch was compiled with the headers of NumPy 2; one without any compiled part counts so."""
    with zipfile.ZipFile(torch) as archive:
        names = [name for name in archive.namelist() if name.endswith("libtorch_python.so")]
        return not names or any(NUMPY_2 in archive.read(name) for name in names)


def _complete(
    root: str,
    mine: Path,
    target: Target,
    folder: Path,
    index: str | None,
    constraint: Path | None,
    more: list[str],
) -> list[Path]:
    """Download until nothing is missing beside what is required already."""
    for _ in range(ROUNDS_MOST):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _download([f"{root} @ {mine.resolve().as_uri()}", *more], Path(scratch), target, index, constraint)
            got = {wheel.name: wheel for wheel in map(Wheel.read, sorted(Path(scratch).glob("*.whl")))}
            needed, missing = closure(root, got, target)
            if not missing:
                kept = [got[name].path for name in sorted(needed - {"fedquilt"})]
                return [Path(shutil.copy(path, folder / path.name)) for path in kept]
            more += missing
    raise JobError(f"wheels for {target.name} cannot be resolved: {', '.join(more)} asks for more each time")


def closure(root: str, wheels: Mapping[str, Wheel], target: Target) -> tuple[set[str], list[str]]:
    """Names of the wheels that `root` needs on the target, and the requirements that none of them meets."""
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
            waiting += [one for one in map(Requirement, wheel.requires) if _applies(one, target, extra)]
    return set(needed), sorted(set(missing))


def _applies(one: Requirement, target: Target, extra: str) -> bool:
    """Whether a line of metadata is meant for this target, for the sake of this extra ("": in any case)."""
    if one.marker is None:
        return not extra
    environment = target.environment()
    if not extra:
        return one.marker.evaluate({**environment, "extra": ""})
    return one.marker.evaluate({**environment, "extra": extra}) and not one.marker.evaluate(
        {**environment, "extra": ""}
    )


def _download(what: Sequence[str], folder: Path, target: Target, index: str | None, constraint: Path | None) -> None:
    besides = ["--extra-index-url", index] if index else []
    why = _pip(what, folder, target, constraint, besides, local=index is not None)
    if why is not None:
        raise JobError(
            f"no wheels for {target.name} (Python {target.python}, {target.machine}): {why}; is there a network, "
            "does this Python have pip, do these packages have wheels for that board (--index names another index)"
            f"{f', does {constraint} allow versions that go together' if constraint else ''}?"
        )


def _pip(
    what: Sequence[str], folder: Path, target: Target, constraint: Path | None, where: Sequence[str], *, local: bool
) -> str | None:
    """Download with pip; None, or why it cannot.

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
    for platform in ([target.local] if local else []) + list(target.platforms):
        command += ["--platform", platform]
    command += ["--constraint", str(constraint)] if constraint else []
    done = subprocess.run([*command, *where, "--dest", str(folder), *what], capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    told = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
    return "; ".join(told[-2:]) or done.stderr.strip()[-300:] or "pip said nothing"

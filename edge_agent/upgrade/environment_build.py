"""Program that builds an environment from an upgrade's bundle, checked by the new version.

    python -m fedquilt.edge_agent.upgrade.environment_build

The program reads a `BuildRequest` as JSON from stdin. An environment is complete when its synced folder is renamed to
FOLDER/<sha256>, so that the program may be killed at any moment. Finally the program replaces itself by the new
version, which checks itself (`fedquilt agent agent.toml --check`). Exit code 0 means success. Otherwise the last line
on stderr is the reason.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Final

import msgspec

from fedquilt.core import FedquiltError, JobError, ModelError, StoreError
from fedquilt.edge_agent.task.process import exit_with_parent
from fedquilt.edge_agent.task.sandbox import protect_memory
from fedquilt.edge_agent.upgrade import archive, launcher
from fedquilt.edge_agent.upgrade.archive import UpgradeBundle, UpgradeManifest
from fedquilt.host import virtual_environment
from fedquilt.host.disk import REAL, Disk, disk_errors

SPARE_BYTES: Final = 32 << 20  # disk space that stays free
FLASHED_PATHS_FILE: Final = "flashed.pth"  # file with the folders of packages that are not copied
ARCHITECTURE_HINT: Final = "upgrade each kind of board with a bundle of its own, chosen by --label LABEL"


class BuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bundle: str
    sha256: str
    folder: str  # folder of all environments
    arguments: tuple[str, ...]  # command line of the agent
    packages: tuple[str, ...]  # folders of the packages that the board was flashed with
    ca: str | None  # file with the authority's certificate
    unsigned: bool
    highest_number: int  # number of the latest version confirmed on this board, below which bundles are refused
    parent: int  # id of the process with which this one ends, or 0


def base_interpreter() -> str:
    """Return the path of the Python on which this process's virtual environment is based."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in (Path(sys.executable).resolve(), Path(sys.base_prefix) / "bin" / name):
        if path.name.startswith("python") and path.is_file():
            return str(path)
    return sys.executable


def require_fitting_machine(manifest: UpgradeManifest) -> None:
    if manifest.machine != platform.machine():
        raise ModelError(
            f"upgrade bundle is for {manifest.machine}, this board is {platform.machine()}: {ARCHITECTURE_HINT}"
        )
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if manifest.python != python:
        raise ModelError(
            f"upgrade bundle is for Python {manifest.python}, this board has {python}: {ARCHITECTURE_HINT}"
        )


def require_valid_signature(bundle: UpgradeBundle, ca: str | None, unsigned: bool) -> None:
    if unsigned:
        return
    if ca is None:
        raise ModelError(
            "upgrade cannot be verified, because agent.toml has no [broker] ca: make an authority for the fleet "
            "(`fedquilt identity init`), or write unsigned = true under [upgrade]"
        )
    if bundle.signature is None:
        raise ModelError("upgrade bundle is not signed: build it with `fedquilt rollout build FILE --ca DIR`")
    try:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise JobError(
            "signature cannot be verified without fedquilt[identity]: flash this board with --extras identity"
        ) from None
    with disk_errors(f"read {ca}"):
        pem = Path(ca).read_bytes()
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise JobError(
            f"{ca} contains no certificate in PEM: copy the ca.crt of `fedquilt identity init` there"
        ) from None
    for certificate in certificates:
        try:
            key = certificate.public_key()
            if isinstance(key, ec.EllipticCurvePublicKey):
                return key.verify(bundle.signature, archive.SIGNED_PREFIX + bundle.signed, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            continue
    raise ModelError(
        f"upgrade bundle is not signed by the authority in {ca}: sign the bundle with the authority of this fleet"
    )


def require_not_older(manifest: UpgradeManifest, newest: int) -> None:
    if manifest.number < newest:
        raise ModelError(
            f"upgrade bundle of fedquilt {manifest.version} has signature number {manifest.number}, older than number "
            f"{newest} on this board: build and sign that version again (`fedquilt rollout build FILE --ca DIR`)"
        )


def flashed_packages(manifest: UpgradeManifest, packages: Iterable[str]) -> list[str]:
    """Return the folders `packages` if the bundle uses them, else []. A missing package raises ModelError."""
    if not manifest.present:
        return []
    folders = list(packages)
    installed: dict[str, str] = {}
    for distribution in metadata.distributions(path=folders):
        if "Name" in distribution.metadata:
            installed.setdefault(_canonical_name(distribution.metadata["Name"]), distribution.version)
    for name, version in sorted(manifest.present.items()):
        installed_version = installed.get(_canonical_name(name))
        if installed_version != version:
            problem = "does not have it" if installed_version is None else f"has {installed_version}"
            raise ModelError(
                f"upgrade bundle needs {name} {version}, this board {problem}: build a bundle with --whole"
            )
    return folders


def _canonical_name(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def build_environment(request: BuildRequest, disk: Disk = REAL) -> Path:
    """Check a bundle, unpack it unless its environment exists, and return the environment's folder."""
    folder = Path(request.folder)
    environment, incomplete = folder / request.sha256, folder / f"{request.sha256}.new"
    with _open_private_copy(request, disk) as copy, archive.open_bundle(Path(request.bundle), copy) as bundle:
        require_fitting_machine(bundle.manifest)
        require_valid_signature(bundle, request.ca, request.unsigned)
        if not request.unsigned:
            require_not_older(bundle.manifest, request.highest_number)
        bundle.verify_wheels()
        flashed_folders = flashed_packages(bundle.manifest, request.packages)
        if environment.is_dir():
            return environment
        with disk_errors(f"make {incomplete}", "free some space on the board"):
            try:
                disk.remove(incomplete)
                _require_space(folder, bundle.manifest.unpacked_bytes, disk)
                _install_bundle(bundle, incomplete, environment, flashed_folders)
                os.sync()  # one sync for all files, because there are thousands
                disk.replace(incomplete, environment)
                disk.sync(folder)
            except OSError:
                shutil.rmtree(incomplete, ignore_errors=True)
                raise
            except virtual_environment.InvalidWheelError as error:
                shutil.rmtree(incomplete, ignore_errors=True)
                raise ModelError(f"upgrade bundle cannot be unpacked: {error}") from None
    return environment


@contextmanager
def _open_private_copy(request: BuildRequest, disk: Disk) -> Iterator[IO[bytes]]:
    """Yield an unnamed copy of the bundle, which no other process can change after the check."""
    with disk_errors(f"copy {request.bundle}", "free some space on the board"):
        disk.make_folder(Path(request.folder))
        file = tempfile.TemporaryFile(dir=request.folder)  # noqa: SIM115 - closed below
    with file:
        digest = hashlib.sha256()
        with disk_errors(f"copy {request.bundle}", "free some space on the board"):
            for chunk in disk.read_pieces(request.bundle):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != request.sha256:
            raise ModelError(f"{request.bundle} is damaged: its sha256 is {digest.hexdigest()}: send the release again")
        file.seek(0)
        yield file


def _require_space(folder: Path, required_bytes: int, disk: Disk) -> None:
    free_bytes = disk.free_bytes(folder)
    if free_bytes < required_bytes + SPARE_BYTES:
        required_mb = (required_bytes + SPARE_BYTES) / 1e6
        raise StoreError(
            f"{folder} has {free_bytes / 1e6:.0f} MB free, this version needs {required_mb:.0f} MB: free disk space"
        )


def _install_bundle(bundle: UpgradeBundle, folder: Path, final_folder: Path, flashed_packages: Iterable[str]) -> None:
    manifest = bundle.manifest
    packages = virtual_environment.packages_folder(folder, manifest.python)
    virtual_environment.unpack_wheels(
        [(name, bundle.open_wheel(name)) for name in manifest.wheels], packages, manifest.unpacked_bytes
    )
    lines = "".join(f"{path}\n" for path in flashed_packages)
    if lines:
        (packages / FLASHED_PATHS_FILE).write_text(lines)
    virtual_environment.make_environment(folder, manifest.python, base_interpreter())
    virtual_environment.compile_packages(folder, manifest.python, str(final_folder))
    (folder / archive.MANIFEST).write_bytes(bundle.signed)


def main() -> None:
    try:
        protect_memory()
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildRequest)
        if request.parent:
            exit_with_parent(request.parent)
        build_environment(request)
    except (FedquiltError, msgspec.MsgspecError) as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    program = str(launcher.python_path(Path(request.folder), request.sha256))
    os.environ[launcher.SAFE_PATH_VARIABLE] = "1"
    try:
        os.execv(program, launcher.fedquilt_command(program, (*request.arguments, "--check")))  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"fedquilt: {program} cannot be started ({error.strerror})")


if __name__ == "__main__":
    main()

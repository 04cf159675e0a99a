"""Program that builds an environment from an upgrade's bundle, checked by the new version.

    python -m fedquilt.edge_agent.upgrade.environment_build

The program reads a `BuildRequest` as JSON from stdin. An environment counts once a synced folder is renamed to
FOLDER/<sha256>, so the program may be killed at any moment. At its end, the program becomes the new version, which
checks itself: `fedquilt agent agent.toml --check`. Exit code 0 means success. Otherwise the last line on stderr is the
reason.
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

SPARE_BYTES: Final = 32 << 20  # that stay free on the disk
FLASHED: Final = "flashed.pth"  # names the packages that are used where they are
MEND_ARCHITECTURE: Final = "upgrade each kind of board with a bundle of its own, chosen by --label LABEL"


class BuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bundle: str
    sha256: str
    folder: str  # of all environments
    words: tuple[str, ...]  # command line of the agent
    packages: tuple[str, ...]  # folders of the packages that the board was flashed with
    ca: str | None  # file with the authority's certificate
    unsigned: bool  # whether unsigned bundles are accepted
    newest: int  # number of the latest version confirmed on this board: older bundles are refused
    parent: int  # id of the process to end with, or 0


def base_interpreter() -> str:
    """Return the Python for a new environment: this one without its own environment."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for place in (Path(sys.executable).resolve(), Path(sys.base_prefix) / "bin" / name):
        if place.name.startswith("python") and place.is_file():
            return str(place)
    return sys.executable


def require_fitting_machine(manifest: UpgradeManifest) -> None:
    if manifest.machine != platform.machine():
        raise ModelError(
            f"the bundle is for {manifest.machine}, and this board is {platform.machine()}: {MEND_ARCHITECTURE}"
        )
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if manifest.python != python:
        raise ModelError(
            f"the bundle is for Python {manifest.python}, and this board has {python}: {MEND_ARCHITECTURE}"
        )


def require_valid_signature(bundle: UpgradeBundle, ca: str | None, unsigned: bool) -> None:
    if unsigned:
        return
    if ca is None:
        raise ModelError(
            "this board has no certificate of an authority ([broker] ca in agent.toml) by which an upgrade could be "
            "checked: give the fleet one (`fedquilt identity init`), or write unsigned = true under [upgrade] there"
        )
    if bundle.signature is None:
        raise ModelError("the bundle is not signed: `fedquilt rollout build FILE --ca DIR` signs it")
    try:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise JobError(
            "checking a signature needs fedquilt[identity]: flash this board with --extras identity"
        ) from None
    with disk_errors(f"read {ca}"):
        pem = Path(ca).read_bytes()
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise JobError(f"{ca} holds no certificate in PEM: it is the ca.crt of `fedquilt identity init`") from None
    for certificate in certificates:
        try:
            key = certificate.public_key()
            if isinstance(key, ec.EllipticCurvePublicKey):
                return key.verify(bundle.signature, archive.SIGNED + bundle.signed, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            continue
    raise ModelError(f"the bundle's signature is not of the authority in {ca}: sign it with the fleet's own")


def require_not_older(manifest: UpgradeManifest, newest: int) -> None:
    if manifest.number < newest:
        raise ModelError(
            f"the bundle of fedquilt {manifest.version} has the authority's number {manifest.number}, and this board "
            f"has kept number {newest}: what was signed before that is refused; if this version is wanted again, make "
            "and sign its bundle anew (`fedquilt rollout build FILE --ca DIR`)"
        )


def flashed_packages(manifest: UpgradeManifest, packages: Iterable[str]) -> list[str]:
    if not manifest.present:
        return []
    places = list(packages)
    found: dict[str, str] = {}
    for one in metadata.distributions(path=places):
        if "Name" in one.metadata:
            found.setdefault(_canonical_name(one.metadata["Name"]), one.version)
    for name, wanted in sorted(manifest.present.items()):
        has = found.get(_canonical_name(name))
        if has != wanted:
            says = "does not have it" if has is None else f"has {has}"
            raise ModelError(
                f"the bundle needs {name} {wanted}, and this board {says}: make one with all packages (--whole)"
            )
    return places


def _canonical_name(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def build_environment(order: BuildRequest, disk: Disk = REAL) -> Path:
    """Check a bundle, unpack it unless its environment exists, and return the environment's folder."""
    folder = Path(order.folder)
    home, new = folder / order.sha256, folder / f"{order.sha256}.new"
    with _open_private_copy(order, disk) as copy, archive.open_bundle(Path(order.bundle), copy) as bundle:
        require_fitting_machine(bundle.manifest)
        require_valid_signature(bundle, order.ca, order.unsigned)
        if not order.unsigned:
            require_not_older(bundle.manifest, order.newest)
        bundle.verify_wheels()
        places = flashed_packages(bundle.manifest, order.packages)
        if home.is_dir():
            return home
        with disk_errors(f"make {new}", "free some space on the board"):
            try:
                disk.remove(new)
                _require_space(folder, bundle.manifest.unpacked_bytes, disk)
                _install_bundle(bundle, new, home, places)
                os.sync()  # thousands of files: one wait for all of them
                disk.replace(new, home)
                disk.sync(folder)
            except OSError:
                shutil.rmtree(new, ignore_errors=True)
                raise
            except virtual_environment.InvalidWheelError as error:
                shutil.rmtree(new, ignore_errors=True)
                raise ModelError(f"the bundle cannot be unpacked: {error}") from None
    return home


@contextmanager
def _open_private_copy(order: BuildRequest, disk: Disk) -> Iterator[IO[bytes]]:
    """Yield a copy of the bundle without a name, so that the bytes checked are those unpacked."""
    with disk_errors(f"copy {order.bundle}", "free some space on the board"):
        disk.make_folder(Path(order.folder))
        file = tempfile.TemporaryFile(dir=order.folder)  # noqa: SIM115 - closed below
    with file:
        digest = hashlib.sha256()
        with disk_errors(f"copy {order.bundle}", "free some space on the board"):
            for piece in disk.read_pieces(order.bundle):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != order.sha256:
            raise ModelError(f"{order.bundle} is damaged: its sha256 is {digest.hexdigest()}: send the release again")
        file.seek(0)
        yield file


def _require_space(folder: Path, needed: int, disk: Disk) -> None:
    free = disk.free_bytes(folder)
    if free < needed + SPARE_BYTES:
        wanted = (needed + SPARE_BYTES) / 1e6
        raise StoreError(
            f"{free / 1e6:.0f} MB are free at {folder}, and this version takes {wanted:.0f} MB: make room on the board"
        )


def _install_bundle(bundle: UpgradeBundle, folder: Path, final_folder: Path, flashed_packages: Iterable[str]) -> None:
    manifest = bundle.manifest
    packages = virtual_environment.packages_folder(folder, manifest.python)
    virtual_environment.unpack_wheels(
        [(name, bundle.open_wheel(name)) for name in manifest.wheels], packages, manifest.unpacked_bytes
    )
    lines = "".join(f"{place}\n" for place in flashed_packages)
    if lines:
        (packages / FLASHED).write_text(lines)
    virtual_environment.make_environment(folder, manifest.python, base_interpreter())
    virtual_environment.compile_packages(folder, manifest.python, str(final_folder))
    (folder / archive.MANIFEST).write_bytes(bundle.signed)


def main() -> None:
    try:
        protect_memory()
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildRequest)
        if order.parent:
            exit_with_parent(order.parent)
        build_environment(order)
    except (FedquiltError, msgspec.MsgspecError) as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    program = str(launcher.python_path(Path(order.folder), order.sha256))
    os.environ[launcher.SAFE] = "1"
    try:
        os.execv(program, launcher.fedquilt_command(program, (*order.words, "--check")))  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"fedquilt: {program} cannot be started ({error.strerror})")


if __name__ == "__main__":
    main()

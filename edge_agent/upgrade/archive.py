"""Bundle of an upgrade: a tar archive of wheels with a signed manifest.

    upgrade.json     version, machine, Python, and the sha256 of every wheel
    upgrade.sig      signature of upgrade.json by the fleet's authority, absent in a fleet without one
    wheels/*.whl

`fedquilt rollout build FILE` creates a bundle, without settings and secrets, for all boards of a kind.
"""

from __future__ import annotations

import hashlib
import tarfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.core import DECODE_ERRORS, Count, Digest, ModelError, ShortText
from fedquilt.host.disk import disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = 1
MANIFEST: Final = "upgrade.json"
SIGNATURE: Final = "upgrade.sig"
SIGNED_PREFIX: Final = b"fedquilt: manifest of an upgrade, 1\n"  # a prefix makes the signature valid for nothing else
MAX_MANIFEST_BYTES: Final = 1 << 20
MAX_SIGNATURE_BYTES: Final = 1024
MAX_UNPACKED_BYTES: Final = 16 << 30  # size limit in bytes, above any environment with torch and CUDA

Wheel = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}\.whl\Z")]


class UpgradeManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    format: int
    version: ShortText  # version of fedquilt
    machine: ShortText  # output of `uname -m`
    python: Annotated[str, Meta(pattern=r"^3\.\d{1,3}\Z")]
    wheels: dict[Wheel, Digest]
    unpacked_bytes: Annotated[int, Meta(ge=0, le=MAX_UNPACKED_BYTES)]
    # Omitted package -> version that must be installed.
    present: dict[ShortText, ShortText] = msgspec.field(default_factory=dict)
    made_s: Count = 0  # seconds since 1970
    number: Count = 0  # number of the signature, rising with each signature, or 0 if unsigned


class _PlainTarHeader(tarfile.TarInfo):
    """Header of a regular file in a bundle. Links, folders and too large files raise ReadError."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainTarHeader:
        header = super().frombuf(buf, encoding, errors)
        if header.type != tarfile.REGTYPE or not 0 <= header.size <= MAX_UNPACKED_BYTES:
            raise tarfile.ReadError(f"{header.name[:80]!a} is not a regular file or is too large")
        return header


class UpgradeBundle:
    """Open bundle of an upgrade. The constructor reads the manifest and verifies nothing."""

    def __init__(self, archive: tarfile.TarFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._members = {member.name: member for member in archive.getmembers()}
        self.signed = self._read_small_file(MANIFEST, MAX_MANIFEST_BYTES)
        self.signature = self._read_small_file(SIGNATURE, MAX_SIGNATURE_BYTES) if SIGNATURE in self._members else None
        try:
            self.manifest = msgspec.json.decode(self.signed, type=UpgradeManifest)
        except DECODE_ERRORS as error:
            raise self._error(f"{MANIFEST}: {error}") from None
        if self.manifest.format != FORMAT:
            raise ModelError(
                f"upgrade bundle has format {self.manifest.format}, this version of fedquilt reads {FORMAT}: "
                "build the bundle with this version (`fedquilt rollout build FILE`), or flash the board"
            )

    def open_wheel(self, name: str) -> IO[bytes]:
        member = self._members.get(f"wheels/{name}")
        file = None if member is None else self._archive.extractfile(member)
        if file is None:
            raise self._error(f"{name} is missing")
        return file

    def verify_wheels(self) -> None:
        for name, sha256 in self.manifest.wheels.items():
            digest = hashlib.sha256()
            with self.open_wheel(name) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() != sha256:
                raise self._error(f"{name} differs from the manifest")

    def _read_small_file(self, name: str, max_bytes: int) -> bytes:
        member = self._members.get(name)
        file = None if member is None or member.size > max_bytes else self._archive.extractfile(member)
        if file is None:
            raise self._error(f"{name} is missing or too large")
        return file.read()

    def _error(self, reason: str) -> ModelError:
        return bundle_error(self._path, reason)


def bundle_error(path: Path, reason: object) -> ModelError:
    return ModelError(f"{path} is not an upgrade bundle ({reason}): build one with `fedquilt rollout build FILE`")


@contextmanager
def open_bundle(path: Path, copy: IO[bytes] | None = None) -> Iterator[UpgradeBundle]:
    """Open a bundle, read from `copy` if given. Raise ModelError if the file is not an upgrade bundle."""
    with disk_errors(f"read {path}"), path.open("rb") if copy is None else nullcontext(copy) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_PlainTarHeader) as archive:
                yield UpgradeBundle(archive, path)
        except tarfile.TarError as error:
            raise bundle_error(path, error) from None

"""Root file system of a disk image, from its partition table: GPT (L4T) or MBR (Raspberry Pi OS)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from fedquilt.tools.boards.flash.install import InstallRefusedError

SECTOR: Final = 512
ROOT_NAME: Final = "APP"  # of L4T's root file system, in its partition tables
SPARSE: Final = b"\x3a\xff\x26\xed"  # Android's sparse format, in which flash.sh writes system.img
MOST_ENTRIES: Final = 256


@dataclass(frozen=True)
class Partition:
    """A partition of a disk image. Number 0 is an image without a partition table."""

    number: int
    offset: int  # bytes
    size: int  # bytes
    name: str = ""

    def __str__(self) -> str:
        if not self.number:
            return "the image, which is one file system"
        return f"partition {self.number}" + (f" ({self.name})" if self.name else "")


def find_root_partition(image: Path, *, called: Path | None = None) -> Partition:
    """Return the ext partition named APP (L4T), or else the largest ext partition.

    Args:
        image: Disk image.
        called: File named in errors, if `image` is a copy.

    Raises:
        InstallRefusedError: If the file is not a disk image or does not have such a partition.
        OSError: If the file cannot be read.
    """
    name = called or image
    with image.open("rb") as file:
        if file.read(4) == SPARSE:
            raise InstallRefusedError(
                f"{name} is in Android's sparse format: simg2img {name} raw.img, and take raw.img"
            )
        found = [Partition(0, 0, image.stat().st_size), *(_read_gpt(file) or _read_mbr(file))]
        ext = [one for one in found if _is_ext(file, one.offset)]
    if not ext:
        has = ", ".join(map(str, found[1:])) or "no partition table"
        raise InstallRefusedError(
            f"{name} has no root file system of type ext4 ({has}): take a Raspberry Pi's or L4T's disk image"
        )
    return max(ext, key=lambda one: (one.name == ROOT_NAME, one.size))


def _read_gpt(file: BinaryIO) -> list[Partition]:
    # UEFI specification, 5.3
    head = _read_at(file, SECTOR, 92)
    if head[:8] != b"EFI PART":
        return []
    first, count, size = struct.unpack("<QII", head[72:88])
    if not 128 <= size <= 4096:
        return []
    found = []
    for number in range(min(count, MOST_ENTRIES)):
        entry = _read_at(file, first * SECTOR + number * size, 128)
        if len(entry) == 128 and any(entry[:16]):
            begin, end = struct.unpack("<QQ", entry[32:48])
            name = entry[56:].decode("utf-16-le", "replace").rstrip("\0")
            found.append(Partition(number + 1, begin * SECTOR, (end + 1 - begin) * SECTOR, name))
    return found


def _read_mbr(file: BinaryIO) -> list[Partition]:
    # logical partitions are skipped: no board boots from one
    head = _read_at(file, 0, SECTOR)
    if head[510:] != b"\x55\xaa":
        return []
    entries = [struct.unpack("<B3xB3xII", head[446 + 16 * number :][:16]) for number in range(4)]
    return [
        Partition(number + 1, begin * SECTOR, length * SECTOR)
        for number, (_, kind, begin, length) in enumerate(entries)
        if kind and length
    ]


def _is_ext(file: BinaryIO, offset: int) -> bool:
    return _read_at(file, offset + 1024 + 56, 2) == b"\x53\xef"


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)

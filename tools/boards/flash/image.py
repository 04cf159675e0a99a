"""Installation of a bundle into the root file system of a disk image.

Neither root rights nor a mount are needed: partx (util-linux) finds the partition, debugfs (e2fsprogs) reads and writes
the file system in it, and e2fsck checks the file system. The bundle is installed into an empty folder with the files
that `install` reads, and the result is copied into the image. The given image is not changed.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from fedquilt.core import JobError
from fedquilt.host.disk import disk_errors
from fedquilt.tools.boards.flash import install
from fedquilt.tools.boards.flash.install import InstallRefusedError

PIECE: Final = 4 << 20
ZEROS: Final = bytes(PIECE)
PATHS: Final = ("/usr/sbin", "/sbin")  # often not on an ordinary user's PATH
LOOKED_AT: Final = ("usr/bin/env", "bin/sh", "sbin/init")  # files that show a board's architecture, as Python does
TAKEN: Final = ("opt/fedquilt", "etc/fedquilt")
SECTOR: Final = 512
BLOCK, INODE = 4096, 256  # bytes of a file system's block, and of what it notes of a file
SPARE: Final = 0.05  # share of the file system that stays free
ROOT_NAME: Final = "APP"  # of L4T's root file system, in its partition table
SPARSE: Final = b"\x3a\xff\x26\xed"  # Android's sparse format, in which flash.sh writes system.img
PARTITION: Final = re.compile(r'NR="(\d+)" START="(\d+)" SECTORS="(\d+)" NAME="(.*)"')


class Partition(NamedTuple):
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
    """Return the ext partition named APP (L4T), or else the largest ext partition."""
    name = called or image
    words = [_find_program("partx"), "--pairs", "--output", "NR,START,SECTORS,NAME", "-", str(image)]
    table = subprocess.run(words, capture_output=True, text=True, check=False).stdout  # "" without a partition table
    found = [Partition(0, 0, image.stat().st_size)]
    for number, start, sectors, label in PARTITION.findall(table):
        found.append(Partition(int(number), int(start) * SECTOR, int(sectors) * SECTOR, label))
    with image.open("rb") as file:
        if file.read(4) == SPARSE:
            raise InstallRefusedError(
                f"{name} is in Android's sparse format: simg2img {name} raw.img, and take raw.img"
            )
        ext = [one for one in found if _is_ext(file, one.offset)]
    if not ext:
        has = ", ".join(map(str, found[1:])) or "no partition table"
        raise InstallRefusedError(
            f"{name} has no root file system of type ext4 ({has}): take a Raspberry Pi's or L4T's disk image"
        )
    return max(ext, key=lambda one: (one.name == ROOT_NAME, one.size))


def _is_ext(file: BinaryIO, offset: int) -> bool:
    file.seek(offset + 1024 + 56)
    return file.read(2) == b"\x53\xef"


class ExtFileSystem:
    def __init__(self, image: Path, offset: int) -> None:
        self._debugfs, self._e2fsck = _find_program("debugfs"), _find_program("e2fsck")
        self._at = f"{image}?offset={offset}"

    def run_query(self, command: str) -> str:
        """Return the output of a read-only debugfs command, or "" if a path is missing."""
        done = subprocess.run([self._debugfs, "-R", command, self._at], capture_output=True, check=False)
        return done.stdout.decode(errors="replace")

    def file_type(self, name: str) -> str:
        """Return "regular", "directory" or "symlink", or "" for a missing path and paths below TAKEN."""
        if any(str(Path(name)).startswith(f"{one}/") for one in TAKEN):
            return ""  # looked at once, when the image was opened
        found = re.search(r"Type: (\w+)", self.run_query(f'stat "/{name}"'))
        return found[1] if found else ""

    def resolve_links(self, name: str, links: int = 20) -> str:
        for _ in range(links):
            told = self.run_query(f'stat "/{name}"')
            found = re.search(r'link dest: "(.*)"', told)
            if found is None:
                return name
            name = os.path.normpath(os.path.join(os.path.dirname(f"/{name}"), found[1])).lstrip("/")
        raise InstallRefusedError(f"links go in circles at /{name} of the image")

    def free_bytes(self) -> int:
        told = self.run_query("stats -h")
        blocks, size = (re.search(rf"^{key}:\s+(\d+)", told, re.M) for key in ("Free blocks", "Block size"))
        return int(blocks[1]) * int(size[1]) if blocks and size else 0

    def copy_out(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        self.run_query(f'dump "/{name}" "{to}"')

    def run_write_commands(self, commands: Sequence[str], script: Path) -> None:
        """Run writing debugfs commands, then check the file system."""
        script.write_text("\n".join(commands) + "\n", encoding="utf-8")
        done = subprocess.run([self._debugfs, "-w", "-f", str(script), self._at], capture_output=True, check=False)
        told = [line for line in done.stderr.decode(errors="replace").splitlines() if not line.startswith("debugfs ")]
        if told or done.returncode:
            raise InstallRefusedError(
                f"the image cannot be written: {'; '.join(told[:3]) or f'debugfs ended with {done.returncode}'}"
            )
        self.check_integrity()

    def check_integrity(self) -> None:
        done = subprocess.run([self._e2fsck, "-fn", self._at], capture_output=True, check=False)
        if done.returncode:
            last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise InstallRefusedError(f"the image's file system is not sound ({' '.join(last)}): fetch the image again")


def _find_program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *PATHS)))
    if found is None:
        package = "util-linux" if name == "partx" else "e2fsprogs"
        raise JobError(f"--image needs {name}, which is not here: sudo apt install {package}")
    return found


class DiskImage:
    def __init__(
        self, base: Path, copy: Path, out: Path, scratch: Path, interpreter: str, say: Callable[[str], None]
    ) -> None:
        self.partition = find_root_partition(copy, called=base)
        self._system, self._copy, self._out = ExtFileSystem(copy, self.partition.offset), copy, out
        self._scratch, self._say = scratch, say
        for taken in TAKEN:
            if self._system.file_type(taken):
                raise InstallRefusedError(f"the image has /{taken} already: use an image as its maker ships it")
        staged = scratch / "root"
        self._brought = {*self._copy_files_for_checks(interpreter, staged)}
        self.root = install.RootFileSystem(staged, say=say)

    def _copy_files_for_checks(self, interpreter: str, staged: Path) -> Iterator[Path]:
        # `install.check_compatibility` reads these files. Of other Pythons it reads only the names.
        for name in (interpreter.lstrip("/"), *LOOKED_AT):
            path = staged / name
            self._system.copy_out(self._system.resolve_links(name), path)
            if path.is_file():
                yield path
        for name in re.findall(r"python3\.\d+\b(?!-)", self._system.run_query("ls /usr/bin")):
            path = staged / "usr/bin" / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                yield path

    def save_image(self) -> None:
        """Copy the installed files into the image, and rename the copy to its final name."""
        commands, needed = self._build_write_commands()
        free = self._system.free_bytes()
        if free * (1 - SPARE) < needed:
            raise InstallRefusedError(
                f"{self.partition} has {free / 1e6:.0f} MB free, and {needed / 1e6:.0f} MB are needed: truncate -s +1G "
                "the image, let growpart and resize2fs enlarge the partition, and take that image"
            )
        self._system.run_write_commands(commands, self._scratch / "commands")
        with disk_errors(f"write {self._out}"):
            self._copy.replace(self._out)
        self._say(f"{self._out}: {self.partition} holds it; write it to a card as any image")

    def _build_write_commands(self) -> tuple[list[str], int]:
        commands: list[str] = []
        needed, staged, there = 0, self.root.path, {"."}
        for folder, folders, names in os.walk(staged):
            here = Path(folder).relative_to(staged)
            folders.sort()
            links = [name for name in folders if Path(folder, name).is_symlink()]
            new = [name for name in sorted({*names, *links}) if Path(folder, name) not in self._brought]
            if not new and not here.as_posix().startswith(TAKEN):
                continue
            for one in reversed([here, *here.parents]):
                if one.as_posix() not in there:
                    there.add(one.as_posix())
                    if not self._system.file_type(one.as_posix()):
                        commands += [f'cd "/{one.parent.as_posix()}"', f'mkdir "{one.name}"']
                        needed += BLOCK
            commands.append(f'cd "/{here.as_posix()}"')
            for name in new:
                path = Path(folder, name)
                if re.search(r'["\n\\]', str(path)):
                    raise InstallRefusedError(f"{path.name!r} has a letter that debugfs does not take")
                if path.is_symlink():
                    commands.append(f'symlink "{name}" "{os.readlink(path)}"')
                else:
                    commands.append(f'write "{path}" "{name}"')
                    needed += -(-path.stat().st_size // BLOCK) * BLOCK + INODE
        return commands, needed


@contextmanager
def open_image_copy(base: Path, out: Path, interpreter: str, say: Callable[[str], None]) -> Iterator[DiskImage]:
    """Yield a copy of a disk image to install into. The copy is removed unless saved."""
    copy = out.with_name(out.name + ".part")
    try:
        copy_image(base, copy)
        with tempfile.TemporaryDirectory(prefix="fedquilt-") as scratch:
            yield DiskImage(base, copy, out, Path(scratch), interpreter, say)
    finally:
        copy.unlink(missing_ok=True)


def copy_image(base: Path, to: Path) -> None:
    """Copy a disk image as a sparse file, decompressing xz."""
    if not base.is_file():
        raise JobError(f"--image {base} is no file: a Raspberry Pi's or L4T's disk image is wanted, .img or .img.xz")
    with disk_errors(f"write {to}"), base.open("rb") as head:
        packed = head.read(6) == b"\xfd7zXZ\0"
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        to.touch(mode=0o600)  # it will hold a token or a key
        with lzma.open(base) if packed else base.open("rb") as source, to.open("wb") as file:
            try:
                while piece := source.read(PIECE):
                    if piece == ZEROS[: len(piece)]:
                        file.seek(len(piece), os.SEEK_CUR)
                    else:
                        file.write(piece)
            except (lzma.LZMAError, EOFError) as error:
                raise JobError(f"{base} is damaged ({error}): fetch it again") from None
            file.truncate(file.tell())

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

CHUNK_BYTES: Final = 4 << 20
ZEROS: Final = bytes(CHUNK_BYTES)
PROGRAM_FOLDERS: Final = ("/usr/sbin", "/sbin")  # often not in the PATH of ordinary users
ARCHITECTURE_FILES: Final = ("usr/bin/env", "bin/sh", "sbin/init")  # programs that show the architecture
INSTALLATION_FOLDERS: Final = ("opt/fedquilt", "etc/fedquilt")
SECTOR_BYTES: Final = 512
BLOCK, INODE = 4096, 256  # bytes of a block and of an inode
SPARE_SHARE: Final = 0.05  # share of the file system that stays free
ROOT_NAME: Final = "APP"  # of L4T's root file system, in its partition table
SPARSE_MAGIC: Final = b"\x3a\xff\x26\xed"  # Android's sparse format, in which flash.sh writes system.img
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


def find_root_partition(image: Path, *, original_path: Path | None = None) -> Partition:
    """Return L4T's ext partition APP, or else the largest ext one, or raise InstallRefusedError."""
    name = original_path or image
    command = [_find_program("partx"), "--pairs", "--output", "NR,START,SECTORS,NAME", "-", str(image)]
    table = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # "" without a partition table
    partitions = [Partition(0, 0, image.stat().st_size)]
    for number, start, sectors, label in PARTITION.findall(table):
        partitions.append(Partition(int(number), int(start) * SECTOR_BYTES, int(sectors) * SECTOR_BYTES, label))
    with image.open("rb") as file:
        if file.read(4) == SPARSE_MAGIC:
            raise InstallRefusedError(
                f"{name} is in Android's sparse format: convert it (simg2img {name} raw.img), and use raw.img"
            )
        ext_partitions = [partition for partition in partitions if _is_ext(file, partition.offset)]
    if not ext_partitions:
        partition_text = ", ".join(map(str, partitions[1:])) or "no partition table"
        raise InstallRefusedError(
            f"{name} has no ext4 root file system ({partition_text}): use a disk image of Raspberry Pi OS or L4T"
        )
    return max(ext_partitions, key=lambda partition: (partition.name == ROOT_NAME, partition.size))


def _is_ext(file: BinaryIO, offset: int) -> bool:
    file.seek(offset + 1024 + 56)
    return file.read(2) == b"\x53\xef"


class ExtFileSystem:
    def __init__(self, image: Path, offset: int) -> None:
        self._debugfs, self._e2fsck = _find_program("debugfs"), _find_program("e2fsck")
        self._location = f"{image}?offset={offset}"

    def run_query(self, command: str) -> str:
        """Return the output of a read-only debugfs command, or "" if a path is missing."""
        process = subprocess.run([self._debugfs, "-R", command, self._location], capture_output=True, check=False)
        return process.stdout.decode(errors="replace")

    def file_type(self, name: str) -> str:
        """Return "regular", "directory", "symlink" or, for other paths, "".

        Paths in INSTALLATION_FOLDERS also give "", because they were checked when the image was opened.
        """
        if any(str(Path(name)).startswith(f"{folder}/") for folder in INSTALLATION_FOLDERS):
            return ""  # checked once, when the image was opened
        match = re.search(r"Type: (\w+)", self.run_query(f'stat "/{name}"'))
        return match[1] if match else ""

    def resolve_links(self, name: str, max_links: int = 20) -> str:
        for _ in range(max_links):
            output = self.run_query(f'stat "/{name}"')
            match = re.search(r'link dest: "(.*)"', output)
            if match is None:
                return name
            name = os.path.normpath(os.path.join(os.path.dirname(f"/{name}"), match[1])).lstrip("/")
        raise InstallRefusedError(f"symbolic links at /{name} of the image form a loop: use another image")

    def free_bytes(self) -> int:
        output = self.run_query("stats -h")
        keys = ("Free blocks", "Block size")
        block_count, block_size = (re.search(rf"^{key}:\s+(\d+)", output, re.M) for key in keys)
        return int(block_count[1]) * int(block_size[1]) if block_count and block_size else 0

    def copy_out(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        self.run_query(f'dump "/{name}" "{to}"')

    def run_write_commands(self, commands: Sequence[str], script: Path) -> None:
        """Write debugfs commands into `script` and run them, then check the file system.

        Raise InstallRefusedError if a command or the check fails.
        """
        script.write_text("\n".join(commands) + "\n", encoding="utf-8")
        process = subprocess.run(
            [self._debugfs, "-w", "-f", str(script), self._location], capture_output=True, check=False
        )
        errors = [
            line for line in process.stderr.decode(errors="replace").splitlines() if not line.startswith("debugfs ")
        ]
        if errors or process.returncode:
            raise InstallRefusedError(
                f"image cannot be written: {'; '.join(errors[:3]) or f'debugfs exit code {process.returncode}'}"
            )
        self.check_integrity()

    def check_integrity(self) -> None:
        process = subprocess.run([self._e2fsck, "-fn", self._location], capture_output=True, check=False)
        if process.returncode:
            last_line = process.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise InstallRefusedError(
                f"image's file system is damaged ({' '.join(last_line)}): download the image again"
            )


def _find_program(name: str) -> str:
    program = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *PROGRAM_FOLDERS)))
    if program is None:
        package = "util-linux" if name == "partx" else "e2fsprogs"
        raise JobError(f"--image needs {name}, which is not installed: sudo apt install {package}")
    return program


class DiskImage:
    def __init__(
        self,
        base_image: Path,
        copy_path: Path,
        output_path: Path,
        scratch: Path,
        interpreter: str,
        print_line: Callable[[str], None],
    ) -> None:
        self.partition = find_root_partition(copy_path, original_path=base_image)
        self._file_system = ExtFileSystem(copy_path, self.partition.offset)
        self._copy_path, self._output_path = copy_path, output_path
        self._scratch, self._print_line = scratch, print_line
        for folder in INSTALLATION_FOLDERS:
            if self._file_system.file_type(folder):
                raise InstallRefusedError(f"image has /{folder} already: use an image without fedquilt")
        staged = scratch / "root"
        self._staged_files = {*self._copy_files_for_checks(interpreter, staged)}
        self.root = install.RootFileSystem(staged, print_line=print_line)

    def _copy_files_for_checks(self, interpreter: str, staged: Path) -> Iterator[Path]:
        # `install.check_compatibility` reads these files. Of other Pythons it reads only the names.
        for name in (interpreter.lstrip("/"), *ARCHITECTURE_FILES):
            path = staged / name
            self._file_system.copy_out(self._file_system.resolve_links(name), path)
            if path.is_file():
                yield path
        for name in re.findall(r"python3\.\d+\b(?!-)", self._file_system.run_query("ls /usr/bin")):
            path = staged / "usr/bin" / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                yield path

    def save_image(self) -> None:
        """Copy the installed files into the image, and rename the copy to its final name.

        Raise InstallRefusedError if the partition is too small or the image cannot be written.
        """
        commands, needed_bytes = self._build_write_commands()
        free_disk_bytes = self._file_system.free_bytes()
        if free_disk_bytes * (1 - SPARE_SHARE) < needed_bytes:
            raise InstallRefusedError(
                f"{self.partition} has {free_disk_bytes / 1e6:.0f} MB free, but {needed_bytes / 1e6:.0f} MB are "
                "needed: enlarge the image (truncate -s +1G) and its partition (growpart, resize2fs)"
            )
        self._file_system.run_write_commands(commands, self._scratch / "commands")
        with disk_errors(f"write {self._output_path}"):
            self._copy_path.replace(self._output_path)
        self._print_line(f"{self._output_path}: installed in {self.partition}; write the image to a card as usual")

    def _build_write_commands(self) -> tuple[list[str], int]:
        commands: list[str] = []
        needed_bytes, staged, existing_folders = 0, self.root.path, {"."}
        for folder, folders, names in os.walk(staged):
            relative_folder = Path(folder).relative_to(staged)
            folders.sort()
            links = [name for name in folders if Path(folder, name).is_symlink()]
            new_names = [name for name in sorted({*names, *links}) if Path(folder, name) not in self._staged_files]
            if not new_names and not relative_folder.as_posix().startswith(INSTALLATION_FOLDERS):
                continue
            for parent in reversed([relative_folder, *relative_folder.parents]):
                if parent.as_posix() not in existing_folders:
                    existing_folders.add(parent.as_posix())
                    if not self._file_system.file_type(parent.as_posix()):
                        commands += [f'cd "/{parent.parent.as_posix()}"', f'mkdir "{parent.name}"']
                        needed_bytes += BLOCK
            commands.append(f'cd "/{relative_folder.as_posix()}"')
            for name in new_names:
                path = Path(folder, name)
                if re.search(r'["\n\\]', str(path)):
                    raise InstallRefusedError(f"file name {path.name!r} has a character that debugfs does not accept")
                if path.is_symlink():
                    commands.append(f'symlink "{name}" "{os.readlink(path)}"')
                else:
                    commands.append(f'write "{path}" "{name}"')
                    needed_bytes += -(-path.stat().st_size // BLOCK) * BLOCK + INODE
        return commands, needed_bytes


@contextmanager
def open_image_copy(
    base_image: Path, output_path: Path, interpreter: str, print_line: Callable[[str], None]
) -> Iterator[DiskImage]:
    """Yield a copy of a disk image to install into. Unless `save_image` was called, the copy is removed."""
    copy_path = output_path.with_name(output_path.name + ".part")
    try:
        copy_image(base_image, copy_path)
        with tempfile.TemporaryDirectory(prefix="fedquilt-") as scratch:
            yield DiskImage(base_image, copy_path, output_path, Path(scratch), interpreter, print_line)
    finally:
        copy_path.unlink(missing_ok=True)


def copy_image(base_image: Path, copy_path: Path) -> None:
    """Copy a disk image as a sparse file, decompressing xz. Raise JobError if it is missing or damaged."""
    if not base_image.is_file():
        raise JobError(f"--image {base_image} is not a file: name a disk image, .img or .img.xz")
    with disk_errors(f"write {copy_path}"), base_image.open("rb") as head:
        is_compressed = head.read(6) == b"\xfd7zXZ\0"
        copy_path.parent.mkdir(parents=True, exist_ok=True)
        copy_path.unlink(missing_ok=True)
        copy_path.touch(mode=0o600)  # the image will contain a token or key
        with lzma.open(base_image) if is_compressed else base_image.open("rb") as source, copy_path.open("wb") as file:
            try:
                while chunk := source.read(CHUNK_BYTES):
                    if chunk == ZEROS[: len(chunk)]:
                        file.seek(len(chunk), os.SEEK_CUR)
                    else:
                        file.write(chunk)
            except (lzma.LZMAError, EOFError) as error:
                raise JobError(f"{base_image} is damaged ({error}): download it again") from None
            file.truncate(file.tell())

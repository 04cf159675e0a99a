"""Puts a bundle into the root file system of a disk image, which the usual card writer then writes.

No root and no mount: debugfs (e2fsprogs) reads and writes the file system inside the image, and e2fsck checks it. The
bundle is installed into an empty folder that holds what `install` looks at, and what it has made is copied in.
The image that is given stays as it is.
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
from typing import Final

from fedquilt.core import JobError
from fedquilt.disk import doing
from fedquilt.tools.flash import install, partitions
from fedquilt.tools.flash.install import Refused

PIECE: Final = 4 << 20
ZEROS: Final = bytes(PIECE)
PATHS: Final = ("/usr/sbin", "/sbin", "/opt/homebrew/opt/e2fsprogs/sbin")  # often not on an ordinary user's PATH
LOOKED_AT: Final = ("usr/bin/env", "bin/sh", "sbin/init")  # beside Python, what tells a board's machine
TAKEN: Final = ("opt/fedquilt", "etc/fedquilt")
BLOCK, INODE = 4096, 256  # bytes of a file system's block, and of what it notes of a file
SPARE: Final = 0.05  # share of the file system that stays free


class FileSystem:
    """An ext file system at an offset of an image.

    Raises:
        JobError: there is no debugfs here.
    """

    def __init__(self, image: Path, offset: int) -> None:
        self._debugfs, self._e2fsck = _program("debugfs"), _program("e2fsck")
        self._at = f"{image}?offset={offset}"

    def tell(self, command: str) -> str:
        """Output of a command of debugfs that reads; what is not there gives ""."""
        done = subprocess.run([self._debugfs, "-R", command, self._at], capture_output=True, check=False)
        return done.stdout.decode(errors="replace")

    def kind(self, name: str) -> str:
        """Kind of what is at a path: "regular", "directory", "symlink"; "": nothing."""
        if any(str(Path(name)).startswith(f"{one}/") for one in TAKEN):
            return ""  # looked at once, when the image was opened
        found = re.search(r"Type: (\w+)", self.tell(f'stat "/{name}"'))
        return found[1] if found else ""

    def real(self, name: str, links: int = 20) -> str:
        """The path without links at its end."""
        for _ in range(links):
            told = self.tell(f'stat "/{name}"')
            found = re.search(r'link dest: "(.*)"', told)
            if found is None:
                return name
            name = os.path.normpath(os.path.join(os.path.dirname(f"/{name}"), found[1])).lstrip("/")
        raise Refused(f"links go in circles at /{name} of the image")

    def free_bytes(self) -> int:
        """Bytes free."""
        told = self.tell("stats -h")
        blocks, size = (re.search(rf"^{key}:\s+(\d+)", told, re.M) for key in ("Free blocks", "Block size"))
        return int(blocks[1]) * int(size[1]) if blocks and size else 0

    def take(self, name: str, to: Path) -> None:
        """Copy a file out of it, if it is there."""
        to.parent.mkdir(parents=True, exist_ok=True)
        self.tell(f'dump "/{name}" "{to}"')

    def write(self, commands: Sequence[str], script: Path) -> None:
        """Carry out commands of debugfs that write, and check the file system.

        Raises:
            Refused: one has failed, or the file system is not clean afterwards.
        """
        script.write_text("\n".join(commands) + "\n", encoding="utf-8")
        done = subprocess.run([self._debugfs, "-w", "-f", str(script), self._at], capture_output=True, check=False)
        told = [line for line in done.stderr.decode(errors="replace").splitlines() if not line.startswith("debugfs ")]
        if told or done.returncode:
            raise Refused(
                f"the image cannot be written: {'; '.join(told[:3]) or f'debugfs ended with {done.returncode}'}"
            )
        self.sound()

    def sound(self) -> None:
        """Check the file system as a whole.

        Raises:
            Refused: e2fsck finds fault.
        """
        done = subprocess.run([self._e2fsck, "-fn", self._at], capture_output=True, check=False)
        if done.returncode:
            last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise Refused(f"the image's file system is not sound ({' '.join(last)}): fetch the image again")


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *PATHS)))
    if found is None:
        raise JobError(f"--image needs {name}, which is not here: sudo apt install e2fsprogs")
    return found


class Image:
    """A copy of an image while fedquilt is put into it; see `opened`."""

    def __init__(
        self, base: Path, copy: Path, out: Path, scratch: Path, interpreter: str, say: Callable[[str], None]
    ) -> None:
        self.partition = partitions.root(copy, called=base)
        self._system, self._copy, self._out = FileSystem(copy, self.partition.offset), copy, out
        self._scratch, self._say = scratch, say
        for taken in TAKEN:
            if self._system.kind(taken):
                raise Refused(f"the image has /{taken} already: take one as its maker ships it")
        staged = scratch / "root"
        self._brought = {*self._looked_at(interpreter, staged)}
        self.root = install.Root(staged, say=say)

    def _looked_at(self, interpreter: str, staged: Path) -> Iterator[Path]:
        """Copy out of the image what `install.check` looks at; of other Pythons the names alone."""
        for name in (interpreter.lstrip("/"), *LOOKED_AT):
            path = staged / name
            self._system.take(self._system.real(name), path)
            if path.is_file():
                yield path
        for name in re.findall(r"python3\.\d+\b(?!-)", self._system.tell("ls /usr/bin")):
            path = staged / "usr/bin" / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                yield path

    def finish(self) -> None:
        """Copy what has been installed into the image, and give it its name.

        Raises:
            Refused: too little room in it, or debugfs fails.
        """
        commands, needed = self._commands()
        free = self._system.free_bytes()
        if free * (1 - SPARE) < needed:
            raise Refused(
                f"{self.partition} has {free / 1e6:.0f} MB free, and {needed / 1e6:.0f} MB are needed: truncate -s +1G "
                "the image, let growpart and resize2fs enlarge the partition, and take that image"
            )
        self._system.write(commands, self._scratch / "commands")
        with doing(f"write {self._out}"):
            self._copy.replace(self._out)
        self._say(f"{self._out}: {self.partition} holds it; write it to a card as any image")

    def _commands(self) -> tuple[list[str], int]:
        """What debugfs has to do, and the bytes that it takes."""
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
                    if not self._system.kind(one.as_posix()):
                        commands += [f'cd "/{one.parent.as_posix()}"', f'mkdir "{one.name}"']
                        needed += BLOCK
            commands.append(f'cd "/{here.as_posix()}"')
            for name in new:
                path = Path(folder, name)
                if re.search(r'["\n\\]', str(path)):
                    raise Refused(f"{path.name!r} has a letter that debugfs does not take")
                if path.is_symlink():
                    commands.append(f'symlink "{name}" "{os.readlink(path)}"')
                else:
                    commands.append(f'write "{path}" "{name}"')
                    needed += -(-path.stat().st_size // BLOCK) * BLOCK + INODE
        return commands, needed


@contextmanager
def opened(base: Path, out: Path, interpreter: str, say: Callable[[str], None]) -> Iterator[Image]:
    """A copy of `base` to install into; what is not finished leaves nothing behind.

    Args:
        base: disk image, also compressed by xz.
        out: file for the new image.
        interpreter: the board's Python, whose machine is looked at.
        say: prints a line.

    Raises:
        Refused: it is no disk image with a root file system.
        JobError: programs are missing here, or the file.
        StoreError: the copy cannot be written.
    """
    copy = out.with_name(out.name + ".part")
    try:
        plain(base, copy)
        with tempfile.TemporaryDirectory(prefix="fedquilt-") as scratch:
            yield Image(base, copy, out, Path(scratch), interpreter, say)
    finally:
        copy.unlink(missing_ok=True)


def plain(base: Path, to: Path) -> None:
    """Copy an image, unpacked if it is compressed by xz; what is all zeros takes no room on the disk.

    Raises:
        JobError: it is not there, or no such file.
        StoreError: it cannot be written.
    """
    if not base.is_file():
        raise JobError(f"--image {base} is no file: a Raspberry Pi's or L4T's disk image is wanted, .img or .img.xz")
    with doing(f"write {to}"), base.open("rb") as head:
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

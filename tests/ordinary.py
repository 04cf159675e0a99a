"""What a board does is done by an ordinary user: tests of it are too, also where the suite itself runs as root.

Run by root, `User.does` carries out part of a test in a forked child that has become the user nobody, and `User.start`
starts processes as that user. Run by anybody else, the same user does both. Where Python or the project lies in a
folder that is shut to nobody (root's home), these children see that folder open, in a mount namespace of their own.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pytest

import fedquilt
from fedquilt.edge_agent.clocks.helper import Helper
from fedquilt.edge_agent.clocks.hold import Clamp

LIMIT_S = 120.0
PR_SET_DUMPABLE = 4
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
PLACES = (sys.base_prefix, sys.prefix, *filter(None, sys.path), *(os.path.dirname(path) for path in fedquilt.__path__))
NEEDED = {place for place in (Path(path).resolve() for path in PLACES) if place.is_dir()}  # every child reads them
LIBC = ctypes.CDLL(None, use_errno=True)


class User:
    """An ordinary user, with a folder of its own that root and it can reach."""

    def __init__(self, folder: Path) -> None:
        self.root = os.geteuid() == 0
        name = pwd.getpwnam("nobody") if self.root else pwd.getpwuid(os.geteuid())
        self.uid, self.gid = name.pw_uid, name.pw_gid
        self.folder = folder
        self.home = self.own("home")
        self._started: list[subprocess.Popen[bytes]] = []

    def own(self, name: str) -> Path:
        """A new folder that belongs to this user."""
        place = self.folder / name
        place.mkdir(mode=0o700)
        self.owns(place)
        return place

    def owns(self, path: Path) -> None:
        if self.root:
            os.chown(path, self.uid, self.gid)

    def shut(self, path: Path) -> None:
        """Shut a file or folder to this user, as the kernel does with what is root's alone."""
        mode = path.stat().st_mode & 0o700 if self.root else 0  # its owner would not be kept out by 0700
        path.chmod(mode)

    def does(self, body: Callable[[], Any]) -> Any:
        """Carry out `body` as this user; what it returns, as JSON has it. Its exception fails the test."""
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: threads of the test are not forked
            child = os.fork()
        if child == 0:
            os.close(reading)
            self._be(body, writing)
        os.close(writing)
        try:
            told = _read(reading, time.monotonic() + LIMIT_S)
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)  # it has said all, or it will not say anything
            os.waitpid(child, 0)
        failure, result = msgspec.json.decode(told) if told else ("it said nothing: it was killed, or hangs", None)
        assert failure is None, f"as user {self.uid}: {failure}"
        return result

    def _be(self, body: Callable[[], Any], writing: int) -> None:
        """Become this user in the forked child, and never come back."""
        failure, result = None, None
        try:
            self._drop()
            os.chdir(self.home)
            os.environ["HOME"] = str(self.home)
            result = body()
        except BaseException:
            failure = traceback.format_exc()
        try:
            data = msgspec.json.encode((failure, result))
        except TypeError as error:
            data = msgspec.json.encode((f"the result is not for JSON: {error}", None))
        while data:
            data = data[os.write(writing, data) :]
        os._exit(0)

    def _drop(self) -> None:
        """Give root's rights up, in a new process."""
        if self.root:
            _open_folders()
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
            LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own files in /proc are root's
        os.umask(0o077)

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process as this user, in its home; it is killed at the end of the test.

        Args:
            environment: what it has beside, or in place of, this process's.
        """
        with log.open("ab") as out, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in `does`
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                preexec_fn=self._drop,
                env={**os.environ, "HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1", **environment},
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def _open_folders() -> None:
    """Open what is shut to others above the needed folders, for this process and its children alone."""
    shut = {above for place in NEEDED for above in (place, *place.parents) if not above.stat().st_mode & 0o001}
    tops = {one for one in shut if not shut & set(one.parents)}
    if not tops or LIBC.unshare(CLONE_NEWNS) or LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return
    for top in tops:
        inside = sorted(place for place in NEEDED if top in place.parents)
        inside = [place for place in inside if not {*place.parents} & {*inside}]
        held = {place: os.open(place, os.O_PATH) for place in inside}
        LIBC.mount(b"tmpfs", bytes(top), b"tmpfs", 0, b"mode=0755")
        before = os.umask(0o022)
        for place, handle in held.items():
            place.mkdir(parents=True)
            LIBC.mount(f"/proc/self/fd/{handle}".encode(), bytes(place), None, MS_BIND | MS_REC, None)
            os.close(handle)
        os.umask(before)


def _read(reading: int, until_s: float) -> bytes:
    """All that is written until the other end closes, or time is up."""
    told = b""
    while select.select([reading], [], [], max(0.0, until_s - time.monotonic()))[0]:
        some = os.read(reading, 1 << 16)
        if not some:
            return told
        told += some
    return b""


@contextmanager
def made() -> Iterator[User]:
    """An ordinary user for one test. The test is skipped where that user cannot reach the code, as in root's home."""
    before = os.umask(0o022)  # what a test plants is for all to read, as a kernel's files are
    folder = Path(tempfile.mkdtemp(prefix="fq"))  # pytest's own folders are shut to others
    try:
        folder.chmod(0o755)
        user = User(folder)
        shut = user.does(lambda: [str(one) for one in (Path(sys.executable), folder, *sorted(NEEDED)) if _shut(one)])
        if shut:
            pytest.skip(f"user {user.uid} may not read {', '.join(shut)}: lay the project where all may read it")
        try:
            yield user
        finally:
            user.close()
    finally:
        os.umask(before)
        for place, folders, _ in os.walk(folder):  # what a test has shut can be removed again
            for name in folders:
                if not (Path(place) / name).is_symlink():
                    (Path(place) / name).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


def _shut(path: Path) -> bool:
    try:
        os.stat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.R_OK)


class Served:
    """The clock helper of a board made of files, in a thread of this process; a context manager.

    Args:
        group: of those who may speak to it, beside root and the helper's own user.
    """

    def __init__(self, root: Path, folder: Path, group: int | None) -> None:
        folder.mkdir(mode=0o755)
        self.path = folder / "clocks.sock"
        self._helper = Helper(Clamp(root, folder / "state"), self.path, folder / "state", group=group)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._helper.step(time.monotonic(), 0.01)
        self._helper.close()

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

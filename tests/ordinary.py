"""What a board does is done by an ordinary user: tests of it are too, also where the suite itself runs as root.

Run by root, `User.does` carries out part of a test in a child that has become the user nobody, and `User.start` starts
processes as that user. Run by anybody else, the same user does both. Where Python or the project lies in a folder that
is shut to nobody (root's home), these children see that folder open, in a mount namespace of their own.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import dropped
import msgspec
import pytest
from forks import CONTEXT
from waiting import LIMIT_S

import fedquilt
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.helper import ClockHelper

PLACES = (sys.base_prefix, sys.prefix, *filter(None, sys.path), *(os.path.dirname(path) for path in fedquilt.__path__))
NEEDED = {place for place in (Path(path).resolve() for path in PLACES) if place.is_dir()}  # every child reads them


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

    def does(self, body: Callable[..., Any], *arguments: Any) -> Any:
        """Carry out a module's function as this user; what it returns, as JSON has it. Its exception fails the test."""
        reading, writing = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=_be, args=(self.uid, self.gid, self.home, writing, body, arguments))
        child.start()
        writing.close()
        try:
            told = reading.recv_bytes() if reading.poll(LIMIT_S) else b""
        except EOFError:
            told = b""
        finally:
            reading.close()
            child.kill()  # it has said all, or it will not say anything
            child.join()
        failure, result = msgspec.json.decode(told) if told else ("it said nothing: it was killed, or hangs", None)
        assert failure is None, f"as user {self.uid}: {failure}"
        return result

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process, which has become this user when this returns; it is killed at the end of the test.

        Args:
            environment: what it has beside, or in place of, this process's.
        """
        reading, writing = os.pipe()
        numbers, folders = map(str, (writing, self.uid, self.gid)), ":".join(map(str, NEEDED))
        with log.open("ab") as out, open(reading, "rb") as pipe:
            process = subprocess.Popen(
                (sys.executable, "-IS", dropped.__file__, *numbers, folders, *command),
                pass_fds=[writing],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env={**os.environ, "HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1", **environment},
            )
            os.close(writing)
            self._started.append(process)
            pipe.read()  # to its end, which the command's beginning is
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def _be(uid: int, gid: int, home: Path, writing: Connection, body: Callable[..., Any], given: Sequence[Any]) -> None:
    """Be this user in a new process, carry out the body and say how it ended."""
    failure, result = None, None
    try:
        dropped.drop(uid, gid, NEEDED)
        os.chdir(home)
        os.environ["HOME"] = str(home)
        result = body(*given)
    except BaseException:
        failure = traceback.format_exc()
    try:
        writing.send_bytes(msgspec.json.encode((failure, result)))
    except TypeError as error:
        writing.send_bytes(msgspec.json.encode((f"the result is not for JSON: {error}", None)))


@contextmanager
def made() -> Iterator[User]:
    """An ordinary user for one test. The test is skipped where that user cannot reach the code, as in root's home."""
    before = os.umask(0o022)  # what a test plants is for all to read, as a kernel's files are
    folder = Path(tempfile.mkdtemp(prefix="fq"))  # pytest's own folders are shut to others
    try:
        folder.chmod(0o755)
        user = User(folder)
        shut = user.does(_shut, [Path(sys.executable), folder, *sorted(NEEDED)])
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


def _shut(places: Sequence[Path]) -> list[str]:
    """Those of the places that this user may not look into."""

    def shut(path: Path) -> bool:
        try:
            os.stat(path)
        except PermissionError:
            return True
        except OSError:
            return False
        return not os.access(path, os.R_OK)

    return [str(path) for path in places if shut(path)]


class Served:
    """The clock helper of a board made of files, in a thread of this process; a context manager.

    Args:
        group: of those who may speak to it, beside root and the helper's own user.
    """

    def __init__(self, root: Path, folder: Path, group: int | None) -> None:
        folder.mkdir(mode=0o755)
        self.path = folder / "clocks.sock"
        self._helper = ClockHelper(ClockPin(root, folder / "state"), self.path, folder / "state", group=group)
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

"""Releases of the agent itself: a new version's environment is made beside what runs, checked, and started on trial.

The launcher (`fedquilt.edge_agent.upgrade.launch`) starts the version that choice.json names. This kind writes that
file and asks its process to end; the service manager then starts the launcher again. What runs until then stays
as it is, so a kill at any moment leaves the old version or the new one in use.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from fedquilt import threads
from fedquilt.core import UNDECODABLE, ModelError, shorten_error
from fedquilt.disk import REAL, Disk, doing
from fedquilt.edge_agent.releases.kind import Kind, Verdict
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.upgrade import archive, build, launch
from fedquilt.edge_agent.upgrade.launch import Choice
from fedquilt.wire import Release

log = logging.getLogger("fedquilt.agent")

COMMAND: Final = (sys.executable, "-m", "fedquilt.edge_agent.upgrade.build")
CHECK_S: Final = 1800.0  # for unpacking, compiling and the new version's own check, on a slow card
CHECK_BYTES: Final = 300 << 20  # memory of that: an agent, and the process of one small task
KILLED_MOST: Final = 2  # most restarts of a check that was killed from outside, such as for memory
TAIL_BYTES: Final = 4096
NEWEST: Final = "newest"  # file in the folder of versions: the greatest number of a signed one that was kept
NO_LAUNCHER: Final = (
    "this agent was not started by its launcher, which returns from a version that does not start: flash the board "
    "once more, or start `python -m fedquilt.edge_agent.upgrade.launch FOLDER agent agent.toml` again and again"
)


class Launched(msgspec.Struct, frozen=True):
    """What the launcher has told this process. See `launch.environment`."""

    folder: str
    flashed: str
    running: str  # version of this process; "": the flashed one
    words: tuple[str, ...]
    packages: tuple[str, ...] = ()
    unable: str = ""  # why it is not the version that was chosen


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """What the launcher has told this process; None: it was started without one."""
    try:
        return msgspec.json.decode(environ[launch.LAUNCHED], type=Launched)
    except (KeyError, *UNDECODABLE):
        return None


def _no_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


class AgentKind(Kind):
    """Releases of the agent on one board.

    Args:
        started: by which launcher; None: by none, and every release is refused.
        settings: agent.toml.
        connected: whether the broker is reached.
        restart: ends this process in good order.
        quiet: cancels the launcher's alarm.
        command: of the process that builds and checks.
        clock: seconds that grow, for the patience with that process.
    """

    def __init__(
        self,
        started: Launched | None,
        settings: AgentSettings,
        connected: Callable[[], bool],
        restart: Callable[[], None],
        *,
        disk: Disk = REAL,
        quiet: Callable[[], None] = _no_alarm,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._started, self._settings = started, settings
        self._connected, self._restart, self._quiet = connected, restart, quiet
        self._disk, self._command, self._clock = disk, command, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._tail, self._until_s, self._killed = b"", 0.0, 0
        self._staged: build.Order | None = None

    # -- choice.json --

    def _launcher(self) -> Launched:
        if self._started is None:
            raise ModelError(NO_LAUNCHER)
        return self._started

    def _folder(self) -> Path:
        return Path(self._launcher().folder)

    def _choice(self) -> Choice:
        """What is in use; a damaged file counts for the launcher as none, and so it does here.

        Raises:
            StoreError: it cannot be read.
        """
        started, file = self._launcher(), self._folder() / launch.CHOICE
        with doing(f"read {file}"):
            if not self._disk.is_file(file):
                return Choice(started.flashed)
            payload = self._disk.read(file)
        return launch.parse(payload.decode(errors="replace")) or Choice(started.flashed)

    def _choose(self, choice: Choice) -> None:
        file = self._folder() / launch.CHOICE
        with doing(f"write {file}"):
            self._disk.make(file.parent)
            self._disk.put(file, launch.text(choice).encode())

    def _newest(self) -> int:
        """Greatest number of a signed version that was kept here, also if it was taken back since; 0: none was.

        Raises:
            StoreError: it cannot be read.
        """
        file = self._folder() / NEWEST
        with doing(f"read {file}"):
            text = self._disk.read(file, 0, 32).decode(errors="replace").strip() if self._disk.is_file(file) else "0"
        if not re.fullmatch(r"[0-9]{1,16}", text):
            log.warning("%s is damaged: only the versions that are here say which signed one was the latest", file)
            text = "0"
        choice = self._choice()
        there = {choice.previous or "", "" if choice.trying else choice.current} - {""}
        return max([int(text), *(self._number(name) for name in there)])

    def _number(self, name: str) -> int:
        """The number of a version that lies here; 0: it has none, or cannot be read."""
        if self._settings.upgrade.unsigned:
            return 0
        try:
            payload = self._disk.read(self._folder() / name / archive.MANIFEST, 0, archive.MANIFEST_MOST)
            return msgspec.json.decode(payload, type=archive.Manifest).number
        except (OSError, *UNDECODABLE):
            return 0

    def _count(self, name: str) -> None:
        """Note the number of a version that has held, before anything says that it was kept."""
        if (number := self._number(name)) > self._newest():
            file = self._folder() / NEWEST
            with doing(f"write {file}"):
                self._disk.put(file, str(number).encode())

    # -- as a kind of release --

    def unable(self) -> str:
        """Reason why the agent cannot be upgraded: without a launcher nothing returns from a version that fails."""
        return "none: no launcher started the agent" if self._started is None else ""

    def current(self) -> str:
        """Bundle of the version in use; "": the flashed one."""
        if self._started is None:
            return ""
        return self._started.running if self._started.unable else self._choice().current

    def stage(self, release: Release, blob: Path | None) -> None:
        """Check what the bundle is for; its signature and wheels are checked where they are unpacked.

        Raises:
            ModelError: this board cannot use it.
            StoreError: it cannot be read.
        """
        started = self._launcher()
        if blob is None or release.blob is None:
            raise ModelError("a release of the agent needs a bundle of wheels")
        with archive.open_bundle(blob) as bundle:
            build.fits(bundle.manifest)
        choice = self._choice()
        if choice.returned or choice.failed:
            self._choose(choice._replace(returned="", failed=""))
        self._staged = build.Order(
            bundle=str(blob),
            sha256=release.blob.sha256,
            folder=started.folder,
            words=started.words,
            packages=started.packages,
            ca=self._settings.broker.ca,
            unsigned=self._settings.upgrade.unsigned,
            newest=self._newest(),
            parent=os.getpid(),
        )

    def begin_check(self, release: Release) -> None:
        """Start the process that makes the environment and becomes the new version's own check."""
        self._killed = 0
        self._begin()

    def _begin(self) -> None:
        self.stop()
        assert self._staged is not None, "a release is staged before it is checked"
        environ = {name: value for name, value in os.environ.items() if name not in (launch.LAUNCHED, "NOTIFY_SOCKET")}
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**threads.QUIET, **environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        except OSError as error:
            raise ModelError(f"its check cannot be started: {error.strerror}") from None
        self._tail, self._until_s = b"", self._clock() + CHECK_S
        stdin, stderr = self._process.stdin, self._process.stderr
        assert stdin is not None
        assert stderr is not None
        os.set_blocking(stderr.fileno(), False)
        try:
            stdin.write(msgspec.json.encode(self._staged))  # some hundred bytes: a pipe takes 64 KiB at once
            stdin.close()
        except BrokenPipeError:  # it has ended; its last words say why
            pass

    def checked(self) -> Verdict | None:
        """Return the verdict of the running check, or None while it goes on. Start a killed check again."""
        if self._process is None:
            return Verdict("its check was ended", {})
        said = _read(self._process.stderr)
        self._tail = (self._tail + said)[-TAIL_BYTES:]
        code = self._process.poll()
        if code is None and self._clock() < self._until_s:
            return None
        self._tail = (self._tail + _read(self._process.stderr))[-TAIL_BYTES:]
        self.stop()
        if code is None:
            return Verdict(f"its check has not ended within {CHECK_S:g} s", {})
        if code == 0:
            return Verdict("", {})
        if code == -signal.SIGKILL and self._killed < KILLED_MOST:
            log.warning("the check of the new version was killed: it is made again")
            self._killed += 1
            try:
                self._begin()
            except ModelError as error:
                return Verdict(str(error), {})
            return None
        lines = self._tail.decode(errors="replace").strip().splitlines()
        words = shorten_error(lines[-1].removeprefix("fedquilt: "), 900) if lines else "it said nothing"
        if code < 0:
            return Verdict(f"its check was ended by {signal.Signals(-code).name}; {words}", {})
        return Verdict(words, {})

    def swap(self, release: Release) -> None:
        """Put the new version on trial, and ask this process to end.

        Raises:
            ModelError: its environment is gone.
            StoreError: choice.json cannot be written.
        """
        assert release.blob is not None
        started, choice, new = self._launcher(), self._choice(), release.blob.sha256
        if choice.current != new:
            if not launch.python(self._folder(), new).exists():
                raise ModelError(f"the environment {new[:12]} is gone from {self._folder()}: send the release again")
            online_s = self._settings.upgrade.online_s
            self._choose(Choice(started.flashed, new, choice.current, trying=True, online_s=online_s))
        if started.running != new:
            log.warning("ends, to be started as version %s (%s)", release.name or new[:12], new[:12])
            self._restart()

    def ill(self) -> str:
        """Why the version in use does not hold: the launcher has returned from it. Notes that it is online."""
        if self._started is None:
            return NO_LAUNCHER
        choice = self._choice()
        if self._started.unable or choice.returned:
            return self._started.unable or choice.returned
        if choice.trying and not choice.online and self._started.running == choice.current and self._connected():
            self._quiet()
            self._choose(choice._replace(online=True))
        return ""

    def settled(self) -> bool:
        """Whether the version in use is the one that runs, and has been online."""
        if self._started is None or self._started.unable:
            return True
        choice = self._choice()
        return self._started.running == choice.current and (not choice.trying or choice.online)

    def back(self) -> bool:
        """Put the previous version in use again, and ask this process to end; False: there is none.

        Raises:
            StoreError: choice.json cannot be written.
        """
        if self._started is None:
            return False
        choice = self._choice()
        if choice.previous is None and not choice.failed:
            return False
        if choice.previous is not None:
            choice = launch.back(choice, "")
            self._choose(choice)
        if self._started.running != choice.current:
            log.warning("ends, to be started as the version before")
            self._restart()
        return True

    def keep(self) -> None:
        """End the trial of the version that runs, once it has been online: its launcher returns from it no more."""
        if self._started is None:
            return
        choice = self._choice()
        if choice.trying and choice.online and self._started.running == choice.current:
            self._count(choice.current)
            self._choose(choice._replace(trying=False))

    def drop(self) -> None:
        """End a check; delete environments that are of no use any more."""
        self.stop()
        self._staged = None
        if self._started is None:
            return
        choice = self._choice()
        if self._started.unable and choice.current != self._started.running:
            return self._choose(launch.back(choice, self._started.unable))
        if choice.trying:
            return
        kept = {choice.current, choice.previous, self._started.running}
        folder = self._folder()
        with doing(f"look at {folder}"):
            entries = self._disk.entries(folder) if self._disk.is_dir(folder) else []
        for entry in entries:
            if entry.is_dir and entry.name not in kept:
                with doing(f"remove {folder / entry.name}"):
                    self._disk.remove(folder / entry.name)

    def need_bytes(self, release: Release) -> int:
        """Memory that the check takes."""
        return CHECK_BYTES

    def fds(self) -> Sequence[int]:
        """The check's output."""
        pipe = None if self._process is None else self._process.stderr
        return () if pipe is None or pipe.closed else (pipe.fileno(),)

    def stop(self) -> None:
        """End the check, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._process = None


def _read(pipe: IO[bytes] | None) -> bytes:
    """What can be read now; at the end of the pipe it is closed, so that nobody waits for it."""
    if pipe is None or pipe.closed:
        return b""
    said = pipe.read(1 << 16)
    if said == b"":
        pipe.close()
    return said or b""

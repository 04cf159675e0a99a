"""Processes of releases: the check of a version, and the owner's hook after a change of the model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, NamedTuple

TAIL_BYTES: Final = 4096
HOOK_S: Final = 60.0  # time limit of a hook
MAX_HOOK_OUTPUT: Final = 300  # characters of a hook's last line


class ProcessEnd(NamedTuple):
    code: int | None  # exit status, or None after the time limit
    last_line: str  # last line of the output


class ReleaseProcess:
    """Command in a process group of its own, killed after a time limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._end_s = 0.0

    def start(
        self, command: Sequence[str], timeout_s: float, environment: Mapping[str, str], request: bytes = b""
    ) -> None:
        """Kill the previous command and start another with `request` as its input, or raise OSError."""
        self.stop()
        self._end_s = self._clock() + timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if request else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if request else self._output,
                stderr=self._output,
                start_new_session=True,
                env=environment,
            )
        except OSError:
            self.stop()
            raise
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the process has ended, and its output gives the reason
                self.process.stdin.write(request)
                self.process.stdin.close()

    def poll(self) -> ProcessEnd | None:
        """Return the command's end once, else None. Kill a command that exceeds its time limit."""
        if self.process is None or ((code := self.process.poll()) is None and self._clock() < self._end_s):
            return None
        end = ProcessEnd(code, self._last_line())
        self.stop()
        return end

    def stop(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.kill()
            self.process.wait()
            self.process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _last_line(self) -> str:
        assert self._output is not None
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size - TAIL_BYTES, 0))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


class ReleaseHook:
    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._command, self._process = list(command), ReleaseProcess(clock)
        self._failure = ""

    def start(self, extra_environment: Mapping[str, str]) -> None:
        self._process.stop()
        self._failure = ""
        try:
            if self._command:
                self._process.start(self._command, HOOK_S, {**os.environ, **extra_environment})
        except OSError as error:
            self._failure = f"hook {self._command[0]} cannot be started: {error.strerror}"

    @property
    def is_running(self) -> bool:
        """Whether the command still runs. Reading this property kills a command that exceeds its time limit."""
        if (end := self._process.poll()) is not None and end.code != 0:
            if end.code is None:
                ending = f"was stopped after {HOOK_S:g} s"
            elif end.code < 0:
                ending = f"was ended by {signal.Signals(-end.code).name}"
            else:
                ending = f"ended with exit code {end.code}"
            output = f": {end.last_line[-MAX_HOOK_OUTPUT:]}" if end.last_line and end.code is not None else ""
            self._failure = f"hook {self._command[0]} {ending}{output}"
        return self._process.process is not None

    @property
    def failure(self) -> str:
        """How the latest run failed, or "" if it succeeded or still runs."""
        return "" if self.is_running else self._failure

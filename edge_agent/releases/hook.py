"""Command of the device's owner, run after each installation of a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

WORDS_MOST: Final = 300  # characters of a command's last words


class ReleaseHook:
    """Command in a process group of its own, killed after a time limit.

    Args:
        command: Command with arguments, or () for no command.
        timeout_s: Longest duration of a run.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, command: Sequence[str], timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._command, self._timeout_s, self._clock = list(command), timeout_s, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._end_s = 0.0
        self._failed = ""

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the command with additional environment variables. A previous run is killed first."""
        self.stop()
        self._failed = ""
        if not self._command:
            return
        self._end_s = self._clock() + self._timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._failed = f"the hook {self._command[0]} cannot be started: {error.strerror}"
            self.stop()

    @property
    def is_running(self) -> bool:
        """Whether the command still runs. A run beyond its time limit is killed by this check."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None and self._clock() < self._end_s:
            return True
        if code is None:
            self._failed = f"the hook {self._command[0]} hung: it was ended after {self._timeout_s:g} s"
        elif code:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._failed = f"the hook {self._command[0]} {how}{self._last_output()}"
        self.stop()
        return False

    @property
    def failure(self) -> str:
        """Reason why the latest run has failed, with its last output, or ""."""
        return "" if self.is_running else self._failed

    def stop(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _last_output(self) -> str:
        assert self._output is not None
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size - 4 * WORDS_MOST, 0))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-WORDS_MOST:]}" if lines else ""

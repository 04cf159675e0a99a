"""Child process of the daemon: its pipes never block, its size is known, and its death is explained in a sentence."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final

import msgspec

from fedquilt import threads
from fedquilt.core import UNDECODABLE, shorten_error
from fedquilt.edge_agent import exhausted
from fedquilt.edge_agent.task import budget
from fedquilt.edge_agent.task.protocol import Event, Outcome
from fedquilt.heap import PROC

log = logging.getLogger("fedquilt.agent")

LINE_MOST_BYTES: Final = 4 << 20  # of one answer; a thousand metrics of a task are some 100 kB
INVALID_LINES_MOST: Final = 100  # lines that are no answer, of one process
TAIL_BYTES: Final = 4096  # of the child's last output
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

PR_SET_PDEATHSIG: Final = 1

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Child:
    """A process that takes orders on stdin and answers on stdout, started with this process's id as last argument.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        engine: str,
        count_kills: Callable[[], int | None] = budget.oom_kills,
        count_own: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`count_kills` and `count_own`: the kernel's kills for want of memory, in all and within the task's limit."""
        self.engine = engine
        self.garbled = False
        self._invalid_lines = 0
        self._count_kills, self._oom_kills = count_kills, count_kills()
        self._count_own, self._own_kills = count_own, count_own()
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**threads.QUIET, **os.environ},
            start_new_session=True,  # with a process group, which a confined process cannot leave
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._orders: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] | None = self._process.stdout
        self._errors: IO[bytes] | None = self._process.stderr
        for number in (self._orders.fileno(), *self.fds()):
            os.set_blocking(number, False)
        self._unsent, self._line, self._tail = b"", b"", b""
        self._held: int | None = None

    @property
    def gone(self) -> bool:
        """Whether it has ended, or has closed its output."""
        return self._answers is None or self._process.poll() is not None

    @property
    def last_output(self) -> str:
        """Last line of the process's output that was no answer, or "(nothing)"."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return shorten_error(lines[-1], 500) if lines else "(nothing)"

    def fds(self) -> list[int]:
        """File descriptors of its output."""
        return [pipe.fileno() for pipe in (self._answers, self._errors) if pipe is not None]

    def send(self, line: bytes) -> None:
        """Send it a line, as far as the pipe takes it; `receive` sends the rest."""
        self._unsent += line
        self._push()

    def receive(self) -> list[Event]:
        """Return the answers that have arrived, and keep the end of all other output."""
        self._push()
        self._errors, said = _drain(self._errors)
        self._tail = (self._tail + said)[-TAIL_BYTES:]
        self._answers, said = _drain(self._answers)
        *lines, self._line = (self._line + said).split(b"\n")
        self.garbled = self.garbled or len(self._line) > LINE_MOST_BYTES
        events: list[Event] = []
        for line in lines:
            if self.garbled:  # millions of lines may follow, and the agent has other work
                break
            try:
                events.append(_decoder.decode(line))
            except UNDECODABLE:
                self._keep_invalid_line(line)
        return events

    def _keep_invalid_line(self, line: bytes) -> None:
        """Keep a line that is no answer as output, log the first one, and mark the child garbled after many."""
        self._tail = (self._tail + line + b"\n")[-TAIL_BYTES:]
        if not self._invalid_lines:
            log.warning(
                "the task's process wrote a line that is no answer (further ones are not logged): %s", line[:200]
            )
        self._invalid_lines += 1
        self.garbled = self._invalid_lines > INVALID_LINES_MOST

    def look(self) -> int | None:
        """Resident size in bytes; None: it is gone."""
        held = budget.resident_bytes(self.pid)
        self._held = held or self._held
        return held

    def obituary(self) -> Outcome:
        """Outcome that explains its death in a sentence."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.poll()
        held = "" if self._held is None else f", which held {budget.megabytes(self._held)} when last seen,"
        if status is None:
            return Outcome(code="failed", reason=f"the task's process stopped answering; it said: {self.last_output}")
        if status != -signal.SIGKILL and exhausted.tells_of_memory(self._tail.decode(errors="replace")):
            return self._out_of_memory(
                f"the task's process{held} ran out of memory and ended; it said: {self.last_output}"
            )
        if status >= 0:
            return Outcome(
                code="failed", reason=f"the task's process ended with code {status}; it said: {self.last_output}"
            )
        if status != -signal.SIGKILL:
            name = signal.Signals(-status).name
            reason = f"the task's process{held} died of {name}; it said: {self.last_output}"
            return Outcome(code="failed", reason=reason, killed=-status in FROM_OUTSIDE)
        return self._murdered(held)

    def _murdered(self, held: str) -> Outcome:
        """Cause of a SIGKILL: only within the task's own limit is it certain that the task itself was too large."""
        if (self._count_own() or 0) > (self._own_kills or 0):
            return self._out_of_memory(f"the kernel killed the task's process{held} at its budget")
        kills = self._count_kills()
        if kills is None or self._oom_kills is None:  # JetPack 4 (Linux 4.9) does not count
            how = f"the task's process{held} was killed, most likely by the kernel for want of memory"
        elif kills > self._oom_kills:
            how = f"the kernel ran out of memory and killed the task's process{held} most likely"
        else:
            return Outcome(
                code="failed", reason=f"the task's process{held} was killed by somebody (SIGKILL)", killed=True
            )
        return msgspec.structs.replace(self._out_of_memory(how), killed=True)

    def _out_of_memory(self, how: str) -> Outcome:
        """Return the outcome of a process that ran out of memory."""
        reason = f"{how}: ask for less, or lower budget to what the board can give"
        return Outcome(code="memory", reason=shorten_error(reason), peak_bytes=self._held, overrun=True)

    def has_company(self) -> bool:
        """Return whether other processes, which a task has started, are left in the process group."""
        return any(pid != self.pid for pid in _processes_in_group(self.pid))

    def kill(self) -> None:
        """Kill the process with its group and close the pipes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also where the first process has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._orders, self._answers, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _push(self) -> None:
        """Write as much of the order as the pipe takes."""
        while self._unsent:
            try:
                written = self._orders.write(self._unsent[:65536])
            except BrokenPipeError:  # it is dead, which its obituary will explain
                self._unsent = b""
                return
            if written is None:  # the pipe is full
                return
            self._unsent = self._unsent[written:]


def _drain(pipe: IO[bytes] | None) -> tuple[IO[bytes] | None, bytes]:
    """Bytes that can be read now; the pipe is None once it has ended."""
    parts: list[bytes] = []
    while pipe is not None and sum(map(len, parts)) <= LINE_MOST_BYTES:
        part = pipe.read(65536)
        if part is None:
            break
        if not part:
            pipe.close()
            return None, b"".join(parts)
        parts.append(part)
    return pipe, b"".join(parts)


def _processes_in_group(leader: int) -> Iterator[int]:
    """Yield the ids of running processes in a process group."""
    for name in os.listdir(PROC):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                status = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(status[2]) == leader and status[0] not in "ZX":
                    yield int(name)


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent dies, also by kill -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        sys.exit()

"""Child process of the daemon, with non-blocking pipes, a known size and an explained end, and the child's own loop."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from fedquilt import plugins
from fedquilt.core import DECODE_ERRORS, shorten_error
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import Event, ProcessRequest, WorkResult
from fedquilt.host import process_resources
from fedquilt.host.process_resources import PROC

log = logging.getLogger("fedquilt.agent")

LINE_MOST_BYTES: Final = 4 << 20  # of one answer; a thousand metrics of a task are some 100 kB
INVALID_LINES_MOST: Final = 100  # lines that are no answer, of one process
TAIL_BYTES: Final = 4096  # of the child's last output
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

PR_SET_PDEATHSIG: Final = 1

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


R = TypeVar("R", bound=ProcessRequest)


class ChildProcess:
    """Process that reads requests from stdin and writes events to stdout.

    The command gets the id of this process as last argument.
    """

    def __init__(
        self,
        command: Sequence[str],
        engine: str,
        count_kills: Callable[[], int | None] = memory_budget.count_oom_kills,  # on the machine
        count_own: Callable[[], int | None] = lambda: None,  # within the task's memory limit
    ) -> None:
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
            env={**process_resources.QUIET, **os.environ},
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
    def has_ended(self) -> bool:
        return self._answers is None or self._process.poll() is not None

    @property
    def last_output(self) -> str:
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return shorten_error(lines[-1], 500) if lines else "(nothing)"

    def fds(self) -> list[int]:
        return [pipe.fileno() for pipe in (self._answers, self._errors) if pipe is not None]

    def send_line(self, line: bytes) -> None:
        """Send a line as far as the pipe accepts it. `receive_events` sends the rest."""
        self._unsent += line
        self._send_pending()

    def receive_events(self) -> list[Event]:
        """Send pending input and return the new events. Invalid lines are kept as the last output."""
        self._send_pending()
        self._errors, said = _read_available(self._errors)
        self._tail = (self._tail + said)[-TAIL_BYTES:]
        self._answers, said = _read_available(self._answers)
        *lines, self._line = (self._line + said).split(b"\n")
        self.garbled = self.garbled or len(self._line) > LINE_MOST_BYTES
        events: list[Event] = []
        for line in lines:
            if self.garbled:  # millions of lines may follow, and the agent has other work
                break
            try:
                events.append(_decoder.decode(line))
            except DECODE_ERRORS:
                self._keep_invalid_line(line)
        return events

    def _keep_invalid_line(self, line: bytes) -> None:
        self._tail = (self._tail + line + b"\n")[-TAIL_BYTES:]
        if not self._invalid_lines:
            log.warning(
                "the task's process wrote a line that is no answer (further ones are not logged): %s", line[:200]
            )
        self._invalid_lines += 1
        self.garbled = self._invalid_lines > INVALID_LINES_MOST

    def measure_resident_bytes(self) -> int | None:
        held = memory_budget.resident_bytes(self.pid)
        self._held = held or self._held
        return held

    def explain_end(self) -> WorkResult:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.poll()
        held = (
            "" if self._held is None else f", which held {memory_budget.format_megabytes(self._held)} when last seen,"
        )
        if status is None:
            return WorkResult(
                code="failed", reason=f"the task's process stopped answering; it said: {self.last_output}"
            )
        if status != -signal.SIGKILL and failures.is_out_of_memory_text(self._tail.decode(errors="replace")):
            return self._out_of_memory_outcome(
                f"the task's process{held} ran out of memory and ended; it said: {self.last_output}"
            )
        if status >= 0:
            return WorkResult(
                code="failed", reason=f"the task's process ended with code {status}; it said: {self.last_output}"
            )
        if status != -signal.SIGKILL:
            name = signal.Signals(-status).name
            reason = f"the task's process{held} died of {name}; it said: {self.last_output}"
            return WorkResult(code="failed", reason=reason, killed=-status in FROM_OUTSIDE)
        return self._explain_sigkill(held)

    def _explain_sigkill(self, held: str) -> WorkResult:
        # Only a kill within the task's own memory limit proves that the task was too large.
        if (self._count_own() or 0) > (self._own_kills or 0):
            return self._out_of_memory_outcome(f"the kernel killed the task's process{held} at its budget")
        kills = self._count_kills()
        if kills is None or self._oom_kills is None:  # JetPack 4 (Linux 4.9) does not count
            how = f"the task's process{held} was killed, most likely by the kernel for want of memory"
        elif kills > self._oom_kills:
            how = f"the kernel ran out of memory and killed the task's process{held} most likely"
        else:
            return WorkResult(
                code="failed", reason=f"the task's process{held} was killed by somebody (SIGKILL)", killed=True
            )
        return msgspec.structs.replace(self._out_of_memory_outcome(how), killed=True)

    def _out_of_memory_outcome(self, how: str) -> WorkResult:
        reason = f"{how}: ask for less, or lower budget to what the board can give"
        return WorkResult(code="memory", reason=shorten_error(reason), peak_bytes=self._held, overrun=True)

    def has_other_processes(self) -> bool:
        return any(pid != self.pid for pid in _processes_in_group(self.pid))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also where the first process has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._orders, self._answers, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send_pending(self) -> None:
        while self._unsent:
            try:
                written = self._orders.write(self._unsent[:65536])
            except BrokenPipeError:  # it is dead, which its obituary will explain
                self._unsent = b""
                return
            if written is None:  # the pipe is full
                return
            self._unsent = self._unsent[written:]


def _read_available(pipe: IO[bytes] | None) -> tuple[IO[bytes] | None, bytes]:
    """Read without blocking, up to about LINE_MOST_BYTES. Return the pipe, or None at its end, and the bytes."""
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
    for name in os.listdir(PROC):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                status = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(status[2]) == leader and status[0] not in "ZX":
                    yield int(name)


def serve_requests(kind: type[R], answer: Callable[[R, Callable[[Event], None]], WorkResult]) -> None:
    """Answer the requests on standard input, one after another, until the input or the parent process ends.

    The parent's id is the last argument of this process. `answer` gets a request and a function that sends an event.
    """
    exit_with_parent(int(sys.argv[-1]))
    with contextlib.suppress(OSError):  # short of memory, the kernel should take this process and not another
        Path("/proc/self/oom_score_adj").write_text("500")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send_event(event: Event) -> None:
        answers.write(msgspec.json.encode(event) + b"\n")
        answers.flush()

    with contextlib.suppress(BrokenPipeError):  # the daemon is gone
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=kind)
            plugins.restrict_plugins(order.plugins)
            send_event(answer(order, send_event))


def exit_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even after kill -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        sys.exit()

"""Child process of the daemon with non-blocking pipes, and the loop that serves its requests."""

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
from fedquilt.edge_agent.task.protocol import EngineLoaded, Event, ProcessEvent, ProcessRequest, WorkResult
from fedquilt.host import process_resources
from fedquilt.host.process_resources import PROC

log = logging.getLogger("fedquilt.agent")

MAX_LINE_BYTES: Final = 4 << 20  # limit of one event: a thousand metrics of a task are about 100 kB
MAX_INVALID_LINES: Final = 100  # limit of undecodable lines of one process
TAIL_BYTES: Final = 4096  # limit of the child's last output
EXTERNAL_SIGNALS: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

PR_SET_PDEATHSIG: Final = 1
_CPU_TIMES: Final = slice(11, 15)  # utime, stime, cutime, cstime after the state in /proc/PID/stat

_decoder: msgspec.json.Decoder[ProcessEvent] = msgspec.json.Decoder(ProcessEvent)


R = TypeVar("R", bound=ProcessRequest)


class ChildProcess:
    """Process that reads requests from stdin and writes events to stdout.

    The command gets the id of this process as last argument. The constructor raises OSError if the process cannot be
    started. The two functions count out-of-memory kills, in the machine and in the task's group, or return None.
    """

    def __init__(
        self,
        command: Sequence[str],
        engine: str,
        count_machine_oom_kills: Callable[[], int | None] = memory_budget.count_oom_kills,
        count_task_oom_kills: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.base_bytes: int | None = None  # resident size before the work, or None while the engine is loaded
        self.is_garbled = False
        self._invalid_lines = 0
        self._count_machine_oom_kills, self._initial_machine_kills = count_machine_oom_kills, count_machine_oom_kills()
        self._count_task_oom_kills, self._initial_task_kills = count_task_oom_kills, count_task_oom_kills()
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**process_resources.LIBRARY_ENVIRONMENT, **os.environ},
            start_new_session=True,  # kills the process group, which a sandboxed process cannot leave
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] | None = self._process.stdout
        self._errors: IO[bytes] | None = self._process.stderr
        for fd in (self._input.fileno(), *self.fds()):
            os.set_blocking(fd, False)
        self._unsent, self._partial_line, self._output_tail = b"", b"", b""
        self._last_resident_bytes: int | None = None

    @property
    def has_ended(self) -> bool:
        return self._output is None or self._process.poll() is not None

    @property
    def last_output(self) -> str:
        lines = self._output_tail.decode(errors="replace").strip().splitlines()
        return shorten_error(lines[-1], 500) if lines else "(nothing)"

    def fds(self) -> list[int]:
        return [pipe.fileno() for pipe in (self._output, self._errors) if pipe is not None]

    def send_line(self, line: bytes) -> None:
        """Send a line as far as the pipe accepts it. `receive_events` sends the rest."""
        self._unsent += line
        self._send_pending()

    def receive_events(self) -> list[Event]:
        """Send pending input and return the new events. Invalid lines are kept as the last output."""
        self._send_pending()
        self._errors, output = _read_available(self._errors)
        self._output_tail = (self._output_tail + output)[-TAIL_BYTES:]
        self._output, output = _read_available(self._output)
        *lines, self._partial_line = (self._partial_line + output).split(b"\n")
        self.is_garbled = self.is_garbled or len(self._partial_line) > MAX_LINE_BYTES
        events: list[Event] = []
        for line in lines:
            if self.is_garbled:  # millions of lines may follow and would block the agent
                break
            try:
                event = _decoder.decode(line)
            except DECODE_ERRORS:
                self._keep_invalid_line(line)
                continue
            if isinstance(event, EngineLoaded):
                self.base_bytes = event.base_bytes
            else:
                events.append(event)
        return events

    def _keep_invalid_line(self, line: bytes) -> None:
        self._output_tail = (self._output_tail + line + b"\n")[-TAIL_BYTES:]
        if not self._invalid_lines:
            log.warning("task process wrote an invalid line (further lines are not logged): %s", line[:200])
        self._invalid_lines += 1
        self.is_garbled = self._invalid_lines > MAX_INVALID_LINES

    def measure_resident_bytes(self) -> int | None:
        resident_bytes = memory_budget.resident_bytes(self.pid)
        self._last_resident_bytes = resident_bytes or self._last_resident_bytes
        return resident_bytes

    def explain_end(self, budget_bytes: int) -> WorkResult:
        """Return a failed result with the most likely cause of the process's end. Wait for the end up to 1 s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status = self._process.poll()
        size_text = (
            ""
            if self._last_resident_bytes is None
            else f" (last measured at {memory_budget.format_megabytes(self._last_resident_bytes)})"
        )
        output = f"; last output: {self.last_output}"
        if status is None:
            return WorkResult(code="failed", reason=f"the task's process closed its output{output}")
        if status != -signal.SIGKILL and failures.is_out_of_memory_text(self._output_tail.decode(errors="replace")):
            return self._out_of_memory_outcome(f"the task's process{size_text} ran out of memory and ended{output}")
        if status >= 0:
            return WorkResult(code="failed", reason=f"the task's process ended with exit code {status}{output}")
        if status != -signal.SIGKILL:
            name = signal.Signals(-status).name
            reason = f"the task's process{size_text} was ended by {name}{output}"
            return WorkResult(code="failed", reason=reason, killed_externally=-status in EXTERNAL_SIGNALS)
        return self._explain_sigkill(size_text, budget_bytes)

    def _explain_sigkill(self, size_text: str, budget_bytes: int) -> WorkResult:
        # Only a kill within the task's own memory limit proves that the task was too large.
        if (self._count_task_oom_kills() or 0) > (self._initial_task_kills or 0):
            return self.overrun_outcome(budget_bytes, budget_bytes)
        kills = self._count_machine_oom_kills()
        if kills is None or self._initial_machine_kills is None:  # JetPack 4 (Linux 4.9) does not count kills
            cause = f"the task's process{size_text} was killed, most likely by the kernel for lack of memory"
        elif kills > self._initial_machine_kills:
            cause = f"the machine ran out of memory, and the kernel most likely killed the task's process{size_text}"
        else:
            return WorkResult(
                code="failed",
                reason=f"the task's process{size_text} was killed from outside (SIGKILL)",
                killed_externally=True,
            )
        return msgspec.structs.replace(self._out_of_memory_outcome(cause), killed_externally=True)

    def overrun_outcome(self, used_bytes: int, budget_bytes: int) -> WorkResult:
        return WorkResult(
            code="memory",
            reason=memory_budget.describe_overrun(self.engine, used_bytes, self.base_bytes, budget_bytes),
            peak_bytes=used_bytes,
            base_bytes=used_bytes if self.base_bytes is None else self.base_bytes,
            ran_out_of_memory=True,
        )

    def _out_of_memory_outcome(self, cause: str) -> WorkResult:
        reason = f"{cause}: reduce model or batch, or lower budget to the memory that the device has free"
        return WorkResult(
            code="memory", reason=shorten_error(reason), peak_bytes=self._last_resident_bytes, ran_out_of_memory=True
        )

    def has_other_processes(self) -> bool:
        return any(pid != self.pid for pid, _ in _processes_in_group(self.pid))

    def read_cpu_ticks(self) -> int:
        """Return the processor time of the process group in clock ticks, with that of ended children."""
        return sum(sum(map(int, status[_CPU_TIMES])) for _, status in _processes_in_group(self.pid))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also if the first process has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send_pending(self) -> None:
        while self._unsent:
            try:
                written = self._input.write(self._unsent[:65536])
            except BrokenPipeError:  # `explain_end` reports why the process has ended
                self._unsent = b""
                return
            if written is None:  # the pipe is full
                return
            self._unsent = self._unsent[written:]


def _read_available(pipe: IO[bytes] | None) -> tuple[IO[bytes] | None, bytes]:
    """Read about MAX_LINE_BYTES without blocking. Return (pipe, or None at its end, and the bytes)."""
    parts: list[bytes] = []
    while pipe is not None and sum(map(len, parts)) <= MAX_LINE_BYTES:
        part = pipe.read(65536)
        if part is None:
            break
        if not part:
            pipe.close()
            return None, b"".join(parts)
        parts.append(part)
    return pipe, b"".join(parts)


def _processes_in_group(leader: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the id of each process and its fields of /proc/PID/stat from the state on."""
    for name in os.listdir(PROC):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
                status = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(status[2]) == leader and status[0] not in "ZX":
                    yield int(name), status


def serve_requests(
    request_type: type[R], handle_request: Callable[[R, Callable[[ProcessEvent], None]], WorkResult]
) -> None:
    """Handle requests on standard input one after another, until the input or the parent process ends.

    The last command-line argument is the parent's process id. `handle_request` gets a request and a function that sends
    an event. All other output of this process goes to stderr.
    """
    exit_with_parent(int(sys.argv[-1]))
    with contextlib.suppress(OSError):  # the kernel should kill this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("500")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon handles Ctrl-C
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send_event(event: ProcessEvent) -> None:
        output.write(msgspec.json.encode(event) + b"\n")
        output.flush()

    with contextlib.suppress(BrokenPipeError):  # the daemon has ended
        for line in sys.stdin.buffer:
            request = msgspec.json.decode(line, type=request_type)
            plugins.restrict_plugins(request.allowed_plugins)
            send_event(handle_request(request, send_event))


def exit_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even after kill -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request
        sys.exit()

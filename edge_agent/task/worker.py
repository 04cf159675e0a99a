"""Workers that run tasks for the daemon, in a child process or on virtual time.

The child (`fedquilt.edge_agent.task.main`) reads requests as JSON lines from stdin and writes events to stdout. An idle
child is kept for a while, so that the next task with the same engine finds its imports and data loaded. The child may
be killed at any moment. While a task runs, the resident size is checked a few times a second. Above the budget, the
child is killed to protect the board.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from fedquilt.core import Cost, Device, WorkEstimate
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.task import memory_budget, sandbox
from fedquilt.edge_agent.task.process import ChildProcess
from fedquilt.edge_agent.task.protocol import DataLoaded, Event, ProcessRequest, ProgressReport, WorkRequest, WorkResult
from fedquilt.edge_agent.task.stall_detector import STALL_S, StallDetector
from fedquilt.host.disk import REAL

if TYPE_CHECKING:
    from fedquilt.core import Examples
    from fedquilt.data.spec import DataSpec

    Shares = tuple[Examples, Examples]  # training and held-out examples

CHECK_S: Final = 0.2  # interval between checks of the child's resident size
PROGRESS_S: Final = 1.0  # interval of progress reports on virtual time
PROGRESS_FRACTION: Final = 0.02  # minimum interval as a fraction of the task's duration
COMMAND: Final = (sys.executable, "-m", "fedquilt.edge_agent.task.main")


class TaskWorker(Protocol):
    @property
    def resident_bytes(self) -> int:
        """Memory of the worker's process, available to the next task, or 0 without a process."""
        ...

    def start(self, request: WorkRequest, now_s: float) -> None:
        """Start a task. `poll_events` returns the result, even if the start failed."""
        ...

    def poll_events(self, now_s: float) -> list[Event]:
        """Return the events since the last call. After a `WorkResult` the worker is free."""
        ...

    def next_poll_s(self, now_s: float) -> float:
        """Return the time by which `poll_events` must be called, or infinity."""
        ...

    def kill(self) -> None:
        """Cancel the current task. No more events follow."""
        ...

    def fds(self) -> Sequence[int]: ...

    def close(self) -> None: ...


class VirtualWorker:
    """Simulated worker whose tasks take as much virtual time as they would on the simulated board.

    The remaining time follows the board's operating point, also if the point changes during the task. `set_outcome`
    must be called at the time at which the task was started. `poll_events` returns no event before that call.
    """

    resident_bytes: int = 0

    def __init__(self, board: Device) -> None:
        self._board = board
        self.pending_request: WorkRequest | None = None  # started, without an outcome yet
        self._outcome: WorkResult | None = None
        self._reported_loaded = False  # whether `DataLoaded` was returned
        self._work = WorkEstimate()
        self._fraction_done = self._updated_s = 0.0  # fraction at the time `_updated_s`
        self._total_s = 0.0  # duration of the whole task
        self._next_report_s = 0.0  # time of the next progress event

    def start(self, request: WorkRequest, now_s: float) -> None:
        self.pending_request = request

    def set_outcome(self, outcome: WorkResult, now_s: float) -> None:
        assert self.pending_request is not None, "no request is pending"
        self._work, self._outcome, self.pending_request = (
            self.pending_request.task.work.total_for_examples(outcome.examples),
            outcome,
            None,
        )
        self._reported_loaded, self._fraction_done, self._updated_s, self._next_report_s = False, 0.0, now_s, now_s
        self._total_s = self._board.task_cost(self._work, Cost(duration_s=0.0)).duration_s

    def poll_events(self, now_s: float) -> list[Event]:
        if self._outcome is None:
            return []
        if self._outcome.code == "ok" and not self._reported_loaded:
            self._reported_loaded, self._next_report_s = True, now_s + self._report_interval_s()
            return [DataLoaded(self._outcome.examples)]
        if now_s >= self._end_s():
            outcome, self._outcome = self._outcome, None
            return [outcome]
        if self._outcome.code != "ok" or now_s < self._next_report_s:
            return []
        self._next_report_s = now_s + self._report_interval_s()
        return [ProgressReport(self._share_done(now_s))]

    def next_poll_s(self, now_s: float) -> float:
        if self._outcome is None:
            return math.inf
        whole_s = self._board.task_cost(self._work, Cost(duration_s=0.0)).duration_s
        if whole_s != self._total_s:  # the board is pinned at another point now
            self._fraction_done, self._updated_s, self._total_s = self._share_done(now_s), now_s, whole_s
        return min(self._end_s(), self._next_report_s) if self._outcome.code == "ok" else self._end_s()

    def energy_so_far_j(self, now_s: float) -> float:
        """Return the joules of the running task until now, or 0 if none runs or its energy is unknown."""
        if self._outcome is None or self._outcome.code != "ok":
            return 0.0
        return self._share_done(now_s) * (self._board.task_cost(self._work, Cost(duration_s=0.0)).energy_j or 0.0)

    def kill(self) -> None:
        self.pending_request = self._outcome = None

    def fds(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.kill()

    def _share_done(self, now_s: float) -> float:
        return 1.0 if self._total_s <= 0 else min(self._fraction_done + (now_s - self._updated_s) / self._total_s, 1.0)

    def _end_s(self) -> float:
        return self._updated_s + (1 - self._fraction_done) * self._total_s

    def _report_interval_s(self) -> float:
        return max(PROGRESS_S, PROGRESS_FRACTION * self._total_s)


class InlineWorker(VirtualWorker):
    """Worker that runs each task in this process when it starts, on virtual time."""

    def __init__(
        self,
        board: Device,
        load: Callable[[DataSpec], Shares] | None = None,
        report_computed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(board)
        self._load, self._report_computed = load, report_computed
        self._executor: Any = None  # fedquilt.edge_agent.task.main.TaskExecutor, created with the first request

    def start(self, request: WorkRequest, now_s: float) -> None:
        from fedquilt.edge_agent.task import main

        super().start(request, now_s)
        self._executor = self._executor or main.TaskExecutor(self._load)
        self.set_outcome(main.run_task(request, self._executor), now_s)
        self._report_computed()


class ChildWorker:
    def __init__(
        self,
        keep_s: float,
        command: Sequence[str] = COMMAND,
        memory_limit: memory_budget.MemoryLimit | None = None,
        private_folder: Path | None = None,
    ) -> None:
        self._keep_s, self._command, self._private_folder = keep_s, command, private_folder
        self._memory_limit = memory_limit or memory_budget.MemoryLimit()
        self._child: ChildProcess | None = None
        self._request: ProcessRequest | None = None
        self._idle_since_s = math.inf  # start of the idle time
        self._start_failure: WorkResult | None = None  # result of a request that could not be sent
        self._stall_detector = StallDetector()

    @property
    def resident_bytes(self) -> int:
        return (memory_budget.resident_bytes(self._child.pid) or 0) if self._child else 0

    def start(self, request: ProcessRequest, now_s: float) -> None:
        if self._child is not None and self._child.engine != request.engine:
            self._end_child()
        try:
            if self._child is None:
                self._memory_limit.create_group()
                self._empty_temporary()  # files of the child of a killed agent
                self._child = ChildProcess(
                    self._command, request.engine, count_task_oom_kills=self._memory_limit.count_oom_kills
                )
                self._memory_limit.apply_limit(self._child.pid, request.budget_bytes)
            self._child.send_line(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            self._end_child()
            self._start_failure = WorkResult(code="failed", reason=f"the task's process cannot be started: {error}")
        self._request, self._idle_since_s, self._stall_detector = request, math.inf, StallDetector()

    def poll_events(self, now_s: float) -> list[Event]:
        if self._start_failure is not None:
            start_failure, self._start_failure, self._request = self._start_failure, None, None
            return [start_failure]
        if self._child is None:
            return []
        events: list[Event] = []
        is_unusable = False
        for event in self._child.receive_events():
            if self._request is None:
                continue  # the result has arrived already
            if isinstance(event, WorkResult):
                event = _result_or_size_failure(event, self._request.budget_bytes)
            events.append(event)
            self._stall_detector = StallDetector()
            if isinstance(event, WorkResult):
                self._request, self._idle_since_s = None, now_s
                has_gpu_failed = event.code == "failed" and failures.is_gpu_failure_text(event.reason)
                is_unusable = has_gpu_failed or self._child.has_other_processes()  # affects all later requests
        if (
            self._request is not None
            and (failure := self._find_process_failure(self._child, self._request, now_s)) is not None
        ):
            self._end_child()
            self._request = None
            events.append(failure)
        elif self._request is None and (
            is_unusable or self._child.is_garbled or self._child.has_ended or now_s >= self._idle_since_s + self._keep_s
        ):
            self._end_child()
        return events

    def next_poll_s(self, now_s: float) -> float:
        if self._start_failure is not None:
            return now_s
        if self._child is None:
            return math.inf
        return now_s + CHECK_S if self._request else self._idle_since_s + self._keep_s

    def kill(self) -> None:
        self._request = self._start_failure = None
        self._end_child()

    def fds(self) -> Sequence[int]:
        return self._child.fds() if self._child else ()

    def close(self) -> None:
        self.kill()

    def _find_process_failure(self, child: ChildProcess, request: ProcessRequest, now_s: float) -> WorkResult | None:
        resident_bytes = child.measure_resident_bytes()
        if child.is_garbled:
            return WorkResult(code="failed", reason=f"the task's process wrote invalid output: {child.last_output}")
        if child.has_ended:
            return child.explain_end(request.budget_bytes)
        if resident_bytes is not None and resident_bytes > request.budget_bytes:
            return child.overrun_outcome(resident_bytes, request.budget_bytes)
        if self._stall_detector.is_sample_due(now_s):
            self._stall_detector = self._stall_detector.add_sample(child.read_cpu_ticks(), now_s)
        if self._stall_detector.is_stalled:
            reason = f"the task's process made no progress for {STALL_S:.0f} s, without processor time, and was killed"
            return WorkResult(code="failed", reason=reason, killed_externally=True)
        return None

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
            with contextlib.suppress(OSError):  # emptied again before the next child starts
                self._empty_temporary()

    def _empty_temporary(self) -> None:
        if self._private_folder is not None:
            REAL.clear_folder(self._private_folder / sandbox.TEMPORARY)


def _result_or_size_failure(outcome: WorkResult, budget_bytes: int) -> WorkResult:
    files = [*outcome.bundles.values(), *([] if outcome.private is None else [outcome.private])]
    if (size := sum(ref.size for ref in files)) <= budget_bytes:
        return outcome
    limit = memory_budget.format_megabytes(budget_bytes)
    reason = (
        f"the task's result of {memory_budget.format_megabytes(size)} exceeds the memory budget of {limit}: send less"
    )
    return WorkResult(code="failed", reason=reason)

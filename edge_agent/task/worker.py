"""Worker that carries out a task for the daemon: a child process, or on virtual time the daemon itself.

The child (`fedquilt.edge_agent.task.main`) takes orders as JSON lines on its stdin and answers on its
stdout. It is kept for a while after a task, so that the next one with the same engine finds its
imports and its data in place; it may be killed at any moment, as it owns nothing of value.
While it works, its resident size is checked a few times a second: above the budget it is killed
to protect the board.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from fedquilt.core import Cost, Device, Work
from fedquilt.disk import REAL
from fedquilt.edge_agent import exhausted
from fedquilt.edge_agent.task import budget, confine
from fedquilt.edge_agent.task.process import Child
from fedquilt.edge_agent.task.protocol import Asked, Event, Loaded, Order, Outcome, Progressed

if TYPE_CHECKING:
    from fedquilt.core import Examples
    from fedquilt.data.spec import DataSpec

    Shares = tuple[Examples, Examples]  # for training, and held out

WATCH_S: Final = 0.2  # interval between checks of the child's resident size
TELL_S: Final = 1.0  # on virtual time, progress is reported after this,
TELL_SHARE: Final = 0.02  # or after this share of the work if that is longer
COMMAND: Final = (sys.executable, "-m", "fedquilt.edge_agent.task.main")


class Worker(Protocol):
    """Carries out one order at a time."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held by its process now, available to the next task's; 0: it has no process of its own."""
        ...

    def start(self, order: Order, now_s: float) -> None:
        """Begin an order; `poll` returns the outcome, also if it could not begin."""
        ...

    def poll(self, now_s: float) -> list[Event]:
        """Events since the last call; after an Outcome it is free for the next order."""
        ...

    def due_s(self, now_s: float) -> float:
        """Time by which it has to be polled."""
        ...

    def kill(self) -> None:
        """Give up the order in hand; no more events come of it."""
        ...

    def fds(self) -> Sequence[int]:
        """File descriptors that become readable when there is something to poll."""
        ...

    def close(self) -> None:
        """End at once."""
        ...


class VirtualWorker:
    """Simulates, on virtual time, the progress of an order that takes as long as it would on the board.

    The remaining time follows the point at which the board is held, also when that changes meanwhile. An order's
    outcome is given to `worked`, at the time at which the order was begun: until then no event comes, and its time
    has to stand still.
    """

    resident_bytes: int = 0

    def __init__(self, board: Device) -> None:
        self._board = board
        self.order: Order | None = None  # begun, its outcome not known yet
        self._outcome: Outcome | None = None
        self._loaded = False  # whether that event has been returned
        self._work = Work()
        self._done, self._at_s, self._whole_s = 0.0, 0.0, 0.0  # share done, by when, and duration of the whole
        self._tell_s = 0.0  # time of the next progress event

    def start(self, order: Order, now_s: float) -> None:
        """Note the order; it waits for `worked`."""
        self.order = order

    def worked(self, outcome: Outcome, now_s: float) -> None:
        """Set the outcome that the order has once its time is up."""
        assert self.order is not None, "no order waits for an outcome"
        self._work, self._outcome, self.order = self.order.task.work.on(outcome.examples), outcome, None
        self._loaded, self._done, self._at_s, self._tell_s = False, 0.0, now_s, now_s
        self._whole_s = self._board.cost(self._work, Cost(duration_s=0.0)).duration_s

    def poll(self, now_s: float) -> list[Event]:
        """Events that are due at this time."""
        if self._outcome is None:
            return []
        if self._outcome.code == "ok" and not self._loaded:
            self._loaded, self._tell_s = True, now_s + self._every_s()
            return [Loaded(self._outcome.examples)]
        if now_s >= self._until_s():
            outcome, self._outcome = self._outcome, None
            return [outcome]
        if self._outcome.code != "ok" or now_s < self._tell_s:
            return []
        self._tell_s = now_s + self._every_s()
        return [Progressed(self._done_by(now_s))]

    def due_s(self, now_s: float) -> float:
        """Time of the next event; infinite without an order."""
        if self._outcome is None:
            return math.inf
        whole_s = self._board.cost(self._work, Cost(duration_s=0.0)).duration_s
        if whole_s != self._whole_s:  # the board is held at another point now
            self._done, self._at_s, self._whole_s = self._done_by(now_s), now_s, whole_s
        return min(self._until_s(), self._tell_s) if self._outcome.code == "ok" else self._until_s()

    def kill(self) -> None:
        """Drop the order."""
        self.order = self._outcome = None

    def fds(self) -> Sequence[int]:
        """Return no file descriptors: a worker on virtual time has no process to hear from."""
        return ()

    def close(self) -> None:
        """Drop the order."""
        self.kill()

    def _done_by(self, now_s: float) -> float:
        return 1.0 if self._whole_s <= 0 else min(self._done + (now_s - self._at_s) / self._whole_s, 1.0)

    def _until_s(self) -> float:
        return self._at_s + (1 - self._done) * self._whole_s

    def _every_s(self) -> float:
        return max(TELL_S, TELL_SHARE * self._whole_s)


class InlineWorker(VirtualWorker):
    """Carries out tasks in this process as they begin, on virtual time."""

    def __init__(self, board: Device, load: Callable[[DataSpec], Shares] | None = None) -> None:
        """`load` returns a device's examples, if workers are not to read the data each by itself."""
        super().__init__(board)
        self._load = load
        self._bench: Any = None  # fedquilt.edge_agent.task.main.Bench, made with the first order

    def start(self, order: Order, now_s: float) -> None:
        """Carry out the order at once; its outcome is due when the board would be done."""
        from fedquilt.edge_agent.task import main

        super().start(order, now_s)
        self._bench = self._bench or main.Bench(self._load)
        self.worked(main.run_order(order, self._bench), now_s)


class ChildWorker:
    """Carries out tasks in a child process, which is started with the first order.

    Args:
        warm_s: time for which an idle child waits for the next order.
        command: program that takes the orders.
        cage: holds the child to its budget through the kernel, if it can.
        private: folder of the child's private folders, of which the temporary one is emptied when the child ends.
    """

    def __init__(
        self,
        warm_s: float,
        command: Sequence[str] = COMMAND,
        cage: budget.Cage | None = None,
        private: Path | None = None,
    ) -> None:
        self._warm_s, self._command, self._private = warm_s, command, private
        self._cage = cage or budget.Cage()
        self._child: Child | None = None
        self._order: Asked | None = None
        self._idle_s = math.inf  # time since which it has been idle
        self._failed: Outcome | None = None  # of an order that could not even begin

    @property
    def resident_bytes(self) -> int:
        """Resident size of the idle or working child, in bytes; 0: there is none."""
        return (budget.resident_bytes(self._child.pid) or 0) if self._child else 0

    def start(self, order: Asked, now_s: float) -> None:
        """Send the order to the child process, which is started unless one for this engine runs."""
        if self._child is not None and self._child.engine != order.engine:
            self._end_child()
        try:
            if self._child is None:
                self._cage.divide()
                self._empty_temporary()  # of a child that an agent which was killed has left
                self._child = Child(self._command, order.engine, count_own=self._cage.kills)
                self._cage.limit(self._child.pid, order.budget_bytes)
            self._child.send(msgspec.json.encode(order) + b"\n")
        except OSError as error:
            self._end_child()
            self._failed = Outcome(code="failed", reason=f"the task's process cannot be started: {error}")
        self._order, self._idle_s = order, math.inf

    def poll(self, now_s: float) -> list[Event]:
        """Return the child's answers. End the child if it exceeds its budget, is spoilt, or was idle for long."""
        if self._failed is not None:
            failed, self._failed, self._order = self._failed, None, None
            return [failed]
        if self._child is None:
            return []
        events: list[Event] = []
        spoilt = False
        for event in self._child.receive():
            if self._order is None:
                continue  # it has answered already
            if isinstance(event, Outcome):
                event = _require_small_result(event, self._order.budget_bytes)
            events.append(event)
            if isinstance(event, Outcome):
                self._order, self._idle_s = None, now_s
                broken_gpu = event.code == "failed" and exhausted.tells_of_gpu(event.reason)
                spoilt = broken_gpu or self._child.has_company()  # for every later order too
        if self._order is not None and (ended := self._watch(self._child, self._order)) is not None:
            self._end_child()
            self._order = None
            events.append(ended)
        elif self._order is None and (
            spoilt or self._child.garbled or self._child.gone or now_s >= self._idle_s + self._warm_s
        ):
            self._end_child()
        return events

    def due_s(self, now_s: float) -> float:
        """Time of the next check of its size, or of its end."""
        if self._failed is not None:
            return now_s
        if self._child is None:
            return math.inf
        return now_s + WATCH_S if self._order else self._idle_s + self._warm_s

    def kill(self) -> None:
        """End the child with its order."""
        self._order = self._failed = None
        self._end_child()

    def fds(self) -> Sequence[int]:
        """File descriptors of the child's output."""
        return self._child.fds() if self._child else ()

    def close(self) -> None:
        """End the child."""
        self.kill()

    def _watch(self, child: Child, order: Asked) -> Outcome | None:
        """Outcome of the order if its process is dead or has to be killed; None: it continues."""
        held = child.look()
        if child.garbled:
            return Outcome(
                code="failed", reason=f"the task's process answers no protocol; it said: {child.last_output}"
            )
        if child.gone:
            return child.obituary()
        if held is not None and held > order.budget_bytes:
            size = budget.megabytes(held)
            limit = budget.megabytes(order.budget_bytes)
            return Outcome(
                code="memory",
                reason=f"the task held {size}, the budget is {limit}, so its process was killed: "
                "ask for less (a smaller model, batch or tier), or raise budget",
                peak_bytes=held,
                overrun=True,
            )
        return None

    def _end_child(self) -> None:
        """Kill the child process, if any, and empty its temporary folder."""
        if self._child is not None:
            self._child.kill()
            self._child = None
            with contextlib.suppress(OSError):  # it is emptied again before the next child starts
                self._empty_temporary()

    def _empty_temporary(self) -> None:
        if self._private is not None:
            REAL.clear(self._private / confine.TEMPORARY)


def _require_small_result(outcome: Outcome, budget_bytes: int) -> Outcome:
    """Return the outcome, or a failure if its files are larger than the memory budget."""
    files = [*outcome.bundles.values(), *([] if outcome.private is None else [outcome.private])]
    if (size := sum(each.size for each in files)) <= budget_bytes:
        return outcome
    most = budget.megabytes(budget_bytes)
    reason = (
        f"the task's result has {budget.megabytes(size)}, more than its memory budget of {most}: send a smaller one"
    )
    return Outcome(code="failed", reason=reason)

"""The processes of a simulated federation: a coordinator and agents that end, and are started again on what is left."""

from __future__ import annotations

import errno
import math
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt import wire
from fedquilt.coordinator.executors import OverLink
from fedquilt.coordinator.facts import Answered, AnyFact, Committed, Folded, Rounds, apply
from fedquilt.coordinator.limits import Limits
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.snapshots import Standing
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.worker import Here, Then
from fedquilt.core import FedquiltError, JobError, StoreError
from fedquilt.disk import Place
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices import make as make_board
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.protocol import Event, Loaded, Order, Outcome
from fedquilt.testing.faults import schedule
from fedquilt.testing.faults.broker import SimBroker, SimLink, newer
from fedquilt.testing.faults.disk import Crash, SimDisk
from fedquilt.testing.faults.platter import Platter
from fedquilt.testing.faults.truth import BOARD, BUDGET, Known, Truth

T = TypeVar("T")

FLEET: Final = "sim"
WORK_S: Final = 1.0  # of a task
FEW: Final = Limits(waiting_mb=0)  # large updates: two at a time, so that boards wait for their turn
AGAIN_S: Final = 5.0  # until a process that ended by an error is started again
AT_ONCE_MOST: Final = 20  # steps within a moment that ask for another one; working processes have made three
MOMENT_S: Final = 0.001  # shorter than a message's way
ERRORS: Final = {"full": errno.ENOSPC, "readonly": errno.EROFS, "io": errno.EIO}


class BrokenError(FedquiltError):
    """What must hold does not."""


class Side(ABC):
    """One computer, with the process on it.

    Args:
        name: "coordinator" or a device's.
        broker: of the federation.
        platter: what the computer keeps.
        plan: the faults that concern it are taken from there.
        happened: counts what has happened.
    """

    def __init__(
        self, name: str, broker: SimBroker, platter: Platter, plan: schedule.Schedule, happened: Counter[str]
    ) -> None:
        self.name, self.broker, self.platter = name, broker, platter
        self.due_s, self.up_s = 0.0, 0.0
        self.inner: Any = None
        self.lives = 0
        self._calls, self._offset_s = 0, 0.0
        self._happened = happened
        self._roll = random.Random(f"{plan.seed} {name}")
        mine = [fault for fault in plan.faults if isinstance(fault, schedule.OneSided) and fault.who == name]
        self._crashes = {fault.call: fault for fault in mine if isinstance(fault, schedule.Crash)}
        self._refusals = [fault for fault in mine if isinstance(fault, schedule.Refuse)]
        self._newer = any(isinstance(fault, schedule.Newer) for fault in mine)
        self._slow = math.prod(fault.factor for fault in mine if isinstance(fault, schedule.Slow))
        self._work = {fault.start: fault.how for fault in mine if isinstance(fault, schedule.Worker)}
        self._until = max((fault.call + fault.calls for fault in self._refusals), default=0)
        self._fell: schedule.Crash | None = None
        self._disk = SimDisk(platter)
        self._starts = 0  # of tasks
        self._beside_s = plan.beside_s
        self._began_s, self._at_once = -1.0, 0  # steps in a row, each of which was due at once, and since when

    def step(self, now_s: float) -> None:
        """Start the process if it is time, or let it do what is due; it may end by that."""
        if now_s < self.up_s:
            self.due_s = self.up_s
            return
        try:
            if self.inner is None:
                self._begin()
            self.due_s = max(self.inner.step(now_s + self._offset_s) - self._offset_s, now_s)
            self._require_rest(now_s)
            if self._link.inbox:
                self.due_s = now_s
        except Crash:
            assert self._fell is not None
            self._end(power=self._fell.power)
            self.up_s = self.due_s = now_s + self._fell.down_s
            self._fell = None
        except StoreError:
            if not self._refusals and not self._happened["rot"]:
                raise
            self._happened["ended by its disk"] += 1
            self._end(power=False)
            self.up_s = self.due_s = now_s + AGAIN_S

    def ends(self) -> None:
        """End the process; it is started again a while later."""
        self._end(power=False)
        self.up_s = self.due_s = self.broker.now_s + AGAIN_S

    def sleep(self, seconds: float) -> None:
        """Its own clock jumps."""
        self._offset_s += seconds

    def close(self) -> None:
        """Let go of everything; nobody will look at what is left."""
        self.inner = None
        self.platter.close()

    # -- within --

    def _require_rest(self, now_s: float) -> None:
        """Raise BrokenError if the process keeps its processor busy while nothing happens."""
        if self.due_s > now_s + MOMENT_S or now_s > self._began_s + MOMENT_S:
            self._began_s, self._at_once = now_s, 0
        self._at_once += self.due_s <= now_s + MOMENT_S
        if self._at_once > AT_ONCE_MOST:
            raise BrokenError(f"{self.name} spins: {self._at_once} steps at virtual second {now_s:g}, each due at once")

    def _begin(self) -> None:
        self.lives += 1
        self._disk = SimDisk(self.platter, self._gate)
        self._link: SimLink = self.broker.connect(self.name, self._will())
        self._link.gate = self._gate
        if self._newer:
            self._link.rewrite = newer
            self._happened["newer"] += 1
        self.inner = self._start(self._link)

    @abstractmethod
    def _start(self, link: SimLink) -> Any:
        """Start the process on what its disk holds, speaking over `link`; returns what `step` is called on."""

    def _will(self) -> tuple[str, bytes] | None:
        return None

    def _end(self, *, power: bool) -> None:
        self.inner = None
        self._disk.end()
        self.broker.gone(self.name)
        if power:
            self.platter.power_fails(self._roll)
        else:
            self.platter.processes_end()

    def _gate(self, what: str, where: Place) -> OSError | None:
        """Count a call; it may be the process's last, or fail."""
        if self._fell is not None:
            raise Crash  # whatever runs while a dead process's stack unwinds has not happened
        self._calls += 1
        crash = self._crashes.pop(self._calls, None)
        if crash is not None:
            self._fell = crash
            self._happened["crash"] += 1
            self._happened[f"crash at {what}"] += 1
            self._happened["power"] += crash.power
            raise Crash
        if self._calls < self._until and what in ("read", "write", "sync", "name", "commit"):
            for fault in self._refusals:
                if fault.call <= self._calls < fault.call + fault.calls and _refused(fault.how, what):
                    self._happened["refuse"] += 1
                    return OSError(ERRORS[fault.how], os.strerror(ERRORS[fault.how]))
        return None


def _refused(how: str, what: str) -> bool:
    return {"full": what in ("write", "commit"), "readonly": what != "read", "io": True}[how]


class WatchedStore(Store):
    """A store that raises BrokenError where a fact names a state that its disk does not hold yet."""

    def append(self, id: str, fact: AnyFact) -> None:
        """See `Store`."""
        named = fact.state if isinstance(fact, Committed) else fact.sum if isinstance(fact, Folded) else None
        if named is not None and self.depot.ref(named.sha256) is None:
            raise BrokenError(f"{id}: the log names {named.sha256[:12]} before it is stored")
        super().append(id, fact)


class Beside(Here):
    """A coordinator's worker on virtual time: a piece is done at once, and its result is taken later.

    Args:
        delay_s: until then; below 0: nothing is large enough for it.
        now_s: tells the time.
    """

    def __init__(self, delay_s: float, now_s: Callable[[], float]) -> None:
        super().__init__(math.inf if delay_s < 0 else 0)
        self.stored_at = 0
        self._delay_s, self._now_s, self.due_s = delay_s, now_s, math.inf

    @property
    def ended(self) -> bool:
        """See `Worker`."""
        return super().ended and self._now_s() >= self.due_s

    def start(self, piece: Callable[[], T], then: Then[T]) -> None:
        """See `Worker`."""
        super().start(piece, then)
        self.due_s = min(self.due_s, self._now_s() + self._delay_s)

    def finish(self, now_s: float) -> bool:
        """See `Worker`."""
        if not self.ended:
            return False
        self.due_s = math.inf
        return super().finish(now_s)


class CoordinatorSide(Side):
    """The coordinator: started as `fedquilt serve` is, and again after it has ended."""

    observe: Callable[[Any, Any], None]
    load: Callable[[str], Any]
    acknowledged: set[tuple[str, int, str]]  # job, round and device of every update that it said it has counted
    ahead = False  # whether it is of the next version now

    def _start(self, link: SimLink) -> Server:
        self.store = WatchedStore(Path(self.platter.root), disk=self._disk, every=1)
        if not self.store.lock():
            raise JobError("another coordinator runs in its home")
        self._require_recorded()
        self._require_same()
        link.rewrite = self._noted
        executor = OverLink(link, FLEET, self.store.depot, self.store.next_epoch())
        self._worker = Beside(self._beside_s, lambda: self.broker.now_s)
        given = executor, self.store, self.observe, None, self.load, 30.0, FEW
        return Server(*given, worker=self._worker, by_wall=True)

    def step(self, now_s: float) -> None:
        """See `Side`; also when the worker has done something."""
        super().step(now_s)
        if self.inner is not None:
            self.due_s = min(self.due_s, max(self._worker.due_s, now_s))

    def _noted(self, topic: str, payload: bytes) -> bytes:
        """What it sends, as its version has it; acknowledgements are noted."""
        route = wire.route(topic)
        if route.kind is wire.Ack:
            ack = wire.decode(payload, wire.Ack)
            if ack.accepted:
                self.acknowledged.add((ack.job, ack.round, route.device))
        return newer(topic, payload) if self.ahead else payload

    def _require_recorded(self) -> None:
        """Raise BrokenError unless the log has every update that an earlier process has acknowledged."""
        if self._happened["rot"] or self._happened["restore"]:
            return
        for job in {job for job, _, _ in self.acknowledged}:
            facts = [fact for _, _, fact in self.store.facts(job)]
            known = {(job, fact.round, fact.update.device) for fact in facts if isinstance(fact, Answered)}
            if lost := {each for each in self.acknowledged if each[0] == job} - known:
                raise BrokenError(f"acknowledged, and not in the log after a restart: {sorted(lost)}")

    def _require_same(self) -> None:
        """Raise BrokenError unless each job's snapshot and the facts behind it come to what all its facts come to."""
        if self._happened["rot"]:
            return
        for row in self.store.jobs():
            plan = Plan.of(row.job)
            whole, (standing, upto) = Standing(Rounds(plan)), self.store.snapshots.of(row.id, plan, 0.0)
            self._happened["snapshot"] += upto > 0
            for seq, _, fact in self.store.facts(row.id):
                whole.take(fact, apply(whole.rounds, fact, 0.0))
                if seq > upto:
                    standing.take(fact, apply(standing.rounds, fact, 0.0))
            if standing != whole:
                raise BrokenError(f"{row.id}: the snapshot up to fact {upto} does not fit the log: {standing}, {whole}")

    def restore(self, copied: Any) -> None:
        """End the process, and start it again on a copy of its home."""
        self.ends()
        self.platter.restore(copied)

    def second(self) -> bool:
        """Whether a second coordinator could be started in the same home."""
        with Store(Path(self.platter.root), disk=SimDisk(self.platter)) as store:
            return store.lock()


class AgentSide(Side):
    """A device's agent."""

    truths: dict[str, Truth]

    def _will(self) -> tuple[str, bytes]:
        topic = wire.Topics(FLEET).device(self.name, "up", "presence")
        return topic, wire.encode(wire.Presence(online=False, boot=f"{self.name}-{self.lives}"))

    def _start(self, link: SimLink) -> Agent:
        options = AgentSettings(
            device=self.name,
            fleet=FLEET,
            home=self.platter.root,
            budget=BUDGET,
            plugins=(),
            telemetry_s=1e9,
            data={"share": self.name},
        )
        board = make_board(BOARD)
        boot = f"{self.name}-{self.lives}"
        return Agent(link, options, board, SimWorker(self), boot, disk=self._disk, clock=lambda: None)

    def work(self, order: Order) -> Outcome:
        """Carry out an order: its output lies in its folder afterwards, not synced."""
        disk, truth = SimDisk(self.platter), self.truths[order.task.method]
        private = None if order.private is None else disk.read(order.private)
        known = Known(private, order.private_sha256, order.lost, order.forgotten)
        try:
            done = truth.shop.work(
                order.task, self.name, known, lambda sha256: disk.read(f"{self.platter.root}/blobs/{sha256}")
            )
        except FileNotFoundError:
            return Outcome(code="disk", reason="a bundle is gone")
        for name, payload in done.files.items():
            disk.write(f"{order.out}/{name}", payload)
        return done.outcome

    def next_way(self) -> str | None:
        """How the next task is to end, if not well."""
        self._starts += 1
        how = self._work.get(self._starts)
        if how is not None:
            self._happened["worker"] += 1
        if self._slow > 1:
            self._happened["slow"] += 1
        return how

    @property
    def work_s(self) -> float:
        """Seconds that a task takes."""
        return WORK_S * self._slow


class SimWorker:
    """A device's worker on virtual time; ends well unless its side says otherwise."""

    resident_bytes = 0

    def __init__(self, side: AgentSide) -> None:
        self._side = side
        self._events: list[tuple[float, Event]] = []

    def start(self, order: Order, now_s: float) -> None:
        """Begin an order."""
        how = self._side.next_way()
        if how == "killed":
            outcome = Outcome(code="failed", reason="the task's process was killed", killed=True)
        elif how is not None:
            outcome = Outcome(code=how, reason="by the schedule", overrun=how == "memory")  # type: ignore[arg-type]
        else:
            outcome = self._side.work(order)
        self._events = [(now_s + self._side.work_s, outcome)]
        if outcome.code == "ok":
            self._events.insert(0, (now_s, Loaded(outcome.examples)))

    def poll(self, now_s: float) -> list[Event]:
        """Events that are due."""
        due = [event for at_s, event in self._events if at_s <= now_s]
        if due:
            self._events = [each for each in self._events if each[0] > now_s]
        return due

    def due_s(self, now_s: float) -> float:
        """Time of the next event."""
        return self._events[0][0] if self._events else math.inf

    def kill(self) -> None:
        """Drop the order."""
        self._events = []

    def fds(self) -> tuple[int, ...]:
        """None: nothing arrives from outside."""
        return ()

    def close(self) -> None:
        """Drop the order."""
        self._events = []

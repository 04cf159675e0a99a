"""Worker of a site's agent: what it is ordered by the coordinator above is a round of the coordinator that is here.

The agent of a site is that of a board: it accepts tasks, keeps results until they are answered, and joins again. Its
worker gives the order to the store as a job's round, with the state from above, and the outcome is that round's sum.
All of it is in the log: a site that is started again goes on with its round, and gives an answer again that was lost.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import bundle, methods, tensors
from fedquilt.coordinator import facts, settings, sites
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import Job
from fedquilt.coordinator.store import Store
from fedquilt.core import BlobRef, Cost, FedquiltError, JobError, OperatingPoint, Reading, Update, Work
from fedquilt.edge_agent.events import Means
from fedquilt.edge_agent.task.protocol import Event, Order, Outcome

log = logging.getLogger("fedquilt.agent")

WITHIN: Final = 0.9  # share of the task's deadline that the boards get: the rest is for the way up
POLL_S: Final = 0.5
LONG: Final = 1_000_000  # rounds of a site's job: the coordinator above ends it


class Site:
    """The board of a site's agent: memory and joules are those of its boards. A `core.Device`."""

    board = "site"
    points: tuple[OperatingPoint, ...] = ()
    idle_w: float | None = None
    provenance = "its boards'"
    adjustable = holds = False

    def __init__(self) -> None:
        self.memory_bytes = 1 << 40  # until its boards are seen
        self.energy_j: float | None = None  # of the last round's boards; None: one of them has no meter

    def read(self, now_s: float) -> Reading:
        """Nothing: a site has no sensors of its own."""
        return Reading()

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Do nothing: each board holds its own point."""
        return point

    def release(self) -> None:
        """Do nothing, as for `hold`."""

    def cost(self, work: Work, measured: Cost) -> Cost:
        """Duration as measured, and the joules of the boards."""
        source = None if self.energy_j is None else "its boards' meters"
        return msgspec.structs.replace(measured, energy_j=self.energy_j, energy_source=source)


class SiteWorker:
    """Carries out a site's orders as rounds of its own coordinator. A `Worker`, and an observer of `Server`.

    Args:
        store: of the site's coordinator.
        board: the site.
        quorum: share of the boards that suffices at the deadline.
    """

    resident_bytes: int = 0
    server: Server  # set once it is made, with this worker's `observe`

    def __init__(self, store: Store, board: Site, quorum: float = 0.5) -> None:
        self._store, self._board, self._quorum = store, board, quorum
        self._order: Order | None = None
        self._begun_s = 0.0
        self._asked = False  # whether the store has the round of the order
        self._outcome: Outcome | None = None

    def start(self, order: Order, now_s: float) -> None:
        """Note the order; its round begins as soon as the one before it has been given up."""
        self._order, self._begun_s, self._asked, self._outcome = order, now_s, False, None

    def poll(self, now_s: float) -> list[Event]:
        """The outcome, once the round has been committed or has failed."""
        order = self._order
        if order is None:
            return []
        if not self._asked and self._outcome is None and self.server.job(order.task.job) is None:
            self._asked = True
            try:
                self._outcome = self._begin(order)
            except FedquiltError as error:
                self._outcome = Outcome(code="failed", reason=str(error)[:1000])
        if self._outcome is None or self.server.job(order.task.job) is not None:
            return []
        outcome, self._outcome, self._order = self._outcome, None, None
        return [msgspec.structs.replace(outcome, wall_s=now_s - self._begun_s)]

    def due_s(self, now_s: float) -> float:
        """Soon, while there is an order."""
        return math.inf if self._order is None else now_s + POLL_S

    def kill(self) -> None:
        """Stop the round: the coordinator above does not want it any more."""
        if self._order is not None and self._asked:
            self._stop(self._order.task.job)
        self._order = self._outcome = None

    def fds(self) -> Sequence[int]:
        """None: the coordinator is in this process."""
        return ()

    def close(self) -> None:
        """Leave the round as it is in the log: it goes on at the next start."""

    def observe(self, job: Running, fact: facts.AnyFact) -> None:
        """Take note of what happens to the round; one that is committed is followed by none until the next order."""
        if isinstance(fact, facts.Committed):
            self._stop(job.id)
            if self._order is not None and (job.id, fact.round) == (self._order.task.job, self._order.task.round):
                self._outcome = self._answer(job.id, fact)
        elif isinstance(fact, facts.Ended) and fact.status == "failed" and self._is_ordered(job.id):
            self._outcome = Outcome(code="failed", reason=f"the site's round failed: {fact.reason}"[:1000])

    def means(self, before: Means, now_s: float) -> Means:
        """What the site has, as its boards are: engines of any, the largest budget, and how many there are."""
        seen = [each.profile for each in self.server.registry.seen(now_s).values() if each.online and each.profile]
        self._board.memory_bytes = sum(each.memory_bytes for each in seen)
        return msgspec.structs.replace(
            before,
            budget_bytes=max((each.budget_bytes for each in seen), default=0),
            engines=tuple(sorted({engine for each in seen for engine in each.engines})),
            codecs=("raw",),
            boards=max(len(seen), 1),  # a site without boards is no board
        )

    # -- rounds --

    def _is_ordered(self, id: str) -> bool:
        return self._order is not None and id == self._order.task.job

    def _stop(self, id: str) -> None:
        if self._store.status(id) in ("queued", "running"):
            self._store.set_status(id, "stopping")
            self.server.look()

    def _begin(self, order: Order) -> Outcome | None:
        """Have the round carried out; an outcome if that has happened already.

        Raises:
            FedquiltError: the order is none that a site can carry out.
        """
        task = order.task
        if "check" in task.actions:
            raise JobError("a site does not evaluate: set [check] every = 0, or beside = true")
        if sites.STATE not in order.bundles or "job" not in task.params:
            raise JobError("the task is none for a site: this method, or this phase of it, works with boards alone")
        given = sites.given(tensors.read(Path(order.bundles[sites.STATE])))
        tensors.unpack(given.inner.tobytes(), methods.load(task.method).state)  # before it is in the log
        store, id = self._store, task.job
        if not store.status(id):
            job = self._job(task.params["job"], task.deadline_s)
            folder = (store.home / "sites" / id).resolve()
            bundle.write(folder, {"network": {}}, {})
            store.add(job, folder, id=id)
        else:
            row = store.job(id)
            job = row.job
            if not row.bundle.exists():  # a restored home has the log alone
                bundle.write(row.bundle, {"network": {}}, {})
        state, last = facts.Rounds(facts.Plan.of(job)), None
        for _, _, fact in store.facts(id):
            state = facts.apply(state, fact, 0.0)
            last = fact if isinstance(fact, facts.Committed) else last
        if state.state is not None and self._same(state.state, given):
            if last is not None and (last.round, last.state) == (task.round, state.state):
                return self._answer(id, last)
            if state.round == task.round:
                self._resume(id)
                return None
        ref = store.depot.put(tensors.pack(given))
        store.append(id, facts.Started(ref, begins=task.round))
        self._resume(id)
        return None

    def _resume(self, id: str) -> None:
        self._store.set_status(id, "running")
        self.server.look()

    def _same(self, ref: BlobRef, given: sites.Given) -> bool:
        """Whether the job's state is of this state from above."""
        payload = self._store.depot.load(ref.sha256)
        return payload is not None and np.array_equal(tensors.unpack(payload, sites.Given).inner, given.inner)

    def _job(self, table: Mapping[str, Any], deadline_s: float) -> Job:
        """The job of the coordinator above as one of this: every board here, in most of the time that there is."""
        told = settings.parse(table)
        return msgspec.structs.replace(
            told,
            rounds=LONG,
            cohort=settings.Cohort(quorum=self._quorum, deadline_s=max(WITHIN * deadline_s, 1.0), attempts=1),
            check=settings.Check(),
            stop=settings.Stop(),
            trigger=None,
            model={},
            input={},
            donors=(),
        )

    def _answer(self, id: str, fact: facts.Committed) -> Outcome:
        """The outcome of a committed round: its sum, and what its boards took, as the log tells."""
        payload = self._store.depot.load(fact.state.sha256)
        total = b"" if payload is None else tensors.unpack(payload, sites.Given).total
        if payload is None or not len(total):
            return Outcome(code="failed", reason="the sum of the site's round is gone from its disk, or of no board")
        answered: dict[str, Update] = {}
        for _, _, each in self._store.facts(id):
            if isinstance(each, facts.Answered) and each.round == fact.round:
                answered[each.update.device] = each.update
            elif isinstance(each, facts.Lost | facts.Rejected) and each.round == fact.round:
                answered.pop(each.device, None)
        used = [update.usage for update in answered.values()]
        joules = [usage.energy_j for usage in used if usage.energy_j is not None]
        self._board.energy_j = math.fsum(joules) if len(joules) == len(used) else None
        sent = {"packed": total}
        blob = tensors.encode(sent)  # type: ignore[arg-type]
        ref = BlobRef(sha256=hashlib.sha256(blob).hexdigest(), size=len(blob))
        order = self._order
        assert order is not None
        out = Path(order.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{order.prefix}{ref.sha256}").write_bytes(blob)
        return Outcome(
            weight=math.fsum(update.weight for update in answered.values()),
            metrics=sites.summed_up(fact.metrics, len(answered)),
            bundles={sites.SUM: ref},
            layouts={sites.SUM: tensors.layout(sent)},  # type: ignore[arg-type]
            examples=sum(usage.examples or 0 for usage in used),
            cpu_s=math.fsum(usage.cpu_s for usage in used),
        )

"""A job on a simulated fleet: the coordinator's own rounds and store, devices on virtual time.

Every round is opened, filled, closed and committed by `coordinator.server` with its log in a store, so deadlines,
quorums, refusals, budgets, governors, codecs and limits count as in the field, and an interrupted run goes on.
Who carries the devices' orders out is in `fedquilt.tools.simulation.carriers`, what drives both in `run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedquilt import bundle, methods, tensors
from fedquilt.coordinator import cohort, mending
from fedquilt.coordinator.facts import Answered, AnyFact, Asked, Committed, Declined, Ended, Rejected, Resumed, Started
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.preflight import needs
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import Fleet, Job
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.store import Store
from fedquilt.core import Contribution, Device, EvaluationSums, JobError, Method, Task, Tensors
from fedquilt.edge_agent import devices as boards
from fedquilt.edge_agent import engines, events
from fedquilt.edge_agent.power.governor import Rule
from fedquilt.edge_agent.settings import size_bytes
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import adversaries
from fedquilt.tools.simulation.fleet import SimulatedFleet
from fedquilt.tools.simulation.fleet_device import Spec

NEWCOMER = "newcomer"  # a device that has taken part in nothing, and has room for everything
ROOM_BYTES = 1 << 40
ROOM = Fleet(budgets=("1TiB",))  # for runs in which no device may be short of memory
WAITS_S = 3600.0  # of virtual time for which nobody is at a run; boards tell their sensors, but no other will come
POLL_S = 1e18  # nobody else uses the store of a simulated run; what is due then is due never


@dataclass(frozen=True)
class Round:
    """One round as it was committed. Evaluations beside the rounds are not part of its costs."""

    number: int  # from 0
    devices: tuple[str, ...]  # whose updates were folded, sorted
    metrics: Mapping[str, float]  # devices' means, of training
    down_bytes: int
    up_bytes: int
    wall_s: float  # on this machine; of a round that an interrupted process made, with evaluations after the one before
    duration_s: float  # on virtual time, from the round's opening to its end
    energy_j: float | None  # of the boards' tasks; None: one does not tell
    devices_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the devices' work, on this machine
    evaluation: EvaluationSums | None = None


class Ahead(Protocol):
    """Somebody who may begin orders before `Simulation.advance` returns them."""

    def coming(self, count: int) -> None:
        """So many orders will be announced, if their devices accept them; what was announced before has been done."""
        ...

    def begun(self, order: Order) -> None:
        """Announce one of them; the others follow in the order in which they will be asked for."""
        ...

    def fold_for(self, sums: Simulation) -> None:
        """Have what orders come to folded where they are carried out, and give `sums` the sums."""
        ...


class Simulation:
    """One job on one simulated fleet.

    Args:
        folder: the job's bundle, as `fedquilt prepare` writes it.
        members: device -> how many held-out examples it has, in the order in which they take the job's boards and
            budgets in turn.
        home: of the coordinator; a run that was interrupted there goes on, and `rounds` begins with those it had.
        load: finds a method by its name.
        engine: that devices have; None: the job's, or the first of the method's that is installed.
        heard: called with each fact of the run.
        away: members that are not online at first (`fleet.arrive`, `fleet.leave`).

    Raises:
        JobError: no engine of the method's is installed, or a budget or board that there is not.
        StoreError: the home cannot be written.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        members: Mapping[str, int],
        home: Path,
        *,
        load: Callable[[str], Method] = methods.load,
        engine: str | None = None,
        heard: Callable[[Running, AnyFact], None] = lambda running, fact: None,
        make: Callable[[str], Device] = boards.make,
        away: Collection[str] = (),
    ) -> None:
        self.job, self.members, self._heard = job, members, heard
        self.now_s = 0.0
        self.rounds: list[Round] = []
        self.status, self.reason = "running", ""
        self.running: Running | None = None
        self.refusals: dict[str, str] = {}  # device -> the last reason for which it did not take part
        self._answers: list[Answered] = []
        self._ahead: Ahead | None = None
        self._busy_s = 0.0  # when somebody was last at the run, on virtual time
        self.adversaries = adversaries.drawn(job, members)
        self._overheard = adversaries.Overheard()
        self._store = Store(home, durable=False)
        if not self._store.lock():
            raise JobError(f"another coordinator serves {home} already: give another home")
        self._store.next_epoch()
        place = folder.resolve()
        self.run = self._store.unfinished(job, place, "simulation") or self._store.add(job, place, "simulation")
        self._take_up()
        self._store.set_status(self.run, "running")
        self.engine = engine or engine_of(job, load(job.method))
        self._plugins = {f"plugin {module}": proof for module, proof in needs(job, bundle.load(folder)).items()}
        spare = self._means(ROOM_BYTES)
        self.devices = home / "agents" / self.run  # of this run alone: what a board keeps of another would count here
        newcomer = Spec(NEWCOMER, lambda: boards.make("x86-host"), spare, {"share": NEWCOMER})
        self.fleet = SimulatedFleet(self._specs(make), self._store.depot, self.devices, {NEWCOMER: newcomer}, away)
        self._server = Server(self.fleet, self._store, self._observe, self.run, load, poll_s=POLL_S)
        self._began_s, self._opened_s = time.perf_counter(), 0.0

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    @property
    def state(self) -> Any:
        """The method's state after the last committed round."""
        assert self.running is not None
        return self.running.state

    @property
    def state_digest(self) -> str:
        """The sha256 of the method's state after the last committed round."""
        assert self.running is not None
        assert self.running.rounds.state is not None
        return self.running.rounds.state.sha256

    @property
    def ended(self) -> str:
        """How a run ended, as what it has: "failed", or "stopped" where it waits for ever."""
        return "stopped" if self.status == "running" else self.status

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._server.finished

    @property
    def done(self) -> int:
        """How many rounds of work are done."""
        return 0 if self.running is None else self.running.rounds.counted

    @property
    def ready(self) -> bool:
        """Whether the state may be evaluated: what an evaluation of it needs has been gathered."""
        return self.running is not None and not self.running.rounds.settling

    @property
    def finished(self) -> bool:
        """Whether all rounds of work are done, and what an evaluation needs has been gathered."""
        return self.running is not None and self.running.rounds.over and self.ready

    def advance(self) -> list[Order]:
        """Go on until orders have to be carried out, and which; none: the run is over, or waits for devices to come."""
        while not self.over:
            due_s = self._server.step(self.now_s)
            if self.fleet.at_work_now:
                self._server.step(self.now_s)  # devices have said that they begin: it is heard while they are at work
                self._prepare()
            if orders := self._in_turn(self.fleet.waiting):
                return orders
            job = self._server.job(self.run)
            if job is None and not self.over:
                self._not_begun()
                break
            at_work = job is not None and job.rounds.asked
            if due_s >= (POLL_S if at_work else self._busy_s + WAITS_S):
                self.reason = "no device is left that could go on with it"
                break
            self.now_s = max(self.now_s, due_s)
        return []

    def _prepare(self) -> None:
        """Draw the next round's lots while devices are at work."""
        if (job := self._server.job(self.run)) is not None:
            cohort.draws(job.job.seed, job.rounds.round + 1, job.rounds.eligible)

    def look_ahead(self, ahead: Ahead | None) -> None:
        """Announce a round's orders from now on, each as its device begins it, while others are still being asked."""
        if ahead is not None and not self._conspiring:  # adversaries who listen are asked after the others, otherwise
            self._ahead, self.fleet.begun = ahead, ahead.begun
            ahead.fold_for(self)

    def _not_begun(self) -> None:
        """Take over what the log says of a run that could not be taken up; nobody was told of it."""
        self.status = self._store.status(self.run)
        ends = [fact for _, _, fact in self._store.facts(self.run) if isinstance(fact, Ended)]
        self.reason = ends[-1].reason if ends else ""

    def paused(self, seconds: float) -> None:
        """Leave out so many seconds of the running round's on this machine: something else was done meanwhile."""
        self._began_s += seconds

    def worked(self, device: str, outcome: Outcome) -> None:
        """Outcome of an order."""
        task, job = self.fleet.at_work(device), self._server.job(self.run)
        if job is not None and task is not None and task.job == job.id and outcome.bundles:
            small = all(ref.sha256 in outcome.blobs for ref in outcome.bundles.values())
            if small and job.sums.foreseen(job.rounds, task.round, device):
                job.sums.foresee(self._given(device, task, outcome), outcome.bundles)  # while others are at work
            if self._conspiring and device not in self.adversaries:
                self._overheard.hear(self._given(device, task, outcome))
        self.fleet.worked(device, outcome)

    def state_of(self, orders: Sequence[Order]) -> str:
        """File of the state that what comes of these orders is folded with; "": it is not folded elsewhere."""
        job = self._server.job(self.run)
        if job is None or any((each.task.job, each.task.round) != (job.id, job.rounds.round) for each in orders):
            return ""
        return job.sums.folded_from(job.rounds) or ""

    def summed(self, orders: Sequence[Order], outcomes: Sequence[Outcome], packed: Callable[[], bytes]) -> None:
        """Take what waits for the sum of what these orders have come to; their outcomes follow."""
        job, done = self._server.job(self.run), zip(orders, outcomes, strict=True)
        if job is not None and all(self.fleet.at_work(each.device) is each.task for each in orders):
            given = {each.device: (it.weight, it.metrics, it.bundles) for each, it in done if it.code == "ok"}
            job.sums.foresee_sum(job.rounds, orders[0].task.round, given, packed)

    def _given(self, device: str, task: Task, outcome: Outcome) -> Contribution:
        """What a device will send, as its order has left it."""
        bundles: dict[str, Tensors] = {}
        for name, ref in outcome.bundles.items():
            payload = outcome.blobs.get(ref.sha256)
            bundles[name] = tensors.read(self.fleet.made(device, ref)) if payload is None else tensors.decode(payload)
        return Contribution(device, task.round, outcome.weight, outcome.metrics, bundles)

    @property
    def _conspiring(self) -> bool:
        """Whether adversaries know what the other boards send."""
        lying = self.job.fleet.adversaries
        return lying is not None and lying.attack == "inner_product"

    def _in_turn(self, orders: list[Order]) -> list[Order]:
        """The orders to carry out now: those of adversaries who know what the others send come after the others'."""
        if not self._conspiring:
            return orders
        first = [order for order in orders if order.device not in self.adversaries]
        if first or not orders:
            return first
        job = self._server.job(self.run)
        assert job is not None
        for device, update in job.rounds.answered.items():  # those that an interrupted process has carried out
            if device not in self.adversaries and device not in self._overheard.heard(job.rounds.round):
                self._overheard.hear(mending.contribution(self._store.depot, update))
        if not self._overheard.heard(job.rounds.round):
            return orders
        honest = self._overheard.write(self.devices / "honest.safetensors")
        return [adversaries.informed(order, honest) for order in orders]

    def evaluation(self, device: str) -> Order | None:
        """The method's own check of what a device would be sent next; None: there is nothing to check.

        Args:
            device: a member, or NEWCOMER.

        Raises:
            JobError: the method has no evaluation of its own.
        """
        job = self.running
        assert job is not None
        if job.method.check is None:
            raise JobError(f"{self.job.method} has no evaluation of its own")
        task = job.task(device, self.engine, self.fleet.profile(device), self.now_s, ("check",))
        return None if task is None else self.fleet.order(device, task)

    def _specs(self, make: Callable[[str], Device]) -> Iterator[Spec]:
        fleet = self.job.fleet
        budgets = [size_bytes(budget) for budget in fleet.budgets]
        for index, name in enumerate(self.members):
            board = fleet.boards[index % len(fleet.boards)]
            means = self._means(budgets[index % len(budgets)], fleet.labels_of(index))
            lies = adversaries.data(fleet.adversaries) if fleet.adversaries and name in self.adversaries else {}
            data = {"share": name, **lies}
            rule, link = Rule(fleet.policy), fleet.link_of(index)
            yield Spec(name, lambda board=board: make(board), means, data, rule, link)  # type: ignore[misc]

    def _means(self, budget_bytes: int, labels: tuple[str, ...] = ()) -> events.Means:
        """Plug-ins of a simulated device: those of this process, as they share their code."""
        return events.Means(budget_bytes, (self.engine,), (self.job.method,), plugins=self._plugins, labels=labels)

    def _observe(self, job: Shown, fact: AnyFact) -> None:
        if isinstance(job, Running):  # it has not failed before it was taken up
            self.running = job
            self._heard(job, fact)
        if isinstance(fact, Asked) and self._ahead is not None:
            self._ahead.coming(len(fact.devices))
        if isinstance(fact, Asked | Answered | Committed):
            self._busy_s = self.now_s
        if isinstance(fact, Committed):
            now_s = time.perf_counter()
            self._committed(fact, now_s - self._began_s, self.now_s - self._opened_s)
            self._began_s, self._opened_s = now_s, self.now_s
        else:
            self._note(fact)

    def _take_up(self) -> None:
        """Note what the log of an interrupted run says, so that its rounds are told with those to come."""
        began_s = 0.0  # by the clock of the day: rounds follow one another, with evaluations between them
        for _, at_s, fact in self._store.facts(self.run):
            if isinstance(fact, Committed):
                self._committed(fact, at_s - began_s, fact.took_s)
            elif isinstance(fact, Ended):
                continue  # it goes on
            self._note(fact)
            if isinstance(fact, Started | Committed | Resumed):
                began_s = at_s

    def _committed(self, fact: Committed, wall_s: float, duration_s: float) -> None:
        self.rounds.append(_round(fact, self._answers, wall_s, duration_s))
        self._answers = []

    def _note(self, fact: AnyFact) -> None:
        if isinstance(fact, Answered):
            self._answers.append(fact)
        elif isinstance(fact, Declined | Rejected) and getattr(fact, "code", "") != "none":
            self.refusals[fact.device] = fact.reason
        elif isinstance(fact, Ended):
            self.status, self.reason = fact.status, fact.reason


def _round(fact: Committed, answers: Sequence[Answered], wall_s: float, duration_s: float) -> Round:
    updates = sorted((answer.update for answer in answers), key=lambda update: update.device)
    joules = [update.usage.energy_j for update in updates]
    return Round(
        number=fact.round,
        devices=tuple(update.device for update in updates),
        metrics=fact.metrics,
        evaluation=fact.evaluation,
        down_bytes=sum(update.usage.down_bytes for update in updates),
        up_bytes=sum(update.usage.up_bytes for update in updates),
        wall_s=wall_s,
        duration_s=duration_s,
        energy_j=sum(each for each in joules if each is not None) if None not in joules else None,
        devices_metrics={update.device: update.metrics for update in updates},
        cpu_s=sum(update.usage.cpu_s for update in updates),
    )


def engine_of(job: Job, method: Method) -> str:
    """The engine that the job names, or the first of the method's that is installed.

    Raises:
        JobError: none is.
    """
    there = engines.available()
    for name in [job.engine] if job.engine else method.engines:
        if name in there:
            return name
    raise JobError(f"{job.method} runs on {' or '.join(method.engines)}; installed here: {', '.join(there)}")

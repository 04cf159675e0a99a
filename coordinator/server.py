"""Loop of the coordinator: executor <-> rounds <-> store. It decides nothing itself.

Messages of devices pass through `admission.heard`, the next step through `rounds.decide`; both only return facts
and actions. Here facts are written to the log, and the executor and the store carry out the actions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from fedquilt import methods, wire
from fedquilt.coordinator import admission, choice, facts, mending, rounds, turns
from fedquilt.coordinator.conduct import ASIDE_S
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.executors import Executor
from fedquilt.coordinator.fleet import GRACE_S, Registry
from fedquilt.coordinator.folding import blobs
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.store import Row, Store
from fedquilt.core import FedquiltError, JobError, Method, Profile, StoreError, Update, Wired
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

POLL_S = 1.0


class Server:
    """Runs the jobs of a store, one at a time, through an executor. A `fedquilt.transport.link.Endpoint`.

    Args:
        observe: `observe(job, fact)` is called with each new fact.
        only: finish when this job has ended.
        load: finds a method by its name.
        poll_s: interval at which the store is asked for new, stopped and resumed jobs.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        observe: Callable[[Running, facts.AnyFact], None] = lambda job, fact: None,
        only: str | None = None,
        load: Callable[[str], Method] = methods.load,
        poll_s: float = POLL_S,
    ) -> None:
        self.finished = False
        self.registry = Registry()
        self.active: Running | None = None
        self._executor, self._store, self._observe, self._only, self._load = executor, store, observe, only, load
        self._arriving: admission.Arriving = {}
        self._later: list[admission.Action] | None = None  # while messages are heard: what is done after the last one
        self._begun: dict[str, Update] = {}  # device -> the last update of it that began to be fetched
        self._every_s, self._poll_s = poll_s, -math.inf
        self._opened_s = -math.inf  # when the running job was taken up
        self._busy_s = -math.inf  # when a device was last seen working on it
        self._gave_way_s: dict[str, float] = {}  # job -> when it last gave way to another
        self._news: dict[str, Running] = {}  # jobs with changes that have not been published yet
        self._unsent: set[str] = set()  # devices with a task to come that have not sent their profile yet
        self._behind: set[str] = set()  # jobs of which devices know more rounds than the log, as was reported
        self._left: set[str] = set()  # runs already reported as not taken up here

    def fds(self) -> Sequence[int]:
        """No sockets of its own: the executor is polled."""
        return ()

    def step(self, now_s: float) -> float:
        """Handle messages that have arrived and everything due; returns when to call again.

        Raises:
            StoreError: nothing can be written any more; accepted updates are safe, a restart continues.
        """
        self._poll(now_s)  # first: messages arriving now belong to the job that was running
        self._later = []
        with self._store.together():
            for heard in self._executor.hear(now_s):
                if heard is None:
                    self._say_all_again(now_s)
                elif isinstance(heard, admission.Appeared | admission.Arrived | admission.Flooded):
                    self._happened(heard, now_s)
                else:
                    self._said(*heard, now_s)
        actions, self._later = self._later, None
        for action in actions:
            self._do(action, now_s)
        committed = False
        while not committed:
            committed = self.active is not None and self.active.rounds.phase == "closing"
            if not self._advance(now_s):
                break
        for job in self._news.values():  # once a step: a step may bring hundreds of facts
            self._executor.tell(job)
        self._news.clear()
        if committed:
            return now_s  # that may have taken long: what follows is decided by the time that it is then
        deadline_s = rounds.next_s(self.active.rounds) if self.active else math.inf
        return min(self._executor.due_s(now_s), self._poll_s + self._every_s, deadline_s)

    def goodbye(self) -> None:
        """Announce the end of the coordinator; open tasks stay open and continue at the next start."""
        self._executor.close()

    def _say_all_again(self, now_s: float) -> None:
        """Publish everything again after a new session: the broker may have lost it."""
        for device in sorted(self.active.rounds.asked) if self.active else ():
            self._issue(device, now_s)
        self._tell()

    def _said(self, device: str, message: Wired, now_s: float) -> None:
        match message:
            case wire.Presence():
                if self.registry.presence(device, message, now_s):
                    self._happened(admission.Appeared(device), now_s)
            case Profile():
                self.registry.profile(device, message)
                if device in self._unsent:
                    self._unsent.remove(device)
                    self._issue(device, now_s)
            case wire.Claim():
                job = self.active
                ask = job.ask(device, self.registry.profile_of(device)) if job and not message.accepted else Ask()
                if job is not None:
                    mending.compare(job.rounds, job.id, device, message, self._behind)
                self._happened(admission.Claimed(device, message, ask), now_s)
            case Update():
                ours = self.active is not None and message.job == self.active.id
                status = "running" if ours else self._store.status(message.job)
                counted = not ours and self._store.counted(message)
                unfit = self.active.unfit(message) if self.active else ""
                told = msgspec.structs.replace(message, layouts={}) if message.layouts else message
                self._happened(admission.Offered(device, told, status, counted, unfit), now_s)
            case wire.Telemetry():
                self.registry.telemetry(device, message, now_s)

    def _happened(self, event: admission.Event, now_s: float) -> None:
        """Apply an event: facts first, then actions."""
        if isinstance(event, admission.Flooded):
            log.warning("%s %s", event.device, admission.FLOODED, extra=about(device=event.device))
            self.registry.set_aside(event.device, now_s + ASIDE_S)
        job = self.active
        step = admission.heard(job.id if job else "", job.rounds if job else None, self._arriving, event, now_s)
        self._arriving = step.arriving
        for fact in step.facts:
            self._record(fact, now_s)
        for action in step.actions:
            self._act(action, now_s)

    def _act(self, action: admission.Action, now_s: float) -> None:
        """Do what follows from an event; what others see of it waits until the facts that it rests on are written."""
        if self._later is None or isinstance(action, admission.Fetch | admission.Examine):
            self._do(action, now_s)
        else:
            self._later.append(action)

    def _do(self, action: admission.Action, now_s: float) -> None:
        match action:
            case admission.Issue(device):
                self._issue(device, now_s)
            case admission.Withdraw(device):
                self._withdraw(device)
            case admission.Patience(device):
                self._executor.be_patient(device)
            case admission.Fetch(device, update):
                self._let_go(device, update)
                self._begun[device] = update
                self._executor.fetch(device, update.bundles.values())
            case admission.Examine(device, update):
                self._examine(device, update, now_s)
            case admission.Answer(device, update, accepted, reason):
                ack = wire.Ack(update.job, update.round, update.attempt, accepted, reason[:1000])
                self._executor.answer(device, ack)
            case admission.Discard(update):
                self._discard(update)
            case admission.Renew(device, epoch):
                self._renew(device, epoch, now_s)

    def _renew(self, device: str, above: int, now_s: float) -> None:
        """Send a device its task with an epoch later than the one with which it counted the round."""
        if self.active is not None and above >= self._store.epoch:
            self._executor.renew(self._store.next_epoch(above))
            self._store.begin(self.active.id)
        self._issue(device, now_s)

    def _withdraw(self, device: str) -> None:
        self._executor.withdraw(device)
        self._let_go(device)

    def _let_go(self, device: str, instead: Update | None = None) -> None:
        """Drop what has come of the last update that a device began to send, unless it sends the same again.

        So a device has one unfinished update on the disk, no larger than an update may be, whatever it offers.
        """
        begun = self._begun.pop(device, None)
        if begun is not None and self.active is not None and (instead is None or begun.bundles != instead.bundles):
            self._discard(begun)

    def _examine(self, device: str, update: Update, now_s: float) -> None:
        """Read an update, and let count what it holds."""
        assert self.active is not None
        examined = self.active.examined(device, update, self.registry.profile_of(device), now_s)
        if examined.odd:
            log.warning("%s claims what cannot be: %s", device, examined.odd, extra=about(device=device))
        self._happened(examined, now_s)

    def _discard(self, update: Update) -> None:
        """Drop the blobs of an update that have no other use."""
        job = self.active
        assert job is not None
        kept = blobs([*job.rounds.answered.values(), *self._arriving.values()])
        for sha256 in blobs([update]) - kept - job.pinned() - job.sent() - self._store.held(but=job.id):
            self._store.depot.drop(sha256)

    def _issue(self, device: str, now_s: float) -> None:
        """Send a device its task of the running round (again)."""
        job = self.active
        if job is None or device not in job.rounds.asked:
            return
        profile = self.registry.profile_of(device)
        if profile is None:  # after a restart: the profile names its engine, and the task is sent when it arrives
            return self._unsent.add(device)
        engine = next((name for name in job.engines if name in profile.engines), job.engines[0])
        try:
            task = job.task(device, engine, profile, now_s)
        except Exception as error:
            return self._fail(error, now_s)
        if task is None:
            return self._record(
                facts.Declined(job.rounds.round, device, facts.NOTHING, "the method has nothing for it now"), now_s
            )
        try:
            return self._executor.send(device, task, now_s)
        except FedquiltError as error:
            return self._fail(error, now_s)

    def _poll(self, now_s: float) -> None:
        """Read requests from the store: new jobs, jobs stopped and resumed."""
        if now_s < self._poll_s + self._every_s:
            return
        self._poll_s = now_s
        if self.active is not None and self._store.status(self.active.id) == "stopping":
            self._record(facts.Ended("stopped", "by request"), now_s)
            return
        if self.active is not None and self._only is not None:
            return
        wanted = [row for row in self._store.jobs() if self._only in (None, row.id)]
        for row in wanted if self.active is None else ():
            if row.status == "stopping":
                self._store.end(row.id, facts.Ended("stopped", "by request"))
        self._tell_left(wanted)
        rows = [row for row in wanted if turns.mine(row, self._only)]
        served = turns.served(rows, self._idle_s(now_s), self._gave_way_s)
        if self.active is not None and served and self.active.id not in served:
            self._give_way(served, now_s)
        if self.active is None and served:
            self._open(next(row for row in rows if row.id == served[0]), now_s)
        elif self.active is None:
            self.finished = self._only is not None

    def _idle_s(self, now_s: float) -> dict[str, float]:
        """The running job, with the seconds since a device last worked on it."""
        job = self.active
        if job is None:
            return {}
        if not rounds.idle(job.rounds, self.registry.able(job.engines, now_s).keys()):
            self._busy_s = now_s
        return {job.id: now_s - self._busy_s}

    def _give_way(self, served: Sequence[str], now_s: float) -> None:
        """Return the running job to the queue, in the state of its facts."""
        job = self.active
        assert job is not None
        told = (job.id, turns.PATIENCE_S, served[0])
        log.warning("%s has waited for devices for %.0f s: %s is next", *told, extra=about(run=job.id))
        for device in sorted(job.rounds.asked):
            self._withdraw(device)
        self._store.set_status(job.id, "queued")
        self._gave_way_s[job.id] = now_s
        self.active, self._arriving = None, {}

    def _tell_left(self, rows: Sequence[Row]) -> None:
        """Report once for each unfinished run that it is not taken up here."""
        for row in rows:
            if row.status in ("queued", "running") and not turns.mine(row, self._only) and row.id not in self._left:
                self._left.add(row.id)
                log.warning(
                    "%s is a simulated fleet's, whose boards are not here: it is left to `fedquilt fleet`", row.id
                )

    def _open(self, row: Row, now_s: float) -> None:
        """Take up a job in the state of its facts."""
        try:
            job = Running(row, self._store, now_s, self._load(row.job.method))
        except StoreError:
            raise
        except Exception as error:  # one job that cannot run does not keep the others from running
            ended = facts.failed(error)
            log.error("%s cannot run: %s", row.id, ended.reason, exc_info=not isinstance(error, FedquiltError))
            self._store.end(row.id, ended)
            return
        self.active, self._opened_s, self._busy_s, self._arriving = job, now_s, now_s, {}
        if unsound := self._store.unsound():
            log.error("blobs that seem to be of no use are kept: the log of %s is damaged", ", ".join(unsound))
        else:  # leftovers of a crash
            self._store.depot.keep(self._store.held() | job.pinned())
        self._store.begin(row.id)
        if job.rounds.phase in ("stopped", "failed"):
            self._record(facts.Resumed(), now_s)
        for device in sorted(job.rounds.asked):
            self._issue(device, now_s)
        self._tell()

    def _advance(self, now_s: float) -> bool:
        """Make one decision, if one is due."""
        job = self.active
        if job is None:
            return False
        try:
            if job.rounds.phase == "closing":
                with self._executor.tended():  # a method may compute for longer than a broker waits for a word
                    fact: facts.AnyFact | None = job.commit(now_s)
            elif job.rounds.phase in ("done", "failed", "stopped"):
                self._leave()
                return True
            else:
                fact = choice.decide(job, self.registry, self._at_work(job, now_s), now_s)
        except mending.LostUpdateError as lost:
            fact = facts.Lost(job.rounds.round, lost.device, lost.reason)
        except Exception as error:
            self._fail(error, now_s)
            return True
        if fact is not None:
            self._record(fact, now_s)
        return fact is not None

    def _at_work(self, job: Running, now_s: float) -> set[str]:
        """Devices with a task, whatever else is known of them.

        Just after a start these are all devices asked: boards that are away for a moment, as they may have been
        when their wills were published, get the same grace as with a coordinator that has been running all along.
        """
        asked = set(job.rounds.asked)
        return asked if now_s < self._opened_s + GRACE_S else asked & self.registry.able(job.engines, now_s).keys()

    def _fail(self, error: Exception, now_s: float) -> None:
        """Handle an error: one in the method's own code ends its job, not the coordinator; a full disk ends both."""
        if isinstance(error, StoreError | MemoryError):
            raise error
        assert self.active is not None
        log.error("%s failed in its method", self.active.id, exc_info=error, extra=about(run=self.active.id))
        self._record(facts.failed(error), now_s)

    def _record(self, fact: facts.AnyFact, now_s: float) -> None:
        """Write a fact, then act on it."""
        job = self.active
        assert job is not None
        before = job.rounds
        try:
            job.record(fact, now_s)
        except JobError as error:  # a fact that could not be read back is the job's fault, not the coordinator's
            return self._fail(error, now_s)
        if not isinstance(fact, facts.Answered) and not self._arriving.keys() <= job.rounds.asked:
            self._arriving = {device: each for device, each in self._arriving.items() if device in job.rounds.asked}
        self._observe(job, fact)
        match fact:
            case facts.Asked():
                for device in fact.devices:
                    self._issue(device, now_s)
            case facts.Answered():
                self._begun.pop(fact.update.device, None)  # it counts: none of its blobs is left over
            case facts.Lost():
                ids = about(run=job.id, round=fact.round, device=fact.device)
                log.warning("%s: %s's update is asked for again: %s", job.id, fact.device, fact.reason, extra=ids)
                self._renew(fact.device, self._store.epoch, now_s)
            case facts.Closed() | facts.Reopened() | facts.Ended():
                for device in sorted(before.asked):
                    self._act(admission.Withdraw(device), now_s)
            case facts.Committed():
                spent = job.spent(before)
                job.committed()
                others = self._store.held(but=job.id)  # other jobs may have the same content
                for sha256 in spent - job.pinned() - others:
                    self._store.depot.drop(sha256)
        self._tell()

    def _leave(self) -> None:
        assert self.active is not None
        self._store.set_status(self.active.id, self.active.rounds.phase)
        if self._only == self.active.id:
            self.finished = True
        self.active = None
        self._poll_s = -math.inf

    def _tell(self) -> None:
        """Publish the running job's state at the end of this step."""
        if self.active is not None:
            self._news[self.active.id] = self.active

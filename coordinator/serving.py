"""One job that a coordinator serves: its messages, its next facts, and the tasks and updates of its devices.

`Desk` is what the jobs of a coordinator share. A `Serving` never touches another job's boards: it asks those that
`Loans` lets it have, and takes back its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from typing import TypeVar

from fedquilt import wire
from fedquilt.coordinator import admission, choice, claims, facts, mending, rounds, turns
from fedquilt.coordinator.beside import Beside
from fedquilt.coordinator.encoding import Done
from fedquilt.coordinator.executors import Executor
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.folding import blobs
from fedquilt.coordinator.garbage import GarbageCollector
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.loans import Loans
from fedquilt.coordinator.refusals import NOTHING
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.worker import Then, Worker
from fedquilt.core import FedquiltError, JobError, StoreError, Update, shorten_error
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")
START_S = 20.0  # after a job is taken up, until a device of its round that has not been heard of is not at work
AT_ONCE = frozenset((admission.Fetch, admission.Examine))  # actions that nobody sees outside
Observe = Callable[[Shown, facts.AnyFact], None]


class Desk:
    """What the jobs of one coordinator share: its devices, their executor, the store, and which job has which board.

    Args:
        observe: `observe(job, fact)` is called with each new fact.
        worker: for what is too large to be done between two messages.
    """

    def __init__(self, executor: Executor, store: Store, observe: Observe, worker: Worker) -> None:
        self.executor, self.store, self.observe, self.worker = executor, store, observe, worker
        self.registry, self.loans = Registry(), Loans()
        self.jobs: dict[str, Serving] = {}  # by id, in the order in which they were taken up
        self.news: dict[str, Shown] = {}  # jobs with changes that have not been published yet
        self.fetching: dict[str, Serving] = {}  # device -> the job that its blobs are fetched for
        self.later: list[tuple[Serving, admission.Action]] | None = None  # what is done once messages are heard
        self._followed: set[str] = set()  # devices whose claim of a later start has been followed
        self.garbage = GarbageCollector(store, self.in_use)

    def start_work(self, item: Callable[[], T], then: Then[T]) -> None:
        """Give the worker a work item. Blobs that it stores or finds are pinned until `then` has returned."""
        self.worker.start(*self.store.depot.pin_during(item, then))

    def withdraw(self, device: str, job: str, now_s: float) -> None:
        """Withdraw a device's task, unless it is another job's, and let a job that waits for the device have it."""
        if not self.loans.take_back(device, job, now_s):
            if (fetched := self.fetching.get(device)) is not None and fetched.id == job:
                self.executor.fetch(device, ())
            return
        self.executor.withdraw(device)
        self.fetching.pop(device, None)
        self.available(device, now_s)

    def back(self, device: str, job: str, now_s: float) -> None:
        """Note that a job has nothing for a device that it was to have."""
        if self.loans.take_back(device, job, now_s):
            self.available(device, now_s)

    def available(self, device: str, now_s: float) -> None:
        """Send a device the task that could not be sent to it yet, if there is one."""
        for serving in self.jobs.values():
            if device in serving.unsent:
                serving.unsent.remove(device)
                serving.issue(device, now_s)

    def acknowledge_update(self, device: str, update: Update, accepted: bool, reason: str) -> None:
        """Send a device the message that its update is accepted or rejected."""
        self.executor.answer(
            device, wire.Ack(update.job, update.round, update.attempt, accepted, shorten_error(reason))
        )

    def adopt_epoch(self, device: str, epoch: int) -> None:
        """Adopt an epoch above the one that a device knows, as the home may be an older copy.

        A device can cause this once, and only for the next LATER_EPOCHS.
        """
        if epoch < self.store.epoch:
            return
        if device in self._followed or epoch > self.store.epoch + claims.LATER_EPOCHS:
            log.warning(
                "%s claims to know start %d of the coordinator: ignored", device, epoch, extra=about(device=device)
            )
            return
        self._followed.add(device)
        self.renew(epoch)

    def renew(self, above: int) -> None:
        """Go on as a later start of the coordinator than this one, if it is not one already."""
        if above >= self.store.epoch:
            self.executor.renew(self.store.next_epoch(above))
            for id in self.jobs:
                self.store.begin(id)

    def in_use(self) -> set[str]:
        """Return the blobs that active jobs and running uploads use, beyond those that their logs name."""
        return self.executor.in_use.union(*(serving.in_use() for serving in self.jobs.values()))

    def collect_garbage(self) -> None:
        """Delete unreferenced blobs, if a collection is due."""
        if self.garbage.is_due(sum(len(serving.job.rounds.answered) for serving in self.jobs.values())):
            self.garbage.collect()


class Serving:
    """A job at work, with what is known of its devices' tasks and updates beside its log.

    Raises, from every method that has `now_s`:
        StoreError: nothing can be written any more.
    """

    def __init__(self, desk: Desk, job: Running, submitter: str, since_s: float, now_s: float) -> None:
        self.job, self.id, self.submitter, self._desk = job, job.id, submitter, desk
        timeout_s = job.job.cohort.start_timeout_s
        self._begins_s = math.inf if timeout_s is None else since_s + timeout_s  # when its first round is to have begun
        self._lost_s = desk.executor.absence.lost_s  # of the time until now
        self._rounds_s = (0.0, self._had_s(now_s))  # boards' time of the latest round, and of all up to its end
        self.unsent: set[str] = set()  # devices with a task to come: no profile of them yet, or another job has them
        self.arriving: dict[str, Update] = {}  # device -> its update while its blobs are fetched
        self.garbage = desk.garbage
        self._begun: dict[str, Update] = {}  # device -> the last update of it that began to be fetched
        self._opened_s = self._busy_s = now_s  # when it was taken up; when a device was last seen working on it
        # fleet, `most` and devices that were gone when there was nothing to decide
        self._undecided: tuple[object, float, AbstractSet[str]] | None = None
        self.summed = Beside(
            self, desk.worker, desk.start_work, desk.executor, lambda: desk.jobs.get(job.id) is not self
        )
        self._behind: set[str] = set()  # this job, once devices are reported to know more rounds than its log
        self.unreadable: mending.UnreadableError | None = None  # what the disk has not given back: it goes on later

    @property
    def over(self) -> bool:
        """Whether it has ended, or has been stopped."""
        return self.job.rounds.phase in ("done", "failed", "stopped")

    @property
    def asked(self) -> frozenset[str]:
        """Devices asked that have not answered."""
        return self.job.rounds.asked

    @property
    def _late_s(self) -> float:
        """When its first round is to have begun; while no device can be reached, no time passes."""
        return self._begins_s + self._desk.executor.absence.since(self._lost_s)

    def next_s(self, now_s: float) -> float:
        """Time at which `advance` may do something without an event."""
        late_s = self._late_s if rounds.starting(self.job.rounds) else math.inf
        return min(self.summed.deadline_s(now_s), late_s)

    def begin(self, now_s: float) -> None:
        """Go on where the log ends: open tasks are sent again."""
        self._desk.store.begin(self.id)
        if self.job.rounds.phase in ("stopped", "failed"):
            self.record(facts.Resumed(), now_s)
        self.issue_all(now_s)
        self.tell()

    def issue_all(self, now_s: float) -> None:
        """Send every device its task (again)."""
        for device in sorted(self.asked):
            self.issue(device, now_s)

    def give_up(self, now_s: float) -> None:
        """Take all tasks back; the job is as its log has it."""
        self._take_back(self.asked | set(self.job.rounds.silent), now_s)

    def wait(self, now_s: float) -> turns.Wait:
        """How long it has waited for boards."""
        if not self._idle(now_s):
            self._busy_s = now_s
        return turns.Wait(now_s - self._busy_s, self.job.rounds.phase != "selecting")

    def claim(self, now_s: float) -> turns.Claim:
        """What it has had of the boards' time."""
        had_s = self._had_s(now_s)
        round_s, until_s = self._rounds_s
        return turns.Claim(had_s, max(round_s, had_s - until_s), self.job.rounds.roll, not self._idle(now_s))

    def level(self, least_s: float, now_s: float) -> None:
        """Count as much of the boards' time as the job at work that has had least, if this one waits for no other's.

        What it did not use while its boards were not there is not made up for later.
        """
        if self._idle(now_s) and not self._waits_for_others(now_s):
            self._desk.loans.level(self.id, least_s * self.job.job.priority, now_s)
            self._rounds_s = (self._rounds_s[0], self._had_s(now_s))

    def _waits_for_others(self, now_s: float) -> bool:
        """Whether there are enough devices for the job, some of which other jobs have."""
        registry = self._desk.registry
        barred = registry.barred(self.job.wants, now_s)
        enough = len(registry.seen(now_s)) - len(barred) >= rounds.needed(self.job.rounds)
        return enough and any(device not in barred for device in self._desk.loans.elsewhere(self.id))

    def _had_s(self, now_s: float) -> float:
        return self._desk.loans.seconds(self.id, now_s) / self.job.job.priority

    def in_use(self) -> set[str]:
        """Return the blobs that the job uses, whether its log names them yet or not."""
        state = self.job.rounds
        folded = state.folded.devices if state.folded else ()
        accepted = [update for device, update in state.answered.items() if device not in folded]
        return self.job.pinned() | self.job.sent() | blobs([*accepted, *self.arriving.values(), *self._begun.values()])

    def _release_begun_update(self, device: str, instead: Update | None = None) -> None:
        """Release the blobs of a device's unfinished update, unless `instead` has the same blobs.

        So a device has one unfinished update of a job on the disk, no larger than one may be, whatever it offers.
        """
        begun = self._begun.pop(device, None)
        if begun is not None and (instead is None or begun.bundles != instead.bundles):
            self.garbage.add_candidates(blobs([begun]))

    def tell(self) -> None:
        """Publish the job's state at the end of this step."""
        self._desk.news[self.id] = self.job

    def claimed(self, device: str, claim: wire.Claim, now_s: float) -> None:
        """A device has accepted or declined a task of this job."""
        registry = self._desk.registry
        mending.compare(self.job.rounds, self.id, device, claim, self._behind)
        event = admission.Claimed(device, claim)
        if not claim.accepted:
            ask = self.job.ask(device, registry.profile_of(device))
            event = admission.Claimed(device, claim, ask, registry.agent_start_key(device))
        self.happened(event, now_s)

    def offered(self, device: str, update: Update, told: Update, now_s: float) -> None:
        """A device has an update of this job; `told` is what is kept of the message."""
        unfit = self.job.unfit(update, self._desk.registry.profile_of(device))
        self.happened(admission.Offered(device, told, unfit=unfit), now_s)

    def happened(self, event: admission.Event, now_s: float) -> None:
        """Apply an event: facts first, then actions."""
        step = admission.decide_step(self.id, self.job.rounds, self.arriving.get(event.device), event, now_s)
        if step.arriving is None:
            self.arriving.pop(event.device, None)
        else:
            self.arriving[event.device] = step.arriving
        for fact in step.facts:
            self.record(fact, now_s)
        for action in step.actions:
            self._act(action, now_s)

    # -- actions --

    def _act(self, action: admission.Action, now_s: float) -> None:
        """Carry out an action. If others can see its effect, do so after its events are written."""
        if self._desk.later is None or type(action) in AT_ONCE:
            self.carry_out(action, now_s)
        else:
            self._desk.later.append((self, action))

    def carry_out(self, action: admission.Action, now_s: float) -> None:
        """Carry out an action that `admission` has decided."""
        match action:  # the most frequent first
            case admission.Patience(device):
                self._desk.executor.be_patient(device)
            case admission.Withdraw(device):
                self.unsent.discard(device)
                self._desk.withdraw(device, self.id, now_s)
                self._release_begun_update(device)
            case admission.Answer(device, update, accepted, reason):
                self._desk.acknowledge_update(device, update, accepted, reason)
            case admission.Fetch(device, update):
                self._release_begun_update(device, update)
                self._begun[device] = update
                self._desk.fetching[device] = self
                in_turn = self.summed.offered(device, update, now_s)
                self._desk.executor.fetch(device, update.bundles.values(), in_turn=in_turn)
            case admission.Examine(device, update):
                registry = self._desk.registry
                self.summed.examine(device, update, registry.profile_of(device), registry.right_of(device), now_s)
            case admission.Issue(device):
                self.issue(device, now_s)
            case admission.Discard(update):
                self.garbage.add_candidates(blobs([update]))
            case admission.Renew(device, epoch):
                self._desk.adopt_epoch(device, epoch)
                self.issue(device, now_s)

    def issue(self, device: str, now_s: float) -> None:
        """Send a device its task of the running round (again), as soon as it can be sent."""
        job, desk = self.job, self._desk
        if job.rounds.phase != "open" or device not in job.rounds.asked:  # it may have ended with another device's task
            return
        profile = desk.registry.profile_of(device)
        # after a restart the profile, which names its engine, may not be here yet
        if profile is None or not desk.loans.lend(device, self.id, now_s):
            return self.unsent.add(device)
        engine = next((name for name in job.engines if name in profile.engines), job.engines[0])
        try:
            task = job.task(device, engine, profile, now_s)
        except Exception as error:
            return self.fail(error, now_s)
        if task is None:
            self.record(facts.Declined(job.rounds.round, device, NOTHING, "the method has nothing for it now"), now_s)
            return desk.back(device, self.id, now_s)
        try:
            return desk.executor.send(device, task, now_s)
        except FedquiltError as error:
            return self.fail(error, now_s)

    # -- decisions --

    def advance(self, now_s: float, left: AbstractSet[str] = frozenset(), most: float = math.inf) -> bool:
        """Make the job's next decision, if one is due. Return whether the job has changed.

        Args:
            now_s: seconds of the coordinator's clock.
            left: devices that are left to other jobs, beside those that they have.
            most: number of devices that may be asked now.
        """
        job = self.job
        self.summed.start_folding()
        if job.rounds.phase == "closing":
            return self.summed.start_commit(now_s)
        if self.summed.waits(now_s):
            return False
        try:
            busy = self._desk.loans.elsewhere(self.id) | left
            if self._has_nothing_to_decide(busy, most, now_s):
                return False
            late, lost_s = now_s >= self._late_s, self.summed.lost_s
            registry, gone = self._desk.registry, self._gone_devices(now_s)
            at_work = self._devices_at_work(now_s) - gone
            fact = choice.decide_for_fleet(job, registry, at_work, now_s, busy, most, late, lost_s, gone)
            if (
                fact is None
                and now_s >= self._opened_s + START_S
                and self._desk.executor.absence.can_reach_devices(now_s)
            ):
                self._undecided = registry.seen(now_s), most, gone
        except Exception as error:
            self.fail(error, now_s)
            return True
        if fact is None:
            return False
        self.record(fact, now_s)
        return True

    def _has_nothing_to_decide(self, busy: AbstractSet[str], most: float, now_s: float) -> bool:
        """Return whether only updates have arrived since the last decision, and they change nothing.

        To decide takes as long as there are devices, and answers of a few of them come at a time.
        """
        if self._undecided is None or busy:
            return False
        fleet, before, gone = self._undecided
        same = fleet is self._desk.registry.seen(now_s) and before == most
        return same and rounds.waits_for_updates(self.job.rounds, now_s, gone)

    def _able(self, now_s: float) -> Collection[str]:
        return self._desk.registry.able(self.job.engines, now_s).keys()

    def _idle(self, now_s: float) -> bool:
        """Whether no device works on the running round: none was asked, or those that were have gone or are others'."""
        return rounds.idle(self.job.rounds, self._able(now_s), self._desk.loans.elsewhere(self.id))

    def _devices_at_work(self, now_s: float) -> set[str]:
        """Return the devices with a task of this job that can be reached, or all of them just after a start.

        Just after a start these are all devices asked: in a signed fleet they have to prove who they are first.
        """
        asked = set(self.asked - self._desk.loans.elsewhere(self.id))
        return asked if now_s < self._opened_s + START_S else asked.intersection(self._able(now_s))

    def _gone_devices(self, now_s: float) -> frozenset[str]:
        """Return the unreachable devices of the running round, or none while devices may be reconnecting."""
        state = self.job.rounds
        if state.phase != "open" or not self._desk.executor.absence.can_reach_devices(now_s):
            return frozenset()
        return self._desk.registry.find_gone(state.asked | state.due, now_s)

    def fail(self, error: Exception, now_s: float) -> None:
        """End the job for an error of its method, or hold it for a failed read. Raise store and memory errors."""
        if (hold := mending.suspension_reason(error)) is not None:
            self.unreadable = hold
            return
        if isinstance(error, StoreError | MemoryError):
            raise error
        log.error("%s failed in its method", self.id, exc_info=error, extra=about(run=self.id))
        self.record(facts.failed(error), now_s)

    def record(self, fact: facts.AnyFact, now_s: float, done: Done | None = None) -> None:
        """Write an event to the log, then carry out what follows from it."""
        job = self.job
        before = job.rounds
        try:
            job.record(fact, now_s)
        except JobError as error:  # a fact that could not be read back is the job's fault, not the coordinator's
            return self.fail(error, now_s)
        if not isinstance(fact, facts.Answered) and not self.arriving.keys() <= job.rounds.asked:
            self.arriving = {device: each for device, each in self.arriving.items() if device in job.rounds.asked}
        self._desk.observe(job, fact)
        if not isinstance(fact, facts.Answered):
            self._undecided = None
        match fact:
            case facts.Answered():  # the most frequent first
                self._begun.pop(fact.update.device, None)  # its blobs are in use until they are folded
            case facts.Asked():
                for device in fact.devices:
                    self.issue(device, now_s)
                self._take_back(set(job.rounds.silent) - job.rounds.asked, now_s)  # whom this attempt does without
            case facts.Lost():
                ids = about(run=job.id, round=fact.round, device=fact.device)
                log.warning("%s: %s's update is asked for again: %s", job.id, fact.device, fact.reason, extra=ids)
                self._desk.renew(self._desk.store.epoch)
                self.issue(fact.device, now_s)
            case facts.Closed() | facts.Ended():
                self._take_back(before.asked | set(before.silent), now_s)
            case facts.Committed() if done is not None:
                self.garbage.add_candidates(job.spent(before))
                job.committed(done)
                self._rounds_s = ((had_s := self._had_s(now_s)) - self._rounds_s[1], had_s)
        if isinstance(fact, facts.Committed | facts.Ended):
            self._desk.store.snapshots.keep(job.id, job.standing)
        self.tell()

    def _take_back(self, devices: Collection[str], now_s: float) -> None:
        """Withdraw tasks. `Reopened` withdraws none: a device that the next attempt asks too works on."""
        for device in sorted(devices):
            self._act(admission.Withdraw(device), now_s)

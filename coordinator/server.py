"""Loop of the coordinator: executor <-> jobs <-> store. It decides nothing itself.

Messages of devices are passed to the job that they are about, which is a `Serving`: they go through
`admission.decide_step`, its next step through `rounds.decide`; both only return facts and actions. Facts are written to
the log, and the executor and the store carry out the actions. `turns` decides which jobs are served.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from fedquilt import methods, wire
from fedquilt.coordinator import admission, claims, facts, housekeeping, rounds, sites, triggers, turns
from fedquilt.coordinator.conduct import ASIDE_S
from fedquilt.coordinator.executors import Executor
from fedquilt.coordinator.facts import Rounds
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.limits import Limits
from fedquilt.coordinator.opening import Opening
from fedquilt.coordinator.rolling import Rolling, Tell
from fedquilt.coordinator.serving import Desk, Observe, Serving
from fedquilt.coordinator.store import UNDER_WAY, Row, Store
from fedquilt.coordinator.worker import Here, Worker
from fedquilt.core import Method, Profile, Update, Wired
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

Happening: TypeAlias = (
    admission.Appeared
    | admission.Arrived
    | admission.Flooded
    | admission.Silent
    | admission.Returned
    | admission.Removed
)

POLL_S = 0.5
TELL_S = 0.5  # between two messages on a round that goes on as before
TIDY_S = 600.0  # from one look for runs that need not be kept to the next


class Server:
    """Runs the jobs of a store side by side, through an executor. A `fedquilt.transport.link.Endpoint`.

    Args:
        observe: `observe(job, fact)` is called with each new fact.
        only: serve this job alone, and finish when it has ended.
        load: finds a method by its name.
        limits: on how many jobs run at once, and how long ended ones are kept.
        poll_s: interval at which the store is asked for new, stopped and resumed jobs.
        tell: `tell(rollout, fact)` is called with each new fact of a rollout; `only` a job has none carried out.
        worker: for updates and states that are too large for the loop; None: none is.
        around: makes of a job's method the one that is run: `sites.below` in a site.
        by_wall: whether time goes by the store's wall clock: rounds that an earlier process began have what is left.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        observe: Observe = lambda job, fact: None,
        only: str | None = None,
        load: Callable[[str], Method] = methods.load,
        poll_s: float = POLL_S,
        limits: Limits = Limits(),
        tell: Tell = lambda rollout, fact: None,
        worker: Worker | None = None,
        around: sites.Around = sites.above,
        by_wall: bool = False,
    ) -> None:
        self.finished = False
        self._desk = Desk(executor, store, observe, worker or Here())
        self._worker = self._desk.worker
        self.registry = self._desk.registry
        self._executor, self._store, self._only = executor, store, only
        self._opening = Opening(self._desk, load, around, self._serve_jobs, by_wall)
        self._limits = limits
        self._jobs = self._desk.jobs
        self._every_s, self._poll_s, self._tidy_s = poll_s, -math.inf, -math.inf
        self._gave_way_s: dict[str, float] = {}  # job -> when it last gave way to another
        self._first_s: dict[str, float] = {}  # unfinished job -> when it was first taken up
        self._rollouts = Rolling(executor, store, self.registry, poll_s, tell) if only is None else None
        self._told: dict[str, tuple[object, float]] = {}  # job -> phase, round and attempt published last, and when
        self._left: set[str] = set()  # runs already reported as not taken up here
        self._unentitled: set[str] = set()  # devices already reported as sites without a right

    def fds(self) -> Sequence[int]:
        """File descriptors of the executor and of the worker."""
        return [*self._executor.fds(), *self._worker.fds()]

    def jobs(self) -> list[Running]:
        """Jobs at work, in the order in which they were taken up."""
        return [serving.job for serving in self._jobs.values()]

    def job(self, id: str) -> Running | None:
        """A job at work, or one that is being taken up; None: it is not served now."""
        serving = self._jobs.get(id)
        return serving.job if serving else self._opening.jobs.get(id)

    def look(self) -> None:
        """Read requests from the store at the next step, not only when it is time."""
        self._poll_s = -math.inf

    def elsewhere(self, id: str) -> AbstractSet[str]:
        """Devices that other jobs have at this moment."""
        return self._desk.loans.elsewhere(id)

    def wall_clock_state(self, id: str, now_s: float, now: float) -> tuple[Rounds, float]:
        """Return the state of an active job and its round's deadline, with times in wall-clock seconds."""
        serving = self._jobs[id]
        to_wall = now - now_s
        state = serving.job.rounds
        asked_s = {device: at_s + to_wall for device, at_s in state.asked_s.items() if device in state.asked}
        state = replace(state, opened_s=state.opened_s + to_wall, asked_s=asked_s)
        return state, serving.summed.deadline_s(now_s) + to_wall

    def holders(self, id: str) -> dict[str, str]:
        """The same devices, with the job of each."""
        others = (each for each in (*self._jobs, *self._opening.jobs) if each != id)
        return {device: other for other in others for device in self._desk.loans.lent(other)}

    def step(self, now_s: float) -> float:
        """Handle messages that have arrived and everything due. Return the time of the next call.

        Raises:
            StoreError: nothing can be written any more; accepted updates are safe, a restart continues.
        """
        desk = self._desk
        self._poll_store(now_s)  # first: messages arriving now belong to the jobs that were running
        later = desk.later = []
        with self._store.together():
            for heard in self._executor.hear(now_s):
                if heard is None:
                    self._say_all_again(now_s)
                elif isinstance(heard, tuple):
                    self._handle_message(*heard, now_s)
                else:
                    self._handle_happening(heard, now_s)
        desk.later = None
        for serving, action in later:
            serving.carry_out(action, now_s)
        self._worker.finish(now_s)
        rollouts_s = self._rollouts.step(now_s) if self._rollouts is not None else math.inf
        committed = self._advance(now_s)
        self._pace()
        tell_s = self._tell(now_s)
        if not committed:  # else after the next round's tasks have been sent
            self._desk.collect_garbage()
        if committed or self._worker.ended:
            return now_s  # that may have taken long: what follows is decided by the time that it is then
        deadline_s = min((serving.next_s(now_s) for serving in self._jobs.values()), default=math.inf)
        return min(self._executor.due_s(now_s), self._poll_s + self._every_s, deadline_s, rollouts_s, tell_s)

    def goodbye(self) -> None:
        """Announce the end of the coordinator; open tasks stay open and continue at the next start."""
        self._worker.close()
        self._executor.close()

    def _pace(self) -> None:
        """Report to the executor what it has brought of large updates that is not folded yet."""
        waiting = [serving.summed.waiting for serving in self._jobs.values()]
        updates, waiting_bytes = sum(count for count, _ in waiting), sum(size for _, size in waiting)
        self._executor.pace(updates, waiting_bytes, self._limits.waiting_mb * 1e6)

    def _tell(self, now_s: float) -> float:
        """Publish the rounds that have changed; returns when to publish the others."""
        news, again_s = self._desk.news, math.inf
        for id, job in list(news.items()):
            mark = job.rounds.phase, job.rounds.round, job.rounds.attempt
            before, told_s = self._told.get(id, (None, -math.inf))
            if mark == before and now_s < told_s + TELL_S:
                again_s = min(again_s, told_s + TELL_S)
                continue
            self._told[id] = mark, now_s
            self._executor.tell(job)
            del news[id]
        return again_s

    # -- messages --

    def _say_all_again(self, now_s: float) -> None:
        """Publish everything again after a new session: the broker may have lost it."""
        for serving in self._jobs.values():
            serving.issue_all(now_s)
            serving.tell()
        if self._rollouts is not None:
            self._rollouts.say_all_again(now_s)

    def _handle_message(self, device: str, message: Wired, now_s: float) -> None:
        """Pass a device's message to its job, to the registry or to the rollouts."""
        self.registry.set_right(device, self._executor.right_of(device) or self._limits.sites.get(device))
        match message:  # the most frequent first
            case wire.Claim():
                if (serving := self._jobs.get(message.job)) is not None:
                    serving.claimed(device, message, now_s)
                else:
                    self._stray(admission.Claimed(device, message), now_s)
            case Update():
                own = message.layouts or message.boards  # what is not kept, and what its device does not say
                told = msgspec.structs.replace(message, layouts={}, boards=()) if own else message
                if (serving := self._jobs.get(message.job)) is not None:
                    serving.offered(device, message, told, now_s)
                else:
                    status, counted = self._store.status(message.job), self._store.counted(message)
                    self._stray(admission.Offered(device, told, status, counted), now_s)
            case wire.Telemetry():
                self.registry.update_telemetry(device, message, now_s)
            case wire.Presence():
                if self.registry.update_presence(device, message, now_s):
                    self._handle_appearance(device, now_s)
            case Profile():
                right = self.registry.right_of(device)
                if message.boards and right is None and device not in self._unentitled:
                    self._unentitled.add(device)
                    log.warning(claims.UNENTITLED, device, extra=about(device=device))
                self.registry.profile(device, claims.verify_profile(message, right))
                self._desk.available(device, now_s)
            case wire.Installed() if self._rollouts is not None:
                self._rollouts.heard(device, message)

    def _handle_appearance(self, device: str, now_s: float) -> None:
        """Send a device that has connected or returned the tasks and releases that it may lack."""
        self._handle_happening(admission.Appeared(device), now_s)
        if self._rollouts is not None:
            self._rollouts.appeared(device, now_s)

    def _handle_happening(self, event: Happening, now_s: float) -> None:
        """Apply a device's silence, return, flooding, removal or finished fetch, and pass it to its jobs."""
        if isinstance(event, admission.Silent):
            return self.registry.mark_silent(event.device, now_s)
        if isinstance(event, admission.Returned):
            self.registry.mark_returned(event.device)
            return self._handle_appearance(event.device, now_s)
        if isinstance(event, admission.Arrived):
            if (fetched := self._desk.fetching.pop(event.device, None)) is not None:
                fetched.happened(event, now_s)
            return None
        if isinstance(event, admission.Flooded):
            log.warning("%s %s", event.device, admission.FLOODED, extra=about(device=event.device))
            self.registry.set_aside(event.device, now_s + ASIDE_S)
        if isinstance(event, admission.Removed):
            log.info("%s is removed by request", event.device, extra=about(device=event.device))
            self.registry.forget_device(event.device, now_s)
        for serving in self._jobs.values():
            if event.device in serving.asked:
                serving.happened(event, now_s)
        return None

    def _stray(self, event: admission.Claimed | admission.Offered, now_s: float) -> None:
        """Answer a device that speaks of a job which is not served now."""
        for action in admission.decide_step("", None, None, event, now_s).actions:
            match action:
                case admission.Answer(device, update, accepted, reason):
                    self._desk.acknowledge_update(device, update, accepted, reason)
                case admission.Withdraw(device):
                    self._desk.withdraw(device, "", now_s)
                case _:
                    raise AssertionError(action)

    # -- jobs --

    def _poll_store(self, now_s: float) -> None:
        """Read requests from the store: end stopped jobs, start queued ones, preempt those without a slot."""
        if now_s < self._poll_s + self._every_s:
            return
        self._poll_s = now_s
        for serving in list(self._jobs.values()):
            if self._store.status(serving.id) == "stopping":
                serving.record(facts.Ended("stopped", "by request"), now_s)
                self._leave(serving, now_s)
        opening = self._opening.jobs
        if (self._jobs or opening) and self._only is not None:
            return
        wanted = [row for row in self._store.jobs() if self._only in (None, row.id)]
        for row in wanted:
            if row.status == "stopping" and row.id not in self._jobs and row.id not in opening:
                self._opening.end(row, facts.Ended("stopped", "by request"))
        self._tell_left(wanted)
        if now_s >= self._tidy_s:
            self._tidy_s = now_s + TIDY_S
            self._remove_expired_runs()
        if self._only is None and (
            started := triggers.start(self._store, wanted, self.registry.seen(now_s), time.time())
        ):
            wanted = [*wanted, *started]
        rows = [row for row in wanted if turns.mine(row, self._only)]
        waits = {serving.id: serving.wait(now_s) for serving in self._jobs.values()}
        able = [row for row in rows if not self._opening.held(row.id, now_s)]
        here = {**waits, **dict.fromkeys(opening, turns.Wait(0.0))}
        served = turns.served(able, here, self._gave_way_s, self._limits)
        for serving in [serving for serving in self._jobs.values() if serving.id not in served]:
            self._give_way(serving, waits[serving.id], now_s)
        if begun := [row for row in rows if row.id in served and row.id not in self._jobs and row.id not in opening]:
            self._opening.open_jobs(begun, now_s)
        elif not self._jobs and not opening and len(able) == len(rows):
            self.finished = self._only is not None

    def _remove_expired_runs(self) -> None:
        """Delete the runs that limits.toml does not keep, and mark all blobs for garbage collection."""
        for id in housekeeping.remove_expired_runs(self._store, self._limits.retention, time.time()):
            log.info("%s is deleted, as [retention] of limits.toml says", id, extra=about(run=id))
        self._desk.garbage.add_all_blobs()

    def _give_way(self, serving: Serving, wait: turns.Wait, now_s: float) -> None:
        """Return a job to the queue, in the state of its facts."""
        said = "%s has waited for devices for %.0f s: its place goes to the next in line"
        log.log(
            logging.WARNING if wait.begun else logging.INFO, said, serving.id, wait.idle_s, extra=about(run=serving.id)
        )
        serving.give_up(now_s)
        self._close_job(serving, "queued", now_s)
        self._gave_way_s[serving.id] = now_s

    def _tell_left(self, rows: Sequence[Row]) -> None:
        """Report once for each unfinished run that it is not taken up here."""
        for row in rows:
            if row.status in UNDER_WAY and not turns.mine(row, self._only) and row.id not in self._left:
                self._left.add(row.id)
                log.warning(
                    "%s is a simulated fleet's, whose boards are not here: it is left to `fedquilt fleet`", row.id
                )

    def _serve_jobs(self, found: Sequence[tuple[Row, Running]], now_s: float) -> None:
        """Start to serve jobs whose states have been loaded."""
        opened, least_s = [], turns.absent(self._claims(now_s))
        for row, job in found:
            self._desk.loans.level(row.id, least_s * row.job.priority, now_s)
            waits_s = job.rounds.opened_s if rounds.starting(job.rounds) else now_s
            since_s = self._first_s.setdefault(row.id, waits_s)
            opened.append(Serving(self._desk, job, row.submitter, since_s, now_s))
            self._jobs[row.id] = opened[-1]
        self._desk.garbage.add_all_blobs()  # a killed process may have left some
        for serving in opened:
            serving.begin(now_s)

    def _advance(self, now_s: float) -> bool:
        """Make all decisions that are due, one job after the other; True: a round was committed, and some may be left.

        A job that has decided something is followed by all of them again, as it may have taken or left boards.
        """
        claims = self._claims(now_s)
        least_s = turns.absent(claims)
        for serving in self._jobs.values():
            serving.level(least_s, now_s)
        order = sorted(claims, key=lambda id: claims[id].had_s)  # who has had least goes first
        again = True
        while again:
            again = False
            for serving in [self._jobs[id] for id in order if id in self._jobs]:
                if serving.over:
                    self._leave(serving, now_s)
                    continue
                if serving.unreadable is not None:
                    serving.give_up(now_s)
                    self._close_job(serving, "queued", now_s)
                    self._opening.put_off(serving.job, serving.unreadable, now_s)
                    continue
                closing = serving.job.rounds.phase == "closing"
                if serving.advance(now_s, turns.left(serving.id, claims), self._most(serving, now_s)):
                    if closing:
                        return True
                    again = True
                    break
        return False

    def _claims(self, now_s: float) -> dict[str, turns.Claim]:
        return {serving.id: serving.claim(now_s) for serving in self._jobs.values()}

    def _most(self, serving: Serving, now_s: float) -> float:
        """How many devices a job may ask now, as the share of its submitter leaves it; one at least in all."""
        share = self._limits.submitter.share
        if share == 1.0:
            return math.inf
        most = max(1, int(share * len(self.registry.online(now_s))))
        others = (each for each in self._jobs.values() if each.submitter == serving.submitter)
        return max(0, most - sum(len(self._desk.loans.lent(each.id)) for each in others))

    def _leave(self, serving: Serving, now_s: float) -> None:
        """Let go of a job that has ended."""
        self._close_job(serving, serving.job.rounds.phase, now_s)
        self._first_s.pop(serving.id, None)
        self.finished = self.finished or self._only == serving.id
        self._poll_s = -math.inf

    def _close_job(self, serving: Serving, status: str, now_s: float) -> None:
        """Stop serving a job: store its status, and release its leases and, if it has ended, its blobs."""
        if serving.over:
            self._desk.garbage.add_candidates(
                serving.in_use() - serving.job.pinned()
            )  # the bundle stays for the next run of it
        self._store.set_status(serving.id, status, unless="stopping" if status == "queued" else "")
        del self._jobs[serving.id]
        self._told.pop(serving.id, None)
        self._desk.loans.forget(serving.id, now_s)

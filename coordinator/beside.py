"""Updates of one job examined, folded and committed: in the loop, or by a worker where they are large.

Large ones come in turn, and a round waits past its deadline for those that are late by that alone. What a worker has
found counts only if the job is still where it was when the worker was asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from fedquilt.coordinator import admission, facts, mending, rounds
from fedquilt.coordinator.encoding import Done
from fedquilt.coordinator.executors import Executor
from fedquilt.coordinator.folding import blobs, size_of
from fedquilt.coordinator.garbage import GarbageCollector
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.worker import Then, Worker, outcome
from fedquilt.core import Profile, SiteRight, Update
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

T = TypeVar("T")


class Served(Protocol):
    """Job at work: a `Serving`."""

    job: Running
    arriving: dict[str, Update]
    garbage: GarbageCollector

    @property
    def over(self) -> bool:
        """Whether it has ended, or has been stopped."""
        ...

    def happened(self, event: admission.Event, now_s: float) -> None:
        """Apply an event."""
        ...

    def record(self, fact: facts.AnyFact, now_s: float, done: Done | None = None) -> None:
        """Write a fact, then act on it."""
        ...

    def fail(self, error: Exception, now_s: float) -> None:
        """Handle an error of the method."""
        ...


class Beside:
    """Examination, folding and commits of one job's updates.

    Args:
        served: the job.
        worker: for what is large.
        start: gives the worker a work item, as `Desk.start_work` does.
        executor: that brings the updates.
        left: whether the coordinator has let go of the job.
    """

    def __init__(
        self,
        served: Served,
        worker: Worker,
        start: Callable[[Callable[[], Any], Then[Any]], None],
        executor: Executor,
        left: Callable[[], bool],
    ) -> None:
        self._served, self._worker, self._start, self._executor, self._left = served, worker, start, executor, left
        self._summing = False  # whether the worker folds or commits
        self._examining: dict[str, Update] = {}  # by device: what the worker reads for it
        self._in_time: set[str] = set()  # those of them whose update was here before the round's deadline
        self._offered: dict[str, Update] = {}  # device -> update that is fetched in turn, offered before the deadline
        self._lost = (-math.inf, 0.0)  # when the running attempt began; `Absence.lost_s` at that time

    @property
    def waiting(self) -> tuple[int, int]:
        """Number and bytes of the updates here that the worker is to read or fold, and has not yet."""
        if not self._large:
            return 0, 0
        count, size = self._served.job.sums.unfolded(self._served.job.rounds)
        return count + len(self._examining), size + sum(map(size_of, self._examining.values()))

    def offered(self, device: str, update: Update, now_s: float) -> bool:
        """Note an update that is fetched next; returns whether it is so large that it has to wait for its turn."""
        if size_of(update) < self._worker.large_bytes:
            return False
        if self._offered.get(device) != update and now_s < self._due_s:
            self._offered[device] = update
        return True

    @property
    def lost_s(self) -> float:
        """Seconds in which no device could be reached, by which the deadline is later; infinite while none can.

        A site's deadline is no later than its round has to end.
        """
        absence, state = self._executor.absence, self._served.job.rounds
        if state.opened_s != self._lost[0]:
            self._lost = state.opened_s, absence.lost_s
        return min(absence.since(self._lost[1]), rounds.latest_s(state) - state.opened_s - state.deadline_s)

    @property
    def _due_s(self) -> float:
        return rounds.next_s(rounds.later(self._served.job.rounds, self.lost_s))

    def deadline_s(self, now_s: float) -> float:
        """Time of the round's deadline, as long as it lies ahead; then, until which the round waits for who is in time.

        That is whose update is being read, and whose was offered before the deadline and had to wait for its turn to
        be sent: the deadline is so much later for it. A site's round has an end nonetheless.
        """
        deadline_s, latest_s = self._due_s, rounds.latest_s(self._served.job.rounds)
        if self._in_time:
            return latest_s
        if now_s < deadline_s or not self._offered:
            return deadline_s
        arriving = self._served.arriving
        self._offered = {device: each for device, each in self._offered.items() if arriving.get(device) == each}
        return min(deadline_s + max(map(self._executor.held_s, self._offered), default=0.0), latest_s)

    def waits(self, now_s: float) -> bool:
        """Return whether the round waits past its deadline. Let devices in time transfer before late ones."""
        deadline_s = self._due_s
        if not deadline_s <= now_s < self.deadline_s(now_s) or rounds.full(self._served.job.rounds):
            return False
        for device in self._served.arriving:
            if now_s >= deadline_s + self._executor.held_s(device):
                self._executor.give_way(device, now_s)
        return True

    @property
    def _gone(self) -> bool:
        return self._served.over or self._left()

    @property
    def _large(self) -> bool:
        return self._served.job.large

    def examine(
        self, device: str, update: Update, profile: Profile | None, right: SiteRight | None, now_s: float
    ) -> None:
        """Validate an update whose blobs have arrived, in the worker if it is large, then count or refuse it."""
        if size_of(update) >= self._worker.large_bytes:  # as a site's sum may be, whose boards' updates are small
            self._served.job.sums.large = True
        large = self._large
        if large and self._examining.get(device) == update:  # it was offered once more meanwhile
            return
        examining = self._served.job.build_examination(device, update, profile, now_s, large=large, right=right)
        if large:
            self._examining[device] = update
            held_s = self._executor.held_s(device) if self._offered.pop(device, None) == update else 0.0
            if now_s < self._due_s + held_s:
                self._in_time.add(device)
            self._start(examining, partial(self._examined, device, update))
        else:
            self._count(device, examining, now_s)

    def _examined(self, device: str, update: Update, examining: Callable[[], admission.Examined], now_s: float) -> None:
        if self._examining.get(device) != update:
            return  # the device has offered another one since
        del self._examining[device]
        self._in_time.discard(device)
        if self._gone or self._served.arriving.get(device) != update:
            return  # it was not waited for any more while it was read, and its blobs may be gone
        self._count(device, examining, now_s)

    def _count(self, device: str, examining: Callable[[], admission.Examined], now_s: float) -> None:
        try:
            examined = examining()
        except mending.LostUpdateError as lost:
            said = "%s's update could not be read (%s); it will offer it again"
            log.warning(said, device, lost.reason, extra=about(device=device))
            return self._served.happened(admission.Arrived(device, lost.reason), now_s)
        except mending.UnreadableError as error:  # its device offers it again, once the job goes on
            return self._served.fail(error, now_s)
        if examined.odd:
            log.warning("%s claims what cannot be: %s", device, examined.odd, extra=about(device=device))
        self._served.happened(examined, now_s)

    def start_folding(self) -> None:
        """Start to fold accepted updates in the worker, if updates are large and no sum is being computed."""
        if self._large and not self._summing and self._served.job.waits_to_fold():
            self._summing = True
            self._start(self._served.job.folding(self._worker.stored_at), self._record_partial_sum)

    def _record_partial_sum(self, result: Callable[[], facts.Folded | None], now_s: float) -> None:
        """Record a stored partial sum and release the blobs of the updates in it."""
        self._summing = False
        before = self._served.job.rounds
        if self._gone:
            return
        fact = self._ended(result, now_s)
        if fact is not None:
            self._served.record(fact, now_s)
        if isinstance(fact, facts.Folded):
            done = blobs(before.answered[device] for device in fact.devices)
            self._served.garbage.add_candidates(
                done | ({before.folded.sum.sha256} if before.folded else set()), soon=True
            )

    def start_commit(self, now_s: float) -> bool:
        """Commit the round. Return False if the worker has to do it, or is still folding."""
        if self._summing:
            return False
        committing = self._served.job.committing(now_s)
        if self._large:
            self._summing = True
            self._start(committing, self._committed)
            return False
        with self._executor.tended():  # a method may compute for longer than a broker waits for a word
            result = outcome(committing)
        self._committed(result, now_s)
        return True

    def _committed(self, result: Callable[[], Done], now_s: float) -> None:
        self._summing = False
        if self._gone:
            return
        done = self._ended(result, now_s)
        if isinstance(done, Done):
            self._served.record(done.fact, now_s, done)
        elif done is not None:
            self._served.record(done, now_s)

    def _ended(self, result: Callable[[], T], now_s: float) -> T | facts.Lost | None:
        """Result of folding or committing; None: there is none, or it has failed and so has the job."""
        try:
            return result()
        except mending.LostUpdateError as lost:
            return facts.Lost(self._served.job.rounds.round, lost.device, lost.reason)
        except Exception as error:
            self._served.fail(error, now_s)
            return None

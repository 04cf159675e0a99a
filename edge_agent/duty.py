"""One device at its task: carries out the decisions of `plan`, in any surroundings.

An agent provides a link, a disk and a task process; a simulated fleet virtual time and workers
that many devices share. Both run this same code: admission, memory, clocks, joules and the outbox are alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fedquilt import wire
from fedquilt.core import BlobRef, Device, Reading, StoreError, Task, Update, WireError
from fedquilt.edge_agent import events, messages, plan
from fedquilt.edge_agent.events import Arrived, Begin, Done, Failed, Rest, Tick
from fedquilt.edge_agent.power.governor import Rule
from fedquilt.edge_agent.power.learned import Learned
from fedquilt.edge_agent.power.task_power import Pacer
from fedquilt.edge_agent.task import failures
from fedquilt.edge_agent.task.protocol import Event, Loaded, Order, Outcome
from fedquilt.edge_agent.task.worker import Worker
from fedquilt.wire import Claim

log = logging.getLogger("fedquilt.agent")


class Surroundings(Protocol):
    """Services that a device needs for its tasks.

    Raises, from every method:
        StoreError: the device's disk is full or unusable; the task is then refused with this reason.
    """

    def say(self, claim: Claim) -> None:
        """Send the coordinator a claim: whether a task is accepted."""
        ...

    def offer(self, update: Update, now_s: float) -> None:
        """Send the coordinator the result of a task."""
        ...

    def drop(self, update: Update) -> None:
        """Remove the result of a task from the disk, unsent: nobody will ask for it."""
        ...

    def fetch(self, refs: Sequence[BlobRef]) -> None:
        """Start fetching these blobs; `events.Fetched` follows for each."""
        ...

    def abandon(self, sha256: str) -> None:
        """Stop fetching a blob, and forget the part received."""
        ...

    def order(self, task: Task, budget_bytes: int, plan_bytes: int) -> Order:
        """Order for the worker: the task with the paths of its files on this device."""
        ...

    def keep(self, update: Update, blobs: Mapping[str, bytes], private: BlobRef | None) -> bool:
        """Make the result of the order in hand durable; returns whether it leaves private state.

        `blobs` are the bundles that came with the order's outcome instead of in files, by sha256; `private` is the
        private state that the task has written.
        """
        ...

    def remember(self, learned: Mapping[str, Learned]) -> None:
        """Keep what the board has learned for the time after a restart, by workload."""
        ...

    def progressed(self, task: Task, fraction: float, now_s: float) -> None:
        """Report that the share `fraction` of the task is done, 0 to 1."""
        ...


class Duty:
    """A device with its board, its worker and the state of its plan.

    Args:
        state: outbox and counted rounds left by an earlier process, or an empty state.
        rule: policy for operating points.
    """

    def __init__(
        self, device: str, state: events.State, board: Device, worker: Worker, rule: Rule, around: Surroundings
    ) -> None:
        self.device, self.state = device, state
        self._board, self._worker, self._around = board, worker, around
        self._pacer = Pacer(board, rule)
        self._way_s = 0.0  # of the update that the task in hand will make

    def step(self, now_s: float) -> None:
        """Read the sensors if it is time, poll the worker, and do everything due."""
        self._pacer.sample(now_s)
        for event in self._worker.poll(now_s):
            self._worked(event, now_s)
        if now_s >= plan.next_s(self.state):
            self.feed(Tick(), now_s)

    def due_s(self, now_s: float) -> float:
        """Time by which `step` has to be called."""
        return min(plan.next_s(self.state), self._worker.due_s(now_s), self._pacer.due_s())

    def stop(self) -> None:
        """End the task in hand; the outbox stays."""
        self._worker.close()
        self._pacer.stop()

    def feed(self, event: events.Event, now_s: float) -> None:
        """Apply an event, and carry out the actions that follow."""
        reading = self.spare(now_s) if isinstance(event, Arrived) else Reading()
        self.state, actions = plan.advance(self.state, event, now_s, reading)
        self.carry_out(actions, now_s)

    def carry_out(self, actions: Sequence[events.Action], now_s: float) -> None:
        """Carry out the plan's actions. An error of the disk ends them and fails the task."""
        for action in actions:
            try:
                match action:  # the most frequent first
                    case events.Say(claim):
                        self._around.say(claim)
                    case events.Fetch(refs):
                        self._around.fetch(refs)
                    case Begin(task):
                        self._begin(task, now_s)
                    case events.Send(update):
                        self._around.offer(update, now_s)
                    case events.Learn(learned):
                        self._around.remember(learned)
                    case events.Stop():
                        self._worker.kill()
                        self._pacer.stop()
                    case events.Abandon(sha256):
                        self._around.abandon(sha256)
                    case events.Drop(update):
                        self._around.drop(update)
            except StoreError as error:
                return self.feed(Failed(failures.code_of_error(error), failures.describe_error(error)), now_s)

    def take(self, means: events.Means, rule: Rule) -> None:
        """Have other means from the next task on, and choose operating points by another rule at once."""
        means = msgspec.structs.replace(means, runs_on=self.state.means.runs_on)
        self.state = msgspec.structs.replace(self.state, means=means)
        self._pacer.rule = rule

    @property
    def works(self) -> bool:
        """Whether a task runs."""
        return self.state.open is not None and self.state.open.working

    def rest(self, on: bool, now_s: float) -> None:
        """Begin no task while `on`, and end the process that waits for the next one: its memory is needed."""
        if on and not self.works:
            self._worker.kill()
        self.feed(Rest(on), now_s)

    def spare(self, now_s: float) -> Reading:
        """Readings of the board's sensors, with the memory of an idle worker counted as available."""
        reading = self._board.read(now_s)
        if reading.available_bytes is None:
            return reading
        spare = reading.available_bytes + self._worker.resident_bytes
        return msgspec.structs.replace(reading, available_bytes=spare)

    def _begin(self, task: Task, now_s: float) -> None:
        order = self._around.order(task, self.state.means.budget_bytes, plan.plannable_bytes(self.state, task))
        self._way_s = plan.way_s(self.state, now_s)
        self._pacer.begin(now_s)
        self._worker.start(order, now_s)

    def _worked(self, event: Event, now_s: float) -> None:
        open = self.state.open
        if open is None or not open.working:
            return
        if isinstance(event, Outcome):
            return self._finish_task(open, event, now_s)
        if isinstance(event, Loaded):
            known = self.state.learned.get(events.workload(open.task), Learned())
            done_by_s = open.due_s - self._way_s
            return self._pacer.loaded(open.task.work.on(event.examples), done_by_s, known, now_s)
        self._pacer.progress(event.fraction, now_s)
        self._around.progressed(open.task, event.fraction, now_s)

    def _finish_task(self, open: events.Open, outcome: Outcome, now_s: float) -> None:
        """Make the result of an ended task durable and enter it into the plan, or enter its failure."""
        means = self.state.means
        if outcome.runs_on not in ("", means.runs_on.get(open.task.engine)):
            runs_on = {**means.runs_on, open.task.engine: outcome.runs_on}
            self.state = msgspec.structs.replace(self.state, means=msgspec.structs.replace(means, runs_on=runs_on))
        if outcome.code != "ok":
            self._pacer.stop()
            if outcome.killed:
                log.warning("%s, round %d: %s", open.task.job, open.task.round, outcome.reason)
            return self.feed(Failed(outcome.code, outcome.reason, outcome.overrun, outcome.killed), now_s)
        spent = self._pacer.end(open.task.work.on(outcome.examples), outcome.wall_s, now_s)
        update = messages.update(self.device, open, outcome, spent.cost)
        try:
            wire.decode(wire.encode(update), Update)
            private = self._around.keep(update, outcome.blobs, outcome.private)
        except WireError as error:
            return self.feed(Failed("exception", f"the method's answer cannot be sent: {error}"), now_s)
        except StoreError as error:
            return self.feed(Failed(failures.code_of_error(error), failures.describe_error(error)), now_s)
        return self.feed(Done(update, private, spent.learned, outcome.planned_bytes), now_s)

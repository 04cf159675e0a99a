"""One simulated device: the duty of an agent on a simulated board, with simulated transfers."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import structs

from fedquilt import wire
from fedquilt.blobs.storage.store import SMALL_BYTES
from fedquilt.core import BlobRef, Device, Task, Update
from fedquilt.costs.cost_model import LinkCost
from fedquilt.edge_agent import events, messages
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import VirtualWorker
from fedquilt.edge_agent.task_runner import TaskRunner

if TYPE_CHECKING:
    from fedquilt.tools.simulation.fleet import SimulatedFleet

TELEMETRY_S: Final = 30.0  # between two readings that a board with sensors tells, as agents do by default
UNANSWERED: Final = ".update"  # ending of the file with an update whose private state waits for its answer
FOLLOWING: Final = ".next"  # ending of the file with that private state


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Configuration of a simulated device.

    Args:
        board: Factory of the board, called when the device is first needed.
        data: Content of `WorkRequest.data` in the device's work requests, beside the name of its share.
        link: Speed of the device's transfers.
    """

    device: str
    board: Callable[[], Device]
    means: events.Capabilities
    data: Mapping[str, object] = field(default_factory=dict)
    rule: GovernorPolicy = GovernorPolicy()
    link: LinkCost = LinkCost()


class FleetDevice:
    def __init__(self, fleet: SimulatedFleet, spec: DeviceSpec) -> None:
        self.name, self._fleet, self._spec = spec.device, fleet, spec
        self.board = spec.board()
        self.worker = VirtualWorker(self.board)
        self.have = fleet.get_sent_blobs(spec.device)  # sha256 of what it was sent
        self._coming: deque[tuple[float, str]] = deque()  # when blobs will be here, and their sha256
        self._going: deque[tuple[float, Update]] = deque()  # when updates will be there
        self._folder = f"{fleet.folder}/private/"
        self._private = f"{self.name}.safetensors"
        self._following = f"{self.name}{FOLLOWING}"  # what the update in the outbox leaves
        self._unanswered = f"{self.name}{UNANSWERED}"
        self._leaves = False  # whether the order in hand has left private state
        outbox = self._restore_outbox()
        self.follows = bool(outbox)
        self.duty = TaskRunner(
            spec.device, events.DeviceState(spec.means, outbox=outbox), self.board, self.worker, spec.rule, self
        )
        self._places: dict[BlobRef, int] = {}  # positions of the running task's outputs in the pack file
        self._prefix = f"{self.name}."  # of what its tasks write into the folder that all devices share
        self.due_s = math.inf
        self.tell_s = 0.0  # when its sensors are told next

    def _restore_outbox(self) -> dict[events.Key, events.OutboxUpdate]:
        """Return the update of an interrupted run that is still unanswered, due at once, or {} without one."""
        # an interrupted run left an update with private state unanswered, so the update is offered again
        if self._following not in self._fleet.private:
            return {}
        with open(f"{self._folder}{self._unanswered}", "rb") as file:
            update = wire.decode(file.read(), Update)
        return {(update.job, update.round): events.OutboxUpdate(update, True, due_s=-math.inf)}

    def publish_telemetry(self, now_s: float) -> None:
        """Publish the board's sensor readings, at most once per TELEMETRY_S."""
        if now_s < self.tell_s:
            return
        told = messages.telemetry_message(self.board.read_sensors(now_s))
        self.tell_s = math.inf if told is None else now_s + TELEMETRY_S
        if told is not None:
            self._fleet.queue_message(self.name, told)

    def publish_claim(self, claim: wire.Claim) -> None:
        self._fleet.queue_message(self.name, claim)

    def submit_update(self, update: Update, now_s: float) -> None:
        """Queue an update as a message, at the end of its simulated upload if the link has a pace."""
        # published only when the simulated upload of the blobs has ended
        if update in [given for _, given in self._going]:
            return
        due_s = self._compute_transfer_end_s(self._going, sum(ref.size for ref in update.bundles.values()), now_s)
        if due_s > now_s:
            self._going.append((due_s, update))
        else:
            self._fleet.queue_message(self.name, update)

    def discard_update(self, update: Update) -> None:
        self._fleet.unanswered.pop((self.name, (update.job, update.round)), None)
        self._finish_private_state(accepted=False)

    def fetch_blobs(self, refs: Sequence[BlobRef]) -> None:
        # the download takes simulated time alone: the blobs are read in the coordinator's store
        for ref in refs:
            self._coming.append((self._compute_transfer_end_s(self._coming, ref.size, self._fleet.now_s), ref.sha256))

    def deliver_due_transfers(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            sha256 = self._coming.popleft()[1]
            self.have.add(sha256)
            self.duty.handle_event(events.BlobFetched(sha256), now_s)
        while self._going and self._going[0][0] <= now_s:
            self._fleet.queue_message(self.name, self._going.popleft()[1])

    def next_arrival_s(self) -> float:
        coming_s = self._coming[0][0] if self._coming else math.inf
        return min(coming_s, self._going[0][0]) if self._going else coming_s

    def _compute_transfer_end_s(self, before: Sequence[tuple[float, object]], size: int, now_s: float) -> float:
        # transfers of one direction run one after another
        return max(now_s, before[-1][0] if before else now_s) + self._spec.link.transfer_seconds(size)

    def cancel_fetch(self, sha256: str) -> None:
        self.have.discard(sha256)
        self._coming = deque(each for each in self._coming if each[1] != sha256)

    def report_progress(self, task: Task, fraction: float, now_s: float) -> None:
        # there are no observers
        ...

    def store_learned_costs(self, learned: Mapping[str, LearnedModel]) -> None:
        # a simulated board does not restart
        ...

    def build_work_request(self, task: Task, budget_bytes: int, plan_bytes: int, *, spare: bool = False) -> WorkRequest:
        # a spare request is outside of the rounds, so its engine may plan with the whole budget
        return WorkRequest(
            task=task,
            device=self.name,
            budget_bytes=budget_bytes,
            data={"share": self.name, **self._spec.data},
            bundles={name: self._fleet.find_bundle(name, ref) for name, ref in task.bundles.items()},
            private=f"{self._folder}{self._private}" if self._private in self._fleet.private else None,
            cache=f"{self._fleet.folder}/caches/{self.name}",
            out=self._fleet.out,
            plan_bytes=None if spare else plan_bytes,
            prefix=self._prefix,
            whole_bytes=SMALL_BYTES,
        )

    def store_outputs(self, outcome: WorkResult) -> WorkResult:
        """Move the blobs of a result into the blob store, unnamed, and return the bare result."""
        self.discard_outputs()
        self._leaves = outcome.private is not None
        for ref in outcome.bundles.values():
            if ref.sha256 in outcome.blobs and ref not in self._places:
                self._places[ref] = self._fleet.depot.write_unnamed(ref, outcome.blobs[ref.sha256])
        return structs.replace(outcome, blobs={}) if outcome.blobs else outcome

    def discard_outputs(self) -> None:
        """Delete the unnamed blobs that `store_outputs` has written."""
        while self._places:
            self._fleet.depot.discard_unnamed(*self._places.popitem())

    def commit_result(self, update: Update, blobs: Mapping[str, bytes], private: BlobRef | None) -> bool:
        """Name the update's blobs and keep the update until its answer. Return whether a private state was stored."""
        made = f"{self._fleet.out}/{self._prefix}"
        for ref in update.bundles.values():
            place = self._places.pop(ref, None)
            if place is not None:
                self._fleet.depot.name_blob(ref, place)
            else:
                self._fleet.depot.adopt_file(f"{made}{ref.sha256}", ref)
        self._fleet.unanswered[self.name, (update.job, update.round)] = update
        if not self._leaves:  # what a task before it may have written and then failed counts for nothing
            return False
        with open(f"{self._folder}{self._unanswered}", "wb") as file:
            file.write(wire.encode(update))
        os.replace(f"{made}{PRIVATE}", f"{self._folder}{self._following}")
        self._fleet.private |= {self._unanswered, self._following}
        self.follows = True
        return True

    def apply_ack(self, ack: wire.Ack) -> None:
        """Apply the acknowledgement of an update. If accepted, the new private state replaces the old."""
        self._fleet.unanswered.pop((self.name, (ack.job, ack.round)), None)
        if (ack.job, ack.round) in self.duty.state.outbox:
            self._finish_private_state(ack.accepted)

    def _finish_private_state(self, accepted: bool) -> None:
        if not self.follows:
            return
        if accepted:
            os.replace(f"{self._folder}{self._following}", f"{self._folder}{self._private}")
            self._fleet.private.add(self._private)
        else:
            os.unlink(f"{self._folder}{self._following}")
        self._fleet.private -= {self._following, self._unanswered}
        os.unlink(f"{self._folder}{self._unanswered}")  # last: with it, what follows is offered again after a kill
        self.follows = False

"""Simulated devices on virtual time as one executor, without broker, messages and processes.

Each device is an agent's `TaskRunner` on a simulated board: it accepts or declines a task, chooses an operating point,
spends energy and stores private state as an agent does. Work requests of running tasks are in `waiting_requests`
until their results are delivered. Virtual time is halted until then.

Tasks pass through the wire encoding. Blobs are not copied: devices read them in the coordinator's blob store, and
outputs are moved there. Small bundles arrive with the result and enter the pack file, larger ones are files. Bytes
are counted as an agent counts them.
"""

from __future__ import annotations

import heapq
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec import structs

from fedquilt import wire
from fedquilt.blobs.store import SMALL_BYTES, BlobStore
from fedquilt.coordinator.delivery.executor import ExecutorInput
from fedquilt.coordinator.fleet.registry import BrokerOutage
from fedquilt.coordinator.rounds.decisions import UpdateReceived
from fedquilt.coordinator.rounds.events import JobView
from fedquilt.coordinator.updates.aggregation import blob_hashes
from fedquilt.core import BlobRef, Device, JobError, Profile, SiteRight, StoreError, Task, Update
from fedquilt.costs.cost_model import LinkCost
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.task.protocol import PRIVATE, WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import VirtualWorker
from fedquilt.edge_agent.task_runner import TaskRunner

TELEMETRY_S: Final = 30.0  # between two readings that a board with sensors tells, as agents do by default
PRESENCE: Final = wire.Presence(online=True, boot="simulated-1", seq=1)
UNANSWERED: Final = ".update"  # ending of the file with an update whose private state waits for its answer
FOLLOWING: Final = ".next"  # ending of the file with that private state


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    device: str
    board: Callable[[], Device]  # called when the device is first needed
    means: state_machine.Capabilities
    data: Mapping[str, object] = field(default_factory=dict)  # of its work requests, beside the name of its share
    rule: GovernorPolicy = GovernorPolicy()
    link: LinkCost = LinkCost()


class FleetDevice:
    def __init__(self, fleet: SimulatedFleet, spec: DeviceSpec) -> None:
        self.name, self._fleet, self._spec = spec.device, fleet, spec
        self.board = spec.board()
        self.worker = VirtualWorker(self.board)
        self.have = set[str]()  # sha256 of what it was sent
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
            spec.device, state_machine.DeviceState(spec.means, outbox=outbox), self.board, self.worker, spec.rule, self
        )
        self._places: dict[BlobRef, int] = {}  # positions of the running task's outputs in the pack file
        self._prefix = f"{self.name}."  # of what its tasks write into the folder that all devices share
        self.due_s = math.inf
        self.tell_s = 0.0  # when its sensors are told next

    def _restore_outbox(self) -> dict[state_machine.Key, state_machine.OutboxUpdate]:
        # an interrupted run left an update with private state unanswered, so the update is offered again
        if self._following not in self._fleet.private:
            return {}
        with open(f"{self._folder}{self._unanswered}", "rb") as file:
            update = wire.decode(file.read(), Update)
        return {(update.job, update.round): state_machine.OutboxUpdate(update, True, due_s=-math.inf)}

    def publish_telemetry(self, now_s: float) -> None:
        if now_s < self.tell_s:
            return
        told = messages.telemetry_message(self.board.read_sensors(now_s))
        self.tell_s = math.inf if told is None else now_s + TELEMETRY_S
        if told is not None:
            self._fleet.queue_message(self.name, told)

    def publish_claim(self, claim: wire.Claim) -> None:
        self._fleet.queue_message(self.name, claim)

    def submit_update(self, update: Update, now_s: float) -> None:
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
            self.duty.handle_event(state_machine.BlobFetched(sha256), now_s)
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

    def report_progress(self, task: Task, fraction: float, now_s: float) -> None: ...  # there are no observers

    def store_learned_costs(
        self, learned: Mapping[str, LearnedModel]
    ) -> None: ...  # a simulated board does not restart

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
        self.discard_outputs()
        self._leaves = outcome.private is not None
        for ref in outcome.bundles.values():
            if ref.sha256 in outcome.blobs and ref not in self._places:
                self._places[ref] = self._fleet.depot.write_unnamed(ref, outcome.blobs[ref.sha256])
        return structs.replace(outcome, blobs={}) if outcome.blobs else outcome

    def discard_outputs(self) -> None:
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


OWN: Final = ("seed", "tier", "counted")  # fields of a task that are of its device alone, and plain


class EncodedTasks:
    """Tasks after a round trip through the wire encoding.

    Fields that consecutive tasks share are encoded once.
    """

    def __init__(self) -> None:
        self._last: tuple[Task, Task] | None = None  # as it was sent, and as it came

    def __call__(self, task: Task) -> Task:
        if self._last is not None:
            sent, came = self._last
            if all(map(operator.is_, _shared(task), _shared(sent))):
                return structs.replace(came, **dict(zip(OWN, _own(task), strict=True)))
        came = wire.decode(wire.encode(task), Task)
        self._last = task, came
        return came


_own = operator.attrgetter(*OWN)
_shared = operator.attrgetter(*(name for name in Task.__struct_fields__ if name not in OWN))


class SimulatedFleet:
    """Executor of simulated devices, some of which may come online later.

    Args:
        depot: Blob store of the coordinator.
        folder: Folder for private state, caches and task outputs of the devices.
        apart: Devices outside of the fleet, for `make_extra_request` alone.
        away: Devices of the fleet that are offline at first.
    """

    outage = BrokerOutage()  # none: they are always within reach

    def __init__(
        self,
        specs: Iterable[DeviceSpec],
        depot: BlobStore,
        folder: Path,
        apart: Mapping[str, DeviceSpec] | None = None,
        away: Collection[str] = (),
    ) -> None:
        self.depot, self.folder = depot, folder
        self.specs = {spec.device: spec for spec in specs}
        self.now_s = 0.0
        self._devices: dict[str, FleetDevice] = {}
        self._heard: deque[ExecutorInput] = deque()
        self._due: list[tuple[float, str]] = []
        self._moved: dict[str, FleetDevice] = {}  # devices whose entry in `_due` may be outdated
        self._waiting: dict[str, FleetDevice] = {}  # devices with a work request to run
        self.begun: Callable[[WorkRequest], None] = lambda order: None  # is told of each order that a device begins
        self.out = f"{folder}/made"  # what orders in hand write, all devices' together
        for name in ("private", "made"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for left in os.scandir(self.out):  # by orders that were in hand when an earlier process was killed
            os.unlink(left)
        self._files: dict[str, str] = {}  # sha256 -> file in the depot, as found since the last `receive_inputs`
        self.private = {entry.name for entry in os.scandir(folder / "private")}  # files there, as devices change them
        self.unanswered: dict[tuple[str, state_machine.Key], Update] = {}  # by device, job and round
        for kept in self.private:  # of an interrupted run
            if kept.endswith(FOLLOWING):
                name = kept.removesuffix(FOLLOWING)
                update = wire.decode((folder / "private" / f"{name}{UNANSWERED}").read_bytes(), Update)
                self.unanswered[name, (update.job, update.round)] = update
        self._wire = EncodedTasks()
        self._kinds: dict[
            tuple[object, int], tuple[Profile, bool]
        ] = {}  # profile by board and means, and if it has sensors
        self._away = set(self.specs)
        self.bring_online(name for name in self.specs if name not in away)
        self.specs |= apart or {}

    def bring_online(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.specs:
                raise JobError(f"the simulated fleet has no device {name!r}")
            if name in self._away:
                self._away.remove(name)
                self._heard += [(name, PRESENCE), (name, self.profile(name))]

    @property
    def waiting_requests(self) -> list[WorkRequest]:
        """Work requests of running tasks that need a result before virtual time can continue, by device."""
        return [order for name in sorted(self._waiting) if (order := self._waiting[name].worker.order) is not None]

    def find_running_task(self, device: str) -> Task | None:
        given = self._waiting.get(device)
        return None if given is None or given.worker.order is None else given.worker.order.task

    def deliver_outcome(self, device: str, outcome: WorkResult) -> None:
        """Give a device the result of its work request. Results for devices that are offline are dropped."""
        given = self._waiting.pop(device, None)
        if given is None:
            return
        given.worker.set_outcome(given.store_outputs(outcome), self.now_s)
        given.duty.step(self.now_s)
        self._track_work_request(given)

    def make_extra_request(self, device: str, task: Task) -> WorkRequest:
        """Return a work request outside of the rounds, such as an evaluation. Its outputs are not stored."""
        return self._get_or_create_device(device).build_work_request(
            task, self.specs[device].means.budget_bytes, 0, spare=True
        )

    def profile(self, device: str) -> Profile:
        """Return the profile of a device. A device that is never selected and has no sensors need not exist."""
        spec = self.specs[device]
        kind = spec.board, id(spec.means)
        if kind not in self._kinds:
            board = spec.board()
            has_sensors = messages.telemetry_message(board.read_sensors(self.now_s)) is not None
            self._kinds[kind] = messages.profile_message(device, board, spec.means), has_sensors
        profile, has_sensors = self._kinds[kind]
        if has_sensors or f"{device}{FOLLOWING}" in self.private:
            self._get_or_create_device(device)
        return structs.replace(profile, device=device)

    def receive_inputs(self, now_s: float) -> Iterator[ExecutorInput]:
        """Yield the messages up to `now_s`, running the due devices as soon as no message is left."""
        self.now_s = now_s
        self._files.clear()
        while True:
            while self._heard:
                yield self._heard.popleft()
            self._update_due_times()
            if not self._due or self._due[0][0] > now_s:
                return
            due_s, name = heapq.heappop(self._due)
            device = self._devices.get(name)
            if device is not None and device.due_s == due_s:
                device.deliver_due_transfers(now_s)
                device.duty.step(now_s)
                device.publish_telemetry(now_s)
                self._track_work_request(device)

    def send_pending(self, now_s: float) -> float:
        if self._heard:
            return now_s
        self._update_due_times()
        return self._due[0][0] if self._due else math.inf

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        if device in self._away:
            return  # it is sent again when the device appears
        received, given = self._wire(task), self._get_or_create_device(device)
        missing = frozenset(ref for ref in received.bundles.values() if ref.sha256 not in given.have)
        self._feed_event(given, state_machine.TaskReceived(received, missing), now_s)

    def cancel_task(self, device: str) -> None:
        if device in self._devices:
            self._feed_event(self._devices[device], state_machine.TaskCancelled(), self.now_s)
            self._devices[device].discard_outputs()

    @property
    def unacknowledged_update_blobs(self) -> set[str]:
        return blob_hashes(self.unanswered.values())

    def fds(self) -> Sequence[int]:
        # all events are known in advance
        return ()

    def set_backlog(
        self, updates: int, waiting_bytes: int, max_bytes: float
    ) -> None: ...  # an update is on the coordinator's disk as soon as it is made

    def site_right(self, device: str) -> SiteRight | None:
        return None

    def transfer_wait_s(self, device: str) -> float:
        return 0.0

    def yield_transfer_turn(self, device: str, now_s: float) -> None: ...  # no device waits for a turn

    def send_release(self, device: str, kind: wire.Kind, release: wire.DesiredRelease | None) -> None:
        raise JobError(
            "devices that are simulated in this process run no releases: `fedquilt agent` starts one that does"
        )

    def keep_alive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def slow_resends(self, device: str) -> None: ...  # no message is lost, so none is repeated

    def fetch_blobs(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        # devices write into the coordinator's blob store, so all blobs are there already
        lost = [ref.sha256 for ref in refs if not self.depot.has_blob(ref)]
        self._heard.append(
            UpdateReceived(device, f"blob {lost[0][:12]} is gone from {self.depot.folder}" if lost else None)
        )

    def send_ack(self, device: str, ack: wire.Ack) -> None:
        if device in self._away:
            return  # it offers an update that leaves private state again when it is back
        given = self._get_or_create_device(device)
        given.apply_ack(ack)
        self._feed_event(
            given, state_machine.UpdateAcked((ack.job, ack.round), ack.accepted, attempt=ack.attempt), self.now_s
        )

    def set_epoch(self, epoch: int) -> None: ...  # simulated devices keep no epoch

    def publish_state(self, job: JobView) -> None: ...  # there are no observers

    def close(self) -> None: ...  # there is no connection

    def queue_message(self, device: str, message: wire.Claim | Update | wire.Telemetry) -> None:
        self._heard.append((device, message))

    def find_bundle(self, name: str, ref: BlobRef) -> str:
        path = self._files.get(ref.sha256) or self.depot.verified_path(ref.sha256)
        if path is None:
            raise StoreError(f"bundle {name!r} has vanished from {self.depot.folder}: leave it alone")
        self._files[ref.sha256] = path
        return path

    def _get_or_create_device(self, name: str) -> FleetDevice:
        if name not in self._devices:
            self._devices[name] = FleetDevice(self, self.specs[name])
            self._devices[name].publish_telemetry(self.now_s)
            self._track_work_request(self._devices[name])
        return self._devices[name]

    def _feed_event(self, device: FleetDevice, event: state_machine.Event, now_s: float) -> None:
        device.duty.handle_event(event, now_s)
        device.deliver_due_transfers(now_s)
        self._track_work_request(device)

    def _track_work_request(self, device: FleetDevice) -> None:
        if device.worker.order is not None:
            if device.name not in self._waiting:
                self._waiting[device.name] = device
                self.begun(device.worker.order)
        else:
            self._waiting.pop(device.name, None)
        self._moved[device.name] = device

    def _update_due_times(self) -> None:
        # once per device and step, however many events the device has received
        while self._moved:
            name, device = self._moved.popitem()
            due_s = min(device.duty.next_step_s(self.now_s), device.tell_s, device.next_arrival_s())
            if due_s != device.due_s:
                device.due_s = due_s
                if due_s < math.inf:
                    heapq.heappush(self._due, (due_s, name))

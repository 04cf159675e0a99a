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
from fedquilt.blobs.store import MAX_SMALL_BYTES, BlobStore
from fedquilt.coordinator.delivery.executor import ExecutorInput
from fedquilt.coordinator.fleet.registry import BrokerOutage
from fedquilt.coordinator.rounds.job_state import JobView
from fedquilt.coordinator.rounds.responses import UpdateReceived
from fedquilt.coordinator.updates.aggregation import blob_hashes
from fedquilt.core import BlobRef, Device, JobError, Profile, SiteRight, StoreError, Task, Update
from fedquilt.costs.cost_model import LinkCost
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import VirtualWorker
from fedquilt.edge_agent.task_runner import TaskRunner

TELEMETRY_S: Final = 30.0  # interval of readings of a board with sensors, the default of agents
ONLINE_PRESENCE: Final = wire.Presence(online=True, boot="simulated-1", seq=1)
OFFLINE_PRESENCE: Final = wire.Presence(online=False, boot="simulated-1", seq=2)
UPDATE_SUFFIX: Final = ".update"  # of the file with an unacknowledged update that has left private state
NEXT_STATE_SUFFIX: Final = ".next"  # of the file with that private state


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    device: str
    create_board: Callable[[], Device]  # called when the device is first needed
    capabilities: state_machine.Capabilities
    data: Mapping[str, object] = field(default_factory=dict)  # additional data of the device's work requests
    governor: GovernorPolicy = GovernorPolicy()
    link: LinkCost = LinkCost()


class FleetDevice:
    def __init__(self, fleet: SimulatedFleet, spec: DeviceSpec) -> None:
        self.name = spec.device
        self._fleet, self._spec = fleet, spec
        self.board = spec.create_board()
        self.worker = VirtualWorker(self.board)
        self.fetched_hashes = set[str]()
        self._downloads: deque[tuple[float, str]] = deque()  # end of each transfer, and the sha256
        self._uploads: deque[tuple[float, Update]] = deque()  # end of each transfer
        self._folder = f"{fleet.folder}/private/"
        self._private_file = f"{self.name}.safetensors"
        self._next_private_file = f"{self.name}{NEXT_STATE_SUFFIX}"  # state after the update in the outbox
        self._update_file = f"{self.name}{UPDATE_SUFFIX}"
        self._has_new_private_state = False  # whether the running task has written private state
        outbox = self._restore_outbox()
        self.has_pending_state = bool(outbox)
        self.task_runner = TaskRunner(
            spec.device,
            state_machine.DeviceState(spec.capabilities, outbox=outbox),
            self.board,
            self.worker,
            spec.governor,
            self,
        )
        self._pack_offsets: dict[BlobRef, int] = {}  # of the running task's small outputs in the pack file
        self._prefix = f"{self.name}."  # of its tasks' files in the folder that all devices share
        self.due_s = math.inf
        self.next_telemetry_s = 0.0

    def _restore_outbox(self) -> dict[state_machine.Key, state_machine.OutboxUpdate]:
        # an interrupted run left an unacknowledged update with private state, so the update is submitted again
        if self._next_private_file not in self._fleet.private_files:
            return {}
        with open(f"{self._folder}{self._update_file}", "rb") as file:
            update = wire.decode(file.read(), Update)
        return {(update.job, update.round): state_machine.OutboxUpdate(update, True, resend_s=-math.inf)}

    def publish_telemetry(self, now_s: float) -> None:
        if now_s < self.next_telemetry_s:
            return
        telemetry = messages.telemetry_message(self.board.read_sensors(now_s))
        self.next_telemetry_s = math.inf if telemetry is None else now_s + TELEMETRY_S
        if telemetry is not None:
            self._fleet.queue_message(self.name, telemetry)

    def publish_claim(self, claim: wire.Claim) -> None:
        self._fleet.queue_message(self.name, claim)

    def submit_update(self, update: Update, now_s: float) -> None:
        # published only when the simulated upload of the blobs has ended
        if update in [pending for _, pending in self._uploads]:
            return
        due_s = self._compute_transfer_end_s(self._uploads, sum(ref.size for ref in update.bundles.values()), now_s)
        if due_s > now_s:
            self._uploads.append((due_s, update))
        else:
            self._fleet.queue_message(self.name, update)

    def discard_update(self, update: Update) -> None:
        self._fleet.wasted_j += update.usage.energy_j or 0.0
        self._fleet.unacknowledged_updates.pop((self.name, (update.job, update.round)), None)
        self._finish_private_state(accepted=False)

    def fetch_blobs(self, refs: Sequence[BlobRef]) -> None:
        # the download takes simulated time alone: the blobs are read from the coordinator's store
        for ref in refs:
            self._downloads.append(
                (self._compute_transfer_end_s(self._downloads, ref.size, self._fleet.now_s), ref.sha256)
            )

    def deliver_due_transfers(self, now_s: float) -> None:
        while self._downloads and self._downloads[0][0] <= now_s:
            sha256 = self._downloads.popleft()[1]
            self.fetched_hashes.add(sha256)
            self.task_runner.handle_event(state_machine.BlobFetched(sha256), now_s)
        while self._uploads and self._uploads[0][0] <= now_s:
            self._fleet.queue_message(self.name, self._uploads.popleft()[1])

    def next_arrival_s(self) -> float:
        coming_s = self._downloads[0][0] if self._downloads else math.inf
        return min(coming_s, self._uploads[0][0]) if self._uploads else coming_s

    def _compute_transfer_end_s(
        self, earlier_transfers: Sequence[tuple[float, object]], size: int, now_s: float
    ) -> float:
        # transfers of one direction run one after another
        free_s = max(now_s, earlier_transfers[-1][0]) if earlier_transfers else now_s
        return free_s + self._spec.link.transfer_seconds(size)

    def cancel_fetch(self, sha256: str) -> None:
        self.fetched_hashes.discard(sha256)
        self._downloads = deque(each for each in self._downloads if each[1] != sha256)

    def report_progress(self, task: Task, fraction: float, now_s: float) -> None: ...  # there are no observers

    def store_learned_costs(self, learned: Mapping[str, LearnedModel]) -> None: ...  # a simulated board never restarts

    def build_work_request(self, task: Task, budget_bytes: int, plan_bytes: int, *, spare: bool = False) -> WorkRequest:
        # a spare request is no task of a round, so its engine may plan with the whole budget
        private_state = f"{self._folder}{self._private_file}"
        return WorkRequest(
            task=task,
            device=self.name,
            budget_bytes=budget_bytes,
            data={"share": self.name, **self._spec.data},
            bundles={name: self._fleet.find_bundle(name, ref) for name, ref in task.bundles.items()},
            private_state=private_state if self._private_file in self._fleet.private_files else None,
            cache_folder=f"{self._fleet.folder}/caches/{self.name}",
            output_folder=self._fleet.output_folder,
            plan_bytes=None if spare else plan_bytes,
            file_prefix=self._prefix,
            max_inline_bytes=MAX_SMALL_BYTES,
        )

    def store_outputs(self, outcome: WorkResult) -> WorkResult:
        self.discard_outputs()
        self._has_new_private_state = outcome.private is not None
        for ref in outcome.bundles.values():
            if ref.sha256 in outcome.blobs and ref not in self._pack_offsets:
                self._pack_offsets[ref] = self._fleet.blob_store.write_unnamed(ref, outcome.blobs[ref.sha256])
        return structs.replace(outcome, blobs={}) if outcome.blobs else outcome

    def discard_outputs(self) -> None:
        while self._pack_offsets:
            self._fleet.blob_store.discard_unnamed(*self._pack_offsets.popitem())

    def commit_result(self, update: Update, blobs: Mapping[str, bytes], private: BlobRef | None) -> bool:
        """Add the update's blobs to the store. Return whether a new private state was stored with them."""
        output_prefix = f"{self._fleet.output_folder}/{self._prefix}"
        for ref in update.bundles.values():
            pack_offset = self._pack_offsets.pop(ref, None)
            if pack_offset is not None:
                self._fleet.blob_store.name_blob(ref, pack_offset)
            else:
                self._fleet.blob_store.adopt_file(f"{output_prefix}{ref.sha256}", ref)
        self._fleet.unacknowledged_updates[self.name, (update.job, update.round)] = update
        if not self._has_new_private_state:  # ignores private state of an earlier task that failed
            return False
        with open(f"{self._folder}{self._update_file}", "wb") as file:
            file.write(wire.encode(update))
        os.replace(f"{output_prefix}{PRIVATE_FILE}", f"{self._folder}{self._next_private_file}")
        self._fleet.private_files |= {self._update_file, self._next_private_file}
        self.has_pending_state = True
        return True

    def apply_ack(self, ack: wire.Ack) -> None:
        """Apply the acknowledgement of an update. If accepted, the new private state replaces the old."""
        self._fleet.unacknowledged_updates.pop((self.name, (ack.job, ack.round)), None)
        if (ack.job, ack.round) in self.task_runner.state.outbox:
            self._finish_private_state(ack.accepted)

    def _finish_private_state(self, accepted: bool) -> None:
        if not self.has_pending_state:
            return
        if accepted:
            os.replace(f"{self._folder}{self._next_private_file}", f"{self._folder}{self._private_file}")
            self._fleet.private_files.add(self._private_file)
        else:
            os.unlink(f"{self._folder}{self._next_private_file}")
        self._fleet.private_files -= {self._next_private_file, self._update_file}
        os.unlink(f"{self._folder}{self._update_file}")  # last: a restart submits the update while the file exists
        self.has_pending_state = False


# Fields of a task that differ between devices, all of plain types.
DEVICE_FIELDS: Final = ("seed", "tier", "last_counted_round")


class EncodedTasks:
    """Tasks after a round trip through the wire encoding.

    Fields that consecutive tasks share are encoded once.
    """

    def __init__(self) -> None:
        self._last_task: tuple[Task, Task] | None = None  # as sent and as received

    def __call__(self, task: Task) -> Task:
        if self._last_task is not None:
            last_sent, received = self._last_task
            if all(map(operator.is_, _shared_field_values(task), _shared_field_values(last_sent))):
                return structs.replace(received, **dict(zip(DEVICE_FIELDS, _device_field_values(task), strict=True)))
        received = wire.decode(wire.encode(task), Task)
        self._last_task = task, received
        return received


_device_field_values = operator.attrgetter(*DEVICE_FIELDS)
_shared_field_values = operator.attrgetter(*(name for name in Task.__struct_fields__ if name not in DEVICE_FIELDS))


class SimulatedFleet:
    """Executor of simulated devices, some of which may come online later.

    Args:
        blob_store: Blob store of the coordinator.
        folder: Folder for private state, caches and task outputs of the devices.
        extra_specs: Devices outside of the fleet, for `make_extra_request` alone.
        offline: Devices of the fleet that are offline at first.
        failure_times_s: Virtual time at which each failing device goes offline permanently.
    """

    outage = BrokerOutage()  # no outage: simulated devices are always reachable

    def __init__(
        self,
        specs: Iterable[DeviceSpec],
        blob_store: BlobStore,
        folder: Path,
        extra_specs: Mapping[str, DeviceSpec] | None = None,
        offline: Collection[str] = (),
        failure_times_s: Mapping[str, float] = {},
    ) -> None:
        self.blob_store, self.folder = blob_store, folder
        self.specs = {spec.device: spec for spec in specs}
        self.now_s = 0.0
        self.wasted_j = 0.0  # of tasks that were cancelled or whose updates were discarded
        self._failures = sorted((time_s, device) for device, time_s in failure_times_s.items())
        self._devices: dict[str, FleetDevice] = {}
        self._inbox: deque[ExecutorInput] = deque()
        self._due_times: list[tuple[float, str]] = []
        self._changed_devices: dict[str, FleetDevice] = {}  # devices whose entry in `_due_times` may be outdated
        self._working_devices: dict[str, FleetDevice] = {}  # devices with a work request to run
        self.on_work_started: Callable[[WorkRequest], None] = lambda request: None  # called when a device starts work
        self.output_folder = f"{folder}/made"  # outputs of the running tasks of all devices
        for name in ("private", "made"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for stale_file in os.scandir(self.output_folder):  # from tasks that ran when an earlier process was killed
            os.unlink(stale_file)
        self._blob_paths: dict[str, str] = {}  # path by sha256, cleared by `receive_inputs`
        self.private_files = {entry.name for entry in os.scandir(folder / "private")}  # names, updated by the devices
        self.unacknowledged_updates: dict[tuple[str, state_machine.Key], Update] = {}  # by device, job and round
        for private_file in self.private_files:  # of an interrupted run
            if private_file.endswith(NEXT_STATE_SUFFIX):
                name = private_file.removesuffix(NEXT_STATE_SUFFIX)
                update = wire.decode((folder / "private" / f"{name}{UPDATE_SUFFIX}").read_bytes(), Update)
                self.unacknowledged_updates[name, (update.job, update.round)] = update
        self._encode_task = EncodedTasks()
        # profile by board and capabilities, and whether the board has sensors
        self._profile_cache: dict[tuple[object, int], tuple[Profile, bool]] = {}
        self._offline = set(self.specs)
        self.bring_online(name for name in self.specs if name not in offline)
        self.specs |= extra_specs or {}

    def bring_online(self, names: Iterable[str]) -> None:
        """Bring devices online that are offline. Raise JobError if the fleet lacks a device."""
        for name in names:
            if name not in self.specs:
                raise JobError(f"the simulated fleet has no device {name!r}: use one of its {len(self.specs)} names")
            if name in self._offline:
                self._offline.remove(name)
                self._inbox += [(name, ONLINE_PRESENCE), (name, self.profile(name))]

    def _fail_due_devices(self, now_s: float) -> None:
        while self._failures and self._failures[0][0] <= now_s:
            name = self._failures.pop(0)[1]
            self._offline.add(name)
            self._working_devices.pop(name, None)
            self._changed_devices.pop(name, None)
            if (device := self._devices.pop(name, None)) is not None:
                self.wasted_j += device.worker.energy_so_far_j(now_s)
                device.discard_outputs()
            self._inbox.append((name, OFFLINE_PRESENCE))

    @property
    def waiting_requests(self) -> list[WorkRequest]:
        """Work requests of running tasks that need a result before virtual time can continue, by device."""
        return [
            request
            for name in sorted(self._working_devices)
            if (request := self._working_devices[name].worker.pending_request) is not None
        ]

    def find_running_task(self, device: str) -> Task | None:
        fleet_device = self._working_devices.get(device)
        request = None if fleet_device is None else fleet_device.worker.pending_request
        return None if request is None else request.task

    def deliver_outcome(self, device: str, outcome: WorkResult) -> None:
        """Give a device the result of its work request. Results for devices that are offline are dropped."""
        fleet_device = self._working_devices.pop(device, None)
        if fleet_device is None:
            return
        fleet_device.worker.set_outcome(fleet_device.store_outputs(outcome), self.now_s)
        fleet_device.task_runner.step(self.now_s)
        self._track_work_request(fleet_device)

    def make_extra_request(self, device: str, task: Task) -> WorkRequest:
        """Return a work request outside of the rounds, such as an evaluation. Its outputs are not stored."""
        return self._get_or_create_device(device).build_work_request(
            task, self.specs[device].capabilities.budget_bytes, 0, spare=True
        )

    def profile(self, device: str) -> Profile:
        """Return a device's profile. Create a device that has sensors to read or an update to send again."""
        spec = self.specs[device]
        cache_key = spec.create_board, id(spec.capabilities)
        if cache_key not in self._profile_cache:
            board = spec.create_board()
            has_sensors = messages.telemetry_message(board.read_sensors(self.now_s)) is not None
            self._profile_cache[cache_key] = messages.profile_message(device, board, spec.capabilities), has_sensors
        profile, has_sensors = self._profile_cache[cache_key]
        if has_sensors or f"{device}{NEXT_STATE_SUFFIX}" in self.private_files:
            self._get_or_create_device(device)
        return structs.replace(profile, device=device)

    def receive_inputs(self, now_s: float) -> Iterator[ExecutorInput]:
        """Yield all messages up to `now_s`. Due devices run whenever no message is left."""
        self.now_s = now_s
        self._blob_paths.clear()
        self._fail_due_devices(now_s)
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            self._update_due_times()
            if not self._due_times or self._due_times[0][0] > now_s:
                return
            due_s, name = heapq.heappop(self._due_times)
            device = self._devices.get(name)
            if device is not None and device.due_s == due_s:
                device.deliver_due_transfers(now_s)
                device.task_runner.step(now_s)
                device.publish_telemetry(now_s)
                self._track_work_request(device)

    def send_pending(self, now_s: float) -> float:
        if self._inbox:
            return now_s
        self._update_due_times()
        failure_s = self._failures[0][0] if self._failures else math.inf
        return min(self._due_times[0][0], failure_s) if self._due_times else failure_s

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        if device in self._offline:
            return  # the task is sent again when the device comes online
        received, fleet_device = self._encode_task(task), self._get_or_create_device(device)
        missing = frozenset(ref for ref in received.bundles.values() if ref.sha256 not in fleet_device.fetched_hashes)
        self._feed_event(fleet_device, state_machine.TaskReceived(received, missing), now_s)

    def cancel_task(self, device: str) -> None:
        if device in self._devices:
            self.wasted_j += self._devices[device].worker.energy_so_far_j(self.now_s)
            self._feed_event(self._devices[device], state_machine.TaskCancelled(), self.now_s)
            self._devices[device].discard_outputs()

    @property
    def unacknowledged_update_blobs(self) -> set[str]:
        return blob_hashes(self.unacknowledged_updates.values())

    def fds(self) -> Sequence[int]:
        # all events are known in advance
        return ()

    def set_backlog(self, updates: int, waiting_bytes: int, max_bytes: float) -> None: ...  # there are no uploads

    def site_right(self, device: str) -> SiteRight | None:
        return None

    def transfer_wait_s(self, device: str) -> float:
        return 0.0

    def yield_transfer_turn(self, device: str, now_s: float) -> None: ...  # no device waits for a slot

    def send_release(self, device: str, kind: wire.ReleaseKind, release: wire.DesiredRelease | None) -> None:
        raise JobError("simulated devices cannot install releases: start agents with `fedquilt agent`")

    def keep_alive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def slow_resends(self, device: str) -> None: ...  # no message is lost, so none is repeated

    def fetch_blobs(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        # devices write into the coordinator's blob store, so all blobs are there already
        missing_hashes = [ref.sha256 for ref in refs if not self.blob_store.has_blob(ref)]
        problem = f"blob {missing_hashes[0][:12]} is gone from {self.blob_store.folder}" if missing_hashes else None
        self._inbox.append(UpdateReceived(device, problem))

    def send_ack(self, device: str, ack: wire.Ack) -> None:
        if device in self._offline:
            return  # the device submits an update with private state again when online
        fleet_device = self._get_or_create_device(device)
        fleet_device.apply_ack(ack)
        self._feed_event(
            fleet_device, state_machine.UpdateAcked((ack.job, ack.round), ack.accepted, attempt=ack.attempt), self.now_s
        )

    def set_epoch(self, epoch: int) -> None: ...  # simulated devices keep no epoch

    def publish_state(self, job: JobView) -> None: ...  # there are no observers

    def close(self) -> None: ...  # there is no connection

    def queue_message(self, device: str, message: wire.Claim | Update | wire.Telemetry) -> None:
        self._inbox.append((device, message))

    def find_bundle(self, name: str, ref: BlobRef) -> str:
        path = self._blob_paths.get(ref.sha256) or self.blob_store.verified_path(ref.sha256)
        if path is None:
            raise StoreError(f"bundle {name!r} is missing in {self.blob_store.folder}: restore it, or start a new run")
        self._blob_paths[ref.sha256] = path
        return path

    def _get_or_create_device(self, name: str) -> FleetDevice:
        if name not in self._devices:
            self._devices[name] = FleetDevice(self, self.specs[name])
            self._devices[name].publish_telemetry(self.now_s)
            self._track_work_request(self._devices[name])
        return self._devices[name]

    def _feed_event(self, device: FleetDevice, event: state_machine.Event, now_s: float) -> None:
        device.task_runner.handle_event(event, now_s)
        device.deliver_due_transfers(now_s)
        self._track_work_request(device)

    def _track_work_request(self, device: FleetDevice) -> None:
        if device.worker.pending_request is not None:
            if device.name not in self._working_devices:
                self._working_devices[device.name] = device
                self.on_work_started(device.worker.pending_request)
        else:
            self._working_devices.pop(device.name, None)
        self._changed_devices[device.name] = device

    def _update_due_times(self) -> None:
        # once per device and step, however many events the device has received
        while self._changed_devices:
            name, device = self._changed_devices.popitem()
            due_s = min(device.task_runner.next_step_s(self.now_s), device.next_telemetry_s, device.next_arrival_s())
            if due_s != device.due_s:
                device.due_s = due_s
                if due_s < math.inf:
                    heapq.heappush(self._due_times, (due_s, name))

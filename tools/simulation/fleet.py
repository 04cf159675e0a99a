"""Many devices on virtual time as one executor: no broker, no messages, no process of their own.

Each device is an agent's `Duty` on a simulated board: it admits or refuses a task, chooses its operating point,
spends joules and keeps private state as an agent does. Orders that devices have begun wait in `waiting` until
somebody has carried them out (`fedquilt.tools.simulation.hands`); virtual time stands still until then.

A device takes what it is sent through the wire's own encoding. Blobs are not copied: devices read them where the
coordinator keeps them, and what a task makes is moved there: small bundles come with the task's outcome and go into
the depot's pack, others by way of files. Bytes are counted as an agent counts them.
"""

from __future__ import annotations

import heapq
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from msgspec import structs

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.coordinator.admission import Arrived
from fedquilt.coordinator.executors import Heard, WithoutReleases
from fedquilt.coordinator.folding import blobs
from fedquilt.coordinator.shown import Shown
from fedquilt.core import BlobRef, JobError, Profile, StoreError, Task, Update
from fedquilt.edge_agent import events, messages
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation.fleet_device import FOLLOWING, UNANSWERED, FleetDevice, Spec

OWN: Final = ("seed", "tier", "counted")  # fields of a task that are of its device alone, and plain


class Encoded:
    """Tasks as devices take them off the wire; what a task shares with the one before is encoded and decoded once."""

    def __init__(self) -> None:
        self._last: tuple[Task, Task] | None = None  # as it was sent, and as it came

    def __call__(self, task: Task) -> Task:
        """The task as it comes out of its own encoding.

        Raises:
            WireError: it cannot be sent.
        """
        if self._last is not None:
            sent, came = self._last
            if all(map(operator.is_, _shared(task), _shared(sent))):
                return structs.replace(came, **dict(zip(OWN, _own(task), strict=True)))
        came = wire.decode(wire.encode(task), Task)
        self._last = task, came
        return came


_own = operator.attrgetter(*OWN)
_shared = operator.attrgetter(*(name for name in Task.__struct_fields__ if name not in OWN))


class SimulatedFleet(WithoutReleases):
    """An `Executor` of devices that are online from the first moment on, or come and go (`arrive`, `switch_off`).

    Args:
        depot: the coordinator's.
        folder: where devices keep private state, caches and what their tasks write.
        apart: devices that are no part of the fleet and can be given orders beside its rounds.
        away: devices of the fleet that are not online at first.
    """

    def __init__(
        self,
        specs: Iterable[Spec],
        depot: Depot,
        folder: Path,
        apart: Mapping[str, Spec] | None = None,
        away: Collection[str] = (),
    ) -> None:
        self.depot, self.folder = depot, folder
        self.specs = {spec.device: spec for spec in specs}
        self.now_s = 0.0
        self._devices: dict[str, FleetDevice] = {}
        self._heard: deque[Heard] = deque()
        self._due: list[tuple[float, str]] = []
        self._moved: dict[str, FleetDevice] = {}  # whose next event may be due at another time than `_due` says
        self._waiting: dict[str, FleetDevice] = {}  # whose order has to be carried out
        self.begun: Callable[[Order], None] = lambda order: None  # is told of each order that a device begins
        self.out = f"{folder}/made"  # what orders in hand write, all devices' together
        for name in ("private", "made"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for left in os.scandir(self.out):  # by orders that were in hand when an earlier process was killed
            os.unlink(left)
        self._files: dict[str, str] = {}  # sha256 -> file in the depot, as found since the last `hear`
        self.private = {entry.name for entry in os.scandir(folder / "private")}  # files there, as devices change them
        self.unanswered: dict[tuple[str, events.Key], Update] = {}  # by device, job and round
        for kept in self.private:  # of an interrupted run
            if kept.endswith(FOLLOWING):
                name = kept.removesuffix(FOLLOWING)
                update = wire.decode((folder / "private" / f"{name}{UNANSWERED}").read_bytes(), Update)
                self.unanswered[name, (update.job, update.round)] = update
        self._held: dict[str, set[str]] = {}  # device -> sha256 of what it was sent, also while it is away
        self._wire = Encoded()
        self._boots: dict[str, int] = {}  # device -> how often it has come online
        self._away = set(self.specs)
        self.arrive(name for name in self.specs if name not in away)
        self.specs |= apart or {}

    # -- who is there --

    def arrive(self, names: Iterable[str]) -> None:
        """Let devices come online, at the running virtual time; nothing happens to those that are.

        Raises:
            JobError: the fleet has no such device.
        """
        for name in names:
            if name not in self.specs:
                raise JobError(f"the simulated fleet has no device {name!r}")
            if name in self._away:
                self._away.remove(name)
                self._boots[name] = self._boots.get(name, 0) + 1
                self._heard += [(name, self._presence(name, online=True)), (name, self.profile(name))]

    def switch_off(self, names: Iterable[str]) -> None:
        """Switch devices off. A task in hand is lost, private state and blobs are kept."""
        for name in [name for name in names if name in self._boots and name not in self._away]:
            self._away.add(name)
            self._waiting.pop(name, None)
            self._moved.pop(name, None)
            if (gone := self._devices.pop(name, None)) is not None:
                gone.duty.stop()
                gone.give_up()
                for key in () if gone.follows else gone.duty.state.outbox:
                    self.unanswered.pop((name, key), None)
            self._heard.append((name, self._presence(name, online=False)))

    # -- for whoever carries orders out --

    @property
    def waiting(self) -> list[Order]:
        """Orders that have begun, and whose outcome virtual time waits for; sorted by device."""
        return [order for name in sorted(self._waiting) if (order := self._waiting[name].worker.order) is not None]

    @property
    def at_work_now(self) -> bool:
        """Whether orders have begun whose outcomes virtual time waits for."""
        return bool(self._waiting)

    def at_work(self, device: str) -> Task | None:
        """The task whose outcome a device waits for, if it waits for one."""
        given = self._waiting.get(device)
        return None if given is None or given.worker.order is None else given.worker.order.task

    def worked(self, device: str, outcome: Outcome) -> None:
        """What a device's order has come to. It is told when the board would have been done with it.

        It is lost with a device that has left meanwhile.
        """
        given = self._waiting.pop(device, None)
        if given is None:
            return
        given.worker.worked(given.laid_by(outcome), self.now_s)
        given.duty.step(self.now_s)
        self._schedule(given)

    def order(self, device: str, task: Task) -> Order:
        """A task as an order that is no part of a round: an evaluation, say. It leaves nothing behind."""
        return self._device(device).order(task, self.specs[device].means.budget_bytes, 0, spare=True)

    def profile(self, device: str) -> Profile:
        """Profile of a device."""
        return messages.profile(device, self._device(device).board, self.specs[device].means)

    # -- the executor --

    def hear(self, now_s: float) -> Iterator[Heard]:
        """See `Executor`; also lets devices do what is due."""
        self.now_s = now_s
        self._files.clear()
        while True:
            while self._heard:
                yield self._heard.popleft()
            self._reschedule()
            if not self._due or self._due[0][0] > now_s:
                return
            due_s, name = heapq.heappop(self._due)
            device = self._devices.get(name)
            if device is not None and device.due_s == due_s:
                device.move(now_s)
                device.duty.step(now_s)
                device.telling(now_s)
                self._schedule(device)

    def due_s(self, now_s: float) -> float:
        """Time of the next device's event."""
        if self._heard:
            return now_s
        self._reschedule()
        return self._due[0][0] if self._due else math.inf

    def send(self, device: str, task: Task, now_s: float) -> None:
        """Give a device its task, with the blobs that it lacks."""
        if device in self._away:
            return  # it is sent again when the device appears
        received, given = self._wire(task), self._device(device)
        missing = frozenset(ref for ref in received.bundles.values() if ref.sha256 not in given.have)
        self._feed(given, events.Arrived(received, missing), now_s)

    def withdraw(self, device: str) -> None:
        """Withdraw a device's task."""
        if device in self._devices:
            self._feed(self._devices[device], events.Cleared(), self.now_s)
            self._devices[device].give_up()

    @property
    def in_use(self) -> set[str]:
        """Blobs of updates that the coordinator has not answered yet."""
        return blobs(self.unanswered.values())

    def tended(self) -> AbstractContextManager[None]:
        """Nothing to keep up: virtual time stands still meanwhile."""
        return nullcontext()

    def be_patient(self, device: str) -> None:
        """Do nothing: no message is lost, so none is repeated."""

    def fetch(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        """Report the blobs as arrived: devices put them into this depot."""
        lost = [ref.sha256 for ref in refs if not self.depot.has(ref)]
        self._heard.append(Arrived(device, f"blob {lost[0][:12]} is gone from {self.depot.folder}" if lost else None))

    def answer(self, device: str, ack: wire.Ack) -> None:
        """Give a device the answer to its update."""
        if device in self._away:
            return  # it offers an update that leaves private state again when it is back
        given = self._device(device)
        given.apply_ack(ack)
        self._feed(given, events.Acked((ack.job, ack.round), ack.accepted, attempt=ack.attempt), self.now_s)

    def renew(self, epoch: int) -> None:
        """Do nothing: these devices know of no epochs."""

    def tell(self, job: Shown) -> None:
        """Do nothing: nobody observes."""

    def close(self) -> None:
        """Do nothing: no connection is open."""

    # -- within --

    def say(self, device: str, message: wire.Claim | Update | wire.Telemetry) -> None:
        """Pass on what a device says."""
        self._heard.append((device, message))

    def _presence(self, name: str, online: bool) -> wire.Presence:
        return wire.Presence(online=online, boot=f"simulated-{self._boots[name]}", seq=1 if online else 2)

    def place(self, name: str, ref: BlobRef) -> str:
        """The file of a task's bundle.

        Raises:
            StoreError: it is gone.
        """
        path = self._files.get(ref.sha256) or self.depot.verified_path(ref.sha256)
        if path is None:
            raise StoreError(f"bundle {name!r} has vanished from {self.depot.folder}: leave it alone")
        self._files[ref.sha256] = path
        return path

    def made(self, device: str, ref: BlobRef) -> Path:
        """The file of a bundle that the order in hand has left."""
        return Path(f"{self.out}/{device}.{ref.sha256}")

    def held(self, device: str) -> set[str]:
        """The sha256 of all blobs that a device has been sent; its own, to be added to."""
        return self._held.setdefault(device, set())

    def _device(self, name: str) -> FleetDevice:
        if name not in self._devices:
            self._devices[name] = FleetDevice(self, self.specs[name])
            self._devices[name].telling(self.now_s)
            self._schedule(self._devices[name])
        return self._devices[name]

    def _feed(self, device: FleetDevice, event: events.Event, now_s: float) -> None:
        device.duty.feed(event, now_s)
        device.move(now_s)
        self._schedule(device)

    def _schedule(self, device: FleetDevice) -> None:
        if device.worker.order is not None:
            if device.name not in self._waiting:
                self._waiting[device.name] = device
                self.begun(device.worker.order)
        else:
            self._waiting.pop(device.name, None)
        self._moved[device.name] = device

    def _reschedule(self) -> None:
        """Note when the devices to which something has happened are due: once, however much it was."""
        while self._moved:
            name, device = self._moved.popitem()
            due_s = min(device.duty.due_s(self.now_s), device.tell_s, device.moves_s())
            if due_s != device.due_s:
                device.due_s = due_s
                if due_s < math.inf:
                    heapq.heappush(self._due, (due_s, name))

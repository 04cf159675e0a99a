"""Who carries tasks to devices and brings back what they say: the one boundary between rounds and the world.

`OverLink` is a broker's (MQTT, or one in memory); `fedquilt.tools.simulation` has devices on virtual time whose
work is done in this process or by a pool of workers. Rounds, admission, deadlines and the log are the same for all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.coordinator.admission import Appeared, Arrived, Flooded
from fedquilt.coordinator.conduct import Conduct
from fedquilt.coordinator.job import Running
from fedquilt.coordinator.outgoing import Issues
from fedquilt.core import BlobRef, JobError, Task, Wired, WireError
from fedquilt.transport.link import Link, Message
from fedquilt.transport.malformed import Garbage

log = logging.getLogger("fedquilt.coordinator")

Said: TypeAlias = tuple[str, Wired]  # a device, and its presence, profile, telemetry, claim or update
Heard: TypeAlias = (
    Said | Appeared | Arrived | Flooded | None
)  # None: all that was said before may be lost, say it again


class Executor(Protocol):
    """Carries tasks to devices. Never blocks on a device; the coordinator calls `hear` as often as `due_s` says."""

    def hear(self, now_s: float) -> Iterable[Heard]:
        """What devices have said and what has arrived since; what is asked of it meanwhile counts at once."""
        ...

    def due_s(self, now_s: float) -> float:
        """Send what is waiting to be sent; when `hear` is to be called at the latest."""
        ...

    def send(self, device: str, task: Task, now_s: float) -> None:
        """Give a device its task, for the first time or again; it takes the place of any other.

        Raises:
            JobError, WireError: the task holds what cannot be sent.
            LinkError: it is larger than the broker takes.
        """
        ...

    def withdraw(self, device: str) -> None:
        """Take back whatever task the device has, and stop fetching from it."""
        ...

    def be_patient(self, device: str) -> None:
        """The device is at its task: it need not be repeated soon."""
        ...

    def fetch(self, device: str, refs: Iterable[BlobRef]) -> None:
        """Bring these blobs here from a device, and no others from it; `Arrived` follows."""
        ...

    def answer(self, device: str, ack: wire.Ack) -> None:
        """Tell a device what has become of its update."""
        ...

    def tell(self, job: Running) -> None:
        """Tell whoever watches how the job's round stands."""
        ...

    def close(self) -> None:
        """Say goodbye; open tasks stay open."""
        ...


class Slowed(NamedTuple):
    """A message that was dropped."""

    event: Flooded | None  # with which its device is set aside


class OverLink:
    """Devices at the other end of a broker.

    A task is a retained message, sent again while it goes unclaimed; blobs go in chunks (`fedquilt.blobs.transfer`).

    Args:
        depot: where what devices send is put, and what they fetch is taken from.
        epoch: which start of this coordinator it is.
    """

    def __init__(self, link: Link, fleet: str, depot: Depot, epoch: int) -> None:
        self.garbage = Garbage()
        self._link, self._epoch, self._session = link, epoch, 0
        self._topics = wire.Topics(fleet)
        self._issues, self._conduct = Issues(link, self._topics), Conduct()
        self._transfers = Transfers(link, depot, self._topics, "dn", self._issues.may_have)
        self._fetching: dict[str, set[str]] = {}  # device -> sha256 of what has still to come from it

    def hear(self, now_s: float) -> Iterator[Heard]:
        if self._link.session != self._session:
            self._session = self._link.session
            self._link.subscribe(self._topics.for_coordinator())
            self._publish(self._topics.coord, wire.CoordState(online=True, epoch=self._epoch), retain=True)
            yield None
        for message in self._link.receive():
            said = self._read(message, now_s)
            if said is not None:
                yield said
        for sentence in self.garbage.due(now_s):
            log.warning("%s", sentence)
        self._transfers.step(now_s)
        while done := self._transfers.take_done():
            for device, sha256, error in done:
                yield from self._brought(device, sha256, error)
        for device in self._issues.due(now_s):
            yield Appeared(device)

    def due_s(self, now_s: float) -> float:
        return min(self._transfers.step(now_s), self._issues.next_s())

    def send(self, device: str, task: Task, now_s: float) -> None:
        try:
            payload = wire.encode(task)
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"a task of {task.method} cannot be sent: {error}") from None
        self._issues.send(device, task, payload, now_s)

    def withdraw(self, device: str) -> None:
        self.fetch(device, ())
        self._issues.withdraw(device)

    def be_patient(self, device: str) -> None:
        self._issues.be_patient(device)

    def fetch(self, device: str, refs: Iterable[BlobRef]) -> None:
        wanted = {ref.sha256: ref for ref in refs}
        for sha256 in self._fetching.pop(device, set()) - wanted.keys():
            self._transfers.cancel(device, sha256)
        if wanted:
            self._fetching[device] = set(wanted)
        for ref in wanted.values():
            self._transfers.want(device, ref)

    def answer(self, device: str, ack: wire.Ack) -> None:
        self._publish(self._topics.device(device, "dn", "ack"), ack)

    def tell(self, job: Running) -> None:
        state = job.rounds
        message = wire.RoundState(
            job=job.id,
            method=job.job.method,
            round=state.round,
            rounds=job.job.rounds,
            phase="selecting" if state.phase == "new" else state.phase,
            asked=tuple(sorted(state.asked)[:200]),
            answered=tuple(sorted(state.answered)[:200]),
            deadline_s=state.deadline_s,
            note=state.reason[:1000],
        )
        self._publish(self._topics.job(job.id), message, retain=True)

    def close(self) -> None:
        self._publish(self._topics.coord, wire.CoordState(online=False, epoch=self._epoch), retain=True)
        self._link.close()

    def _read(self, message: Message, now_s: float) -> Said | Flooded | None:
        route = None
        try:
            route = wire.route(message.topic)
            if route.direction != "up":
                return None
            if route.leaf != "chunk" and (slowed := self._slowed(route.device, message, now_s)):
                return slowed.event
            if route.leaf in ("presence", "profile") and not message.payload:
                return None  # a cleared retained message: the device was removed from the broker
            if self._transfers.handle(route, message.payload, now_s) or route.kind is None:
                for device, size in self._transfers.take_strain().items():
                    self._conduct.hashed(device, size, now_s)
                return None
            return route.device, wire.decode(message.payload, route.kind)
        except WireError as error:
            if route is None and (slowed := self._slowed(wire.sender(message.topic), message, now_s)):
                return slowed.event
            if said := self.garbage.take(message.topic, error, message.retained, now_s):
                log.warning("%s", said)
            return None

    def _slowed(self, device: str, message: Message, now_s: float) -> Slowed | None:
        """Whether a message is dropped, because its device sends more than can be answered."""
        verdict = self._conduct.message(device, len(message.payload), now_s)
        if verdict == "slowed":
            log.warning("%s sends more than can be answered: what comes too fast is dropped", device)
        return None if verdict == "taken" else Slowed(Flooded(device) if verdict == "aside" else None)

    def _brought(self, device: str, sha256: str, error: str | None) -> Iterator[Arrived]:
        missing = self._fetching.get(device)
        if missing is None or sha256 not in missing:
            return
        if error is not None:
            log.warning("%s's update could not be fetched (%s); it will offer it again", device, error)
            self.fetch(device, ())
            yield Arrived(device, error)
            return
        missing.remove(sha256)
        if not missing:
            del self._fetching[device]
            yield Arrived(device)

    def _publish(self, topic: str, message: Wired, retain: bool = False) -> None:
        self._link.publish(topic, wire.encode(message), retain=retain)

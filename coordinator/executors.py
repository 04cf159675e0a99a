"""Executors carry tasks to devices and bring back their messages: the only boundary between rounds and the world.

`OverLink` uses a broker (MQTT, or one in memory); `fedquilt.tools.simulation` has devices on virtual time whose
work runs in this process or in a pool of workers. Rounds, admission, deadlines and the log are the same for all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import msgspec

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.coordinator import claims
from fedquilt.coordinator.absence import Absence
from fedquilt.coordinator.admission import Appeared, Arrived, Flooded, Removed, Returned, Silent
from fedquilt.coordinator.conduct import ROUND_S
from fedquilt.coordinator.gate import Gate
from fedquilt.coordinator.outgoing import KINDS, Issues
from fedquilt.coordinator.places import Places, Where
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.silence import Silence
from fedquilt.coordinator.worker import LARGE_BYTES
from fedquilt.core import BlobRef, JobError, Profile, SiteRight, Task, Wired, WireError, shorten_error
from fedquilt.logs import about
from fedquilt.transport.handshake import Identity
from fedquilt.transport.link import Link, Message
from fedquilt.transport.malformed import Garbage
from fedquilt.transport.sealed_fleet import FleetLink

log = logging.getLogger("fedquilt.coordinator")

Said: TypeAlias = tuple[str, Wired]  # a device, and its presence, profile, telemetry, claim or update
Heard: TypeAlias = (
    Said | Appeared | Arrived | Flooded | Silent | Returned | Removed | None
)  # None: earlier messages may be lost, send everything again


class Executor(Protocol):
    """Carries tasks to devices. Never blocks on a device; the coordinator calls `hear` as often as `due_s` requires."""

    def fds(self) -> Sequence[int]:
        """File descriptors that are readable when something has happened beside what `due_s` says."""
        ...

    def hear(self, now_s: float) -> Iterable[Heard]:
        """Yield messages and arrivals since the last call; requests made meanwhile take effect at once."""
        ...

    def due_s(self, now_s: float) -> float:
        """Send waiting packets; returns the time by which `hear` has to be called."""
        ...

    def send(self, device: str, task: Task, now_s: float) -> None:
        """Give a device its task, for the first time or again; it replaces any other.

        Raises:
            JobError, WireError: the task holds a value that cannot be sent.
            LinkError: the task is larger than the broker accepts.
        """
        ...

    def withdraw(self, device: str) -> None:
        """Withdraw a device's task, if any, and stop fetching from it."""
        ...

    def be_patient(self, device: str) -> None:
        """Resend a device's task rarely, as it is working on it."""
        ...

    def right_of(self, device: str) -> SiteRight | None:
        """Return the site right in a device's certificate, or None without one."""
        ...

    def fetch(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        """Fetch these blobs from a device, as soon as it is its turn, and no others from it; `Arrived` follows."""
        ...

    def pace(self, updates: int, waiting_bytes: int, most_bytes: float) -> None:
        """Note how many updates that came in turn wait for the coordinator here, with their size.

        `most_bytes` of these, and of those that devices send, are here at a time, and at least two updates.
        """
        ...

    def held_s(self, device: str) -> float:
        """Seconds for which a device had to wait for its turn; infinite while it does."""
        ...

    def give_way(self, device: str, now_s: float) -> None:
        """End a device's turn, where others wait for theirs."""
        ...

    @property
    def in_use(self) -> set[str]:
        """Blobs of updates that devices themselves have written to the store."""
        ...

    @property
    def absence(self) -> Absence:
        """Times in which no device could be reached."""
        ...

    def answer(self, device: str, ack: wire.Ack) -> None:
        """Send a device the result of its update."""
        ...

    def release(self, device: str, kind: wire.Kind, release: wire.Release | None) -> None:
        """Send a release to a device and let it fetch the blob, or clear its release if `release` is None.

        Raises:
            JobError, WireError: it cannot be sent, or devices of this kind run no releases.
            LinkError: it is larger than the broker accepts.
        """
        ...

    def renew(self, epoch: int) -> None:
        """Go on as another start of the coordinator: devices take its tasks for rounds that they have counted."""
        ...

    def tell(self, job: Shown) -> None:
        """Publish the state of the job's round, for observers."""
        ...

    def tended(self) -> AbstractContextManager[None]:
        """While its body computes for long: keep up whatever ties the devices to this coordinator.

        The body must not use the executor.
        """
        ...

    def close(self) -> None:
        """Announce the end; open tasks stay open."""
        ...


class WithoutReleases:
    """Part of an `Executor` whose devices have no agent that could install anything, and no disk of their own."""

    absence = Absence()  # none: they are always within reach

    def fds(self) -> Sequence[int]:
        """None: all that happens is known beforehand."""
        return ()

    def pace(self, updates: int, waiting_bytes: int, most_bytes: float) -> None:
        """Do nothing: an update is on the coordinator's disk as soon as it is made."""

    def right_of(self, device: str) -> SiteRight | None:
        """Return None: these devices have no certificates."""
        return None

    def held_s(self, device: str) -> float:
        """0: none waits for its turn."""
        return 0.0

    def give_way(self, device: str, now_s: float) -> None:
        """Do nothing: none waits."""

    def release(self, device: str, kind: wire.Kind, release: wire.Release | None) -> None:
        """Refuse it.

        Raises:
            JobError: always.
        """
        raise JobError(
            "devices that are simulated in this process run no releases: `fedquilt fleet JOB --link broker "
            "--agents-only` starts agents that do"
        )


class OverLink:
    """Executor for devices at the other end of a broker.

    A task is a retained message, sent again while it goes unclaimed; blobs go in chunks (`fedquilt.blobs.transfer`).

    Args:
        depot: store of the blobs that devices send and fetch.
        epoch: number of this start of the coordinator.
        identity: with which it is signed, and takes messages of boards alone that have proved to be who they say.
        where: places beside the broker where blobs come and go.

    Raises:
        JobError: boards would not take the identity for the coordinator's, or a place cannot be used.
    """

    def __init__(
        self,
        link: Link,
        fleet: str,
        depot: Depot,
        epoch: int,
        identity: Identity | None = None,
        where: Where = Where(),
    ) -> None:
        self.garbage, self.absence, self._silence = Garbage(), Absence(), Silence()
        self._returned: list[str] = []  # silent devices heard by the latest message
        self._topics = wire.Topics(fleet)
        self._gate = Gate(link, self._topics)
        self._signed = None if identity is None else FleetLink(self._gate, identity, fleet)
        self._link: Link = self._signed or self._gate
        self._epoch, self._session = epoch, 0
        self._issues = Issues(self._link, self._topics)
        self._granted: dict[str, tuple[str, int]] = {}  # device -> job and round of its latest task
        may_have = self._issues.may_have
        self.places = Places(where, depot, may_have, identity, fleet)
        self._transfers = Transfers(
            self._link, depot, self._topics, "dn", may_have, carriers=self.places, apart_bytes=LARGE_BYTES
        )
        self._fetching: dict[str, set[str]] = {}  # device -> sha256 of the blobs still expected from it

    def fds(self) -> Sequence[int]:
        """File descriptors that are readable when a transfer beside the broker has ended."""
        return self._transfers.fds()

    def hear(self, now_s: float) -> Iterator[Heard]:
        """Yield messages and changes of devices since the last call, and None after each new session."""
        self._gate.now_s = now_s
        self.absence.record_connection(self._link.connected, now_s)
        if self._link.session != self._session:
            self._session = self._link.session
            self._link.subscribe(self._topics.for_coordinator())
            self.renew(self._epoch)
            yield None
        for message in self._link.receive():
            said = self._decode_message(message, now_s)
            while self._returned:
                yield Returned(self._returned.pop())
            if said is not None:
                yield said
        for device in self._request_presences(now_s):
            yield Silent(device)
        for device in self._gate.take_flooded():
            self._silence.forget(device)  # it may send, and is not read
            yield Flooded(device)
        for sentence in self.garbage.due(now_s):
            log.warning("%s", sentence)
        self._transfers.step(now_s)
        while done := self._transfers.take_done():
            for device, sha256, error in done:
                yield from self._brought(device, sha256, error)
        for device, seconds in self._transfers.take_strain().items():
            self._gate.took(device, seconds)
        for device in self._issues.due(now_s):
            yield Appeared(device)

    def due_s(self, now_s: float) -> float:
        """Send due chunks. Return the time at which `hear` has to be called next."""
        return min(self._transfers.step(now_s), self._issues.next_s(), self._gate.next_s(), self._silence.next_s())

    def send(self, device: str, task: Task, now_s: float) -> None:
        """Publish the task as a retained message.

        Raises:
            JobError, WireError, LinkError: as of `Executor`.
        """
        try:
            payload = wire.encode(msgspec.structs.replace(task, epoch=self._epoch))
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"a task of {task.method} cannot be sent: {error}") from None
        if self._granted.get(device) != (task.job, task.round):
            self._granted[device] = (task.job, task.round)
            self._gate.took(device, -ROUND_S)
        self._issues.send(device, task, payload, now_s)

    def withdraw(self, device: str) -> None:
        """Clear the retained task and cancel its transfers."""
        self.fetch(device, ())
        self._issues.withdraw(device)

    def be_patient(self, device: str) -> None:
        """Lengthen the interval at which the task is repeated."""
        self._issues.be_patient(device)

    def right_of(self, device: str) -> SiteRight | None:
        """See `Executor`."""
        return None if self._signed is None else self._signed.right_of(device)

    def fetch(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        """Request the blobs; transfers of others from this device are cancelled."""
        wanted = {ref.sha256: ref for ref in refs}
        for sha256 in self._fetching.pop(device, set()) - wanted.keys():
            self._transfers.cancel(device, sha256)
        if wanted:
            self._fetching[device] = set(wanted)
        for ref in wanted.values():
            self._transfers.want(device, ref, in_turn=in_turn)

    def pace(self, updates: int, waiting_bytes: int, most_bytes: float) -> None:
        """Let whose turn it is send, now or at the next step."""
        self._transfers.queue.pace(updates, waiting_bytes, most_bytes)

    def held_s(self, device: str) -> float:
        """See `Executor`."""
        return self._transfers.queue.held_s(device)

    def give_way(self, device: str, now_s: float) -> None:
        """Let other devices transfer first, and keep the bytes received so far."""
        self._transfers.give_way(device, now_s)

    @property
    def in_use(self) -> set[str]:
        """Empty set, as devices do not write to the store themselves."""
        return set()

    def answer(self, device: str, ack: wire.Ack) -> None:
        """Publish the acknowledgement to the device."""
        self._publish(self._topics.device(device, "dn", "ack"), msgspec.structs.replace(ack, epoch=self._epoch))

    def release(self, device: str, kind: wire.Kind, release: wire.Release | None) -> None:
        """Publish the release as a retained message, or clear it."""
        payload = b"" if release is None else wire.encode(release)
        if release is not None and self._issues.release(device, release):
            self._gate.took(device, -ROUND_S)
        elif release is None:
            self._issues.recall(device, kind)
        self._link.publish(self._topics.device(device, "dn", kind), payload, retain=True)

    def renew(self, epoch: int) -> None:
        """Publish that the coordinator is online, with the epoch of all further tasks."""
        self._epoch = epoch
        self._publish(self._topics.coord, self._presence_message, retain=True)

    def tell(self, job: Shown) -> None:
        """Publish the job's round as a retained message, and delete that message at the job's end."""
        state, topic = job.rounds, self._topics.job(job.id)
        over = state.phase in ("done", "failed", "stopped")
        message = wire.RoundState(
            job=job.id,
            method=job.job.method,
            round=state.round,
            rounds=job.job.rounds,
            phase="selecting" if state.phase == "new" else state.phase,
            asked=tuple(sorted(state.asked)[:200]),
            answered=tuple(sorted(state.answered)[:200]),
            deadline_s=state.deadline_s,
            note=shorten_error(state.reason),
        )
        self._publish(topic, message, retain=not over)
        if over:
            self._link.publish(topic, b"", retain=True)

    def tended(self) -> AbstractContextManager[None]:
        """Have the link keep its connection alive."""
        return self._link.tended()

    def close(self) -> None:
        """Publish that the coordinator is offline, and close the link."""
        self._publish(self._topics.coord, wire.CoordState(online=False, epoch=self._epoch), retain=True)
        self.places.close()
        self._link.close()

    def _decode_message(self, message: Message, now_s: float) -> Said | None:
        """Decode a message and note the contact. Return None if it is invalid, or handled already."""
        try:
            route = wire.route(message.topic)
            if route.direction != "up":
                return None
            if route.leaf == "hello":  # a signed link would have taken it
                raise WireError("it is signed, and this coordinator is not: give it --ca, --cert and --key")
            if route.leaf in ("presence", "profile") and not message.payload:
                return None  # cleared retained message: the device was removed from the broker
            if self._transfers.handle(route, message.payload, now_s) or route.kind is None:
                unasked = self._transfers.take_unasked()
                for device in unasked:
                    self._gate.weigh(device, 0)
                if not unasked:  # else anybody may have sent it: a chunk is not signed
                    self._record_contact(route.device)
                return None
            told = claims.replace_unprintable(wire.decode(message.payload, route.kind), message.payload)
            if (named := getattr(told, "device", route.device)) != route.device:
                raise WireError(f"it names another device, {named}")
            if isinstance(told, Profile):
                self.places.said(told)
            if isinstance(told, wire.Presence) and not told.online:
                self._silence.forget(route.device)
            elif not message.retained:
                self._record_contact(route.device)
            elif isinstance(told, wire.Presence):
                self._silence.expect_contact(route.device)
            return route.device, told
        except WireError as error:
            if said := self.garbage.take(message.topic, error, message.retained, now_s):
                log.warning("%s", said)
            return None

    def _remove_device(self, device: str) -> None:
        """Withdraw a device's task and delete its retained messages on the broker."""
        self.withdraw(device)
        self._silence.forget(device)
        for kind in KINDS:
            self.release(device, kind, None)
        for leaf in ("presence", "profile"):
            self._link.publish(self._topics.device(device, "up", leaf), b"", retain=True)

    def _record_contact(self, device: str) -> None:
        """Record that a message of a device has just arrived, and whether the device was silent before."""
        if self._silence.record_contact(device):
            self._returned.append(device)

    def _request_presences(self, now_s: float) -> list[str]:
        """Request the presence of quiet devices. Return the devices that have become silent."""
        quiet = self._silence.step(now_s, self.absence.can_reach_devices(now_s))
        for device in quiet.ask:
            self._request_presence(device)
        return quiet.silent

    def _request_presence(self, device: str) -> None:
        """Request a device's presence, by a message that the broker does not keep for later."""
        self._publish(self._topics.device(device, "dn", "presence"), self._presence_message, reliable=False)

    def _brought(self, device: str, sha256: str, error: str | None) -> Iterator[Arrived]:
        missing = self._fetching.get(device)
        if missing is None or sha256 not in missing:
            return
        if error is not None:
            ids = about(device=device)
            log.warning("%s's update could not be fetched (%s); it will offer it again", device, error, extra=ids)
            self.fetch(device, ())
            yield Arrived(device, error)
            return
        missing.remove(sha256)
        if not missing:
            del self._fetching[device]
            yield Arrived(device)

    @property
    def _presence_message(self) -> wire.CoordState:
        return wire.CoordState(online=True, epoch=self._epoch)

    def _publish(self, topic: str, message: Wired, retain: bool = False, reliable: bool = True) -> None:
        self._link.publish(topic, wire.encode(message), retain=retain, reliable=reliable)

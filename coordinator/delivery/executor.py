"""Executors, which connect jobs to devices: they send tasks and receive messages.

`LinkExecutor` uses a broker (MQTT, or one in memory). `fedquilt.tools.simulation` has simulated devices on virtual
time, whose work runs in this process or in other processes. Rounds, deadlines and the event log are the same for
both.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, get_args

import msgspec

from fedquilt import wire
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.coordinator.background_worker import LARGE_BYTES
from fedquilt.coordinator.delivery.blob_server import BlobLocationProvider, BlobLocationSettings
from fedquilt.coordinator.delivery.rate_limiter import ROUND_S, RateLimitedLink
from fedquilt.coordinator.fleet.registry import BrokerOutage, SilenceDetector
from fedquilt.coordinator.rounds import responses
from fedquilt.coordinator.rounds.events import ENDED_PHASES
from fedquilt.coordinator.rounds.job_state import JobView
from fedquilt.coordinator.updates import validation
from fedquilt.core import (
    MAX_COUNTED_ATTEMPTS,
    RESEND,
    BlobRef,
    JobError,
    SiteRight,
    Task,
    WireError,
    WireMessage,
    shorten_error,
)
from fedquilt.host.logs import log_ids
from fedquilt.security.authenticated_link import AuthenticatedFleetLink
from fedquilt.security.handshake import LinkIdentity
from fedquilt.transport.link import Link, MalformedMessages, Message

KINDS: Final[tuple[wire.ReleaseKind, ...]] = get_args(wire.ReleaseKind)


@dataclass
class DispatchedTask:
    sent_s: float  # time at which the task was last due
    sends: int  # to this device, in a row
    blobs: set[str]

    @property
    def due_s(self) -> float:
        return self.sent_s + RESEND.delay_s(self.sends - 1)


class TaskDispatcher:
    def __init__(self, link: Link, topics: wire.Topics) -> None:
        self._link, self._topics = link, topics
        self._open_tasks: dict[str, DispatchedTask] = {}
        # heap of (time, device): when an open task may be due, or earlier
        self._due_times: list[tuple[float, str]] = []
        self._scheduled_s: dict[str, float] = {}  # device -> time of the valid heap entry
        self._releases: dict[tuple[str, wire.ReleaseKind], wire.DesiredRelease] = {}  # by device and kind

    def __contains__(self, device: str) -> bool:
        return device in self._open_tasks

    def send_task(self, device: str, task: Task, payload: bytes, now_s: float) -> None:
        sends = self._open_tasks[device].sends if device in self._open_tasks else 0
        blobs = {ref.sha256 for ref in task.bundles.values()}
        self._open_tasks[device] = dispatched = DispatchedTask(now_s, sends + 1, blobs)
        self._schedule_repetition(device, dispatched.due_s)
        self._link.publish(self._topics.device_topic(device, "dn", "task"), payload, retain=True)

    def cancel_task(self, device: str) -> None:
        self._open_tasks.pop(device, None)
        self._link.publish(self._topics.device_topic(device, "dn", "task"), b"", retain=True)

    def slow_resends(self, device: str) -> None:
        if device in self._open_tasks:
            self._open_tasks[device].sends = MAX_COUNTED_ATTEMPTS

    def take_due_devices(self, now_s: float) -> list[str]:
        """Return the devices whose task must be sent again now, and schedule the next repetition of each."""
        devices = []
        while self.next_repetition_s() <= now_s:
            devices.append(heapq.heappop(self._due_times)[1])
            del self._scheduled_s[devices[-1]]
        for device in devices:
            self._open_tasks[device].sent_s = now_s
            self._schedule_repetition(device, self._open_tasks[device].due_s)
        return devices

    def next_repetition_s(self) -> float:
        """Return the time at which `take_due_devices` next returns a device, or infinity without open tasks."""
        while self._due_times:
            due_s, device = self._due_times[0]
            is_current, dispatched = self._scheduled_s.get(device) == due_s, self._open_tasks.get(device)
            if is_current and dispatched is not None and dispatched.due_s <= due_s:
                return due_s
            heapq.heappop(self._due_times)
            if is_current:
                del self._scheduled_s[device]
                if dispatched is not None:
                    self._schedule_repetition(device, dispatched.due_s)
        return math.inf

    def _schedule_repetition(self, device: str, due_s: float) -> None:
        if due_s < self._scheduled_s.get(device, math.inf):
            self._scheduled_s[device] = due_s
            heapq.heappush(self._due_times, (due_s, device))

    def record_release(self, device: str, release: wire.DesiredRelease) -> bool:
        """Record a device's release and permit the download of its blob. Return whether it has changed."""
        previous = self._releases.get((device, release.kind))
        self._releases[device, release.kind] = release
        return previous != release

    def forget_release(self, device: str, kind: wire.ReleaseKind) -> None:
        self._releases.pop((device, kind), None)

    def may_fetch_blob(self, device: str, sha256: str) -> bool:
        if device in self._open_tasks and sha256 in self._open_tasks[device].blobs:
            return True
        releases = (self._releases.get((device, kind)) for kind in KINDS)
        return any(
            release is not None and release.blob is not None and release.blob.sha256 == sha256 for release in releases
        )


log = logging.getLogger("fedquilt.coordinator")

DeviceMessage: TypeAlias = tuple[str, WireMessage]  # a device, and its presence, profile, telemetry, claim or update
ExecutorInput: TypeAlias = DeviceMessage | responses.DeviceChange | responses.UpdateReceived | None
"""None for a new session: messages sent before may be lost."""


class Executor(Protocol):
    """Connection to devices. No method waits.

    `send_pending` returns the time of the next call of `receive_inputs`.
    """

    def fds(self) -> Sequence[int]:
        """Return file descriptors that become readable when `receive_inputs` has input."""

    def receive_inputs(self, now_s: float) -> Iterable[ExecutorInput]:
        """Yield messages and results since the last call. Other methods may be called in the iteration."""

    def send_pending(self, now_s: float) -> float:
        """Send pending packets. Return the time by which `receive_inputs` must be called."""

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        """Send a device its task, for the first time or again. The task replaces any earlier task."""

    def cancel_task(self, device: str) -> None: ...

    def slow_resends(self, device: str) -> None:
        """Resend a device's task less often, since the device is working on the task."""

    def site_right(self, device: str) -> SiteRight | None:
        """Return the site right in a device's certificate, or None without a certificate or right."""

    def fetch_blobs(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        """Fetch blobs of a device, and cancel the device's other transfers.

        `receive_inputs` later yields `UpdateReceived`. With `in_turn`, earlier transfers of other devices come first.
        """

    def set_backlog(self, updates: int, waiting_bytes: int, max_bytes: float) -> None:
        """Set the number and bytes of the updates that are received but not processed yet.

        Further transfers start only if all these updates and those in transfer fit in `max_bytes`, or are two at most.
        """

    def transfer_wait_s(self, device: str) -> float:
        """Return how long a device waited for its transfer turn, or infinity while waiting."""

    def yield_transfer_turn(self, device: str, now_s: float) -> None:
        """End a device's transfer turn, if other devices wait for a turn."""

    @property
    def unacknowledged_update_blobs(self) -> set[str]:
        """Blobs of unacknowledged updates of simulated devices. Garbage collection must keep these blobs."""

    @property
    def outage(self) -> BrokerOutage: ...

    def send_ack(self, device: str, ack: wire.Ack) -> None: ...

    def send_release(self, device: str, kind: wire.ReleaseKind, release: wire.DesiredRelease | None) -> None:
        """Send a device a release and permit the download of the blob. None clears the device's release."""

    def set_epoch(self, epoch: int) -> None:
        """Set a higher epoch for further tasks, so that devices accept tasks of completed rounds again."""

    def publish_state(self, job: JobView) -> None: ...

    def keep_alive(self) -> AbstractContextManager[None]:
        """Keep the connection alive during a long computation, which must not use the executor."""

    def close(self) -> None: ...


class LinkExecutor:
    """Executor for devices that are connected through a broker.

    A task is a retained message, which is repeated until the device claims the task. Blobs are sent in chunks
    (`fedquilt.blobs.transfers`), or at the locations of `location_settings`. With an identity, messages are signed, and
    only those of authenticated devices are accepted.
    """

    def __init__(
        self,
        link: Link,
        fleet: str,
        blob_store: BlobStore,
        epoch: int,
        identity: LinkIdentity | None = None,
        location_settings: BlobLocationSettings = BlobLocationSettings(),
    ) -> None:
        self.malformed_messages = MalformedMessages()
        self.outage = BrokerOutage()
        self._silence_detector = SilenceDetector()
        self._returned_devices: list[str] = []  # silent devices that have sent a message
        self._topics = wire.Topics(fleet)
        self._rate_limiter = RateLimitedLink(link, self._topics)
        self._authenticated_link = (
            None if identity is None else AuthenticatedFleetLink(self._rate_limiter, identity, fleet)
        )
        self._link: Link = self._authenticated_link or self._rate_limiter
        self._epoch, self._session = epoch, 0
        self._dispatcher = TaskDispatcher(self._link, self._topics)
        self._credited_rounds: dict[str, tuple[str, int]] = {}  # device -> job and round of its latest task
        may_fetch = self._dispatcher.may_fetch_blob
        self.blob_locations = BlobLocationProvider(location_settings, blob_store, may_fetch, identity, fleet)
        self._transfers = Transfers(
            self._link,
            blob_store,
            self._topics,
            "dn",
            may_fetch,
            backend=self.blob_locations,
            background_bytes=LARGE_BYTES,
        )
        self._missing_blobs: dict[str, set[str]] = {}  # device -> sha256 of the blobs still expected

    def fds(self) -> Sequence[int]:
        return self._transfers.fds()

    def receive_inputs(self, now_s: float) -> Iterator[ExecutorInput]:
        self._rate_limiter.now_s = now_s
        self.outage.record_connection(self._link.connected, now_s)
        if self._link.session != self._session:
            self._session = self._link.session
            self._link.subscribe(self._topics.coordinator_filters())
            self.set_epoch(self._epoch)
            yield None
        for message in self._link.receive():
            decoded = self._handle_or_decode_message(message, now_s)
            while self._returned_devices:
                yield responses.DeviceChange(self._returned_devices.pop(), "returned")
            if decoded is not None:
                yield decoded
        for device in self._request_presences(now_s):
            yield responses.DeviceChange(device, "silent")
        for device in self._rate_limiter.take_blocked_devices():
            self._silence_detector.forget(device)  # messages of a blocked device are not read
            yield responses.DeviceChange(device, "flooding")
        for sentence in self.malformed_messages.take_due_lines(now_s):
            log.warning("%s", sentence)
        self._transfers.step(now_s)
        while finished := self._transfers.take_finished():
            for device, sha256, error in finished:
                yield from self._handle_fetched_blob(device, sha256, error)
        for device, seconds in self._transfers.take_charges().items():
            self._rate_limiter.charge_time(device, seconds)
        for device in self._dispatcher.take_due_devices(now_s):
            yield responses.DeviceChange(device, "online")

    def send_pending(self, now_s: float) -> float:
        return min(
            self._transfers.step(now_s),
            self._dispatcher.next_repetition_s(),
            self._rate_limiter.next_s(),
            self._silence_detector.next_step_s(),
        )

    def send_task(self, device: str, task: Task, now_s: float) -> None:
        try:
            payload = wire.encode(msgspec.structs.replace(task, epoch=self._epoch))
        except (TypeError, ValueError, OverflowError) as error:
            raise JobError(f"a task of {task.method} cannot be encoded: {error}") from None
        if self._credited_rounds.get(device) != (task.job, task.round):
            self._credited_rounds[device] = (task.job, task.round)
            self._rate_limiter.charge_time(device, -ROUND_S)
        self._dispatcher.send_task(device, task, payload, now_s)

    def cancel_task(self, device: str) -> None:
        self.fetch_blobs(device, ())
        self._dispatcher.cancel_task(device)

    def slow_resends(self, device: str) -> None:
        self._dispatcher.slow_resends(device)

    def site_right(self, device: str) -> SiteRight | None:
        return None if self._authenticated_link is None else self._authenticated_link.site_right(device)

    def fetch_blobs(self, device: str, refs: Iterable[BlobRef], *, in_turn: bool = False) -> None:
        refs_by_hash = {ref.sha256: ref for ref in refs}
        for sha256 in self._missing_blobs.pop(device, set()) - refs_by_hash.keys():
            self._transfers.cancel(device, sha256)
        if refs_by_hash:
            self._missing_blobs[device] = set(refs_by_hash)
        for ref in refs_by_hash.values():
            self._transfers.request_blob(device, ref, use_queue=in_turn)

    def set_backlog(self, updates: int, waiting_bytes: int, max_bytes: float) -> None:
        self._transfers.queue.set_unprocessed(updates, waiting_bytes, max_bytes)

    def transfer_wait_s(self, device: str) -> float:
        return self._transfers.queue.waiting_s(device)

    def yield_transfer_turn(self, device: str, now_s: float) -> None:
        # the bytes received so far are kept
        self._transfers.yield_turn(device, now_s)

    @property
    def unacknowledged_update_blobs(self) -> set[str]:
        # devices do not write to the store themselves
        return set()

    def send_ack(self, device: str, ack: wire.Ack) -> None:
        self._publish(self._topics.device_topic(device, "dn", "ack"), msgspec.structs.replace(ack, epoch=self._epoch))

    def send_release(self, device: str, kind: wire.ReleaseKind, release: wire.DesiredRelease | None) -> None:
        payload = b"" if release is None else wire.encode(release)
        if release is not None and self._dispatcher.record_release(device, release):
            self._rate_limiter.charge_time(device, -ROUND_S)
        elif release is None:
            self._dispatcher.forget_release(device, kind)
        self._link.publish(self._topics.device_topic(device, "dn", kind), payload, retain=True)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._publish(self._topics.coord, self._presence_message, retain=True)

    def publish_state(self, job: JobView) -> None:
        # the retained message is deleted at the job's end
        state, topic = job.job_state, self._topics.round_topic(job.id)
        has_ended = state.phase in ENDED_PHASES
        message = wire.RoundState(
            job=job.id,
            method=job.job.method,
            round=state.round,
            rounds=job.job.rounds,
            phase="selecting" if state.phase == "new" else state.phase,
            cohort=tuple(sorted(state.pending_devices)[:200]),
            submitted_by=tuple(sorted(state.accepted_updates)[:200]),
            deadline_s=state.deadline_s,
            note=shorten_error(state.reason),
        )
        self._publish(topic, message, retain=not has_ended)
        if has_ended:
            self._link.publish(topic, b"", retain=True)

    def keep_alive(self) -> AbstractContextManager[None]:
        return self._link.keep_alive()

    def close(self) -> None:
        self._publish(self._topics.coord, wire.CoordState(online=False, epoch=self._epoch), retain=True)
        self.blob_locations.close()
        self._link.close()

    def _handle_or_decode_message(self, message: Message, now_s: float) -> DeviceMessage | None:
        try:
            route = wire.parse_topic(message.topic)
            if route.direction != "up":
                return None
            if route.subtopic == "hello":  # only signed links process it
                raise WireError(
                    "signed message, but this coordinator has no certificate: start it with --ca, --cert and --key"
                )
            if route.subtopic in ("presence", "profile") and not message.payload:
                return None  # cleared retained message: the device was removed from the broker
            if self._transfers.handle_message(route, message.payload, now_s) or route.message_type is None:
                senders = self._transfers.take_senders_of_unrequested_chunks()
                for device in senders:
                    self._rate_limiter.admit_message(device, 0)
                if not senders:  # chunks are not signed, so the sender is unknown
                    self._record_contact(route.device)
                return None
            decoded = validation.replace_unprintable(wire.decode(message.payload, route.message_type), message.payload)
            if (claimed_device := getattr(decoded, "device", route.device)) != route.device:
                raise WireError(f"the message names another device, {claimed_device}")
            if isinstance(decoded, wire.Presence) and not decoded.online:
                self._silence_detector.forget(route.device)
            elif not message.retained:
                self._record_contact(route.device)
            elif isinstance(decoded, wire.Presence):
                self._silence_detector.expect_contact(route.device)
            return route.device, decoded
        except WireError as error:
            if line := self.malformed_messages.count_message(message.topic, error, message.retained, now_s):
                log.warning("%s", line)
            return None

    def _remove_device(self, device: str) -> None:
        self.cancel_task(device)
        self._silence_detector.forget(device)
        for kind in KINDS:
            self.send_release(device, kind, None)
        for topic in self._topics.retained_of_device(device):
            self._link.publish(topic, b"", retain=True)

    def _record_contact(self, device: str) -> None:
        if self._silence_detector.record_contact(device):
            self._returned_devices.append(device)

    def _request_presences(self, now_s: float) -> list[str]:
        """Request the presence of devices without recent messages. Return the devices that are now silent."""
        change = self._silence_detector.step(now_s, self.outage.can_reach_devices(now_s))
        for device in change.devices_to_request:
            self._request_presence(device)
        return change.silent

    def _request_presence(self, device: str) -> None:
        # not reliable, so that the broker does not queue the request for an offline device
        self._publish(self._topics.device_topic(device, "dn", "presence"), self._presence_message, reliable=False)

    def _handle_fetched_blob(self, device: str, sha256: str, error: str | None) -> Iterator[responses.UpdateReceived]:
        missing = self._missing_blobs.get(device)
        if missing is None or sha256 not in missing:
            return
        if error is not None:
            ids = log_ids(device=device)
            log.warning(
                "update of %s could not be fetched (%s): the device will submit it again", device, error, extra=ids
            )
            self.fetch_blobs(device, ())
            yield responses.UpdateReceived(device, error)
            return
        missing.remove(sha256)
        if not missing:
            del self._missing_blobs[device]
            yield responses.UpdateReceived(device)

    @property
    def _presence_message(self) -> wire.CoordState:
        return wire.CoordState(online=True, epoch=self._epoch)

    def _publish(self, topic: str, message: WireMessage, retain: bool = False, reliable: bool = True) -> None:
        self._link.publish(topic, wire.encode(message), retain=retain, reliable=reliable)

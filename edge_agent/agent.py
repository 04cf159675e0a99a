"""Main loop of the agent: connects link, state machine, outbox, worker and board."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fedquilt import wire
from fedquilt.blobs.direct_transfers import TransferBackend
from fedquilt.blobs.shared_store import SharedBlobStore
from fedquilt.blobs.store import MAX_SMALL_BYTES
from fedquilt.blobs.transfers import Transfers
from fedquilt.core import BlobRef, Device, LinkError, Retry, StoreError, Task, Update, WireError, WireMessage
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.agent_state import SPARE_BYTES, AgentState
from fedquilt.edge_agent.engines import READ_BY_TASK
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.releases.manager import ReleaseManager
from fedquilt.edge_agent.releases.release_kind import ReleaseKind
from fedquilt.edge_agent.runner_status import RunnerStatusReader
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.edge_agent.state_machine import BlobFetched, SessionStarted, TaskCancelled, TaskReceived, UpdateAcked
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.edge_agent.task.worker import TaskWorker
from fedquilt.edge_agent.task_runner import TaskRunner
from fedquilt.host.disk import REAL, Disk
from fedquilt.host.logs import log_ids
from fedquilt.transport.link import Link, MalformedMessages, Message

log = logging.getLogger("fedquilt.agent")

PROGRESS_S: Final = 2.0  # shortest interval between progress messages
DISK_FULL_TELEMETRY_S: Final = 10.0  # longest interval between telemetry messages while the disk is full
MAX_DISK_FULL_S: Final = (
    60.0  # longest time for which a disk counts as full, because free bytes do not show every quota
)
REPUBLISH: Final = Retry(5.0, 600.0)  # presence and profile: a broker may lose retained messages that it acknowledged


class Agent:
    """Agent of one device, an `Endpoint` of its link.

    Args:
        boot: Id of this start of the agent, different at each start.
        durable: Whether to sync each step to the disk. See `AgentState`.
        shared: Store of small blobs shared with other devices of this process.
        disk: Disk of the home folder.
        clock: Function that returns the device's time in seconds since 1970, or None if the device has no clock.
        kinds: Kinds of release by name: "model", "agent", "settings".
        runner: Reader of the model runner's status, or None if no runner is watched.
        transfer_backends: Transfers besides the link, or None without certificates.
    """

    finished = False
    last_telemetry: wire.Telemetry | None

    def __init__(
        self,
        link: Link,
        settings: AgentSettings,
        board: Device,
        worker: TaskWorker,
        boot: str | None = None,
        *,
        durable: bool = True,
        shared: SharedBlobStore | None = None,
        disk: Disk = REAL,
        clock: Callable[[], float | None] = time.time,
        kinds: Mapping[str, ReleaseKind] = {},
        runner: RunnerStatusReader | None = None,
        transfer_backends: TransferBackend | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self.device, self.settings = settings.device, settings
        self.storage = AgentState(Path(settings.home), durable=durable, shared=shared, disk=disk)
        self._inline_bytes = 0 if durable else MAX_SMALL_BYTES
        self.malformed_messages = MalformedMessages()
        self._link, self._board, self._worker = link, board, worker
        self._boot = boot or os.urandom(8).hex()
        self._presence_count = 0  # number of published presence messages
        self._session = 0
        self._topics = wire.Topics(settings.fleet)
        blob_store = self.storage.blob_store
        self._transfers = Transfers(link, blob_store, self._topics, "up", self._may_upload, backend=transfer_backends)
        capabilities = messages.capabilities_from_settings(settings, board.memory_bytes)
        stored_updates, counted_rounds = self.storage.load_outbox()
        outbox = {
            key: state_machine.OutboxUpdate(update, private, resend_s=-math.inf)
            for key, (update, private) in stored_updates.items()
        }
        self.task_runner = TaskRunner(
            self.device,
            state_machine.DeviceState(
                capabilities,
                outbox=outbox,
                counted_rounds=counted_rounds,
                learned_models=self.storage.load_learned_costs(),
            ),
            board,
            worker,
            settings.governor,
            self,
        )
        self.releases = ReleaseManager(self.storage, kinds, self.task_runner, self, clock)
        if durable and (
            shortage := memory_budget.describe_engine_shortage(capabilities.budget_bytes, capabilities.engines)
        ):
            log.warning("%s: %s", self.device, shortage)
        self._republish_s = math.inf  # next time of presence and profile
        self._republish_count = 0  # in this session
        self._published_capabilities, self.last_telemetry = capabilities, None
        self._unsupported_reason = kinds["agent"].unsupported_reason() if "agent" in kinds else ""
        self._profile = messages.profile_message(self.device, board, capabilities, self._unsupported_reason)
        self._progress_s = self._telemetry_s = -math.inf
        self._free_bytes_at_failure: int | None = None  # free bytes when the disk was last too full for a task
        self._disk_full_s: float | None = None  # time of the first telemetry about the full disk

    @property
    def is_connected(self) -> bool:
        return self._link.connected

    def fds(self) -> Sequence[int]:
        return [*self._worker.fds(), *self.releases.fds(), *self._transfers.fds()]

    def step(self, now_s: float) -> float:
        if self._link.session != self._session:
            self._start_session(now_s)
        for message in self._link.receive():
            self._handle_message(message, now_s)
        for line in self.malformed_messages.take_due_lines(now_s):
            log.warning("%s", line)
        self._transfers.step(now_s)
        for _, sha256, error in self._transfers.take_finished():
            self._handle_fetched(sha256, error, now_s)
        self.task_runner.step(now_s)
        release_s = self.releases.step(now_s)
        if now_s >= self._republish_s:
            self._publish_presence_and_profile(now_s)
        self._publish_readings(now_s)
        due_s = self._transfers.step(now_s)  # a second time, for blobs requested meanwhile
        return min(due_s, self.task_runner.next_step_s(now_s), release_s, self._telemetry_due_s(), self._republish_s)

    def apply_settings(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.apply_capabilities(messages.capabilities_from_settings(settings, self._board.memory_bytes))

    def apply_capabilities(self, capabilities: state_machine.Capabilities) -> None:
        self.task_runner.apply_capabilities(capabilities, self.settings.governor)
        self._published_capabilities = self.task_runner.state.capabilities
        self._profile = messages.profile_message(
            self.device, self._board, self._published_capabilities, self._unsupported_reason
        )
        if self._link.connected:  # else published with the next session
            self.publish_message("profile", self._profile, retain=True)

    def shut_down(self) -> None:
        """Stop the current task, publish the offline presence and close the link. The outbox is kept."""
        self.task_runner.stop()
        self.releases.stop()
        self._publish_presence(online=False)
        self._link.close()

    # -- messages --

    def _start_session(self, now_s: float) -> None:
        self._session = self._link.session
        self._link.subscribe(self._topics.device_filters(self.device))
        self._republish_state(now_s)

    def _republish_state(self, now_s: float) -> None:
        # The broker may have lost everything published before.
        self._republish_count, self._telemetry_s = 0, -math.inf
        self._publish_presence_and_profile(now_s)
        self.releases.republish_progress(now_s)
        self.task_runner.handle_event(SessionStarted(), now_s)

    def _handle_message(self, message: Message, now_s: float) -> None:
        try:
            route = wire.parse_topic(message.topic)
            if route.subtopic == "coord":
                if message.payload and wire.decode(message.payload, wire.CoordState).online:
                    self._republish_state(now_s)
            elif route.direction != "dn" or route.device != self.device:
                return
            elif route.subtopic == "presence":
                wire.decode(message.payload, wire.CoordState)
                self._publish_presence(online=True)
            elif route.subtopic == "task":
                self._start_or_cancel_task(message.payload, now_s)
            elif route.subtopic == "ack":
                ack = wire.decode(message.payload, wire.Ack)
                self._apply_ack(
                    UpdateAcked((ack.job, ack.round), ack.accepted, ack.epoch, ack.attempt),
                    f"is not needed: {ack.reason}" if ack.is_late else f"was rejected: {ack.reason}",
                    now_s,
                )
            elif not self.releases.handle_message(route.subtopic, message.payload, now_s):
                self._transfers.handle_message(route, message.payload, now_s)
        except WireError as error:
            if line := self.malformed_messages.count_message(message.topic, error, message.retained, now_s):
                log.warning("%s", line)
        except StoreError as error:
            self.task_runner.fail_task(error, now_s)

    def _start_or_cancel_task(self, payload: bytes, now_s: float) -> None:
        if not payload:
            return self.task_runner.handle_event(TaskCancelled(), now_s)
        task = wire.decode(payload, Task)
        missing = frozenset(ref for ref in task.bundles.values() if not self.storage.blob_store.has_blob(ref))
        return self.task_runner.handle_event(TaskReceived(task, missing), now_s)

    def _apply_ack(self, ack: UpdateAcked, outcome: str, now_s: float) -> None:
        """Record an update's ack and delete its blobs. Do nothing if an accepted ack cannot be recorded.

        `outcome` ends the log message about an update that is not accepted.
        """
        key, accepted = ack.key, ack.accepted
        entry = self.task_runner.state.outbox.get(key)
        if entry is None:
            return
        state, actions = state_machine.advance(self.task_runner.state, ack, now_s)
        if key in state.outbox:
            return  # the ack belongs to an earlier update of this round
        try:
            self.storage.record_ack(key, accepted, state.counted_rounds)
            self.task_runner.state = state
            self._delete_unneeded(entry.update.bundles.values())
        except StoreError as error:
            log.error("ack of %s, round %d, cannot be recorded: %s", key[0], key[1] + 1, error)
            if accepted:
                return
            self.task_runner.state = state  # an update that is partly deleted cannot be submitted again
        if not accepted:
            ids = log_ids(run=key[0], round=key[1])
            log.warning("update of %s, round %d, %s", key[0], key[1] + 1, outcome, extra=ids)
        self.task_runner.carry_out_actions(actions, now_s)

    def _delete_unneeded(self, refs: Iterable[BlobRef]) -> None:
        needed_hashes = self._needed_hashes()
        for ref in refs:
            if ref.sha256 not in needed_hashes:
                self.storage.blob_store.remove_blob(ref.sha256)

    def _may_upload(self, device: str, sha256: str) -> bool:
        entries = self.task_runner.state.outbox.values()
        return any(ref.sha256 == sha256 for entry in entries for ref in entry.update.bundles.values())

    # -- services of the task runner --

    def publish_claim(self, claim: wire.Claim) -> None:
        ids, number = log_ids(run=claim.job, round=claim.round), claim.round + 1
        if claim.code == "cleared":
            log.info("task of %s, round %d, cancelled: %s", claim.job, number, claim.reason, extra=ids)
        elif not claim.accepted:
            self.storage.blob_store.forget_verifications()  # the task may have failed because of a damaged blob
            log.warning(
                "task of %s, round %d, declined (%s): %s", claim.job, number, claim.code, claim.reason, extra=ids
            )
        self.publish_message("claim", claim)
        if claim.code == "full":
            self._disk_full_s, self._telemetry_s = None, -math.inf
            self._free_bytes_at_failure = self.storage.free_bytes()

    def discard_update(self, update: Update) -> None:
        """Delete an update whose round the coordinator requests again, starting from another model state."""
        log.warning(
            "update of %s, round %d, deleted: the coordinator requests the round again, from another model state",
            update.job,
            update.round + 1,
        )
        self.storage.record_ack((update.job, update.round), False, self.task_runner.state.counted_rounds)
        self._delete_unneeded(update.bundles.values())

    def fetch_blobs(self, refs: Sequence[BlobRef]) -> None:
        size = sum(ref.size for ref in refs)
        idle = not (self.task_runner.is_task_running or self.releases.is_checking)
        self.storage.make_room(size, parse_size(self.settings.cache), self._needed_hashes(), is_idle=idle)
        self.storage.require_room(size)
        for ref in refs:
            self._transfers.request_blob(self.device, ref)

    def _handle_fetched(self, sha256: str, error: str | None, now_s: float) -> None:
        self.releases.handle_fetched(sha256, error, now_s)
        if error is not None:
            log.warning("blob %s could not be fetched: %s", sha256[:12], error)
            open_task = self.task_runner.state.open_task
            size = sum({ref.size for ref in open_task.missing_blobs if ref.sha256 == sha256} if open_task else ())
            try:
                self.storage.require_room(size)
            except StoreError as full:
                return self.task_runner.fail_task(full, now_s)
        return self.task_runner.handle_event(BlobFetched(sha256, error), now_s)

    def cancel_fetch(self, sha256: str) -> None:
        """Cancel the transfer of a blob and delete the blob, unless the agent still needs the blob."""
        if sha256 not in self._needed_hashes():
            self._transfers.cancel(self.device, sha256)
            self.storage.blob_store.remove_blob(sha256)

    def build_work_request(self, task: Task, budget_bytes: int, plan_bytes: int) -> WorkRequest:
        blob_store, paths = self.storage.blob_store, {}
        # The task hashes the blobs that it reads, because hashing a large model here would block the agent for seconds.
        verify_in_task = self.storage.durable and task.engine in READ_BY_TASK
        for name, ref in task.bundles.items():
            path = blob_store.verified_path(ref.sha256, caller_hashes=verify_in_task)
            if path is None:
                raise StoreError(
                    f"bundle {name!r} is missing or damaged in {blob_store.folder}: the next attempt fetches the bundle"
                )
            paths[name] = path
        self.storage.touch_blobs(task.bundles.values())
        private = self.storage.find_private_state(task.job, task.last_counted_round)
        return WorkRequest(
            task=task,
            device=self.device,
            budget_bytes=budget_bytes,
            data=self.settings.data,
            bundles=paths,
            private_state=private.path,
            private_sha256=private.sha256,
            lost_reason=private.lost_reason,
            unknown_reason=private.unknown_reason,
            cache_folder=str(self.storage.cache_folder(task.job)),
            output_folder=str(self.storage.empty_output()),
            plan_bytes=plan_bytes,
            verify_bundles=verify_in_task,
            allowed_plugins=self.settings.plugins,
            max_inline_bytes=self._inline_bytes,
        )

    def commit_result(self, update: Update, blobs: Mapping[str, bytes], private: BlobRef | None) -> bool:
        if update.note:
            log.warning("%s, round %d: %s", update.job, update.round + 1, update.note)
        return self.storage.commit_update(update, blobs, private)

    def store_learned_costs(self, learned: Mapping[str, LearnedModel]) -> None:
        self.storage.store_learned_costs(learned)

    def report_progress(self, task: Task, fraction: float, now_s: float) -> None:
        if now_s >= self._progress_s + PROGRESS_S:
            self._progress_s = now_s
            self.publish_message("progress", messages.progress_message(task, fraction), reliable=False)

    def submit_update(self, update: Update, now_s: float) -> None:
        """Publish an update, or run its task again if blobs of the update are lost.

        If the disk cannot be read, the next call checks the blobs again.
        """
        try:
            has_all_blobs = all(self.storage.blob_store.is_intact(ref) for ref in update.bundles.values())
        except StoreError as error:
            text = "%s, round %d: the update is submitted later: %s"
            log.warning(text, update.job, update.round + 1, error, extra=log_ids(run=update.job))
            return
        if not has_all_blobs:
            rejection = UpdateAcked((update.job, update.round), False, update.epoch, update.attempt)
            return self._apply_ack(
                rejection, "is repeated: its blobs on this device's disk are missing or damaged", now_s
            )
        if self._link.connected:  # else submitted with the next session
            self.publish_message("update", update)

    def _needed_hashes(self) -> set[str]:
        hashes = self.releases.needed_hashes()
        hashes |= {
            ref.sha256 for entry in self.task_runner.state.outbox.values() for ref in entry.update.bundles.values()
        }
        if self.task_runner.state.open_task is not None:
            hashes |= {ref.sha256 for ref in self.task_runner.state.open_task.task.bundles.values()}
        return hashes

    # -- published state --

    def _publish_presence_and_profile(self, now_s: float) -> None:
        self._publish_presence(online=True)
        self.publish_message("profile", self._profile, retain=True)
        self._republish_s = now_s + REPUBLISH.delay_s(self._republish_count)
        self._republish_count += 1

    def _publish_presence(self, online: bool) -> None:
        self._presence_count += 1
        self.publish_message(
            "presence", wire.Presence(online=online, boot=self._boot, seq=self._presence_count), retain=True
        )

    def _publish_readings(self, now_s: float) -> None:
        if now_s < self._telemetry_due_s():
            return
        self._telemetry_s = now_s
        self.last_telemetry = telemetry = messages.telemetry_message(
            self._board.read_sensors(now_s),
            self._worker.resident_bytes or None,
            self._clock(),
            None if self._runner is None else self._runner.read_status(),
            self._is_disk_full(now_s),
        )
        capabilities = self.task_runner.state.capabilities
        # The power mode or the execution provider has changed.
        if self._board.points != self._profile.points or capabilities != self._published_capabilities:
            self._published_capabilities = capabilities
            self._profile = messages.profile_message(
                self.device, self._board, self._published_capabilities, self._unsupported_reason
            )
            self.publish_message("profile", self._profile, retain=True)
        if telemetry is not None:
            self.publish_message("telemetry", telemetry, reliable=False)

    def _telemetry_due_s(self) -> float:
        is_full = self.last_telemetry is not None and self.last_telemetry.disk_full
        return self._telemetry_s + (
            min(self.settings.telemetry_s, DISK_FULL_TELEMETRY_S) if is_full else self.settings.telemetry_s
        )

    def _is_disk_full(self, now_s: float) -> bool | None:
        """Return whether the disk still has too little room, or None if no task has failed for that reason."""
        if self._free_bytes_at_failure is None:
            return None
        self._disk_full_s = now_s if self._disk_full_s is None else self._disk_full_s
        with contextlib.suppress(StoreError):
            return (
                now_s < self._disk_full_s + MAX_DISK_FULL_S
                and self.storage.free_bytes() < self._free_bytes_at_failure + SPARE_BYTES
            )
        return True

    def publish_message(self, subtopic: str, message: WireMessage, retain: bool = False, reliable: bool = True) -> None:
        topic = self._topics.device_topic(self.device, "up", subtopic)
        try:
            self._link.publish(topic, wire.encode(message), retain=retain, reliable=reliable)
        except (LinkError, WireError) as error:
            log.error("message to the coordinator cannot be published: %s", error)

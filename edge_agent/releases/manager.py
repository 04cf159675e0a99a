"""Releases of all kinds on one device, as decided by the state machine.

    <home>/releases/<kind>.json     `ReleaseRecord`: the requested release and its progress

Releases of several kinds proceed independently, but only one is checked at a time. No task starts during a check.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fedquilt import wire
from fedquilt.core import BlobRef, FedquiltError, StoreError, WireError
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.edge_agent.releases import state_machine
from fedquilt.edge_agent.releases.release_kind import ReleaseKind
from fedquilt.edge_agent.task_runner import TaskRunner
from fedquilt.wire import DesiredRelease, ReleaseStatus

if TYPE_CHECKING:
    from fedquilt.edge_agent.agent import Agent

log = logging.getLogger("fedquilt.agent")

KINDS: Final = frozenset(leaf for leaf, message in wire.COORDINATOR_MESSAGES.items() if message is DesiredRelease)
CHECK_POLL_S: Final = 0.1  # interval between polls of a check
MAX_POLLS: Final = 16  # limit of transitions in one step


class ReleaseManager:
    def __init__(
        self,
        storage: AgentState,
        kinds: Mapping[str, ReleaseKind],
        task_runner: TaskRunner,
        agent: Agent,
        clock: Callable[[], float | None] = time.time,
    ) -> None:
        self._storage, self._kinds, self._task_runner, self._agent = storage, kinds, task_runner, agent
        self._clock = clock
        self._states = {kind: state_machine.ReleaseState(record=self._load_record(kind)) for kind in kinds}
        self._published: dict[str, ReleaseStatus] = {}
        self._has_started = self._is_task_paused = self._was_task_running = False

    # -- calls of the agent --

    def handle_message(self, leaf: str, payload: bytes, now_s: float) -> bool:
        """Handle a message of subtopic `leaf`. Return False if it is not about releases, or raise WireError."""
        if leaf not in KINDS:
            return False
        self._resume_releases(now_s)
        if not payload:
            if leaf in self._kinds:
                self._handle_event_or_wait(leaf, state_machine.ReleaseCancelled(), now_s)
            return True
        release = wire.decode(payload, DesiredRelease)
        if release.kind != leaf:
            raise WireError(f"release of kind {release.kind!r} has the topic of {leaf!r}")
        if leaf in self._kinds:
            self._handle_event_or_wait(leaf, state_machine.ReleaseReceived(release), now_s)
            return True
        reason = f"this device's agent does not support releases of kind {leaf}"
        status = ReleaseStatus(
            rollout=release.rollout, kind=release.kind, serial=release.serial, phase="refused", reason=reason
        )
        self._agent.publish_message("installed", status)
        return True

    def step(self, now_s: float) -> float:
        """Advance all releases. Return the time by which the next call is due."""
        self._resume_releases(now_s)
        has_task_ended, self._was_task_running = (
            self._was_task_running and not self._task_runner.is_task_running,
            self._task_runner.is_task_running,
        )
        due_s = math.inf
        for name in self._kinds:
            with self._retry_after_store_error(name, now_s):
                if has_task_ended:
                    self._handle_event(name, state_machine.DeviceIdle(), now_s)
                self._advance_release(name, now_s)
            due_s = min(due_s, now_s + CHECK_POLL_S if self._is_checking_kind(name) else self._states[name].next_poll_s)
        return due_s

    def _advance_release(self, name: str, now_s: float) -> None:
        if self._is_checking_kind(name) and (verdict := self._kinds[name].poll_check()) is not None:
            if verdict.killed_externally:
                log.warning("check of the %s release was killed and starts again: %s", name, verdict.refusal_reason)
            self._handle_event(name, verdict, now_s)
        for _ in range(MAX_POLLS):
            if self._states[name].next_poll_s > now_s:
                break
            self._handle_event(name, self._poll_status(name, now_s), now_s)

    def handle_fetched(self, sha256: str, error: str | None, now_s: float) -> None:
        for name in self._kinds:
            if (ref := self._blob_in_transfer(name)) is None or ref.sha256 != sha256:
                continue
            event: state_machine.Event = state_machine.ReleaseFetched(error)
            if error is not None:
                try:
                    self._storage.require_room(ref.size)
                except StoreError as full:
                    event = state_machine.ActionFailed(str(full))
            self._handle_event_or_wait(name, event, now_s)

    def needed_hashes(self) -> set[str]:
        hashes = set()
        for state in self._states.values():
            if state.record is not None and state.record.step == "wanted" and state.record.release.blob is not None:
                hashes.add(state.record.release.blob.sha256)
        return hashes

    def republish_progress(self, now_s: float) -> None:
        """Publish the progress of each release again. Call when the broker may have lost messages."""
        for name in self._kinds:
            self._published.pop(name, None)
            with self._retry_after_store_error(name, now_s):
                self._publish_progress(name)

    @property
    def is_checking(self) -> bool:
        return any(map(self._is_checking_kind, self._kinds))

    def fds(self) -> Sequence[int]:
        return [fd for kind in self._kinds.values() for fd in kind.fds()]

    def stop(self) -> None:
        for name, kind in self._kinds.items():
            if self._is_checking_kind(name):
                kind.discard_unused()

    # -- events --

    def _resume_releases(self, now_s: float) -> None:
        if self._has_started:
            return
        self._has_started = True
        for name, kind in self._kinds.items():
            with self._retry_after_store_error(name, now_s):
                self._handle_event(
                    name,
                    state_machine.ProcessStarted(
                        kind.current_sha256(), kind.unhealthy_reason() if self._is_activated(name) else ""
                    ),
                    now_s,
                )

    def _handle_event_or_wait(self, name: str, event: state_machine.Event, now_s: float) -> None:
        with self._retry_after_store_error(name, now_s):
            self._handle_event(name, event, now_s)

    @contextmanager
    def _retry_after_store_error(self, name: str, now_s: float) -> Iterator[None]:
        # The agent and its task continue while the disk fails.
        try:
            yield
        except StoreError as error:
            log.error("%s release waits for the disk, trying again in %g s: %s", name, state_machine.POLL_S, error)
            self._states[name] = replace(self._states[name], next_poll_s=now_s + state_machine.POLL_S)

    def _is_activated(self, name: str) -> bool:
        record = self._states[name].record
        return record is not None and record.step in ("swapping", "soaking")

    def _is_checking_kind(self, name: str) -> bool:
        state = self._states[name]
        return state.record is not None and state.record.step == "wanted" and state.stage == "checking"

    def _blob_in_transfer(self, name: str) -> BlobRef | None:
        state = self._states[name]
        if state.record is None or state.record.step != "wanted" or state.stage != "fetching":
            return None
        return state.record.release.blob

    def _poll_status(self, name: str, now_s: float) -> state_machine.StatusPolled:
        state, kind = self._states[name], self._kinds[name]
        if state.record is None or state.record.step != "wanted":
            return state_machine.StatusPolled(
                current_sha256=kind.current_sha256(),
                is_settled=kind.is_settled(),
                unhealthy_reason=kind.unhealthy_reason(),
            )
        release, clock_s = state.record.release, self._clock()
        return state_machine.StatusPolled(
            current_sha256=kind.current_sha256(),
            is_blob_stored=release.blob is not None and self._storage.blob_store.has_blob(release.blob),
            is_task_running=self._task_runner.is_task_running,
            other_kind_in_check=next(
                (other_name for other_name in self._kinds if other_name != name and self._is_checking_kind(other_name)),
                "",
            ),
            check_bytes=kind.check_memory_bytes(release),
            reading=self._task_runner.read_sensors(now_s),
            local_time=None if clock_s is None else time.localtime(clock_s),
        )

    def _handle_event(self, name: str, event: state_machine.Event, now_s: float) -> None:
        """Apply an event, write the record to disk, publish the progress, then carry out the actions."""
        previous = self._states[name]
        state, actions = state_machine.advance(previous, event, now_s)
        if state.record is not None and state.record != previous.record:
            try:
                self._storage.write_file(_record_name(name), wire.encode(state.record))
            except FedquiltError as error:
                if state.record.step == "swapping":  # nothing is activated unless the record is on disk
                    return self._handle_event(name, state_machine.ActionFailed(str(error)), now_s)
                log.error("progress of %s release %s cannot be recorded: %s", name, state.record.release.name, error)
        self._states[name] = state
        self._publish_progress(name)
        if self._is_task_paused and not self.is_checking:
            self._is_task_paused = False
            self._task_runner.set_task_pause(False, now_s)
        for action in actions:
            if action == "cancel fetch" and previous.record is not None and previous.record.release.blob is not None:
                self._agent.cancel_fetch(previous.record.release.blob.sha256)
            elif state.record is not None:
                self._carry_out_action(name, action, state.record, now_s)

    def _carry_out_action(
        self, name: str, action: state_machine.Action, record: state_machine.ReleaseRecord, now_s: float
    ) -> None:
        kind, release = self._kinds[name], record.release
        if action == "publish":
            self._published.pop(name, None)
            return self._publish_progress(name)
        if action == "fetch" and release.blob is not None and self._storage.blob_store.has_blob(release.blob):
            return self._handle_event(name, state_machine.ReleaseFetched(), now_s)
        if action == "check":
            self._is_task_paused = True
            self._task_runner.set_task_pause(True, now_s)
        try:
            had_previous = self._perform_action(kind, action, record)
        except FedquiltError as error:
            if action in ("confirm", "delete"):
                log.error("action %r of the %s release failed: %s", action, name, error)
            if action == "delete":
                return None
            in_use = action == "activate" and release.blob is not None and kind.current_sha256() == release.blob.sha256
            return self._handle_event(name, state_machine.ActionFailed(str(error), in_use), now_s)
        return self._handle_event(name, state_machine.ActionDone(action, had_previous), now_s)

    def _perform_action(
        self, kind: ReleaseKind, action: state_machine.Action, record: state_machine.ReleaseRecord
    ) -> bool:
        """Perform an action. Return False only if a roll-back found no previous release."""
        release, blob, path = record.release, record.release.blob, None
        match action:
            case "fetch":
                self._agent.fetch_blobs([blob] if blob is not None else [])
            case "check":
                if blob is not None and (path := self._storage.blob_store.blob_path(blob.sha256)) is None:
                    raise StoreError(f"blob {blob.sha256[:12]} of the release is damaged on this device's disk")
                kind.stage(release, path)
                kind.start_check(release)
            case "activate":
                kind.activate(release)
            case "roll back":
                return kind.roll_back() or kind.current_sha256() == record.previous_sha256
            case "confirm":
                kind.confirm()
            case "delete":
                kind.discard_unused()
        return True

    # -- records and published status --

    def _load_record(self, name: str) -> state_machine.ReleaseRecord | None:
        payload = self._storage.read_file(_record_name(name))
        try:
            return None if payload is None else wire.decode(payload, state_machine.ReleaseRecord)
        except WireError as error:
            log.warning("%s is damaged (%s): starting without a record", _record_name(name), error)
            return None

    def _publish_progress(self, name: str) -> None:
        status = state_machine.release_status_message(self._states[name], self._kinds[name].current_sha256())
        if status is None or status == self._published.get(name):
            return
        previous, self._published[name] = self._published.get(name), status
        if previous is None or (previous.phase, previous.reason) != (status.phase, status.reason):
            log_message = log.warning if status.phase in ("refused", "returned") and status.reason else log.info
            log_message(
                "release %s of %s: %s%s", status.rollout, name, status.phase, status.reason and f", {status.reason}"
            )
        self._agent.publish_message("installed", status)


def _record_name(name: str) -> str:
    return f"releases/{name}.json"

"""Releases of all kinds on one device, as decided by the state machine.

    <home>/releases/<kind>.json     `Noted`: the requested release and its progress

Releases of several kinds proceed side by side, but only one is checked at a time. No task starts during a check.
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
CHECK_LOOK_S: Final = 0.1  # between two looks at a check
LOOKS_MOST: Final = 16  # in one step: a release goes through its phases in fewer


class ReleaseManager:
    def __init__(
        self,
        local: AgentState,
        kinds: Mapping[str, ReleaseKind],
        duty: TaskRunner,
        around: Agent,
        clock: Callable[[], float | None] = time.time,
    ) -> None:
        self._local, self._kinds, self._duty, self._around = local, kinds, duty, around
        self._clock = clock
        self._states = {kind: state_machine.ReleaseState(noted=self._load_record(kind)) for kind in kinds}
        self._told: dict[str, ReleaseStatus] = {}
        self._begun = self._rests = self._worked = False

    # -- what the agent asks --

    def handle_message(self, leaf: str, payload: bytes, now_s: float) -> bool:
        if leaf not in KINDS:
            return False
        self._resume_releases(now_s)
        if not payload:
            if leaf in self._kinds:
                self._handle_event_or_wait(leaf, state_machine.ReleaseCancelled(), now_s)
            return True
        release = wire.decode(payload, DesiredRelease)
        if release.kind != leaf:
            raise WireError(f"a release of kind {release.kind!r} on the topic of {leaf!r}")
        if leaf in self._kinds:
            self._handle_event_or_wait(leaf, state_machine.ReleaseReceived(release), now_s)
            return True
        reason = f"this device exchanges no {leaf}: its agent was started without"
        told = ReleaseStatus(
            rollout=release.rollout, kind=release.kind, serial=release.serial, phase="refused", reason=reason
        )
        self._around.publish_message("installed", told)
        return True

    def step(self, now_s: float) -> float:
        """Advance all releases. Return the time by which the next call is due."""
        self._resume_releases(now_s)
        ended, self._worked = self._worked and not self._duty.is_working, self._duty.is_working
        due_s = math.inf
        for name in self._kinds:
            with self._retry_after_store_error(name, now_s):
                if ended:
                    self._handle_event(name, state_machine.DeviceIdle(), now_s)
                self._advance_release(name, now_s)
            due_s = min(due_s, now_s + CHECK_LOOK_S if self._is_checking_kind(name) else self._states[name].again_s)
        return due_s

    def _advance_release(self, name: str, now_s: float) -> None:
        if self._is_checking_kind(name) and (verdict := self._kinds[name].poll_check()) is not None:
            if verdict.killed:
                log.warning("the check of a release of kind %s was killed: %s", name, verdict.refused)
            self._handle_event(name, verdict, now_s)
        for _ in range(LOOKS_MOST):
            if self._states[name].again_s > now_s:
                break
            self._handle_event(name, self._poll_status(name, now_s), now_s)

    def handle_fetched(self, sha256: str, error: str | None, now_s: float) -> None:
        for name in self._kinds:
            if (ref := self._blob_in_transfer(name)) is None or ref.sha256 != sha256:
                continue
            event: state_machine.Event = state_machine.ReleaseFetched(error)
            if error is not None:
                try:
                    self._local.require_room(ref.size)
                except StoreError as full:
                    event = state_machine.ActionFailed(str(full))
            self._handle_event_or_wait(name, event, now_s)

    def needed_blobs(self) -> set[str]:
        found = set()
        for state in self._states.values():
            if state.noted is not None and state.noted.step == "wanted" and state.noted.release.blob is not None:
                found.add(state.noted.release.blob.sha256)
        return found

    def republish_progress(self, now_s: float) -> None:
        """Publish the progress of each release again, because the broker may have lost it."""
        for name in self._kinds:
            self._told.pop(name, None)
            with self._retry_after_store_error(name, now_s):
                self._publish_progress(name)

    @property
    def is_checking(self) -> bool:
        return any(map(self._is_checking_kind, self._kinds))

    def fds(self) -> Sequence[int]:
        return [each for kind in self._kinds.values() for each in kind.fds()]

    def stop(self) -> None:
        for name, kind in self._kinds.items():
            if self._is_checking_kind(name):
                kind.discard_unused()

    # -- events --

    def _resume_releases(self, now_s: float) -> None:
        if self._begun:
            return
        self._begun = True
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
        # The agent and its task continue while the release in use is unreadable.
        try:
            yield
        except StoreError as error:
            log.error("releases of kind %s wait: %s", name, error)
            self._states[name] = replace(self._states[name], again_s=now_s + state_machine.LOOK_S)

    def _is_activated(self, name: str) -> bool:
        noted = self._states[name].noted
        return noted is not None and noted.step in ("swapping", "soaking")

    def _is_checking_kind(self, name: str) -> bool:
        state = self._states[name]
        return state.noted is not None and state.noted.step == "wanted" and state.stage == "checking"

    def _blob_in_transfer(self, name: str) -> BlobRef | None:
        state = self._states[name]
        if state.noted is None or state.noted.step != "wanted" or state.stage != "fetching":
            return None
        return state.noted.release.blob

    def _poll_status(self, name: str, now_s: float) -> state_machine.StatusPolled:
        state, kind = self._states[name], self._kinds[name]
        if state.noted is None or state.noted.step != "wanted":
            return state_machine.StatusPolled(
                current=kind.current_sha256(), settled=kind.is_settled(), ill=kind.unhealthy_reason()
            )
        release, clock_s = state.noted.release, self._clock()
        return state_machine.StatusPolled(
            current=kind.current_sha256(),
            here=release.blob is not None and self._local.depot.has_blob(release.blob),
            works=self._duty.is_working,
            other=next((other for other in self._kinds if other != name and self._is_checking_kind(other)), ""),
            need_bytes=kind.check_memory_bytes(release),
            reading=self._duty.read_sensors(now_s),
            local=None if clock_s is None else time.localtime(clock_s),
        )

    def _handle_event(self, name: str, event: state_machine.Event, now_s: float) -> None:
        """Apply an event, write the record to disk, publish the progress, then carry out the actions."""
        before = self._states[name]
        state, actions = state_machine.advance(before, event, now_s)
        if state.noted is not None and state.noted != before.noted:
            try:
                self._local.write_file(_record_name(name), wire.encode(state.noted))
            except FedquiltError as error:
                if state.noted.step == "swapping":  # nothing is exchanged unless the note is on disk
                    return self._handle_event(name, state_machine.ActionFailed(str(error)), now_s)
                log.error("the release %s of kind %s cannot be noted: %s", state.noted.release.name, name, error)
        self._states[name] = state
        self._publish_progress(name)
        if self._rests and not self.is_checking:
            self._rests = False
            self._duty.set_task_pause(False, now_s)
        for action in actions:
            if action == "cancel fetch" and before.noted is not None and before.noted.release.blob is not None:
                self._around.cancel_fetch(before.noted.release.blob.sha256)
            elif state.noted is not None:
                self._carry_out_action(name, action, state.noted, now_s)

    def _carry_out_action(
        self, name: str, action: state_machine.Action, noted: state_machine.ReleaseRecord, now_s: float
    ) -> None:
        kind, release = self._kinds[name], noted.release
        if action == "publish":
            self._told.pop(name, None)
            return self._publish_progress(name)
        if action == "fetch" and release.blob is not None and self._local.depot.has_blob(release.blob):
            return self._handle_event(name, state_machine.ReleaseFetched(), now_s)
        if action == "check":
            self._rests = True
            self._duty.set_task_pause(True, now_s)
        try:
            found = self._perform_action(kind, action, noted)
        except FedquiltError as error:
            if action in ("confirm", "delete"):
                log.error("releases of kind %s: %s failed: %s", name, action, error)
            if action == "delete":
                return None
            in_use = action == "activate" and release.blob is not None and kind.current_sha256() == release.blob.sha256
            return self._handle_event(name, state_machine.ActionFailed(str(error), in_use), now_s)
        return self._handle_event(name, state_machine.ActionDone(action, found), now_s)

    def _perform_action(
        self, kind: ReleaseKind, action: state_machine.Action, noted: state_machine.ReleaseRecord
    ) -> bool:
        """Perform an action. Return whether a roll-back found a previous release, and True for other actions."""
        release, blob, path = noted.release, noted.release.blob, None
        match action:
            case "fetch":
                self._around.fetch_blobs([blob] if blob is not None else [])
            case "check":
                if blob is not None and (path := self._local.depot.blob_path(blob.sha256)) is None:
                    raise StoreError(f"its blob {blob.sha256[:12]} is damaged on this device's disk")
                kind.stage(release, path)
                kind.start_check(release)
            case "activate":
                kind.activate(release)
            case "roll back":
                return kind.roll_back() or kind.current_sha256() == noted.before
            case "confirm":
                kind.confirm()
            case "delete":
                kind.discard_unused()
        return True

    # -- records and published status --

    def _load_record(self, name: str) -> state_machine.ReleaseRecord | None:
        payload = self._local.read_file(_record_name(name))
        try:
            return None if payload is None else wire.decode(payload, state_machine.ReleaseRecord)
        except WireError as error:
            log.warning("what was noted of releases of kind %s is damaged (%s): it is forgotten", name, error)
            return None

    def _publish_progress(self, name: str) -> None:
        told = state_machine.release_status_message(self._states[name], self._kinds[name].current_sha256())
        if told is None or told == self._told.get(name):
            return
        before, self._told[name] = self._told.get(name), told
        if before is None or (before.phase, before.reason) != (told.phase, told.reason):
            say = log.warning if told.phase in ("refused", "returned") and told.reason else log.info
            say("release %s of %s: %s%s", told.rollout, name, told.phase, told.reason and f", {told.reason}")
        self._around.publish_message("installed", told)


def _record_name(name: str) -> str:
    return f"releases/{name}.json"

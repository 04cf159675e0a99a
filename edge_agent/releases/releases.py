"""Releases on one device: carries out what `plan` decides, for each kind that this device can exchange.

    <home>/releases/<kind>.json     `steps.Noted`: what was asked for, and how far it is

Releases of several kinds go on side by side, but one at a time is checked. While one is checked, no task begins.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from msgspec.structs import replace

from fedquilt import wire
from fedquilt.core import BlobRef, FedquiltError, StoreError, Wired, WireError
from fedquilt.edge_agent.duty import Duty
from fedquilt.edge_agent.releases import plan, steps
from fedquilt.edge_agent.releases.kind import Kind
from fedquilt.edge_agent.settings import ReleaseSettings
from fedquilt.edge_agent.state import Local
from fedquilt.wire import Installed, Release

log = logging.getLogger("fedquilt.agent")

KINDS: Final = frozenset(leaf for leaf, message in wire.DOWN.items() if message is Release)
CHECK_LOOK_S: Final = 0.1  # between two looks at a check
LOOKS_MOST: Final = 16  # in one step: a release goes through its phases in fewer


class Surroundings(Protocol):
    """Interface of the agent towards its releases."""

    def fetch(self, refs: Sequence[BlobRef]) -> None:
        """Start fetching blobs; `Releases.fetched` follows for each.

        Raises:
            StoreError: the disk has no room for the blob.
        """
        ...

    def abandon(self, sha256: str) -> None:
        """Stop fetching a blob, and forget the part received."""
        ...

    def publish(self, leaf: str, message: Wired, retain: bool = False, reliable: bool = True) -> None:
        """Send the coordinator a message."""
        ...


class Releases:
    """Releases of all kinds on one device.

    Args:
        local: the device's disk.
        kinds: by their names on the wire; a release of another kind is refused.
        duty: the device's tasks, which rest while a release is checked.
        around: the device's agent.
        settings: conditions under which a release waits.
        clock: seconds since 1970 as this device counts them; None: it has no clock of its own.

    Raises:
        StoreError: the notes of an earlier process cannot be read.
    """

    def __init__(
        self,
        local: Local,
        kinds: Mapping[str, Kind],
        duty: Duty,
        around: Surroundings,
        settings: ReleaseSettings = ReleaseSettings(),
        clock: Callable[[], float | None] = time.time,
    ) -> None:
        self._local, self._kinds, self._duty, self._around = local, kinds, duty, around
        self._settings, self._clock = settings, clock
        self._states = {kind: steps.State(noted=self._noted(kind)) for kind in kinds}
        self._told: dict[str, Installed] = {}
        self._begun = self._rests = self._worked = False

    # -- what the agent asks --

    def handle(self, leaf: str, payload: bytes, now_s: float) -> bool:
        """Handle a message if it is about a release; returns whether it is.

        Raises:
            WireError: the message's bytes are no release, or one of another kind.
        """
        if leaf not in KINDS:
            return False
        self._begin(now_s)
        if not payload:
            if leaf in self._kinds:
                self._happened(leaf, steps.Withdrawn(), now_s)
            return True
        release = wire.decode(payload, Release)
        if release.kind != leaf:
            raise WireError(f"a release of kind {release.kind!r} on the topic of {leaf!r}")
        if leaf in self._kinds:
            self._happened(leaf, steps.Wanted(release), now_s)
            return True
        reason = f"this device exchanges no {leaf}: its agent was started without"
        told = Installed(
            rollout=release.rollout, kind=release.kind, serial=release.serial, phase="refused", reason=reason
        )
        self._around.publish("installed", told)
        return True

    def step(self, now_s: float) -> float:
        """Do everything that is due; returns when to call again at the latest."""
        self._begin(now_s)
        ended, self._worked = self._worked and not self._duty.works, self._duty.works
        due_s = math.inf
        for name in self._kinds:
            with self._waiting(name, now_s):
                if ended:
                    self._feed(name, steps.Idle(), now_s)
                self._go_on(name, now_s)
            due_s = min(due_s, now_s + CHECK_LOOK_S if self._checks(name) else self._states[name].again_s)
        return due_s

    def _go_on(self, name: str, now_s: float) -> None:
        if self._checks(name) and (verdict := self._kinds[name].checked()) is not None:
            self._feed(name, steps.Checked(verdict.refused, dict(verdict.metrics), verdict.note), now_s)
        for _ in range(LOOKS_MOST):
            if self._states[name].again_s > now_s:
                break
            self._feed(name, self._look(name, now_s), now_s)

    def fetched(self, sha256: str, error: str | None, now_s: float) -> None:
        """Note that a blob has arrived, or could not be fetched this time."""
        for name in self._kinds:
            if (ref := self._fetches(name)) is None or ref.sha256 != sha256:
                continue
            event: steps.Event = steps.Fetched(error)
            if error is not None:
                try:
                    self._local.require_room(ref.size)
                except StoreError as full:
                    event = steps.Failed(str(full))
            self._happened(name, event, now_s)

    def needed(self) -> set[str]:
        """Hashes (sha256) of the blobs that a release waits for or is made of until it is staged."""
        found = set()
        for state in self._states.values():
            if state.noted is not None and state.noted.step == "wanted" and state.noted.release.blob is not None:
                found.add(state.noted.release.blob.sha256)
        return found

    def tell(self, now_s: float) -> None:
        """Publish the progress of each kind's release again: the broker may have lost the message."""
        for name in self._kinds:
            self._told.pop(name, None)
            with self._waiting(name, now_s):
                self._tell(name)

    @property
    def checks(self) -> bool:
        """Whether a release is being checked."""
        return any(map(self._checks, self._kinds))

    def fds(self) -> Sequence[int]:
        """File descriptors of checks."""
        return [each for kind in self._kinds.values() for each in kind.fds()]

    def stop(self) -> None:
        """End checks; the next process repeats them."""
        for name, kind in self._kinds.items():
            if self._checks(name):
                kind.drop()

    # -- events --

    def _begin(self, now_s: float) -> None:
        """Continue from the notes of an earlier process."""
        if self._begun:
            return
        self._begun = True
        for name, kind in self._kinds.items():
            with self._waiting(name, now_s):
                self._feed(name, steps.Begun(kind.current(), kind.ill() if self._swapped(name) else ""), now_s)

    def _happened(self, name: str, event: steps.Event, now_s: float) -> None:
        with self._waiting(name, now_s):
            self._feed(name, event, now_s)

    @contextmanager
    def _waiting(self, name: str, now_s: float) -> Iterator[None]:
        """Read an unreadable current release again later; the agent and its task go on meanwhile."""
        try:
            yield
        except StoreError as error:
            log.error("releases of kind %s wait: %s", name, error)
            self._states[name] = replace(self._states[name], again_s=now_s + plan.LOOK_S)

    def _swapped(self, name: str) -> bool:
        noted = self._states[name].noted
        return noted is not None and noted.step in ("swapping", "soaking")

    def _checks(self, name: str) -> bool:
        state = self._states[name]
        return state.noted is not None and state.noted.step == "wanted" and state.stage == "checking"

    def _fetches(self, name: str) -> BlobRef | None:
        state = self._states[name]
        if state.noted is None or state.noted.step != "wanted" or state.stage != "fetching":
            return None
        return state.noted.release.blob

    def _look(self, name: str, now_s: float) -> steps.Look:
        """Facts about the device that the state depends on."""
        state, kind = self._states[name], self._kinds[name]
        if state.noted is None or state.noted.step != "wanted":
            return steps.Look(current=kind.current(), settled=kind.settled(), ill=kind.ill())
        release, clock_s = state.noted.release, self._clock()
        return steps.Look(
            current=kind.current(),
            here=release.blob is not None and self._local.depot.has(release.blob),
            works=self._duty.works,
            other=next((other for other in self._kinds if other != name and self._checks(other)), ""),
            need_bytes=kind.need_bytes(release),
            reading=self._duty.spare(now_s),
            local=None if clock_s is None else time.localtime(clock_s),
            min_battery=self._settings.min_battery,
            max_c=self._settings.max_temperature_c,
        )

    def _feed(self, name: str, event: steps.Event, now_s: float) -> None:
        """Apply an event: the new state is noted on disk, then published, then carried out."""
        before = self._states[name]
        state, actions = plan.advance(before, event, now_s)
        if state.noted is not None and state.noted != before.noted:
            try:
                self._local.note(_file(name), wire.encode(state.noted))
            except FedquiltError as error:
                if state.noted.step == "swapping":  # nothing is exchanged unless the note is on disk
                    return self._feed(name, steps.Failed(str(error)), now_s)
                log.error("the release %s of kind %s cannot be noted: %s", state.noted.release.name, name, error)
        self._states[name] = state
        self._tell(name)
        if self._rests and not self.checks:
            self._rests = False
            self._duty.rest(False, now_s)
        for action in actions:
            self._do(name, action, now_s)

    def _do(self, name: str, action: steps.Action, now_s: float) -> None:
        kind = self._kinds[name]
        match action:
            case steps.Tell():
                self._told.pop(name, None)
                self._tell(name)
            case steps.Fetch(ref):
                self._fetch(name, ref, now_s)
            case steps.Abandon(sha256):
                self._around.abandon(sha256)
            case steps.Check(release):
                self._check(name, release, now_s)
            case steps.Swap(release):
                self._feed(name, _swapped(kind, release), now_s)
            case steps.Undo(before):
                try:
                    event: steps.Event = steps.Undone(kind.back() or kind.current() == before)
                except FedquiltError as error:
                    event = steps.Failed(str(error))
                self._feed(name, event, now_s)
            case steps.Keep():
                try:
                    kind.keep()
                except FedquiltError as error:
                    log.error("the release of kind %s in use cannot be kept yet: %s", name, error)
                    return self._feed(name, steps.Failed(str(error)), now_s)
                self._feed(name, steps.Kept(), now_s)
            case steps.Drop():
                try:
                    kind.drop()
                except FedquiltError as error:
                    log.warning("what is left of a release of kind %s cannot be deleted: %s", name, error)

    def _fetch(self, name: str, ref: BlobRef, now_s: float) -> None:
        if self._local.depot.has(ref):
            return self._feed(name, steps.Fetched(), now_s)
        try:
            self._around.fetch([ref])
        except StoreError as error:
            self._feed(name, steps.Failed(str(error)), now_s)

    def _check(self, name: str, release: Release, now_s: float) -> None:
        kind, path = self._kinds[name], None
        self._rests = True
        self._duty.rest(True, now_s)
        try:
            if release.blob is not None and (path := self._local.depot.path(release.blob.sha256)) is None:
                raise StoreError(f"its blob {release.blob.sha256[:12]} is damaged on this device's disk")
            kind.stage(release, path)
            kind.begin_check(release)
        except FedquiltError as error:
            self._feed(name, steps.Failed(str(error)), now_s)

    # -- what is noted and told --

    def _noted(self, name: str) -> steps.Noted | None:
        payload = self._local.noted(_file(name))
        try:
            return None if payload is None else wire.decode(payload, steps.Noted)
        except WireError as error:
            log.warning("what was noted of releases of kind %s is damaged (%s): it is forgotten", name, error)
            return None

    def _tell(self, name: str) -> None:
        """Publish the release's progress, if it has changed."""
        told = plan.installed_message(self._states[name], self._kinds[name].current())
        if told is None or told == self._told.get(name):
            return
        before, self._told[name] = self._told.get(name), told
        if before is None or (before.phase, before.reason) != (told.phase, told.reason):
            say = log.warning if told.phase in ("refused", "returned") and told.reason else log.info
            say("release %s of %s: %s%s", told.rollout, name, told.phase, told.reason and f", {told.reason}")
        self._around.publish("installed", told)


def _file(name: str) -> str:
    return f"releases/{name}.json"


def _swapped(kind: Kind, release: Release) -> steps.Event:
    """Put a release in use; returns the event that follows."""
    try:
        kind.swap(release)
    except FedquiltError as error:
        exchanged = release.blob is not None and kind.current() == release.blob.sha256
        return steps.Ill(str(error)) if exchanged else steps.Failed(str(error))
    return steps.Swapped()

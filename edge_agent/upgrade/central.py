"""Settings from the coordinator (`fedquilt settings`), within what the board's own agent.toml allows.

    <home>/settings.json     what is set, and what was set before

What is set takes the place of agent.toml's values; what a release does not name is as in agent.toml. So a board that
was off for some releases is like the others once it has the latest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fedquilt import config, labels, wire
from fedquilt.core import Count, FedquiltError, JobError, ModelError, Wired, WireError
from fedquilt.disk import REAL, Disk, doing
from fedquilt.edge_agent.power.governor import Policy
from fedquilt.edge_agent.releases.kind import Kind, Verdict
from fedquilt.edge_agent.settings import AgentSettings, size_bytes
from fedquilt.wire import Release

log = logging.getLogger("fedquilt.agent")

FILE: Final = "settings.json"


class Central(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings that may come from the coordinator."""

    budget: str | None = None
    labels: tuple[str, ...] | None = None  # all of them; or each with + or -: added to agent.toml's, or taken away
    policy: Policy | None = None  # of the governor
    max_w: Annotated[float, Meta(gt=0)] | None = None  # of the governor
    telemetry_s: Annotated[float, Meta(gt=0)] | None = None


class Kept(Wired, frozen=True):
    """Content of settings.json."""

    serial: Count  # of the release that set it
    set: dict[str, Any]
    before: dict[str, Any] | None = None  # what was set before; None: there is nothing to return to
    returned: bool = False  # `set` is in use again


def parse(table: Mapping[str, Any]) -> Central:
    """Read settings as a release has them.

    Raises:
        JobError: names the wrong key or value.
    """
    central = config.convert(table, Central, "settings from the coordinator")
    if central.budget is not None:
        with config.naming("budget"):
            size_bytes(central.budget)
    if central.labels is not None:
        with config.naming("labels"):
            labels.parse(_labelled((), central.labels))
    return central


def apply(own: AgentSettings, table: Mapping[str, Any], memory_bytes: int) -> AgentSettings:
    """The settings of agent.toml with what the coordinator has set.

    Args:
        own: agent.toml.
        table: what is set.
        memory_bytes: of the board.

    Raises:
        JobError: a wrong key or value, or more than agent.toml allows.
    """
    central, limits = parse(table), own.limits
    made = own
    if central.budget is not None:
        most = own.budget_bytes(memory_bytes) if limits.budget is None else size_bytes(limits.budget)
        if size_bytes(central.budget) > most:
            raise JobError(
                f"budget = {central.budget!r} is above the {most / 1e6:.0f} MB that this board's agent.toml allows: "
                "ask for less, or let its owner raise budget under [limits]"
            )
        made = replace(made, budget=central.budget)
    if central.max_w is not None:
        watts = limits.max_w if limits.max_w is not None else own.governor.max_w
        if watts is not None and central.max_w > watts:
            raise JobError(
                f"max_w = {central.max_w:g} is above the {watts:g} W that this board's agent.toml allows: "
                "ask for less, or let its owner raise max_w under [limits]"
            )
        made = replace(made, governor=replace(made.governor, max_w=central.max_w))
    if central.policy is not None:
        made = replace(made, governor=replace(made.governor, policy=central.policy))
    if central.telemetry_s is not None:
        if central.telemetry_s < limits.telemetry_s:
            raise JobError(
                f"telemetry_s = {central.telemetry_s:g} is below the {limits.telemetry_s:g} s that this board's "
                "agent.toml allows: ask for more, or let its owner lower telemetry_s under [limits]"
            )
        made = replace(made, telemetry_s=central.telemetry_s)
    if central.labels is not None:
        made = replace(made, labels=_labelled(own.labels, central.labels))
        with config.naming("labels"):
            labels.parse(made.labels)
    return made


def _labelled(own: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Labels after words such as "+canary" and "-old"; words without a sign are all that there are."""
    signed = [word for word in words if word[:1] in "+-" and word]
    if not signed:
        return words
    if len(signed) < len(words):
        raise JobError("labels have all a sign (+canary: added, -old: taken away), or none (these and no others)")
    taken = {word[1:] for word in signed if word[0] == "-"}
    kept = [label for label in own if label not in taken]
    return (*kept, *(word[1:] for word in signed if word[0] == "+" and word[1:] not in kept))


class SettingsKind(Kind):
    """Releases of settings on one board.

    Args:
        own: agent.toml.
        memory_bytes: of the board.
        home: the agent's folder.
        take: makes settings the agent's at once.
    """

    def __init__(
        self,
        own: AgentSettings,
        memory_bytes: int,
        home: Path,
        take: Callable[[AgentSettings], None],
        disk: Disk = REAL,
    ) -> None:
        self._own, self._memory_bytes = own, memory_bytes
        self._file, self._take, self._disk = home / FILE, take, disk

    def settings(self) -> AgentSettings:
        """The settings to begin with; agent.toml's where what was set is damaged, or no longer within its limits.

        Raises:
            StoreError: they cannot be read.
        """
        kept = self._kept()
        try:
            return self._own if kept is None else apply(self._own, kept.set, self._memory_bytes)
        except JobError as error:
            log.warning("what the coordinator has set no longer holds here (%s): agent.toml does", error)
            return self._own

    def _kept(self) -> Kept | None:
        with doing(f"read {self._file}"):
            if not self._disk.is_file(self._file):
                return None
            payload = self._disk.read(self._file)
        try:
            return wire.decode(payload, Kept)
        except WireError as error:
            log.warning("%s is damaged (%s): agent.toml holds until settings come again", self._file, error)
            return None

    def _keep(self, kept: Kept) -> None:
        with doing(f"write {self._file}"):
            self._disk.put(self._file, wire.encode(kept))
        self._take(self.settings())

    # -- as a kind of release --

    def current(self) -> str:
        """Hash (sha256) of what is set; "": nothing."""
        kept = self._kept()
        return "" if kept is None or not kept.set else hashlib.sha256(msgspec.json.encode(kept.set)).hexdigest()

    def stage(self, release: Release, blob: Path | None) -> None:
        """Check the release against agent.toml.

        Raises:
            ModelError: a wrong key or value, or more than agent.toml allows.
        """
        try:
            apply(self._own, release.settings, self._memory_bytes)
        except FedquiltError as error:
            raise ModelError(str(error)) from None

    def begin_check(self, release: Release) -> None:
        """Do nothing: `stage` has checked all."""

    def checked(self) -> Verdict | None:
        """Refuse nothing: `stage` would have."""
        return Verdict("", {})

    def swap(self, release: Release) -> None:
        """Keep the settings and take them at once; settings of the same release that are kept already are only taken.

        Raises:
            StoreError: they cannot be written.
        """
        kept = self._kept()
        if kept is not None and kept.serial == release.serial and not kept.returned:
            return self._take(self.settings())
        return self._keep(Kept(release.serial, dict(release.settings), {} if kept is None else kept.set))

    def ill(self) -> str:
        """Why the settings do not hold; "": they do."""
        return ""

    def back(self) -> bool:
        """Take what was set before; False: there is nothing.

        Raises:
            StoreError: it cannot be written.
        """
        kept = self._kept()
        if kept is None or (kept.before is None and not kept.returned):
            return False
        if kept.before is not None:
            self._keep(Kept(kept.serial, kept.before, returned=True))
        return True

    def drop(self) -> None:
        """Do nothing: `stage` leaves nothing."""

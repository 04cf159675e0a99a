"""Settings from the coordinator, within the limits of the device's agent.toml.

    <home>/settings.json     present and previous remote settings

Remote settings override agent.toml. Values that a release does not name are those of agent.toml, so that a device that
was off for some releases equals the others once it has the latest.
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

from fedquilt import wire
from fedquilt.core import Count, FedquiltError, JobError, ModelError, WireError, WireMessage
from fedquilt.edge_agent.power.governor import Policy
from fedquilt.edge_agent.releases.release_kind import ReleaseKind
from fedquilt.edge_agent.settings import AgentSettings, parse_size
from fedquilt.formats import labels, toml
from fedquilt.host.disk import REAL, Disk, disk_errors
from fedquilt.wire import DesiredRelease

log = logging.getLogger("fedquilt.agent")

FILE: Final = "settings.json"


class RemoteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    budget: str | None = None
    labels: tuple[str, ...] | None = None  # all of them; or each with + or -: added to agent.toml's, or taken away
    policy: Policy | None = None  # of the governor
    max_w: Annotated[float, Meta(gt=0)] | None = None  # of the governor
    telemetry_s: Annotated[float, Meta(ge=1)] | None = None


class StoredSettings(WireMessage, frozen=True):
    serial: Count  # of the release that set it
    set: dict[str, Any]
    before: dict[str, Any] | None = None  # what was set before; None: there is nothing to return to
    returned: bool = False  # `set` is in use again


def parse_remote_settings(table: Mapping[str, Any]) -> RemoteSettings:
    central = toml.convert_table(table, RemoteSettings, "settings from the coordinator")
    if central.budget is not None:
        with toml.prefix_errors("budget"):
            parse_size(central.budget)
    if central.labels is not None:
        with toml.prefix_errors("labels"):
            labels.parse_labels(_apply_label_changes((), central.labels))
    return central


def apply_remote_settings(own: AgentSettings, table: Mapping[str, Any], memory_bytes: int) -> AgentSettings:
    central, made = parse_remote_settings(table), own
    if central.budget is not None:
        most = own.task_budget_bytes(memory_bytes)
        if parse_size(central.budget) > most:
            raise JobError(
                f"budget = {central.budget!r} is above the {most / 1e6:.0f} MB that this board's agent.toml allows: "
                "ask for less, or let its owner raise budget"
            )
        made = replace(made, budget=central.budget)
    if central.max_w is not None:
        watts = own.governor.max_w
        if watts is not None and central.max_w > watts:
            raise JobError(
                f"max_w = {central.max_w:g} is above the {watts:g} W that this board's agent.toml allows: "
                "ask for less, or let its owner raise [governor] max_w"
            )
        made = replace(made, governor=replace(made.governor, max_w=central.max_w))
    if central.policy is not None:
        made = replace(made, governor=replace(made.governor, policy=central.policy))
    if central.telemetry_s is not None:
        made = replace(made, telemetry_s=central.telemetry_s)
    if central.labels is not None:
        made = replace(made, labels=_apply_label_changes(own.labels, central.labels))
        with toml.prefix_errors("labels"):
            labels.parse_labels(made.labels)
    return made


def _apply_label_changes(own: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return all labels after signed words such as "+canary" and "-old". Unsigned words replace all."""
    signed = [word for word in words if word[:1] in "+-" and word]
    if not signed:
        return words
    if len(signed) < len(words):
        raise JobError("labels have all a sign (+canary: added, -old: taken away), or none (these and no others)")
    taken = {word[1:] for word in signed if word[0] == "-"}
    kept = [label for label in own if label not in taken]
    return (*kept, *(word[1:] for word in signed if word[0] == "+" and word[1:] not in kept))


class SettingsKind(ReleaseKind):
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

    def effective_settings(self) -> AgentSettings:
        """Return the settings in effect. Invalid or damaged remote settings are ignored."""
        kept = self._read_stored()
        try:
            return self._own if kept is None else apply_remote_settings(self._own, kept.set, self._memory_bytes)
        except JobError as error:
            log.warning("what the coordinator has set no longer holds here (%s): agent.toml does", error)
            return self._own

    def _read_stored(self) -> StoredSettings | None:
        with disk_errors(f"read {self._file}"):
            if not self._disk.is_file(self._file):
                return None
            payload = self._disk.read(self._file)
        try:
            return wire.decode(payload, StoredSettings)
        except WireError as error:
            log.warning("%s is damaged (%s): agent.toml holds until settings come again", self._file, error)
            return None

    def _store_and_apply(self, kept: StoredSettings) -> None:
        with disk_errors(f"write {self._file}"):
            self._disk.write_atomically(self._file, wire.encode(kept))
        self._take(self.effective_settings())

    # -- as a kind of release --

    def current_sha256(self) -> str:
        kept = self._read_stored()
        return "" if kept is None or not kept.set else hashlib.sha256(msgspec.json.encode(kept.set)).hexdigest()

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        try:
            apply_remote_settings(self._own, release.settings, self._memory_bytes)
        except FedquiltError as error:
            raise ModelError(str(error)) from None

    def activate(self, release: DesiredRelease) -> None:
        kept = self._read_stored()
        if kept is not None and kept.serial == release.serial and not kept.returned:
            return self._take(self.effective_settings())
        return self._store_and_apply(
            StoredSettings(release.serial, dict(release.settings), {} if kept is None else kept.set)
        )

    def roll_back(self) -> bool:
        kept = self._read_stored()
        if kept is None or (kept.before is None and not kept.returned):
            return False
        if kept.before is not None:
            self._store_and_apply(StoredSettings(kept.serial, kept.before, returned=True))
        return True

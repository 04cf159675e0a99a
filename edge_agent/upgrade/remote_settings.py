"""Settings from the coordinator, within the limits of the device's agent.toml.

    <home>/settings.json     present and previous remote settings

Remote settings override agent.toml. Values that a release leaves out are those of agent.toml, so that a device that
missed some releases equals the others with the latest one.
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
    labels: tuple[str, ...] | None = None  # all labels, or only changes to agent.toml's labels, with + or -
    policy: Policy | None = None  # [governor] key
    max_w: Annotated[float, Meta(gt=0)] | None = None  # [governor] key
    telemetry_s: Annotated[float, Meta(ge=1)] | None = None


class StoredSettings(WireMessage, frozen=True):
    serial: Count  # serial of the release
    set: dict[str, Any]
    previous: dict[str, Any] | None = None  # previous remote settings, or None
    is_rolled_back: bool = False  # whether the previous settings are in use again


def parse_remote_settings(table: Mapping[str, Any]) -> RemoteSettings:
    remote = toml.convert_table(table, RemoteSettings, "settings from the coordinator")
    if remote.budget is not None:
        with toml.prefix_errors("budget"):
            parse_size(remote.budget)
    if remote.labels is not None:
        with toml.prefix_errors("labels"):
            labels.parse_labels(_apply_label_changes((), remote.labels))
    return remote


def apply_remote_settings(local_settings: AgentSettings, table: Mapping[str, Any], memory_bytes: int) -> AgentSettings:
    """Return agent.toml's settings overridden by remote ones. Raise JobError if they exceed its limits."""
    remote, result = parse_remote_settings(table), local_settings
    if remote.budget is not None:
        limit_bytes = local_settings.task_budget_bytes(memory_bytes)
        if parse_size(remote.budget) > limit_bytes:
            raise JobError(
                f"budget = {remote.budget!r} is above this device's limit of {limit_bytes / 1e6:.0f} MB: reduce the "
                "value, or raise budget in agent.toml"
            )
        result = replace(result, budget=remote.budget)
    if remote.max_w is not None:
        limit_w = local_settings.governor.max_w
        if limit_w is not None and remote.max_w > limit_w:
            raise JobError(
                f"max_w = {remote.max_w:g} is above this device's limit of {limit_w:g} W: reduce the value, or raise "
                "[governor] max_w in agent.toml"
            )
        result = replace(result, governor=replace(result.governor, max_w=remote.max_w))
    if remote.policy is not None:
        result = replace(result, governor=replace(result.governor, policy=remote.policy))
    if remote.telemetry_s is not None:
        result = replace(result, telemetry_s=remote.telemetry_s)
    if remote.labels is not None:
        result = replace(result, labels=_apply_label_changes(local_settings.labels, remote.labels))
        with toml.prefix_errors("labels"):
            labels.parse_labels(result.labels)
    return result


def _apply_label_changes(local_labels: tuple[str, ...], changes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels after changes such as "+canary" and "-old". Unsigned labels replace all others."""
    signed = [change for change in changes if change[:1] in "+-" and change]
    if not signed:
        return changes
    if len(signed) < len(changes):
        raise JobError(f"{' '.join(changes)} mixes changes with full labels: sign all (+canary, -old), or none")
    removed = {change[1:] for change in signed if change[0] == "-"}
    remaining = [label for label in local_labels if label not in removed]
    return (*remaining, *(change[1:] for change in signed if change[0] == "+" and change[1:] not in remaining))


class SettingsKind(ReleaseKind):
    def __init__(
        self,
        local_settings: AgentSettings,
        memory_bytes: int,
        home: Path,
        apply: Callable[[AgentSettings], None],
        disk: Disk = REAL,
    ) -> None:
        self._local_settings, self._memory_bytes = local_settings, memory_bytes
        self._file, self._apply, self._disk = home / FILE, apply, disk

    def effective_settings(self) -> AgentSettings:
        """Return the settings in effect. Invalid or damaged remote settings are ignored."""
        stored = self._read_stored()
        try:
            return (
                self._local_settings
                if stored is None
                else apply_remote_settings(self._local_settings, stored.set, self._memory_bytes)
            )
        except JobError as error:
            log.warning("remote settings are invalid (%s): using agent.toml", error)
            return self._local_settings

    def _read_stored(self) -> StoredSettings | None:
        with disk_errors(f"read {self._file}"):
            if not self._disk.is_file(self._file):
                return None
            payload = self._disk.read(self._file)
        try:
            return wire.decode(payload, StoredSettings)
        except WireError as error:
            log.warning("%s is damaged (%s): using agent.toml until the next settings", self._file, error)
            return None

    def _store_and_apply(self, stored: StoredSettings) -> None:
        with disk_errors(f"write {self._file}"):
            self._disk.write_atomically(self._file, wire.encode(stored))
        self._apply(self.effective_settings())

    # -- as a kind of release --

    def current_sha256(self) -> str:
        stored = self._read_stored()
        return "" if stored is None or not stored.set else hashlib.sha256(msgspec.json.encode(stored.set)).hexdigest()

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        try:
            apply_remote_settings(self._local_settings, release.settings, self._memory_bytes)
        except FedquiltError as error:
            raise ModelError(str(error)) from None

    def activate(self, release: DesiredRelease) -> None:
        stored = self._read_stored()
        if stored is not None and stored.serial == release.serial and not stored.is_rolled_back:
            return self._apply(self.effective_settings())
        return self._store_and_apply(
            StoredSettings(release.serial, dict(release.settings), {} if stored is None else stored.set)
        )

    def roll_back(self) -> bool:
        stored = self._read_stored()
        if stored is None or (stored.previous is None and not stored.is_rolled_back):
            return False
        if stored.previous is not None:
            self._store_and_apply(StoredSettings(stored.serial, stored.previous, is_rolled_back=True))
        return True

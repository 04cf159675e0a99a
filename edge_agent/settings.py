"""Settings of an agent: agent.toml, or the table that a simulated fleet makes.

device = "orin-nano-07"
home = "/var/lib/fedquilt"
budget = "1GB"

[broker]
url = "mqtts://broker.example:8883"

[data]
path = "/srv/images"

[governor]
policy = "energy"
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedquilt import profiles
from fedquilt.core import JobError, Name
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.formats import labels, toml

UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}


class BrokerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = "mqtt://127.0.0.1:1883"
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    password_file: str | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 10  # after 1.5 times this silence, the board counts as offline


class EnrolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str | None = None  # address of `fedquilt identity serve`
    token: str | None = None  # file with the one-time token, or None for "token" beside broker.key


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    listen: str | None = None  # HOST:PORT, or None to disable the endpoint


class UpgradeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    unsigned: bool = False  # accept unsigned bundles


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str | None = (
        None  # folder whose group may read models, for a runner of another user. None: "models" in `home`
    )
    hook: tuple[str, ...] = ()  # command after each change of the model, whose failure rolls the model back
    serve: str | None = None  # HOST:PORT of a flashed board's model runner, or None to install no runner


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Name
    home: str  # folder for all files of the agent
    fleet: Name = "fleet"
    board: str = "auto"  # "auto", or a profile's name for a simulated device
    profile: str | None = None  # profile from `fedquilt board record` or a shipped one. None: by the kind of board
    budget: str | None = None  # maximum resident size of a task's process, or None for half of the board's memory
    cache: str = "2GB"  # maximum size of cached blobs and files of tasks, the least recently used deleted first
    plugins: tuple[str, ...] | None = (
        None  # permitted plug-ins (packages and module:name), or None for all installed entry points
    )
    meter: str | dict[str, Any] | None = None  # additional meter: entry point or module:name, or a table with `name`
    warm_s: Annotated[float, Meta(ge=0)] = 60.0  # idle time after which a task's process ends
    telemetry_s: Annotated[float, Meta(gt=0)] = 30.0
    labels: tuple[str, ...] = ()  # words for the selection of boards by jobs: fedquilt.formats.labels
    broker: BrokerSettings = BrokerSettings()
    enrol: EnrolSettings = EnrolSettings()
    governor: GovernorPolicy = GovernorPolicy()
    metrics: MetricsSettings = MetricsSettings()
    upgrade: UpgradeSettings = UpgradeSettings()
    models: ModelSettings = ModelSettings()
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # fedquilt.data.spec.DataSpec

    def task_budget_bytes(self, memory_bytes: int) -> int:
        return memory_bytes // 2 if self.budget is None else parse_size(self.budget)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "512MB" or "1.5GiB", or raise JobError.

    kB to TB are powers of 1000, and KiB to TiB powers of 1024.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().removesuffix("B") + "B" if match else ""
    size = {name.upper(): factor for name, factor in UNITS.items()}.get(unit)
    if match is None or size is None:
        raise JobError(f'{text!r} is not a size: write, for example, "512MB" or "1.5GiB" (units: {", ".join(UNITS)})')
    whole_digits, _, fraction_digits = match[1].partition(".")
    number = int(whole_digits + fraction_digits)  # a float would lose bytes of large sizes
    if not match[2] and number:
        raise JobError(f'{text!r} has no unit: write "{match[1]}MB", or "{match[1]}B" if it is bytes')
    return number * size // 10 ** len(fraction_digits)


def load_settings(path: Path) -> AgentSettings:
    """Return the settings in an agent.toml, or raise JobError. Relative paths start at the file's folder."""
    table = toml.read_toml(path)
    try:
        if "method" in table and "device" not in table:
            raise JobError("this file is a job, not a board's settings (agent.toml): run a job with `fedquilt run`")
        return parse_settings(_resolve_all_paths(table, path.parent))
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse_settings(table: Mapping[str, Any]) -> AgentSettings:
    """Return validated settings, or raise JobError with the invalid key and value."""
    settings = toml.convert_table(table, AgentSettings, "an agent's settings")
    if settings.data:
        DataSpec.parse(settings.data)
    if settings.metrics.listen is not None:
        from fedquilt import metrics_endpoint

        with toml.prefix_errors("[metrics] listen"):
            metrics_endpoint.parse_listen_address(settings.metrics.listen)
    with toml.prefix_errors("labels"):
        labels.parse_labels(settings.labels)
    for key, size in (
        ("budget", settings.budget),
        ("cache", settings.cache),
    ):
        if size is not None:
            try:
                if parse_size(size) == 0 and key != "cache":
                    raise JobError(f"{size!r} is too small: write a size above 0")
            except JobError as error:
                raise JobError(f"{key}: {error}") from None
    return settings


def _resolve_all_paths(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    profile = table.get("profile")
    is_shipped_profile = (
        isinstance(profile, str) and profiles.is_board_name(profile) and not (folder / profile).exists()
    )
    result = _resolve_paths(table, ("home", *(() if is_shipped_profile else ("profile",))), folder)
    for key, paths in (
        ("broker", ("ca", "cert", "key", "password_file")),
        ("enrol", ("token",)),
        ("data", ("path",)),
        ("models", ("folder",)),
    ):
        if isinstance(result.get(key), dict):
            result[key] = _resolve_paths(result[key], paths, folder)
    if isinstance(result.get("data"), dict) and isinstance(sources := result["data"].get("sources"), list):
        anchored = [
            _resolve_paths(source, ("path",), folder) if isinstance(source, dict) else source for source in sources
        ]
        result["data"] = {**result["data"], "sources": anchored}
    if isinstance(result.get("data"), dict) and isinstance(text := result["data"].get("text"), dict):
        result["data"] = {**result["data"], "text": _resolve_paths(text, ("vocabulary",), folder)}
    return result


def _resolve_paths(table: Mapping[str, Any], keys: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return {k: toml.absolute_path(v, folder) if k in keys and isinstance(v, str) else v for k, v in table.items()}


FILES = ("ca", "cert", "key", "password_file")


def apply_systemd_credentials(settings: AgentSettings) -> AgentSettings:
    """Return settings that read each broker file from $CREDENTIALS_DIRECTORY, if that folder has a copy.

    agent.toml can then name a key that only root may read, while the unit's user reads the copy.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if folder is None:
        return settings
    paths = {key: getattr(settings.broker, key) for key in FILES}
    copies: dict[str, str] = {}
    for key, path in paths.items():
        if path is None or not os.path.isfile(copy := os.path.join(folder, os.path.basename(path))):
            continue
        other_keys = [other for other, other_copy in copies.items() if other_copy == copy and paths[other] != path]
        if other_keys:
            raise JobError(
                f"broker.{other_keys[0]} {paths[other_keys[0]]} and broker.{key} {path} have the same file name, and "
                "systemd stores credentials by file name: rename one of the files"
            )
        copies[key] = copy
    return msgspec.structs.replace(settings, broker=msgspec.structs.replace(settings.broker, **copies))

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

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fedquilt import config, labels, open_metrics, profiles
from fedquilt.core import JobError, Name
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.power.governor import Policy, Rule

UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}


class BrokerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the broker, and the files for this device's identity. See `fedquilt.transport.broker.Broker`."""

    url: str = "mqtt://127.0.0.1:1883"
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    password_file: str | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 10  # silent for half as long again: the board counts as gone
    session_expiry_s: Annotated[int, Meta(ge=0)] = 3600
    max_payload: Annotated[int, Meta(ge=2048)] | None = None


class GovernorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Choice of the device's clocks. See `fedquilt.edge_agent.power.governor`."""

    policy: Policy = "energy"
    margin: Annotated[float, Meta(ge=0, le=10)] = (
        0.05  # share of the predicted time kept as reserve before the deadline
    )
    max_w: Annotated[float, Meta(gt=0)] | None = None  # no operating point that draws more is held
    max_c: Annotated[float, Meta(gt=0, le=150)] | None = None  # hotter, and nothing is held

    def rule(self) -> Rule:
        """The table as a rule of the governor."""
        return Rule(self.policy, self.margin, self.max_w, self.max_c)


class EnrolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source of this board's certificate. See `fedquilt.edge_agent.enrol`."""

    url: str | None = None  # of `fedquilt enrol serve`
    token: str | None = None  # file with the one-time token; None: "token" beside broker.key


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where this board's own metrics are served. See `fedquilt.open_metrics`."""

    listen: str | None = None  # HOST:PORT; None: nowhere


class ReleaseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a release of a model, the agent or its settings has to wait. See `fedquilt.edge_agent.releases`."""

    min_battery: Annotated[float, Meta(ge=0, le=1)] = 0.2  # charge below which none is begun, unless it charges
    max_temperature_c: Annotated[float, Meta(gt=0, le=150)] | None = 85.0  # likewise above; None: no limit


class UpgradeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which versions of the agent may come over the air. See `fedquilt.edge_agent.upgrade.build`."""

    unsigned: bool = False  # take bundles that no authority has signed
    online_s: Annotated[float, Meta(ge=10, le=86400)] = 300.0  # for a new version to reach the broker


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far `fedquilt settings` may go. None: as far as this file. See `fedquilt.edge_agent.upgrade.central`."""

    budget: str | None = None
    max_w: Annotated[float, Meta(gt=0)] | None = None
    telemetry_s: Annotated[float, Meta(gt=0)] = 1.0  # shortest interval


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where models that are deployed to this board lie, and what is done after an exchange."""

    folder: str | None = None  # whose group may read it, for a runner of another user; None: "models" in `home`
    hook: tuple[str, ...] = ()  # command that is run after each exchange: a failure undoes it
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0  # a hook that takes longer has failed
    tensorrt_s: Annotated[float, Meta(ge=0, le=86400)] = 1200.0  # most for a TensorRT engine, where trtexec is; 0: none
    serve: str | None = None  # HOST:PORT at which a flashed board's model runner answers; None: flash installs none


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one agent: agent.toml."""

    device: Name
    home: str  # folder for all files of the agent
    fleet: Name = "fleet"
    board: str = "auto"  # or a profile's name, for a simulated one
    profile: str | None = None  # file of `fedquilt record` for this board, or a shipped one; None: its kind's
    budget: str | None = None  # most that a task's process may hold resident; None: half of the board's memory
    cache: str = "2GB"  # blobs and files of tasks kept for later rounds and jobs; the longest unused go first
    tensorrt: str | None = (
        None  # most disk for the engines that TensorRT builds of graphs to score; None: it is not used
    )
    plugins: tuple[str, ...] | None = None  # packages and module:name it may import; None: all entry points installed
    meter: str | dict[str, Any] | None = None  # one beside its own: entry point or module:name, or a table with `name`
    warm_s: Annotated[float, Meta(ge=0)] = 60.0  # time for which a task's process waits for the next one
    telemetry_s: Annotated[float, Meta(gt=0)] = 30.0
    carriers: tuple[Literal["http"], ...] = (
        "http",
    )  # of blobs, beside the broker, where the coordinator names a place
    labels: tuple[str, ...] = ()  # words by which jobs select boards: fedquilt.labels
    broker: BrokerSettings = BrokerSettings()
    enrol: EnrolSettings = EnrolSettings()
    governor: GovernorSettings = GovernorSettings()
    metrics: MetricsSettings = MetricsSettings()
    releases: ReleaseSettings = ReleaseSettings()
    upgrade: UpgradeSettings = UpgradeSettings()
    limits: LimitSettings = LimitSettings()
    models: ModelSettings = ModelSettings()
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # fedquilt.data.spec.DataSpec

    def budget_bytes(self, memory_bytes: int) -> int:
        """Most that a task's process may hold on a board with `memory_bytes`."""
        return memory_bytes // 2 if self.budget is None else size_bytes(self.budget)


def size_bytes(text: str) -> int:
    """Bytes of a size: "512MB" -> 512000000; kB to TB are powers of 1000, KiB to TiB of 1024.

    Raises:
        JobError: not a size, or without its unit.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper().removesuffix("B") + "B" if found else ""
    size = {name.upper(): each for name, each in UNITS.items()}.get(unit)
    if found is None or size is None:
        raise JobError(f'{text!r} is no size: write, for example, "512MB" or "1.5GiB"; units are {", ".join(UNITS)}')
    whole, _, part = found[1].partition(".")
    number = int(whole + part)  # a float would lose bytes of large sizes
    if not found[2] and number:
        raise JobError(f'{text!r} has no unit: write "{found[1]}MB", or "{found[1]}B" if it is bytes')
    return number * size // 10 ** len(part)


def load(path: Path) -> AgentSettings:
    """Read the settings from an agent.toml. Relative paths in it start at the file's folder.

    Raises:
        JobError: unreadable, not TOML, an unknown key, or a value of the wrong type or out of range.
    """
    table = config.read(path)
    try:
        if "method" in table and "device" not in table:
            raise JobError("this is a job, and a board's settings (agent.toml) are wanted; `fedquilt run` takes a job")
        return parse(_anchored(table, path.parent))
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse(table: Mapping[str, Any]) -> AgentSettings:
    """Read the settings from a table.

    Raises:
        JobError: names the wrong key, what is expected there, and the keys there are.
    """
    settings = config.convert(table, AgentSettings, "an agent's settings")
    if settings.data:
        DataSpec.parse(settings.data)
    if settings.metrics.listen is not None:
        with config.naming("[metrics] listen"):
            open_metrics.address(settings.metrics.listen)
    with config.naming("labels"):
        labels.parse(settings.labels)
    for key, size in (
        ("budget", settings.budget),
        ("cache", settings.cache),
        ("tensorrt", settings.tensorrt),
        ("[limits] budget", settings.limits.budget),
    ):
        if size is not None:
            try:
                if size_bytes(size) == 0 and key != "cache":
                    raise JobError(f"{size!r} leaves a task no memory: write more")
            except JobError as error:
                raise JobError(f"{key}: {error}") from None
    return settings


def _anchored(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The table with its paths made absolute."""
    profile = table.get("profile")
    named = isinstance(profile, str) and profiles.is_name(profile) and not (folder / profile).exists()
    result = _anchor(table, ("home", *(() if named else ("profile",))), folder)
    for key, paths in (
        ("broker", ("ca", "cert", "key", "password_file")),
        ("enrol", ("token",)),
        ("data", ("path",)),
        ("models", ("folder",)),
    ):
        if isinstance(result.get(key), dict):
            result[key] = _anchor(result[key], paths, folder)
    if isinstance(result.get("data"), dict) and isinstance(sources := result["data"].get("sources"), list):
        anchored = [_anchor(one, ("path",), folder) if isinstance(one, dict) else one for one in sources]
        result["data"] = {**result["data"], "sources": anchored}
    if isinstance(result.get("data"), dict) and isinstance(text := result["data"].get("text"), dict):
        result["data"] = {**result["data"], "text": _anchor(text, ("vocabulary",), folder)}
    return result


def _anchor(table: Mapping[str, Any], keys: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return {k: config.absolute(v, folder) if k in keys and isinstance(v, str) else v for k, v in table.items()}

"""Messages of an agent about its device, and the device's capabilities."""

from __future__ import annotations

import platform
import sys
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from msgspec.structs import replace

import fedquilt
from fedquilt import methods, plugins
from fedquilt.core import Cost, Device, Profile, Reading, Task, Update, Usage
from fedquilt.core.messages import UPGRADES
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.runner_status import RunnerStatus
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.state_machine import Capabilities, OpenTask
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.formats import labels
from fedquilt.wire import MAX_CONTROL, Progress, Telemetry

MAX_LAYOUT_BYTES: Final = MAX_CONTROL // 2  # bytes of an update's message that types and shapes may take


def profile_message(device: str, board: Device, capabilities: Capabilities, unsupported_reason: str = "") -> Profile:
    """Return a device's profile. `unsupported_reason` is why the agent cannot be upgraded, or ""."""
    return Profile(
        device=device,
        board=board.board[:200],
        memory_bytes=board.memory_bytes,
        budget_bytes=capabilities.budget_bytes,
        engines=capabilities.engines,
        versions={
            **_package_versions(capabilities.engines),
            **(
                {}
                if capabilities.sandbox_restrictions is None
                else {"tasks without": ", ".join(capabilities.sandbox_restrictions) or "nothing"}
            ),
            **{f"{engine} runs on": provider for engine, provider in sorted(capabilities.runs_on.items())},
            **({UPGRADES: unsupported_reason} if unsupported_reason else {}),
            **capabilities.plugins,
        },
        points=board.points,
        idle_w=board.idle_w,
        provenance=board.provenance,
        codecs=capabilities.codecs,
        labels=capabilities.labels,
        site_device_count=capabilities.site_device_count,
    )


def telemetry_message(
    reading: Reading,
    task_bytes: int | None = None,
    clock_s: float | None = None,
    runner_status: RunnerStatus | None = None,
    disk_full: bool | None = None,
) -> Telemetry | None:
    """Return a telemetry message, or None if all values are unknown."""
    telemetry = Telemetry(
        power_w=reading.power_w,
        energy_j=reading.energy_j,
        temperature_c=reading.temperature_c,
        available_bytes=reading.available_bytes,
        disk_full=disk_full,
        battery=reading.battery,
        charging=reading.charging,
        task_bytes=task_bytes,
        mode=None if reading.mode is None else reading.mode[:200],
        clock_s=clock_s,
        served=None if runner_status is None else runner_status.served,
        drift=None if runner_status is None else runner_status.drift,
        accuracy=None if runner_status is None else runner_status.accuracy,
    )
    return None if telemetry == Telemetry() else telemetry


def progress_message(task: Task, fraction: float) -> Progress:
    return Progress(job=task.job, round=task.round, attempt=task.attempt, fraction=fraction)


def update_message(device: str, open_task: OpenTask, outcome: WorkResult, cost: Cost) -> Update:
    task = open_task.task
    delta_bundles = task.bundles.keys() & outcome.bundles.keys() if task.wire.codec != "raw" else set()
    usage = Usage(
        wall_s=cost.duration_s,
        cpu_s=outcome.cpu_s,
        energy_j=cost.energy_j,
        idle_j=cost.idle_j,
        energy_error_j=cost.energy_error_j,
        energy_source=cost.energy_source,
        point=cost.point,
        peak_bytes=outcome.peak_bytes,
        base_bytes=outcome.base_bytes,
        examples=outcome.examples,
        down_bytes=open_task.down_bytes,
        up_bytes=sum({ref.sha256: ref.size for ref in outcome.bundles.values()}.values()),
    )
    return Update(
        job=task.job,
        round=task.round,
        attempt=task.attempt,
        device=device,
        weight=outcome.weight,
        bundles=outcome.bundles,
        metrics=outcome.metrics,
        evaluation=outcome.evaluation,
        usage=usage,
        bases={name: task.bundles[name].sha256 for name in sorted(delta_bundles)},
        layouts=_layouts_within_limit(outcome),
        state=task.state,
        epoch=task.epoch,
        note=outcome.note,
        devices_usage=outcome.site_usage,
    )


def _layouts_within_limit(outcome: WorkResult) -> dict[str, dict[str, str]]:
    sums = outcome.evaluation
    size = 4 * (len(sums.counts) + len(sums.scores)) // 3 if sums else 0
    size += sum(
        len(name) + len(layout) + 6
        for tensor_layouts in outcome.layouts.values()
        for name, layout in tensor_layouts.items()
    )
    return outcome.layouts if size <= MAX_LAYOUT_BYTES else {}


@lru_cache(maxsize=1)  # reads files that do not change while a process runs
def _package_versions(engine_names: tuple[str, ...]) -> dict[str, str]:
    versions = {"fedquilt": fedquilt.__version__, "python": platform.python_version()}
    for engine in engine_names:
        library, _ = engines.NEEDS.get(engine, ("", ""))
        if not library:  # another package's, listed in `Capabilities.plugins`
            continue
        for name in (library, f"{library}-gpu"):
            if (version := _installed_version(name)) is not None:
                versions[name] = version
    return versions


def _installed_version(name: str) -> str | None:
    # The name of the package's folder is read, as importlib.metadata takes 1 MB of an idle agent's memory.
    stem = f"{name.replace('-', '_')}-"
    info = next((info for folder in sys.path for info in Path(folder).glob(f"{stem}*-info")), None)
    return None if info is None else info.stem.removeprefix(stem).split("-")[0]


def capabilities_from_settings(settings: AgentSettings, memory_bytes: int) -> Capabilities:
    installed = _installed_capabilities(settings.task_budget_bytes(memory_bytes), settings.plugins)
    return replace(installed, labels=labels.parse_labels(settings.labels))


@cache  # looked up on disk, and constant while a process runs
def _installed_capabilities(budget_bytes: int, allowed_plugins: tuple[str, ...] | None) -> Capabilities:
    with plugins.restrict_plugins_within(allowed_plugins):
        method_names = (
            *methods.builtin_names(),
            *methods.plugin_names(),
            *(name for name in allowed_plugins or () if ":" in name),
        )
        fingerprints = plugins.plugin_fingerprints()
    return Capabilities(
        budget_bytes,
        engines.available_engines(),
        method_names,
        plugins=fingerprints,
        sandbox_restrictions=sandbox.available_restrictions(),
    )

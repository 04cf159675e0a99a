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

LAYOUT_MOST: Final = MAX_CONTROL // 2  # bytes of an update's message that types and shapes may take


def profile_message(device: str, board: Device, means: Capabilities, unable: str = "") -> Profile:
    """Return a device's profile. `unable` is the reason why the agent cannot be upgraded, or ""."""
    return Profile(
        device=device,
        board=board.board[:200],
        memory_bytes=board.memory_bytes,
        budget_bytes=means.budget_bytes,
        engines=means.engines,
        versions={
            **_package_versions(means.engines),
            **({} if means.confined is None else {"tasks without": ", ".join(means.confined) or "nothing"}),
            **{f"{engine} runs on": where for engine, where in sorted(means.runs_on.items())},
            **({UPGRADES: unable} if unable else {}),
            **means.plugins,
        },
        points=board.points,
        idle_w=board.idle_w,
        provenance=board.provenance,
        codecs=means.codecs,
        labels=means.labels,
        site_device_count=means.boards,
    )


def telemetry_message(
    reading: Reading,
    task_bytes: int | None = None,
    clock_s: float | None = None,
    served: RunnerStatus | None = None,
    disk_full: bool | None = None,
) -> Telemetry | None:
    told = Telemetry(
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
        served=None if served is None else served.served,
        drift=None if served is None else served.drift,
        accuracy=None if served is None else served.accuracy,
    )
    return None if told == Telemetry() else told


def progress_message(task: Task, fraction: float) -> Progress:
    return Progress(job=task.job, round=task.round, attempt=task.attempt, fraction=fraction)


def update_message(device: str, open: OpenTask, outcome: WorkResult, cost: Cost) -> Update:
    task = open.task
    moved = task.bundles.keys() & outcome.bundles.keys() if task.wire.codec != "raw" else set()
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
        down_bytes=open.down_bytes,
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
        bases={name: task.bundles[name].sha256 for name in sorted(moved)},
        layouts=_layouts_within_limit(outcome),
        state=task.state,
        epoch=task.epoch,
        note=outcome.note,
        devices_usage=outcome.below,
    )


def _layouts_within_limit(outcome: WorkResult) -> dict[str, dict[str, str]]:
    # The layouts of a large network alone would exceed the size limit of a message.
    sums = outcome.evaluation
    size = 4 * (len(sums.counts) + len(sums.scores)) // 3 if sums else 0
    size += sum(len(name) + len(said) + 6 for each in outcome.layouts.values() for name, said in each.items())
    return outcome.layouts if size <= LAYOUT_MOST else {}


@lru_cache(maxsize=1)  # reads files that do not change while a process runs
def _package_versions(available: tuple[str, ...]) -> dict[str, str]:
    found = {"fedquilt": fedquilt.__version__, "python": platform.python_version()}
    for engine in available:
        library, _ = engines.NEEDS.get(engine, ("", ""))
        if not library:  # another package's, listed in `Capabilities.plugins`
            continue
        for name in (library, f"{library}-gpu"):
            if (version := _installed_version(name)) is not None:
                found[name] = version
    return found


def _installed_version(name: str) -> str | None:
    # from the name of the package's folder, as importlib.metadata takes 1 MB of an idle agent's memory
    stem = f"{name.replace('-', '_')}-"
    info = next((info for folder in sys.path for info in Path(folder).glob(f"{stem}*-info")), None)
    return None if info is None else info.stem.removeprefix(stem).split("-")[0]


def capabilities_from_settings(settings: AgentSettings, memory_bytes: int) -> Capabilities:
    installed = _installed_capabilities(settings.task_budget_bytes(memory_bytes), settings.plugins)
    return replace(installed, labels=labels.parse_labels(settings.labels))


@cache  # looked up on disk, and constant while a process runs
def _installed_capabilities(budget_bytes: int, allowed: tuple[str, ...] | None) -> Capabilities:
    with plugins.restrict_plugins_within(allowed):
        known = (*methods.builtin_names(), *methods.plugin_names(), *(name for name in allowed or () if ":" in name))
        found = plugins.plugin_fingerprints()
    return Capabilities(
        budget_bytes, engines.available_engines(), known, plugins=found, confined=sandbox.available_restrictions()
    )

"""Agent process of a device, which runs until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fedquilt import profiles, systemd
from fedquilt.blobs.direct_transfers import TransferBackend
from fedquilt.edge_agent import devices
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.edge_agent.releases import models
from fedquilt.edge_agent.releases.release_kind import ReleaseKind
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import data_check, memory_budget, sandbox
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.edge_agent.upgrade.agent_release import AgentKind, read_launch_info
from fedquilt.edge_agent.upgrade.remote_settings import SettingsKind
from fedquilt.host import process_resources
from fedquilt.transport import link as links

if TYPE_CHECKING:
    from fedquilt.metrics_endpoint import MetricFamily

log = logging.getLogger("fedquilt.agent")


def run_agent(settings: AgentSettings) -> None:
    from fedquilt.edge_agent import device_link
    from fedquilt.security.certificates import require_enrolled
    from fedquilt.transport.mqtt.broker import Broker

    process_resources.keep_freed_memory()
    require_enrolled(settings.broker.cert, settings.enrol.url, settings.device)
    broker = Broker.from_url(**msgspec.structs.asdict(settings.broker))
    profile = None if settings.profile is None else profiles.find_board_profile(settings.profile)
    meter = None if settings.meter is None else devices.create_meter(settings.meter)
    board, boot = devices.create_device(settings.board, profile=profile, meter=meter), os.urandom(8).hex()
    sandbox.protect_memory()
    previous_umask = os.umask(0o077)  # only this user may read models, updates and private state
    lock = AgentState(Path(settings.home)).lock_home()
    with contextlib.suppress(PermissionError):  # the home may belong to another user
        os.chmod(settings.home, 0o700)
    link, identity = device_link.open_device_link(settings, broker, boot)
    memory_limit, home = memory_budget.MemoryLimit(), Path(settings.home).absolute()
    worker = ChildWorker(settings.warm_s, sandbox.task_command(home / "task"), memory_limit, home / "task")
    check_home = home / sandbox.CHECK
    budget_bytes = settings.task_budget_bytes(board.memory_bytes)
    data_check.warn_of_unreadable_data(settings, check_home, memory_limit, budget_bytes)
    check_worker = ChildWorker(0.0, sandbox.task_command(check_home, sandbox.CHECK_PROGRAM), memory_limit, check_home)
    signals: list[int] = []
    settings_releases = SettingsKind(
        settings, board.memory_bytes, Path(settings.home), lambda agent_settings: agent.apply_settings(agent_settings)
    )
    model_releases = models.ModelReleases(
        settings,
        board,
        check_worker,
        lambda: agent.settings.task_budget_bytes(board.memory_bytes),
        private_state=lambda job: agent.storage.latest_private_state(job),
    )
    kinds: dict[str, ReleaseKind] = {
        "model": model_releases,
        "agent": AgentKind(read_launch_info(), settings, lambda: link.connected, lambda: signals.append(0)),
        "settings": settings_releases,
    }
    transfer_backends = TransferBackend(identity, broker.ca)
    agent = Agent(
        link,
        settings_releases.effective_settings(),
        board,
        worker,
        boot,
        kinds=kinds,
        runner=model_releases.runner,
        transfer_backends=transfer_backends,
    )
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda signum, frame: signals.append(signum))
    online = f"online as {settings.device} of fleet {settings.fleet}, through {broker}"
    watchdog_endpoint = systemd.WatchdogEndpoint(
        agent, lambda: link.problem or (online if link.connected else f"connecting to {broker}")
    )
    try:
        with _serve_metrics(agent):
            links.run_endpoint(watchdog_endpoint, link, lambda: bool(signals))
    finally:
        systemd.send_notification("STOPPING=1")
        agent.shut_down()
        lock.release()
        os.umask(previous_umask)


def _serve_metrics(agent: Agent) -> AbstractContextManager[object]:
    if agent.settings.metrics.listen is None:
        return contextlib.nullcontext()
    from fedquilt import metrics_endpoint

    return metrics_endpoint.serve_metrics(agent.settings.metrics.listen, lambda: collect_metrics(agent))


_SENSORS = {
    "power_w": ("power_watts", "Power of the meter that measures most of the board."),
    "temperature_c": ("temperature_celsius", "Temperature of the hottest zone."),
    "available_bytes": ("available_bytes", "Available memory."),
    "task_bytes": ("task_bytes", "Resident memory of the task's process."),
    "battery": ("battery_ratio", "Charge of the battery."),
}


def collect_metrics(agent: Agent) -> Iterator[MetricFamily]:
    """Yield the agent's current metrics and latest sensor readings. Safe from other threads."""
    from fedquilt.metrics_endpoint import MetricFamily

    state, telemetry = agent.task_runner.state, agent.last_telemetry
    values: list[tuple[str, str, float | None]] = [
        ("connected", "Whether the broker is connected.", float(agent.is_connected)),
        ("working", "Whether a task is open.", float(state.open_task is not None)),
        ("outbox", "Updates without the coordinator's ack.", float(len(state.outbox))),
        ("budget_bytes", "Memory budget of a task.", float(state.capabilities.budget_bytes)),
    ]
    values += [(name, description, getattr(telemetry, key, None)) for key, (name, description) in _SENSORS.items()]
    for name, description, value in values:
        if value is not None:
            yield MetricFamily(
                f"fedquilt_agent_{name}", "gauge", description, ("device",), [((agent.device,), float(value))]
            )

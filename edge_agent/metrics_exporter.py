"""Metrics of one agent for Prometheus, served if agent.toml sets [metrics] listen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedquilt.open_metrics import MetricFamily

if TYPE_CHECKING:
    from fedquilt.edge_agent.agent import Agent

_SENSORS = {
    "power_w": ("power_watts", "Power of the widest meter."),
    "temperature_c": ("temperature_celsius", "Temperature of the hottest zone."),
    "available_bytes": ("available_bytes", "Memory that is available."),
    "task_bytes": ("task_bytes", "Resident memory of the task's process."),
    "battery": ("battery_ratio", "Charge of the battery."),
}


def collect_metrics(agent: Agent) -> Iterator[MetricFamily]:
    """Yield the agent's current metrics and latest sensor readings. Safe from other threads."""
    state, told = agent.duty.state, agent.told
    values: list[tuple[str, str, float | None]] = [
        ("connected", "Whether the broker is reached.", float(agent.is_connected)),
        ("working", "Whether it has a task.", float(state.open is not None)),
        ("outbox", "Updates that wait for the coordinator's answer.", float(len(state.outbox))),
        ("budget_bytes", "Memory that a task may take.", float(state.means.budget_bytes)),
    ]
    values += [(name, about, getattr(told, key, None)) for key, (name, about) in _SENSORS.items()]
    for name, about, value in values:
        if value is not None:
            yield MetricFamily(f"fedquilt_agent_{name}", "gauge", about, ("device",), [((agent.device,), float(value))])

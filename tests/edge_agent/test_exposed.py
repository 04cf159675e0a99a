"""Metrics of one agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.edge_agent import daemon, settings
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.transport.memory_link import MemoryBroker
from fedquilt.wire import Telemetry


def test_an_agent_tells_what_it_told_last(tmp_path: Path) -> None:
    broker = MemoryBroker()
    board = SimulatedDevice.from_name("jetson-nano")
    options = AgentSettings(device="a", home=str(tmp_path), budget="1GB")
    agent = Agent(broker.connect(), options, board, InlineWorker(board))
    agent.told = Telemetry(power_w=7.5)
    found = {each.name: each.samples for each in daemon.collect_metrics(agent)}
    assert found["fedquilt_agent_power_watts"] == [(("a",), 7.5)]
    assert found["fedquilt_agent_budget_bytes"] == [(("a",), 1e9)]
    assert found["fedquilt_agent_working"] == [(("a",), 0.0)]
    assert "fedquilt_agent_battery_ratio" not in found


def test_a_place_that_is_none_is_refused_with_the_settings() -> None:
    assert settings.parse_settings({"device": "a", "home": "x"}).metrics.listen is None
    with pytest.raises(JobError, match=r"\[metrics\] listen: '9464' is no address to serve at"):
        settings.parse_settings({"device": "a", "home": "x", "metrics": {"listen": "9464"}})

"""What an agent says and does as it starts, and once as a real daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_agent import Site
from waiting import LIMIT_S

from fedquilt import wire
from fedquilt.core import JobError, Profile
from fedquilt.edge_agent import daemon
from fedquilt.edge_agent.agent import Agent
from fedquilt.edge_agent.daemon import run_agent
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.settings import AgentSettings, parse_settings
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.edge_agent.upgrade.remote_settings import FILE, StoredSettings
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.transport.memory_link import MemoryBroker
from fedquilt.wire import Telemetry


def test_a_budget_that_no_engine_fits_is_told_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.start(budget="5MB")
    (said,) = [record.message for record in caplog.records if "budget" in record.message]
    assert said.startswith("d: memory budget of 5 MB is smaller than each engine without work (numpy ")
    caplog.clear()
    site.start(budget="5GB")
    assert caplog.records == []


@pytest.mark.parametrize(("text", "said"), [(None, "mine.toml cannot be read"), ("board = 3", "board")])
def test_a_recorded_profile_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=said):
        run_agent(AgentSettings(device="d", home=str(tmp_path), profile=str(path)))


def test_tasks_and_checks_run_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Worker:
        def __init__(self, warm_s: float, command: tuple[str, ...], *more: object) -> None:
            commands.append(command)
            if len(commands) == 2:
                raise JobError("it has both")

    monkeypatch.setattr(daemon, "ChildWorker", Worker)
    monkeypatch.setattr(sandbox, "protect_memory", lambda: None)
    before = os.umask(0o022)
    try:
        with pytest.raises(JobError, match="it has both"):
            run_agent(AgentSettings(device="d", home=str(tmp_path), board="jetson-nano"))
    finally:
        os.umask(before)
    folders = (tmp_path / "task", tmp_path / sandbox.CHECK)
    programs = (sandbox.TASK_PROGRAM, sandbox.CHECK_PROGRAM)
    assert commands == [sandbox.task_command(*each) for each in zip(folders, programs, strict=True)]


def test_a_daemon_introduces_itself_and_on_sigterm_says_goodbye(
    tmp_path: Path, embedded_broker: Any, stage: Any
) -> None:
    """A real process on a real broker has what was set from afar, ends with code 0, and stays known as offline."""
    settings = tmp_path / "agent.toml"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / FILE).write_bytes(wire.encode(StoredSettings(serial=1, set={"budget": "300MB"})))
    settings.write_text(
        f'device = "d"\nhome = "home"\nboard = "jetson-nano"\n[broker]\nurl = "{embedded_broker.url}"\n'
    )
    stage.join(embedded_broker.url, "watch", "fq/1/fleet/dev/d/up/#")

    def heard(leaf: str) -> list[bytes]:
        return [message.payload for message in stage.heard["watch"] if message.topic.endswith(f"up/{leaf}")]

    daemon = subprocess.Popen([sys.executable, "-m", "fedquilt.cli", "agent", str(settings)])
    try:
        stage.until(lambda: heard("profile"))
        assert wire.decode(heard("profile")[-1], Profile).budget_bytes == 300_000_000
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=LIMIT_S) == 0
    finally:
        daemon.kill()
        daemon.wait()

    def offline() -> bool:
        told = heard("presence")
        return bool(told) and not wire.decode(told[-1], wire.Presence).online

    stage.until(offline)


def test_an_agent_is_ready_without_a_broker_and_says_when_it_is_online(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "agent.toml").write_text(
        f'device = "d"\nhome = "home"\nboard = "jetson-nano"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
    )
    command = [sys.executable, "-m", "fedquilt.cli", "agent", str(tmp_path / "agent.toml")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "n"))
        line.settimeout(LIMIT_S)

        def heard(word: str) -> str:
            while word not in (told := line.recv(4096).decode()):
                pass
            return told

        agent = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "n")})
        try:
            assert heard("READY=1").startswith(f"READY=1\nWATCHDOG=1\nSTATUS=mqtt://127.0.0.1:{port} refused")
            heard("WATCHDOG=1")
            with EmbeddedBroker(port=port):
                assert heard("STATUS=online") == f"STATUS=online as d of fleet fleet, through mqtt://127.0.0.1:{port}"
                agent.send_signal(signal.SIGTERM)
                heard("STOPPING=1")
                assert agent.wait(LIMIT_S) == 0
        finally:
            agent.kill()
            agent.wait()


def test_an_agent_tells_what_it_told_last(tmp_path: Path) -> None:
    broker = MemoryBroker()
    board = SimulatedDevice.from_name("jetson-nano")
    options = AgentSettings(device="a", home=str(tmp_path), budget="1GB")
    agent = Agent(broker.connect(), options, board, InlineWorker(board))
    agent.last_telemetry = Telemetry(power_w=7.5)
    found = {each.name: each.samples for each in daemon.collect_metrics(agent)}
    assert found["fedquilt_agent_power_watts"] == [(("a",), 7.5)]
    assert found["fedquilt_agent_budget_bytes"] == [(("a",), 1e9)]
    assert found["fedquilt_agent_working"] == [(("a",), 0.0)]
    assert "fedquilt_agent_battery_ratio" not in found


def test_a_place_that_is_none_is_refused_with_the_settings() -> None:
    assert parse_settings({"device": "a", "home": "x"}).metrics.listen is None
    with pytest.raises(JobError, match=r"\[metrics\] listen: '9464' is not a valid address"):
        parse_settings({"device": "a", "home": "x", "metrics": {"listen": "9464"}})

"""Benchmark of the memory of an idle agent and an idle coordinator."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from fedquilt import wire
from fedquilt.core import LinkError
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink
from tests.benches.figures import compare_at_most

SAMPLE_S = 5.0
HEAVY_LIBRARIES = ("torch", "onnxruntime", "pandas")


def measure() -> dict[str, Any]:
    """Measure idle processes, and return resident memory, the agent's processor time and judged figures."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker() as broker:
        home = Path(folder)
        settings = home / "agent.toml"
        settings.write_text(
            f'device = "bench"\nhome = "{home}/agent"\nbudget = "256MB"\n[broker]\nurl = "{broker.url}"\n'
        )
        commands = {
            "agent": ["-m", "fedquilt.cli", "agent", str(settings)],
            "coordinator": ["-m", "fedquilt.cli", "serve", "--broker", broker.url, "--home", str(home / "runs")],
            "python": ["-c", "import time; time.sleep(600)"],
        }
        started = {
            name: subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
            for name, command in commands.items()
        }
        try:
            _wait_online(broker.url)
            return _build_result({name: psutil.Process(process.pid) for name, process in started.items()})
        finally:
            for process in started.values():
                process.terminate()
            for process in started.values():
                process.wait(timeout=10)


def _wait_online(url: str) -> None:
    topics = wire.Topics("fleet")
    link = MqttLink(Broker.from_url(url), "bench-watch")
    link.wait_until_connected(timeout_s=10.0)
    link.subscribe([topics.coord, topics.device_topic("bench", "up", "presence")])
    topics_seen: set[str] = set()
    deadline_s = time.monotonic() + 30
    while len(topics_seen) < 2:
        if time.monotonic() > deadline_s:
            raise LinkError(f"agent or coordinator not online within 30 s (topics seen: {sorted(topics_seen)})")
        link.wait(0.5)
        topics_seen |= {message.topic for message in link.receive()}
    link.close()


def _build_result(processes: dict[str, psutil.Process]) -> dict[str, Any]:
    cpu_start_s = sum(processes["agent"].cpu_times()[:2])
    time.sleep(SAMPLE_S)
    cpu = 100 * (sum(processes["agent"].cpu_times()[:2]) - cpu_start_s) / SAMPLE_S
    resident = {name: process.memory_info().rss / 1e6 for name, process in processes.items()}
    mapped = {name: " ".join(m.path for m in processes[name].memory_maps()) for name in ("agent", "coordinator")}
    heavy = sum(library in paths for paths in mapped.values() for library in HEAVY_LIBRARIES)
    ratios = [f"{name} {resident[name] / resident['python']:.2f}x" for name in ("agent", "coordinator")]
    return {
        "lines": [f"    a bare Python holds {resident['python']:.1f} MB: {', '.join(ratios)}"],
        "figures": {
            "idle_agent_resident": compare_at_most(resident["agent"], 32, "MB"),
            "idle_coordinator_resident": compare_at_most(resident["coordinator"], 60, "MB"),
            "heavy_libraries_mapped": compare_at_most(heavy, 0, "libraries"),
            "idle_agent_processor": compare_at_most(cpu, 1.0, "% of a core"),
        },
    }

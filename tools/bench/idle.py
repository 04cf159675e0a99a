"""`fedquilt bench idle`: what an agent and a coordinator hold resident while nothing happens."""

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
from fedquilt.tools.report.figures import figure, figure_lines
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt import MqttLink

SETTLE_S = 5.0
HEAVY = ("torch", "onnxruntime", "pandas")


def measure() -> dict[str, Any]:
    """Resident MB of an idle agent, an idle coordinator and a bare Python, and the agent's processor time."""
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
            return _result({name: psutil.Process(process.pid) for name, process in started.items()})
        finally:
            for process in started.values():
                process.terminate()
            for process in started.values():
                process.wait(timeout=10)


def _wait_online(url: str) -> None:
    """Until both sides have said on the broker that they are there."""
    topics = wire.Topics("fleet")
    link = MqttLink(Broker.parse(url), "bench-watch")
    link.connect(timeout_s=10.0)
    link.subscribe([topics.coord, topics.device("bench", "up", "presence")])
    seen: set[str] = set()
    limit_s = time.monotonic() + 30
    while len(seen) < 2:
        if time.monotonic() > limit_s:
            raise LinkError(f"only {sorted(seen)} came online within 30 s")
        link.wait(0.5)
        seen |= {message.topic for message in link.receive()}
    link.close()


def _result(processes: dict[str, psutil.Process]) -> dict[str, Any]:
    before = sum(processes["agent"].cpu_times()[:2])
    time.sleep(SETTLE_S)
    cpu = 100 * (sum(processes["agent"].cpu_times()[:2]) - before) / SETTLE_S
    resident = {name: process.memory_info().rss / 1e6 for name, process in processes.items()}
    mapped = {name: " ".join(m.path for m in processes[name].memory_maps()) for name in ("agent", "coordinator")}
    heavy = sum(word in paths for paths in mapped.values() for word in HEAVY)
    return {
        "bench": "idle",
        "resident_mb": {name: round(mb, 1) for name, mb in resident.items()},
        "ratio_to_bare_python": {n: round(mb / resident["python"], 2) for n, mb in resident.items() if n != "python"},
        "figures": {
            "idle_agent_resident": figure(resident["agent"], 40, "MB"),
            "idle_coordinator_resident": figure(resident["coordinator"], 60, "MB"),
            "heavy_libraries_mapped": figure(heavy, 0, "libraries"),
            "idle_agent_processor": figure(cpu, 1.0, "% of a core"),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    ratios = ", ".join(f"{name} {ratio}x" for name, ratio in result["ratio_to_bare_python"].items())
    return [*figure_lines(result), f"    a bare Python holds {result['resident_mb']['python']} MB: {ratios}"]

"""Benchmark of blob transfers by HTTP and MQTT against TCP that hashes and stores too.

With faults, 2 % of chunks are lost (MQTT) or end a connection (HTTP, TCP), and the broker is killed once. MQTT is then
compared with TCP whose server is unreachable for as long, and HTTP with TCP whose server is always reachable, because
a started HTTP transfer does not need the broker. A transfer ends when its last agent has the blob on its disk.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import psutil

from fedquilt.blobs.store import BlobStore
from fedquilt.edge_agent.task import memory_budget
from tests.benches.coordinator import find_free_port, start_mosquitto
from tests.benches.figures import compare_at_least, compare_at_most
from tests.benches.transfer_nodes import AGENTS, OUTAGE_S, SIZE

LOSS: Final = 0.02
REPEATS: Final = 3  # of each method, in turn
OUTAGE_START: Final = 0.5  # as a share of TCP's duration, after the start of the agents

TransferMethod = Literal["tcp", "http", "mqtt"]


class TransferRun(NamedTuple):
    method: TransferMethod
    loss: float = 0.0
    outage: bool = False  # of the broker, or of TCP's server


TRANSFER_RUNS: Final = {  # the duration of the first run determines the start of outages in the others
    "tcp": TransferRun("tcp"),
    "http": TransferRun("http"),
    "mqtt": TransferRun("mqtt"),
    "tcp_with_breaks": TransferRun("tcp", LOSS),
    "http_with_faults": TransferRun("http", LOSS, outage=True),
    "tcp_with_faults": TransferRun("tcp", LOSS, outage=True),
    "mqtt_with_faults": TransferRun("mqtt", LOSS, outage=True),
}


def measure(report: Callable[[str], None]) -> dict[str, Any]:
    """Run all transfers REPEATS times, and return times, memory and judged figures."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sha256 = BlobStore(home / "server").store_bytes(random.Random(0).randbytes(SIZE)).sha256
        measurements: dict[str, list[dict[str, Any]]] = {}
        for _ in range(REPEATS):
            for name, run in TRANSFER_RUNS.items():
                outage_start_s = OUTAGE_START * measurements["tcp"][-1]["seconds"] if run.outage else None
                measurements.setdefault(name, []).append(measurement := _measure_run(home, sha256, run, outage_start_s))
                report(
                    f"{name.replace('_', ' ')}: {measurement['seconds']:.2f} s, "
                    f"{measurement['cpu_s']:.2f} s of processors"
                )
        result = _build_result(measurements)
        return {**result, "lines": _format_lines(result)}


def _measure_run(home: Path, sha256: str, run: TransferRun, outage_start_s: float | None) -> dict[str, Any]:
    port = find_free_port()
    url = f"mqtt://127.0.0.1:{port}"
    node = [sys.executable, "-m", "tests.benches.transfer_nodes"]
    processes: list[subprocess.Popen[str]] = []

    def start_node(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*node, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    broker = start_mosquitto(home, port)
    broker_peak = 0
    try:
        server = start_node("serve", url, str(home / "server"), sha256, run.method, str(run.loss))
        server_port = str(json.loads(_read_line(server))["port"])
        agents = [
            start_node("pull", url, str(home / f"agent-{number}"), sha256, f"agent-{number}", run.method, server_port)
            for number in range(AGENTS)
        ]
        for agent in agents:
            _read_line(agent)
        start_s = time.monotonic()
        for agent in agents:
            assert agent.stdin is not None
            agent.stdin.write("\n")
            agent.stdin.flush()
        if outage_start_s is not None:
            time.sleep(outage_start_s)
            if run.method == "tcp":
                server.send_signal(signal.SIGUSR1)
            else:
                broker_peak = memory_budget.read_peak_bytes(broker.pid) or 0
                broker.kill()
                broker.wait()
                time.sleep(OUTAGE_S)
                broker = start_mosquitto(home, port)
        agent_reports = [json.loads(_read_line(agent)) for agent in agents]
        seconds = (
            max(agent["ended"] for agent in agent_reports) - start_s
        )  # processes of one machine share the monotonic clock
        broker_cpu_s = sum(psutil.Process(broker.pid).cpu_times()[:2])
        broker_peak = max(broker_peak, memory_budget.read_peak_bytes(broker.pid) or 0)
        server.terminate()
        server_report = json.loads(_read_line(server))
    finally:
        broker.kill()
        broker.wait()
        for process in processes:
            process.kill()
            process.communicate()
        for number in range(AGENTS):
            shutil.rmtree(home / f"agent-{number}", ignore_errors=True)
    cpu_s = server_report["cpu_s"] + broker_cpu_s + sum(agent["cpu_s"] for agent in agent_reports)
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "agents": agent_reports,
        "server": server_report,
        "broker_peak": broker_peak,
    }


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _build_result(measurements: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def speed_ratio(name: str, tcp: str = "tcp", by: str = "seconds") -> float:
        return statistics.median(
            bare[by] / each[by] for bare, each in zip(measurements[tcp], measurements[name], strict=True)
        )

    runs = [measurement for several in measurements.values() for measurement in several]
    agents = [agent for measurement in runs for agent in measurement["agents"]]
    errors = [agent["error"] for agent in agents if agent["error"]]
    return {
        "bench": "blobs",
        "bytes": SIZE,
        "agents": AGENTS,
        "turns": REPEATS,
        "chunk_loss": LOSS,
        "chunks_lost": sum(measurement["server"]["lost"] for measurement in runs),
        "errors": errors,
        "seconds": {
            name: [round(measurement["seconds"], 2) for measurement in several]
            for name, several in measurements.items()
        },
        "processor_seconds": {
            name: [round(measurement["cpu_s"], 2) for measurement in several] for name, several in measurements.items()
        },
        "agent_base_mb": round(max(agent["base"] for agent in agents) / 1e6, 1),
        "coordinator_base_mb": round(max(measurement["server"]["base"] for measurement in runs) / 1e6, 1),
        "figures": {
            "agents_that_did_not_finish": compare_at_most(len(errors), 0, "agents"),
            "http_beside_tcp": compare_at_least(speed_ratio("http"), 0.8, "of its speed"),
            "http_beside_tcp_by_cpu": compare_at_least(speed_ratio("http", by="cpu_s"), 0.8, "of its rate"),
            "mqtt_beside_tcp": compare_at_least(speed_ratio("mqtt"), 0.3, "of its speed"),
            "mqtt_beside_tcp_by_cpu": compare_at_least(speed_ratio("mqtt", by="cpu_s"), 0.3, "of its rate"),
            "http_with_faults_beside_tcp_with_breaks": compare_at_least(
                speed_ratio("http_with_faults", "tcp_with_breaks"), 0.8, "of its speed"
            ),
            "mqtt_with_faults_beside_tcp_with_faults": compare_at_least(
                speed_ratio("mqtt_with_faults", "tcp_with_faults"), 0.3, "of its speed"
            ),
            "agent_peak_above_idle": compare_at_most(
                max(agent["peak"] - agent["base"] for agent in agents) / 1e6, 12, "MB"
            ),
            "coordinator_peak_above_base": compare_at_most(
                max(measurement["server"]["peak"] - measurement["server"]["base"] for measurement in runs) / 1e6,
                40,
                "MB",
            ),
            "broker_peak": compare_at_most(max(measurement["broker_peak"] for measurement in runs) / 1e6, 100, "MB"),
        },
    }


def _format_lines(result: dict[str, Any]) -> list[str]:
    return [
        f"    {result['agents']} x {result['bytes'] / 1e6:g} MB; {result['chunks_lost']} chunks lost, or connections",
        *(
            f"    {name.replace('_', ' ')}: {' '.join(map(str, durations))} s, of processors "
            f"{' '.join(map(str, result['processor_seconds'][name]))} s"
            for name, durations in result["seconds"].items()
        ),
        *(f"    failed: {error}" for error in result["errors"]),
    ]

"""`fedquilt bench blobs`: a 45 MB model to 10 agents through Mosquitto, 2 % of chunks lost, the broker killed once.

Each agent is a process with the daemon's own imports and the transfer code it uses; the serving
process has the coordinator's. What they hold beyond their idle size is their own peak (VmHWM after
a reset). Beside it stands the time of raw TCP for the same bytes on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedquilt import wire
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.core import BlobRef, JobError, LinkError
from fedquilt.edge_agent.task import budget
from fedquilt.tools.report.figures import figure, figure_lines
from fedquilt.transport.broker import Broker
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt import MqttLink

SIZE = 45_000_000
AGENTS = 10
LOSS = 0.02
BROKER_DIES_S = 1.5  # after the agents have begun
BROKER_DOWN_S = 1.0
LIMIT_S = 180.0


class LossyLink:
    """A link that loses a share of the chunks it is given to send."""

    def __init__(self, link: MqttLink, loss: float, seed: int) -> None:
        self._link, self._loss, self._roll = link, loss, random.Random(seed)
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        """Publish, but lose chunks with the given probability."""
        if topic.rpartition("/")[2].isdigit() and self._roll.random() < self._loss:
            self.lost += 1
        else:
            self._link.publish(topic, payload, retain=retain, reliable=reliable)


# -- one process ----------------------------------------------------------------------------------


def serve(url: str, folder: str, sha256: str) -> None:
    """Serve the blob as the coordinator does, until SIGTERM; then print what it took."""
    import fedquilt.coordinator.server  # noqa: F401 - its imports are part of the base

    link = MqttLink(Broker.parse(url), "bench-coordinator")
    lossy = LossyLink(link, LOSS, seed=1)
    transfers = Transfers(lossy, Depot(Path(folder)), wire.Topics("bench"), "dn", lambda device, sha: sha == sha256)
    running = [True]
    signal.signal(signal.SIGTERM, lambda number, frame: running.clear())
    base = _begin(link, wire.Topics("bench").for_coordinator())
    print(json.dumps({"ready": True}), flush=True)
    while running:
        due = _turn(link, transfers)
        link.wait(min(max(due - time.monotonic(), 0.0), 0.2))
    print(json.dumps({"base": base, "peak": budget.peak_bytes(os.getpid()), "lost": lossy.lost}), flush=True)


def pull(url: str, folder: str, sha256: str, device: str) -> None:
    """Pull the blob as an agent does; print what it took."""
    import fedquilt.edge_agent.agent  # noqa: F401 - its imports are part of the base

    link = MqttLink(Broker.parse(url), f"bench-{device}")
    depot = Depot(Path(folder))
    transfers = Transfers(link, depot, wire.Topics("bench"), "up", lambda device, sha: False)
    base = _begin(link, wire.Topics("bench").for_device(device))
    began = time.monotonic()
    transfers.want(device, BlobRef(sha256=sha256, size=SIZE))
    done: list[tuple[str, str, str | None]] = []
    while not done and time.monotonic() < began + LIMIT_S:
        due = _turn(link, transfers)
        done = transfers.take_done()
        if not done:
            link.wait(min(max(due - time.monotonic(), 0.0), 0.2))
    error = done[0][2] if done else f"not finished after {LIMIT_S:g} s"
    took = {"base": base, "peak": budget.peak_bytes(os.getpid()), "seconds": time.monotonic() - began, "error": error}
    print(json.dumps(took), flush=True)
    link.close()


def _begin(link: MqttLink, filters: Sequence[str]) -> int:
    link.connect(timeout_s=10.0)
    link.subscribe(filters)
    link.wait(0.2)
    budget.reset_peak(os.getpid())
    return budget.resident_bytes(os.getpid()) or 0


def _turn(link: MqttLink, transfers: Transfers) -> float:
    messages: list[Message] = link.receive()
    for message in messages:
        transfers.handle(wire.route(message.topic), message.payload, time.monotonic())
    return transfers.step(time.monotonic())


# -- all of them ----------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Run the transfer and raw TCP once each.

    Raises:
        JobError: Mosquitto is not installed.
    """
    mosquitto = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if mosquitto is None:
        raise JobError("this bench needs Mosquitto: apt install mosquitto")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        blob = random.Random(0).randbytes(SIZE)
        sha256 = hashlib.sha256(blob).hexdigest()
        Depot(home / "server").put(blob)
        tcp_s = _raw_tcp(blob)
        del blob
        return _result(_run(mosquitto, home, sha256), tcp_s)


def _run(mosquitto: str, home: Path, sha256: str) -> dict[str, Any]:
    port = _free_port()
    (home / "mosquitto.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    command = [mosquitto, "-c", str(home / "mosquitto.conf")]
    url = f"mqtt://127.0.0.1:{port}"
    node = [sys.executable, "-m", "fedquilt.tools.bench.blobs"]
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen([*node, *arguments], stdout=subprocess.PIPE, text=True))
        return processes[-1]

    broker = _broker(command, port)
    broker_peak = 0
    try:
        server = start("serve", url, str(home / "server"), sha256)
        assert server.stdout is not None
        server.stdout.readline()
        agents = [start("pull", url, str(home / f"agent-{i}"), sha256, f"agent-{i}") for i in range(AGENTS)]
        time.sleep(BROKER_DIES_S)
        broker_peak = budget.peak_bytes(broker.pid) or 0
        broker.kill()
        broker.wait()
        time.sleep(BROKER_DOWN_S)
        broker = _broker(command, port)
        pulled = [json.loads(agent.communicate(timeout=LIMIT_S + 30)[0]) for agent in agents]
        broker_peak = max(broker_peak, budget.peak_bytes(broker.pid) or 0)
        server.terminate()
        served = json.loads(server.communicate(timeout=10)[0])
    finally:
        broker.kill()
        for process in processes:
            process.kill()
            process.wait()
    return {"agents": pulled, "server": served, "broker_peak": broker_peak}


def _result(ran: dict[str, Any], tcp_s: float) -> dict[str, Any]:
    agents, server = ran["agents"], ran["server"]
    seconds = max(agent["seconds"] for agent in agents)
    failed = [agent["error"] for agent in agents if agent["error"]]
    return {
        "bench": "blobs",
        "bytes": SIZE,
        "agents": AGENTS,
        "chunk_loss": LOSS,
        "chunks_lost": server["lost"],
        "broker_killed": True,
        "errors": failed,
        "seconds": round(seconds, 2),
        "raw_tcp_seconds": round(tcp_s, 3),
        "times_raw_tcp": round(seconds / tcp_s, 1),
        "agent_base_mb": round(max(agent["base"] for agent in agents) / 1e6, 1),
        "coordinator_base_mb": round(server["base"] / 1e6, 1),
        "figures": {
            "agents_that_did_not_finish": figure(len(failed), 0, "agents"),
            "agent_peak_above_idle": figure(max(a["peak"] - a["base"] for a in agents) / 1e6, 12, "MB"),
            "coordinator_peak_above_base": figure((server["peak"] - server["base"]) / 1e6, 40, "MB"),
            "broker_peak": figure(ran["broker_peak"] / 1e6, 100, "MB"),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    return [
        *figure_lines(result),
        f"    {result['agents']} x {result['bytes'] / 1e6:g} MB in {result['seconds']} s with "
        f"{result['chunks_lost']} chunks lost and the broker killed once; "
        f"raw TCP of the same bytes: {result['raw_tcp_seconds']} s ({result['times_raw_tcp']}x)",
        *(f"    failed: {error}" for error in result["errors"]),
    ]


def _broker(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit_s = time.monotonic() + 10
    while time.monotonic() < limit_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise LinkError("mosquitto did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _raw_tcp(blob: bytes) -> float:
    """Seconds for the same bytes to as many receivers over loopback sockets, one thread each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()) for _ in range(AGENTS)]
        pairs = [(listener.accept()[0], end) for end in ends]

    def receive(end: socket.socket) -> None:
        left, buffer = len(blob), bytearray(1 << 18)
        while left:
            left -= end.recv_into(buffer)

    threads = [threading.Thread(target=receive, args=(b,)) for _, b in pairs]
    threads += [threading.Thread(target=a.sendall, args=(blob,)) for a, _ in pairs]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    for pair in pairs:
        for end in pair:
            end.close()
    return took


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        pull(*sys.argv[2:])

"""`fedquilt bench blobs`: a 45 MB model to 10 agents, by HTTP and through Mosquitto, beside TCP.

Beside TCP that hashes and stores the same bytes, by processes of the same kind that begin at the same moment; then both
again with faults: 2 % of chunks are lost (over the broker) or end a connection (by HTTP), the broker is killed once.

Each agent is a process with the daemon's own imports and the transfer code it uses; the serving
process has the coordinator's. What they hold beyond their idle size is their own peak (VmHWM after
a reset).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from fedquilt import heap, wire
from fedquilt.blobs import over_http
from fedquilt.blobs.carriers import Carriers
from fedquilt.blobs.store import Depot
from fedquilt.blobs.transfer import Transfers
from fedquilt.core import BlobRef, JobError, LinkError, Profile
from fedquilt.edge_agent.task import budget
from fedquilt.tools.report.figures import at_least, figure, figure_lines
from fedquilt.transport.broker import Broker
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt import MqttLink

SIZE = 45_000_000
AGENTS = 10
LOSS = 0.02
TURNS: Final = 3  # of each way, one after another
BROKER_DIES: Final = 0.5  # of the time that TCP takes, after the agents have begun
BROKER_DOWN_S = 1.0
LIMIT_S = 180.0

Way = Literal["tcp", "http", "mqtt"]


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


def _breaking(loss: float, lost: Callable[[], None]) -> Callable[..., None]:
    """`send_file` whose connection ends with the given probability at each chunk."""
    roll, send = random.Random(1), over_http.send_file

    def sending(
        sock: socket.socket, file: int, offset: int, size: int, moved: Callable[[int], None] = lambda size: None
    ) -> None:
        while size:
            piece = min(wire.MAX_CHUNK, size)
            if roll.random() < loss:
                lost()
                raise ConnectionError("broken for the bench")
            send(sock, file, offset, piece, moved)
            offset, size = offset + piece, size - piece

    return sending


# -- one process ----------------------------------------------------------------------------------


def serve(url: str, folder: str, sha256: str, way: str, loss: str) -> None:
    """Serve the blob as the coordinator does, until SIGTERM; then print what it took."""
    import fedquilt.coordinator.server  # noqa: F401 - its imports are part of the base
    from fedquilt.coordinator import blob_server
    from fedquilt.coordinator.places import Places, Where

    depot, lost = Depot(Path(folder)), [0]
    if way == "tcp":
        return _serve_tcp(depot.file(sha256) or "")
    link = MqttLink(Broker.parse(url), "bench-coordinator")
    lossy = LossyLink(link, float(loss), seed=1)
    if float(loss):
        blob_server.send_file = _breaking(float(loss), lambda: lost.append(1))  # type: ignore[attr-defined]
    places = Places(Where("127.0.0.1:0" if way == "http" else None), depot, lambda device, sha: sha == sha256)
    transfers = Transfers(lossy, depot, wire.Topics("bench"), "dn", lambda device, sha: sha == sha256, carriers=places)
    for number in range(AGENTS):
        places.said(_profile(f"agent-{number}"))
    running = [True]
    signal.signal(signal.SIGTERM, lambda number, frame: running.clear())
    base = _begin(link, wire.Topics("bench").for_coordinator())
    idle_s = time.process_time()
    print(json.dumps({"port": 0}), flush=True)
    while running:
        due = _turn(link, transfers)
        link.wait(min(max(due - time.monotonic(), 0.0), 0.2), transfers.fds())
    cpu_s = time.process_time() - idle_s
    told = {"base": base, "peak": budget.peak_bytes(os.getpid()), "lost": lossy.lost + sum(lost), "cpu_s": cpu_s}
    print(json.dumps(told), flush=True)


def _serve_tcp(path: str) -> None:
    """Send the file to whoever connects, by the kernel."""

    def send(sock: socket.socket) -> None:
        with sock, open(path, "rb") as file:
            sock.sendfile(file)

    threads = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        idle_s = time.process_time()
        for _ in range(AGENTS):
            threads.append(threading.Thread(target=send, args=(listener.accept()[0],)))
            threads[-1].start()
    for thread in threads:
        thread.join()
    cpu_s = time.process_time() - idle_s
    print(json.dumps({"base": 0, "peak": 0, "lost": 0, "cpu_s": cpu_s}), flush=True)


def pull(url: str, folder: str, sha256: str, device: str, way: str, port: str) -> None:
    """Pull the blob as an agent does, from when a line comes on standard input; print what it took."""
    import fedquilt.edge_agent.agent  # noqa: F401 - its imports are part of the base

    if way == "tcp":
        return _pull_tcp(int(port), Path(folder), sha256)
    link = MqttLink(Broker.parse(url), f"bench-{device}")
    depot = Depot(Path(folder))
    transfers = Transfers(link, depot, wire.Topics("bench"), "up", lambda device, sha: False, carriers=Carriers())
    base = _begin(link, wire.Topics("bench").for_device(device))
    idle_s = _ready()
    began = time.monotonic()
    transfers.want(device, BlobRef(sha256=sha256, size=SIZE))
    done: list[tuple[str, str, str | None]] = []
    while not done and time.monotonic() < began + LIMIT_S:
        due = _turn(link, transfers)
        done = transfers.take_done()
        if not done:
            link.wait(min(max(due - time.monotonic(), 0.0), 0.2), transfers.fds())
    error = done[0][2] if done else f"not finished after {LIMIT_S:g} s"
    cpu_s, peak = time.process_time() - idle_s, budget.peak_bytes(os.getpid())
    print(json.dumps({"base": base, "peak": peak, "error": error, "cpu_s": cpu_s}), flush=True)
    link.close()


def _pull_tcp(port: int, folder: Path, sha256: str) -> None:
    """What has to be done in any case: receive, hash, write, wait for the disk, name."""
    folder.mkdir(parents=True)
    idle_s = _ready()
    buffer, digest, left = memoryview(bytearray(256 * 1024)), hashlib.sha256(), SIZE
    with socket.create_connection(("127.0.0.1", port)) as sock, open(folder / "part", "wb", buffering=0) as file:
        while left:
            got = sock.recv_into(buffer)
            digest.update(buffer[:got])
            file.write(buffer[:got])
            left -= got
        os.fsync(file.fileno())
    os.replace(folder / "part", folder / sha256)
    error = None if digest.hexdigest() == sha256 else "damaged"
    cpu_s = time.process_time() - idle_s
    print(json.dumps({"base": 0, "peak": 0, "error": error, "cpu_s": cpu_s}), flush=True)


def _profile(device: str) -> Profile:
    return Profile(
        device=device, board="b", memory_bytes=0, budget_bytes=0, engines=(), versions={}, carriers=("http",)
    )


def _ready() -> float:
    """Wait for the start; returns the processor time until then, in seconds."""
    print("ready", flush=True)
    sys.stdin.readline()
    return time.process_time()


def _begin(link: MqttLink, filters: Sequence[str]) -> int:
    heap.keep_pieces()  # as the agent and the coordinator do
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
    """Run every way in turn.

    Raises:
        JobError: Mosquitto is not installed.
    """
    mosquitto = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if mosquitto is None:
        raise JobError("this bench needs Mosquitto: apt install mosquitto")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sha256 = Depot(home / "server").put(random.Random(0).randbytes(SIZE)).sha256
        ran: dict[str, list[dict[str, Any]]] = {}
        for _ in range(TURNS):
            tcp = _run(mosquitto, home, sha256, "tcp")
            ran.setdefault("tcp", []).append(tcp)
            for way, loss in (("http", 0.0), ("mqtt", 0.0), ("http", LOSS), ("mqtt", LOSS)):
                dies_s = BROKER_DIES * tcp["seconds"] if loss else None
                name = f"{way}_with_faults" if loss else way
                ran.setdefault(name, []).append(_run(mosquitto, home, sha256, way, loss, dies_s))  # type: ignore[arg-type]
        return _result(ran)


def _run(
    mosquitto: str, home: Path, sha256: str, way: Way, loss: float = 0.0, dies_s: float | None = None
) -> dict[str, Any]:
    port = _free_port()
    (home / "mosquitto.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    command = [mosquitto, "-c", str(home / "mosquitto.conf")]
    url = f"mqtt://127.0.0.1:{port}"
    node = [sys.executable, "-m", "fedquilt.tools.bench.blobs"]
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*node, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    broker = _broker(command, port)
    broker_peak = 0
    try:
        server = start("serve", url, str(home / "server"), sha256, way, str(loss))
        served_at = str(json.loads(_line(server))["port"])
        agents = [
            start("pull", url, str(home / f"agent-{number}"), sha256, f"agent-{number}", way, served_at)
            for number in range(AGENTS)
        ]
        for agent in agents:
            _line(agent)
        began = time.monotonic()
        for agent in agents:
            assert agent.stdin is not None
            agent.stdin.write("\n")
            agent.stdin.flush()
        if dies_s is not None:
            time.sleep(dies_s)
            broker_peak = budget.peak_bytes(broker.pid) or 0
            broker.kill()
            broker.wait()
            time.sleep(BROKER_DOWN_S)
            broker = _broker(command, port)
        pulled = [json.loads(_line(agent)) for agent in agents]
        seconds = time.monotonic() - began
        brokers_s = sum(psutil.Process(broker.pid).cpu_times()[:2])
        broker_peak = max(broker_peak, budget.peak_bytes(broker.pid) or 0)
        if way != "tcp":
            server.terminate()
        served = json.loads(_line(server))
    finally:
        broker.kill()
        broker.wait()
        for process in processes:
            process.kill()
            process.communicate()
        for number in range(AGENTS):
            shutil.rmtree(home / f"agent-{number}", ignore_errors=True)
    cpu_s = served["cpu_s"] + brokers_s + sum(agent["cpu_s"] for agent in pulled)
    return {"seconds": seconds, "cpu_s": cpu_s, "agents": pulled, "server": served, "broker_peak": broker_peak}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _result(ran: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def share(name: str) -> float:
        """Median over turns of TCP's time as a share of this way's."""
        return statistics.median(
            tcp["seconds"] / each["seconds"] for tcp, each in zip(ran["tcp"], ran[name], strict=True)
        )

    runs = [each for several in ran.values() for each in several]
    agents = [agent for each in runs for agent in each["agents"]]
    errors = [agent["error"] for agent in agents if agent["error"]]
    return {
        "bench": "blobs",
        "bytes": SIZE,
        "agents": AGENTS,
        "turns": TURNS,
        "chunk_loss": LOSS,
        "chunks_lost": sum(each["server"]["lost"] for each in runs),
        "errors": errors,
        "seconds": {name: [round(each["seconds"], 2) for each in several] for name, several in ran.items()},
        "processor_seconds": {name: [round(each["cpu_s"], 2) for each in several] for name, several in ran.items()},
        "agent_base_mb": round(max(agent["base"] for agent in agents) / 1e6, 1),
        "coordinator_base_mb": round(max(each["server"]["base"] for each in runs) / 1e6, 1),
        "figures": {
            "agents_that_did_not_finish": figure(len(errors), 0, "agents"),
            "http_beside_tcp": at_least(share("http"), 0.8, "of its speed"),
            "mqtt_beside_tcp": at_least(share("mqtt"), 0.3, "of its speed"),
            "http_with_faults_beside_tcp": at_least(share("http_with_faults"), 0.8, "of its speed"),
            "mqtt_with_faults_beside_tcp": at_least(share("mqtt_with_faults"), 0.3, "of its speed"),
            "agent_peak_above_idle": figure(max(agent["peak"] - agent["base"] for agent in agents) / 1e6, 12, "MB"),
            "coordinator_peak_above_base": figure(
                max(each["server"]["peak"] - each["server"]["base"] for each in runs) / 1e6, 40, "MB"
            ),
            "broker_peak": figure(max(each["broker_peak"] for each in runs) / 1e6, 100, "MB"),
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    return [
        *figure_lines(result),
        f"    {result['agents']} x {result['bytes'] / 1e6:g} MB; {result['chunks_lost']} chunks lost, or connections",
        *(
            f"    {name.replace('_', ' ')}: {' '.join(map(str, took))} s, of processors "
            f"{' '.join(map(str, result['processor_seconds'][name]))} s"
            for name, took in result["seconds"].items()
        ),
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


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        pull(*sys.argv[2:])

"""Serving and pulling processes of `python -m tests.benches blobs`.

An agent is a process with the daemon's own imports and the transfer code it uses. The serving process imports the
coordinator's. Their memory use is the peak above their idle size (VmHWM after a reset).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fedquilt import wire
from fedquilt.blobs import http_client
from fedquilt.blobs.direct_transfers import TransferBackend
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.core import BlobRef
from fedquilt.edge_agent.task import memory_budget
from fedquilt.host import process_resources
from fedquilt.transport.link import Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink

SIZE: Final = 45_000_000
AGENTS: Final = 10
OUTAGE_S: Final = 1.0  # of the broker, or of TCP's server
TIMEOUT_S: Final = 180.0
PULL_ADDRESS: Final = ("127.0.0.2", 0)
RECONNECT_S: Final = 0.01  # between connection attempts of TCP


class LossyLink:
    def __init__(self, link: MqttLink, loss: float, seed: int) -> None:
        self._link, self._loss, self._rng = link, loss, random.Random(seed)
        self.lost_chunks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        if topic.rpartition("/")[2].isdigit() and self._rng.random() < self._loss:
            self.lost_chunks += 1
        else:
            self._link.publish(topic, payload, retain=retain, reliable=reliable)


def _create_unreliable_send(loss: float, lost_count: list[int]) -> Callable[..., None]:
    rng, send = random.Random(1), http_client.send_file

    def send_unreliably(
        sock: socket.socket, file: int, offset: int, size: int, on_progress: Callable[[int], None] = lambda size: None
    ) -> None:
        while size:
            chunk_bytes = min(wire.MAX_CHUNK, size)
            if rng.random() < loss:
                lost_count[0] += 1
                raise ConnectionError("broken by the benchmark")
            send(sock, file, offset, chunk_bytes, on_progress)
            offset, size = offset + chunk_bytes, size - chunk_bytes

    return send_unreliably


def serve_blob(url: str, folder: str, sha256: str, transport: str, loss: str) -> None:
    """Print the port, serve a blob until SIGTERM, then print memory, time and lost chunks as JSON.

    The `transport` is "tcp", "http" or "mqtt", `loss` the share of chunks that are lost.
    """
    import fedquilt.coordinator.server  # noqa: F401 - its imports are part of the base
    from fedquilt.coordinator.delivery import blob_server
    from fedquilt.coordinator.delivery.blob_server import BlobLocationProvider, BlobLocationSettings

    blob_store, lost_count = BlobStore(Path(folder)), [0]
    if transport == "tcp":
        return _serve_tcp(blob_store.verified_path(sha256) or "", float(loss))
    link = MqttLink(Broker.from_url(url), "bench-coordinator")
    lossy = LossyLink(link, float(loss), seed=1)
    if float(loss):
        blob_server.send_file = _create_unreliable_send(float(loss), lost_count)  # type: ignore[attr-defined]
    location_provider = BlobLocationProvider(
        BlobLocationSettings("127.0.0.1:0" if transport == "http" else None),
        blob_store,
        lambda device, sha: sha == sha256,
    )
    transfers = Transfers(
        lossy, blob_store, wire.Topics("bench"), "dn", lambda device, sha: sha == sha256, backend=location_provider
    )
    running = [True]
    signal.signal(signal.SIGTERM, lambda number, frame: running.clear())
    base = _connect_and_measure_base(link, wire.Topics("bench").coordinator_filters())
    idle_s = time.process_time()
    print(json.dumps({"port": 0}), flush=True)
    while running:
        due = _process_messages(link, transfers)
        link.wait(min(max(due - time.monotonic(), 0.0), 0.2), transfers.fds())
    cpu_s = time.process_time() - idle_s
    report = {
        "base": base,
        "peak": memory_budget.read_peak_bytes(os.getpid()),
        "lost": lossy.lost_chunks + lost_count[0],
        "cpu_s": cpu_s,
    }
    print(json.dumps(report), flush=True)


def _serve_tcp(path: str, loss: float) -> None:
    """Print the port, send each client the rest of the blob until SIGTERM, then print the measurement."""
    # in an outage, all connections and the listener are closed for OUTAGE_S, like those of a killed server
    lost_count, socks = [0], list[socket.socket]()
    send = _create_unreliable_send(loss, lost_count) if loss else _send_rest

    def send_blob(sock: socket.socket) -> None:
        with suppress(OSError), sock, open(path, "rb") as file:
            start = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
            send(sock, file.fileno(), start, SIZE - start)

    def accept_connections(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                socks.append(listener.accept()[0])
                threading.Thread(target=send_blob, args=(socks[-1],), daemon=True).start()

    signals = (signal.SIGTERM, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # of the threads too
    address, idle_s = ("127.0.0.1", 0), time.process_time()
    while True:
        with socket.create_server(address) as listener:
            if not address[1]:
                address = listener.getsockname()
                print(json.dumps({"port": address[1]}), flush=True)
            accepting = threading.Thread(target=accept_connections, args=(listener,))
            accepting.start()
            number = signal.sigwait(signals)
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
        if number == signal.SIGTERM:
            break
        for sock in socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        time.sleep(OUTAGE_S)
    cpu_s = time.process_time() - idle_s
    print(json.dumps({"base": 0, "peak": 0, "lost": lost_count[0], "cpu_s": cpu_s}), flush=True)


def _send_rest(sock: socket.socket, file: int, offset: int, size: int) -> None:
    with open(file, "rb", closefd=False) as opened:
        sock.sendfile(opened, offset)


def pull_blob(url: str, folder: str, sha256: str, device: str, transport: str, port: str) -> None:
    """Pull the blob after a line on standard input, then print memory, processor time and error as JSON.

    The `transport` "tcp" is a plain connection to `port`. Other transports request the blob over the broker at `url`.
    """
    import fedquilt.edge_agent.agent  # noqa: F401 - its imports are part of the base

    if transport == "tcp":
        return _pull_tcp(int(port), Path(folder), sha256)
    link = MqttLink(Broker.from_url(url), f"bench-{device}")
    blob_store = BlobStore(Path(folder))
    transfers = Transfers(
        link, blob_store, wire.Topics("bench"), "up", lambda device, sha: False, backend=TransferBackend()
    )
    base = _connect_and_measure_base(link, wire.Topics("bench").device_filters(device))
    idle_s = _wait_for_start()
    start_s = time.monotonic()
    transfers.request_blob(device, BlobRef(sha256=sha256, size=SIZE))
    finished: list[tuple[str, str, str | None]] = []
    while not finished and time.monotonic() < start_s + TIMEOUT_S:
        due = _process_messages(link, transfers)
        finished = transfers.take_finished()
        if not finished:
            link.wait(min(max(due - time.monotonic(), 0.0), 0.2), transfers.fds())
    error = finished[0][2] if finished else f"not finished after {TIMEOUT_S:g} s"
    end_s, cpu_s, peak = time.monotonic(), time.process_time() - idle_s, memory_budget.read_peak_bytes(os.getpid())
    print(json.dumps({"base": base, "peak": peak, "error": error, "cpu_s": cpu_s, "ended": end_s}), flush=True)
    link.close()


def _pull_tcp(port: int, folder: Path, sha256: str) -> None:
    folder.mkdir(parents=True)
    idle_s = _wait_for_start()
    buffer, digest, total_bytes = memoryview(bytearray(256 * 1024)), hashlib.sha256(), 0
    with open(folder / "part", "wb", buffering=0) as file:
        while total_bytes < SIZE:
            # Another address, because the kernel may assign the unused port to the client, which would reach itself.
            with (
                suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", port), TIMEOUT_S, PULL_ADDRESS) as sock,
            ):
                sock.sendall(total_bytes.to_bytes(8, "big"))
                while received_bytes := sock.recv_into(buffer):
                    digest.update(buffer[:received_bytes])
                    file.write(buffer[:received_bytes])
                    total_bytes += received_bytes
            if total_bytes < SIZE:
                time.sleep(RECONNECT_S)
        os.fsync(file.fileno())
    os.replace(folder / "part", folder / sha256)
    end_s, cpu_s = time.monotonic(), time.process_time() - idle_s
    error = None if digest.hexdigest() == sha256 else "damaged"
    print(json.dumps({"base": 0, "peak": 0, "error": error, "cpu_s": cpu_s, "ended": end_s}), flush=True)


def _wait_for_start() -> float:
    print("ready", flush=True)
    sys.stdin.readline()
    return time.process_time()


def _connect_and_measure_base(link: MqttLink, filters: Sequence[str]) -> int:
    process_resources.keep_freed_memory()  # as the agent and the coordinator do
    link.wait_until_connected(timeout_s=10.0)
    link.subscribe(filters)
    link.wait(0.2)
    memory_budget.reset_peak(os.getpid())
    return memory_budget.resident_bytes(os.getpid()) or 0


def _process_messages(link: MqttLink, transfers: Transfers) -> float:
    messages: list[Message] = link.receive()
    for message in messages:
        transfers.handle_message(wire.parse_topic(message.topic), message.payload, time.monotonic())
    return transfers.step(time.monotonic())


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve_blob(*sys.argv[2:])
    else:
        pull_blob(*sys.argv[2:])

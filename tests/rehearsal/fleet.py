"""Fleet on loopback, made with the commands of an operator, and messages of its device at the broker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedquilt import wire
from fedquilt.core import JobError, LinkError, Profile, WireError, shorten_error
from fedquilt.transport.link import Link, Message
from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.link import MqttLink
from tests.signed_payloads import payload_without_check

HOST: Final = "127.0.0.1"
START_S: Final = 30.0
STOP_S: Final = 15.0
FILES: Final = {"ca": "fedquilt-ca/ca.crt", "cert": "coordinator.crt", "key": "coordinator.key"}
WATCHING: Final = {"ca": "fedquilt-ca/ca.crt", "cert": "watcher.crt", "key": "watcher.key"}  # options of an observer


@dataclass(frozen=True)
class LoopbackFleet:
    folder: Path
    broker: int
    endpoint: int

    @property
    def url(self) -> str:
        return f"mqtts://{HOST}:{self.broker}"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def run_fedquilt(self, *words: str) -> None:
        with self.log.open("a") as log:
            log.write(f"$ fedquilt {' '.join(words)}\n")
            log.flush()
            done = subprocess.run(self.fedquilt_command(*words), cwd=self.folder, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise JobError(f"fedquilt {' '.join(words[:3])} ended with {done.returncode}: {last(self.log)}")

    def fedquilt_command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "fedquilt.cli", *words]

    def coordinator_options(self, home: str = "runs") -> list[str]:
        files = [word for name, path in FILES.items() for word in (f"--{name}", path)]
        return ["--home", home, "--broker", self.url, *files]

    def issue_identities(self, device: str) -> None:
        self.run_fedquilt("identity", "init")
        self.run_fedquilt("identity", "issue", "watcher", "--role", "observer")  # the broker's rules name this observer
        self.run_fedquilt(
            *("broker", "config", "--host", HOST, "--listen", f"{HOST}:{self.broker}"),
            *("--out", "broker", "--installed", str((self.folder / "broker").resolve())),
        )
        self.run_fedquilt("identity", "issue", "coordinator")
        self.run_fedquilt("identity", "token", device, "--out", f"{device}.token")

    def create_listener(self, device: str) -> DeviceListener:
        files: dict[str, Any] = {name: self.folder / path for name, path in WATCHING.items()}
        broker = Broker.from_url(self.url, **files)
        return DeviceListener(lambda: MqttLink(broker, "fedquilt-rehearsal"), "fleet", device)

    def agent_table(self, device: str, budget: str, data: Mapping[str, object]) -> dict[str, object]:
        return {
            "device": device,
            "home": "/var/lib/fedquilt",
            "budget": budget,
            "broker": {"url": self.url, "ca": "fedquilt-ca/ca.crt"},
            "enrol": {"url": f"https://{HOST}:{self.endpoint}"},
            "data": dict(data),
        }

    def write_broker_config(self) -> list[str]:
        lines = (self.folder / "broker" / "fedquilt.conf").read_text().splitlines()
        # a broker started by root becomes the user "mosquitto", who may not read the folder
        lines += ["user root", f"persistence_location {(self.folder / 'broker').resolve()}/"]
        path = self.folder / "broker" / "mosquitto.conf"
        path.write_text("\n".join(lines) + "\n")
        return ["mosquitto", "-c", str(path)]

    def enrolment_command(self) -> list[str]:
        return self.fedquilt_command("identity", "serve", "--listen", f"{HOST}:{self.endpoint}", "--host", HOST)


def find_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def run_server(words: Sequence[str], folder: Path, log: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end_s = time.monotonic() + START_S
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise LinkError(f"{' '.join(words[:3])} does not listen on {HOST}:{port}: {last(log)} ({log})")
            time.sleep(0.05)
        yield process
    finally:
        stop_process(process, STOP_S)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def stop_process(process: subprocess.Popen[bytes], limit_s: float) -> int:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
    return process.wait()


def last(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return shorten_error(lines[-1]) if lines else "(it said nothing)"


# -- messages of a device --------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceivedMessages:
    presence: wire.Presence | None = None
    profile: Profile | None = None
    telemetry: wire.Telemetry | None = None
    begun: frozenset[str] = frozenset()  # names of the agent's starts that have been online

    @property
    def online(self) -> str:
        return self.presence.boot if self.presence is not None and self.presence.online else ""

    def with_message(self, message: Message, device: str) -> ReceivedMessages:
        try:
            route = wire.parse_topic(message.topic)
            if route.device != device or route.direction != "up":
                return self
            payload = payload_without_check(message.payload)
            if route.subtopic == "presence":
                said = wire.decode(payload, wire.Presence)
                begun = self.begun | {said.boot} if said.online else self.begun
                again = self.presence is not None and self.presence.boot == said.boot
                return ReceivedMessages(said, self.profile if again else None, self.telemetry if again else None, begun)
            if route.subtopic == "profile":
                return ReceivedMessages(self.presence, wire.decode(payload, Profile), self.telemetry, self.begun)
            if route.subtopic == "telemetry":
                told = wire.decode(payload, wire.Telemetry)
                return ReceivedMessages(self.presence, self.profile, told, self.begun)
        except WireError:
            pass
        return self


class DeviceListener:
    """Client of the broker that receives the messages of one device and publishes none.

    Args:
        connect: Function that creates a link to the broker.
    """

    def __init__(self, connect: Callable[[], Link], fleet: str, device: str) -> None:
        self._device, self.heard = device, ReceivedMessages()
        self._connect, self._topic = connect, wire.Topics(fleet).device_topic(device, "up", "+")
        self._link: Link | None = self._connect_link()

    def _connect_link(self) -> Link:
        link = self._connect()
        link.subscribe([self._topic])
        return link

    def receive(self, limit_s: float) -> ReceivedMessages:
        self._link = self._link or self._connect_link()
        self._link.wait(limit_s)
        for message in self._link.receive():
            self.heard = self.heard.with_message(message, self._device)
        return self.heard

    def wait_until(
        self, true: Callable[[ReceivedMessages], bool], limit_s: float, alive: Callable[[], bool] = lambda: True
    ) -> bool:
        end_s = time.monotonic() + limit_s
        while not true(self.receive(0.2)):
            if time.monotonic() >= end_s or not alive():
                return False
        return True

    def close(self) -> None:
        # the broker disconnects clients that are silent for long, so `receive` connects again
        if self._link is not None:
            self._link.close()
            self._link = None

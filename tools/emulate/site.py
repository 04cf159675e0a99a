"""A fleet of its own on loopback, made with the commands that an operator types."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedquilt.core import JobError, LinkError, shorten_error
from fedquilt.tools.emulate.listener import Listener
from fedquilt.transport.broker import Broker
from fedquilt.transport.mqtt import MqttLink

HOST: Final = "127.0.0.1"
START_S: Final = 30.0
STOP_S: Final = 15.0
FILES: Final = {"ca": "fedquilt-ca/ca.crt", "cert": "coordinator.crt", "key": "coordinator.key"}
WATCHING: Final = {"ca": "fedquilt-ca/ca.crt", "cert": "watcher.crt", "key": "watcher.key"}  # options of an observer


@dataclass(frozen=True)
class Site:
    """A folder with the authority, the broker's files, the board's and the job's; and two ports."""

    folder: Path
    broker: int
    endpoint: int

    @property
    def url(self) -> str:
        """URL of the broker."""
        return f"mqtts://{HOST}:{self.broker}"

    @property
    def log(self) -> Path:
        """Path of the site's log."""
        return self.folder / "log.txt"

    def fedquilt(self, *words: str) -> None:
        """Run a `fedquilt` command in the site's folder; its output goes to the log.

        Raises:
            JobError: the command fails; quotes the end of its output.
        """
        with self.log.open("a") as log:
            log.write(f"$ fedquilt {' '.join(words)}\n")
            log.flush()
            done = subprocess.run(self.words(*words), cwd=self.folder, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise JobError(f"fedquilt {' '.join(words[:3])} ended with {done.returncode}: {last(self.log)}")

    def words(self, *words: str) -> list[str]:
        """Command line of the `fedquilt` command with these words."""
        return [sys.executable, "-m", "fedquilt.cli", *words]

    def coordinator(self, home: str = "runs") -> list[str]:
        """Options of a coordinator's command for the broker."""
        files = [word for name, path in FILES.items() for word in (f"--{name}", path)]
        return ["--home", home, "--broker", self.url, *files]

    def found(self, device: str) -> None:
        """Make an authority, files of broker, coordinator and observer, and a token for the board."""
        self.fedquilt("ca", "init")
        self.fedquilt("ca", "issue", "watcher", "--role", "observer")  # the broker's rules name this observer
        self.fedquilt(
            *("broker", "config", "--for", "mosquitto", "--host", HOST, "--listen", str(self.broker)),
            *("--out", "broker", "--installed", str((self.folder / "broker").resolve())),
        )
        self.fedquilt("ca", "issue", "coordinator")
        self.fedquilt("enrol", "token", device, "--out", f"{device}.token")

    def listener(self, device: str) -> Listener:
        """Listener to a device's messages at the broker; the caller closes it."""
        files: dict[str, Any] = {name: self.folder / path for name, path in WATCHING.items()}
        broker = Broker.parse(self.url, **files)
        return Listener(lambda: MqttLink(broker, "fedquilt-emulate"), "fleet", device)

    def board(self, device: str, budget: str, data: Mapping[str, object]) -> dict[str, object]:
        """Table of the board's agent.toml."""
        return {
            "device": device,
            "home": "/var/lib/fedquilt",
            "budget": budget,
            "broker": {"url": self.url, "ca": "fedquilt-ca/ca.crt"},
            "enrol": {"url": f"https://{HOST}:{self.endpoint}"},
            "data": dict(data),
        }

    def mosquitto(self) -> list[str]:
        """Command of the broker with the written configuration, but on loopback and as this user."""
        written = (self.folder / "broker" / "fedquilt.conf").read_text().splitlines()
        lines = [f"{line} {HOST}" if line.startswith("listener ") else line for line in written]
        # a broker started by root becomes the user "mosquitto", who may not read the folder
        lines += ["user root", f"persistence_location {(self.folder / 'broker').resolve()}/"]
        path = self.folder / "broker" / "mosquitto.conf"
        path.write_text("\n".join(lines) + "\n")
        return ["mosquitto", "-c", str(path)]

    def enrolment(self) -> list[str]:
        """Command line of the enrolment endpoint."""
        return self.words("enrol", "serve", "--listen", HOST, "--host", HOST, "--port", str(self.endpoint))


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def running(words: Sequence[str], folder: Path, log: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that listens on a port of loopback for the duration of the body.

    Raises:
        LinkError: the server does not listen; quotes the end of its output.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end_s = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise LinkError(f"{' '.join(words[:3])} does not listen on {HOST}:{port}: {last(log)} ({log})")
            time.sleep(0.05)
        yield process
    finally:
        stop(process, STOP_S)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def stop(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """End a process and its group, gently first; its exit code."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
    return process.wait()


def last(log: Path) -> str:
    """Return the last line of a log, or a note that there is none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return shorten_error(lines[-1]) if lines else "(it said nothing)"

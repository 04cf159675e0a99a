"""Debian's Mosquitto as a process of its own, which can be killed and started again."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from waiting import wait_until

MOSQUITTO = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")


class Mosquitto:
    """One Mosquitto on a free loopback port; it keeps the port over `kill` and `restart`."""

    def __init__(self, folder: Path, lines: tuple[str, ...]) -> None:
        self.folder = folder
        self.lines = lines
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> Mosquitto:
        """Start it and wait until it accepts connections; another port if somebody was faster."""
        for _ in range(5):
            self.port = _free_port()
            if self._launch():
                return self
        raise RuntimeError(f"Mosquitto does not start: {self.log()}")

    def restart(self) -> None:
        if not self._launch():
            raise RuntimeError(f"Mosquitto does not start again: {self.log()}")

    def kill(self) -> None:
        """SIGKILL: it saves nothing and says goodbye to nobody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def reload(self) -> None:
        """SIGHUP, and wait until its log says that it was heard."""
        assert self._process is not None
        before = self.log().count("Reloading config")
        self._process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.log().count("Reloading config") > before, "Mosquitto reloads")

    def log(self) -> str:
        return (self.folder / "mosquitto.log").read_text()

    def _launch(self) -> bool:
        # started by root it would become the user "mosquitto", who may not read our certificates
        lines = [f"listener {self.port} 127.0.0.1", f"user {getpass.getuser()}", "set_tcp_nodelay true", *self.lines]
        if not any(line.startswith("allow_anonymous") for line in lines):
            lines.append("allow_anonymous true")
        (self.folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
        with (self.folder / "mosquitto.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(MOSQUITTO), "-c", str(self.folder / "mosquitto.conf")], stdout=log, stderr=log
            )
        wait_until(lambda: self._ended() or self._accepts(), "Mosquitto accepts connections", diagnostics=self.log)
        return not self._ended()

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

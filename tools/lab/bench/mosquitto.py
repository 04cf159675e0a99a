"""Mosquitto as a process of a benchmark."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

import psutil

from fedquilt.core import JobError, LinkError

START_S: Final = 10.0


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_mosquitto(folder: Path, port: int, settings: str = "") -> subprocess.Popen[bytes]:
    """Start Mosquitto on a port of this machine, and wait until it accepts connections."""
    program = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise JobError("this bench needs Mosquitto: apt install mosquitto")
    config = folder / "mosquitto.conf"
    user = psutil.Process().username()  # a broker started by root would change to the user "mosquitto"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nuser {user}\n{settings}")
    file = folder / "mosquitto.log"
    with file.open("wb") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=log)
    limit_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < limit_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    said = " ".join(file.read_text(errors="replace").split())[-300:] or "no message"
    raise LinkError(f"mosquitto accepts no connections on port {port} ({said}): start the bench again")

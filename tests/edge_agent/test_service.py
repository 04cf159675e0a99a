"""An agent as systemd starts it: a real process, told by its notify socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT_S

from fedquilt.tools.broker import EmbeddedBroker


def test_an_agent_is_ready_without_a_broker_and_says_when_it_is_online(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "agent.toml").write_text(
        f'device = "d"\nhome = "home"\nboard = "jetson-nano"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
    )
    command = [sys.executable, "-m", "fedquilt.cli", "agent", str(tmp_path / "agent.toml")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "n"))
        line.settimeout(LIMIT_S)

        def heard(word: str) -> str:
            while word not in (told := line.recv(4096).decode()):
                pass
            return told

        agent = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "n")})
        try:
            assert heard("READY=1").startswith("READY=1\nWATCHDOG=1\nSTATUS=")
            assert f"127.0.0.1:{port}" in heard("STATUS=")
            heard("WATCHDOG=1")
            with EmbeddedBroker(port=port):
                assert heard("STATUS=online") == f"STATUS=online as d of fleet fleet, through mqtt://127.0.0.1:{port}"
                agent.send_signal(signal.SIGTERM)
                heard("STOPPING=1")
                assert agent.wait(LIMIT_S) == 0
        finally:
            agent.kill()
            agent.wait()

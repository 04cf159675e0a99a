"""A coordinator that runs out of file descriptors while a job runs, with real processes."""

from __future__ import annotations

import re
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from processes import Processes, make_job, read_events, read_updates
from waiting import wait_until

from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded

FLOOD = 100  # connections at once


def test_a_job_is_done_after_connections_have_taken_every_descriptor_of_its_coordinator(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes
) -> None:
    """The limit is lowered to what is open while a device computes. The flood takes whatever becomes free."""
    broker, home, log = mosquitto(), tmp_path / "runs", tmp_path / "run.log"
    tables = list(make_job(tmp_path).make_agent_tables())
    processes.start_agents(tmp_path, tables, broker.url)
    words = ("run", str(tmp_path / "job.toml"), "--home", str(home), "--broker", broker.url)
    processes.start("run", log, *words, "--blobs-http", "127.0.0.1:0")
    run = processes.running["run"]
    wait_until(lambda: any(isinstance(fact, CohortSelected) for fact in read_events(home)), "the beginning of round 0")
    slow = processes.running[tables[-1]["device"]]
    slow.send_signal(signal.SIGSTOP)
    wait_until(lambda: read_updates(home, 0) == len(tables) - 1, "the answers of the others")

    port = int(re.findall(r"blobs at http://127\.0\.0\.1:(\d+)", log.read_text())[0])
    before = resource.prlimit(run.pid, resource.RLIMIT_NOFILE)
    open_most = max(int(each.name) for each in Path(f"/proc/{run.pid}/fd").iterdir())
    with ExitStack() as stack:
        resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (open_most + 1, before[1]))
        for _ in range(FLOOD):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(0.1)
            with suppress(OSError):
                sock.connect(("127.0.0.1", port))
        slow.send_signal(signal.SIGCONT)
        wait_until(
            lambda: "Too many open files" in log.read_text() or run.poll() is not None,
            "the lack",
            diagnostics=log.read_text,
        )
        assert run.poll() is None, log.read_text()
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, before)

    wait_until(lambda: run.poll() is not None, "the end of the run", diagnostics=log.read_text)
    assert run.returncode == 0, log.read_text()
    assert [fact.status for fact in read_events(home) if isinstance(fact, JobEnded)] == ["done"]

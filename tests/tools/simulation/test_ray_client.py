"""A fleet whose command reaches its cluster by Ray's client server, from a process that is no node of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from carried import plan, simulated
from ray_nodes import STORE_BYTES, hands

from fedquilt.core import JobError
from fedquilt.tools.simulation import carriers
from fedquilt.tools.simulation.ray_workers import RayWorkers

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedquilt[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Client server of a Ray of its own, on 127.0.0.1 alone, with two processors."""
    port, gcs = free_port(), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--ray-client-server-port={port}", "--num-cpus=2"]
    command += [f"--object-store-memory={STORE_BYTES}", f"--temp-dir={tmp_path_factory.mktemp('ray')}"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    env["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "300"  # on a busy machine Ray's 30 s are too short
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until_s = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
            assert time.monotonic() < until_s
            time.sleep(0.2)
        yield f"ray://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_bits_by_a_client_server_are_those_of_one_process(name: str, tmp_path: Path, address: str) -> None:
    """Of every state, with private state that follows its device."""
    given = plan(name, tmp_path)
    workers = RayWorkers(str(given.job.engine), address, count=2, mixed=False)
    with hands(workers, given) as made:
        there = simulated(given, made, tmp_path / "ray")
    here = carriers.in_process(given.members()[0])[0]
    assert there == simulated(given, here, tmp_path / "here")


def test_more_workers_than_the_cluster_has_processors_are_refused_by_name(tmp_path: Path, address: str) -> None:
    """The connection is closed: the next run can connect."""
    given = plan("fedavg", tmp_path)
    for _ in range(2):
        with (
            pytest.raises(JobError, match="3 workers: the Ray cluster has 2 processors"),
            hands(RayWorkers(str(given.job.engine), address, count=3, mixed=False), given),
        ):
            pass

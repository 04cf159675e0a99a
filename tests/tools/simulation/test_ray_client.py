"""A fleet whose command reaches its cluster by Ray's client server, from a process that is no node of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from carried import plan, simulated
from ray_nodes import STORE_BYTES, hands

from fedquilt.core import JobError
from fedquilt.tools.simulation import run
from fedquilt.tools.simulation.pool import PoolError
from fedquilt.tools.simulation.ray_workers import RayWorkers

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedquilt[ray]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Client server of a Ray of its own, on 127.0.0.1 alone, with two processors and a token."""
    port, gcs = free_port(), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--ray-client-server-port={port}", "--num-cpus=2"]
    command += [f"--object-store-memory={STORE_BYTES}", f"--temp-dir={tmp_path_factory.mktemp('ray')}"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    env["RAY_worker_niceness"] = "0"  # at Ray's 15, workers hardly run on a busy machine
    env["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "300"  # on a busy machine Ray's 30 s are too short
    token = tmp_path_factory.mktemp("token") / "auth_token"
    token.write_text("0123456789abcdef" * 4)
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        yield from served(command, env, port)


def served(command: Sequence[str], env: Mapping[str, str], port: int) -> Iterator[str]:
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
    given = plan(name, tmp_path)
    workers = RayWorkers(str(given.job.engine), address, count=2, mixed=False)
    with hands(workers, given) as made:
        there = simulated(given, made, tmp_path / "ray")
    here = run.make_local_backend(given.load_devices()[0])[0]
    assert there == simulated(given, here, tmp_path / "here")


def test_a_cluster_of_another_ray_is_refused_with_both_versions(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    theirs, init, asked = ray.__version__, ray.init, list[str]()

    def second(*, address: str, **how: Any) -> None:
        asked.append(address)
        if len(asked) == 1:
            raise ConnectionAbortedError("Starting Ray client server failed")
        init(address=address, **how)

    monkeypatch.setattr(ray, "__version__", "2.0.1")
    monkeypatch.setattr(ray, "init", second)
    said = (
        rf"at {address} runs Ray {theirs} on Python 3\.\S+, and this command Ray 2\.0\.1 on .*ray\[client\]=={theirs}"
    )
    workers = RayWorkers("numpy", address, count=1, mixed=False)
    with pytest.raises(PoolError, match=said), hands(workers, plan("fedavg", tmp_path)):
        pass
    assert asked == [address, address]


def test_a_client_server_that_never_starts_a_process_is_given_up(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    asked: list[object] = []

    def fail(**how: object) -> None:
        asked.append(how["address"])
        raise ConnectionAbortedError("Starting Ray client server failed")

    monkeypatch.setattr(ray, "init", fail)
    workers = RayWorkers("numpy", address, count=1, mixed=False)
    said = rf"no Ray cluster answers at {address} \(Starting Ray client server failed\)"
    with pytest.raises(PoolError, match=said), hands(workers, plan("fedavg", tmp_path)):
        pass
    assert asked == [address] * 3


def test_more_workers_than_the_cluster_has_processors_are_refused_by_name(tmp_path: Path, address: str) -> None:
    given = plan("fedavg", tmp_path)
    for _ in range(2):
        with (
            pytest.raises(JobError, match="3 workers: the Ray cluster has 2 processors"),
            hands(RayWorkers(str(given.job.engine), address, count=3, mixed=False), given),
        ):
            pass

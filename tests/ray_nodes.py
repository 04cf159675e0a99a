"""Ray nodes on this machine, and what a job comes to on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import pytest

from fedquilt.tools.simulation import agents
from fedquilt.tools.simulation.pool import WorkBatch, WorkerPool
from fedquilt.tools.simulation.ray_workers import RayWorkers
from fedquilt.tools.simulation.run import WorkBackend

STORE_BYTES = 100 << 20


class Nodes:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "node_name": "one"}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)

    def add(self, name: str, env: dict[str, str] | None = None) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, node_name=name, env_vars=env or {})

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def workers(self, node: Any) -> list[psutil.Process]:
        raylet = node.all_processes["raylet"][0].process.pid
        return [each for each in psutil.Process(raylet).children() if each.name().startswith("ray::RayNode")]

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    def end(self) -> None:
        self._cluster.shutdown()


@contextmanager
def undisturbed(node: str, number: int) -> Iterator[None]:
    yield


class Watched(RayWorkers):
    def __init__(self, engine: str, amid: Callable[[str, int], AbstractContextManager[None]] = undisturbed) -> None:
        super().__init__(engine, "ray", count=None, mixed=False)
        self._amid = amid
        self.nodes: list[str] = []

    def send_work(self, worker: int, work: WorkBatch) -> None:
        node = self._workers[worker].node_id
        self.nodes.append(node)
        with self._amid(node, len(self.nodes)):
            super().send_work(worker, work)


@contextmanager
def hands(workers: RayWorkers, given: agents.FleetPlan) -> Iterator[WorkBackend]:
    members = given.load_devices()[0]
    with WorkerPool(workers, members) as pool:
        pool.wait_until_ready()
        yield WorkBackend(
            lambda requests: (outcome for _, outcome in pool.run_requests(requests)), pool.held_out_counts, pool
        )


@contextmanager
def cluster() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_worker_niceness", "0")  # at Ray's 15, workers hardly run on a busy machine
        made = Nodes()
        patched.setenv("RAY_ADDRESS", made.address)
        yield made
        made.end()

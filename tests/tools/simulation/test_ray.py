"""Ray carries the pool's work: bits of the local pool, files by content, lost workers and nodes, nodes that differ."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from carried import Outcome, plan, simulated

from fedquilt import methods
from fedquilt.core import JobError
from fedquilt.edge_agent.task.protocol import Order
from fedquilt.tools.simulation import agents, carriers
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.pool import Pool
from fedquilt.tools.simulation.ray_workers import RayWorkers
from fedquilt.tools.simulation.workers import PoolError

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedquilt[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SOME = ("fedavg", "scaffold")
ROOT = Path(__file__).parents[3]
STORE_BYTES = 100 << 20
FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Nodes:
    """Ray nodes of one cluster on this machine, with one processor each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "node_name": "one"}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": FAST})
        self.address = str(self._cluster.address)

    def add(self, name: str, env: dict[str, str] | None = None) -> Any:
        """Start a further node, with these variables in its environment."""
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, node_name=name, env_vars=env or {})

    def kill(self, node: Any) -> None:
        """Kill all processes of a node, and forget it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def workers(self, node: Any) -> list[psutil.Process]:
        """Processes of our workers on a node."""
        raylet = node.all_processes["raylet"][0].process.pid
        return [each for each in psutil.Process(raylet).children() if each.name().startswith("ray::Node")]

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of one node, to which tests add others; RAY_ADDRESS names it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Nodes()
        patched.setenv("RAY_ADDRESS", made.address)
        yield made
        made.end()


@pytest.fixture
def second(nodes: Nodes) -> Iterator[Any]:
    """A second node, which the test may kill."""
    node = nodes.add("two")
    yield node
    nodes.kill(node)


class Watched(RayWorkers):
    """Workers with something that happens as the first order of a number is given: after it, before any answer."""

    def __init__(self, engine: str, number: int, happens: Callable[[str], None]) -> None:
        super().__init__(engine, "ray", count=None, mixed=False)
        self._left, self._happens = number, happens
        self.nodes: list[str] = []  # that were given orders

    def give(self, worker: int, orders: Sequence[Order], together: bool) -> None:
        self.nodes.append(self._all[worker].node)
        self._left -= 1
        if self._left == 0:
            self._happens(self._all[worker].node)
        super().give(worker, orders, together)


@contextmanager
def hands(workers: RayWorkers, given: agents.Plan) -> Iterator[Hands]:
    members = given.members()[0]
    with Pool(workers, members) as pool:
        pool.warm()
        yield Hands(lambda orders: (outcome for _, outcome in pool.carry_out(orders)), pool.held, pool)


def here(given: agents.Plan, tmp_path: Path) -> Outcome:
    """What the job comes to in this process."""
    return simulated(given, carriers.in_process(given.members()[0])[0], tmp_path / "here")


ENGINES = [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in methods.names()]


@pytest.mark.parametrize("name", ENGINES)
def test_bits_on_two_ray_nodes_are_those_of_one_process(name: str, tmp_path: Path, nodes: Nodes, second: Any) -> None:
    """Of every state of every method; some in `make test`, all at night."""
    given = plan(name, tmp_path)
    with hands(watched := Watched(str(given.job.engine), 0, lambda node: None), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert len(set(watched.nodes)) == 2
    assert len(watched.machines) == 2


def test_a_worker_that_is_killed_amid_an_order_changes_no_bit(tmp_path: Path, nodes: Nodes, second: Any) -> None:
    """Its order is given to another, and a new one is started on its node; private state lies with the run."""
    given = plan("scaffold", tmp_path)
    killed: list[int] = []

    def kill(node: str) -> None:
        (process,) = nodes.workers(second if node == second.node_id else nodes.head)
        process.kill()
        killed.append(process.pid)

    with hands(Watched("numpy", 4, kill), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert len(killed) == 1


@pytest.mark.nightly
def test_a_node_that_is_lost_amid_a_round_takes_nothing_with_it(tmp_path: Path, nodes: Nodes) -> None:
    """The other one goes on, with the private state of all devices."""
    given = plan("scaffold", tmp_path)
    lost = nodes.add("three")
    gone: list[str] = []

    def kill(node: str) -> None:
        for process in nodes.workers(lost):
            process.send_signal(signal.SIGSTOP)  # so that it has its order in hand
        nodes.kill(lost)
        gone.append(node)

    with hands(watched := Watched("numpy", 3, kill), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert gone
    assert set(watched.nodes[4:]) == {nodes.head.node_id}


@pytest.mark.nightly
def test_a_node_with_another_fedquilt_is_refused_by_name(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where machines may be mixed."""
    monkeypatch.chdir(tmp_path)  # Ray's workers look there first
    other = tmp_path / "other"
    shutil.copytree(ROOT / "fedquilt", other / "fedquilt", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "fedquilt" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "0.1.0"', '__version__ = "0.0.9"'))
    node = nodes.add("older", {"PYTHONPATH": str(other)})
    given = plan("fedavg", tmp_path)
    workers = RayWorkers("numpy", "ray", count=None, mixed=True)
    said = r"older \(Ray node \w+\) has other code than this machine: fedquilt 0\.0\.9 \(\w+\), not 0\.1\.0 \(\w+\)"
    try:
        with pytest.raises(JobError, match=said), Pool(workers, given.members()[0]) as pool:
            pool.warm()
    finally:
        nodes.kill(node)


@pytest.mark.nightly
def test_a_node_whose_libraries_differ_is_refused_by_name_unless_nodes_may_be_mixed(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by a numpy that says it is another version."""
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "other" / "numpy-1.26.4.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    node = nodes.add("mixed", {"PYTHONPATH": str(told.parent)})
    given = plan("fedavg", tmp_path)
    try:
        alike = Pool(RayWorkers("numpy", "ray", count=None, mixed=False), given.members()[0])
        with pytest.raises(JobError, match=r"(mixed|one) .*differs from .*: numpy .*--mixed"), alike:
            alike.warm()
        workers = RayWorkers("numpy", "ray", count=None, mixed=True)
        with Pool(workers, given.members()[0]) as pool:
            pool.warm()
            assert {each.libraries["numpy"] for each in workers.machines.values()} > {"1.26.4"}
    finally:
        nodes.kill(node)


def test_more_workers_than_processors_are_refused(tmp_path: Path, nodes: Nodes) -> None:
    """With how many there are."""
    workers = RayWorkers("numpy", "ray", count=40, mixed=False)
    with pytest.raises(JobError, match=r"40 workers: the Ray cluster has \d+ processors"), Pool(workers, []):
        pass


def test_a_cluster_that_does_not_answer_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with what it needs."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    workers = RayWorkers("numpy", "ray", count=None, mixed=False)
    with pytest.raises(PoolError, match=r"no Ray could be reached at 127\.0\.0\.1:9 .*same token"), Pool(workers, []):
        pass
    assert "OMP_NUM_THREADS" in os.environ

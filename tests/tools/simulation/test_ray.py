"""Ray carries the pool's work: bits of the local pool, files by content, lost workers and nodes, nodes that differ."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from carried import Outcome, plan, simulated
from ray_nodes import Nodes, Watched, cluster, hands

from fedquilt import methods
from fedquilt.core import JobError
from fedquilt.tools.simulation import agents, run
from fedquilt.tools.simulation.pool import PoolError, WorkerPool
from fedquilt.tools.simulation.ray_workers import RayWorkers

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedquilt[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

ROOT = Path(__file__).parents[3]
SOME = ("fedavg", "fedpews", "fedrep", "scaffold")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster() as made:
        yield made


@pytest.fixture
def second(nodes: Nodes) -> Iterator[Any]:
    node = nodes.add("two")
    yield node
    nodes.kill(node)


def here(given: agents.FleetPlan, tmp_path: Path) -> Outcome:
    return simulated(given, run.make_local_backend(given.load_devices()[0])[0], tmp_path / "here")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in methods.builtin_names()]
)
def test_bits_on_two_nodes_are_those_of_one_process(name: str, tmp_path: Path, nodes: Nodes, second: Any) -> None:
    """Not after tests of Ray's client: in a process that was its client, actors are lost."""
    given = plan(name, tmp_path)
    with hands(watched := Watched(str(given.job.engine)), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert (len(watched.machines), bool(watched.nodes)) == (2, True)


def test_a_worker_that_is_killed_amid_an_order_changes_no_bit(tmp_path: Path, nodes: Nodes, second: Any) -> None:
    given = plan("scaffold", tmp_path)
    killed: list[int] = []

    @contextmanager
    def amid(node: str, number: int) -> Iterator[None]:
        if number != 4:
            yield
            return
        (process,) = nodes.workers(second if node == second.node_id else nodes.head)
        process.suspend()  # so that it has its order in hand
        yield
        process.kill()
        killed.append(process.pid)

    with hands(Watched("numpy", amid), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert len(killed) == 1


@pytest.mark.nightly
def test_a_node_that_is_lost_amid_a_round_takes_nothing_with_it(tmp_path: Path, nodes: Nodes) -> None:
    given = plan("scaffold", tmp_path)
    lost = nodes.add("three")
    gone: list[int] = []

    @contextmanager
    def amid(node: str, number: int) -> Iterator[None]:
        if gone or number < 3 or node != lost.node_id:
            yield
            return
        stopped = nodes.workers(lost)
        for process in stopped:
            process.suspend()
        yield
        nodes.kill(lost)
        for process in stopped:
            process.kill()
        gone.append(number)

    with hands(watched := Watched("numpy", amid), given) as made:
        assert simulated(given, made, tmp_path / "ray") == here(given, tmp_path)
    assert set(watched.nodes[gone[0] :]) == {nodes.head.node_id}


@pytest.mark.nightly
def test_a_node_with_another_fedquilt_is_refused_by_name(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray's workers look there first
    other = tmp_path / "other"
    shutil.copytree(ROOT / "fedquilt", other / "fedquilt", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "fedquilt" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "0.1.0"', '__version__ = "0.0.9"'))
    node = nodes.add("older", {"PYTHONPATH": str(other)})
    given = plan("fedavg", tmp_path)
    workers = RayWorkers("numpy", "ray", count=None, mixed=True)
    said = r"older \(Ray node \w+\) has other code than this machine \(fedquilt 0\.0\.9 \(\w+\), not 0\.1\.0 \(\w+\)"
    try:
        with pytest.raises(JobError, match=said), WorkerPool(workers, given.load_devices()[0]) as pool:
            pool.wait_until_ready()
    finally:
        nodes.kill(node)


@pytest.mark.nightly
def test_a_node_whose_libraries_differ_is_refused_by_name_unless_nodes_may_be_mixed(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "other" / "numpy-1.26.4.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    node = nodes.add("mixed", {"PYTHONPATH": str(told.parent)})
    given = plan("fedavg", tmp_path)
    try:
        alike = WorkerPool(RayWorkers("numpy", "ray", count=None, mixed=False), given.load_devices()[0])
        with pytest.raises(JobError, match=r"(mixed|one) .*differs from .*: numpy .*--mixed"), alike:
            alike.wait_until_ready()
        workers = RayWorkers("numpy", "ray", count=None, mixed=True)
        with WorkerPool(workers, given.load_devices()[0]) as pool:
            pool.wait_until_ready()
            assert {each.libraries["numpy"] for each in workers.machines.values()} > {"1.26.4"}
    finally:
        nodes.kill(node)


def test_more_workers_than_processors_are_refused(tmp_path: Path, nodes: Nodes) -> None:
    workers = RayWorkers("numpy", "ray", count=40, mixed=False)
    with pytest.raises(JobError, match=r"40 workers: the Ray cluster has \d+ processors"), WorkerPool(workers, []):
        pass


def test_a_cluster_that_does_not_answer_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    workers = RayWorkers("numpy", "ray", count=None, mixed=False)
    with (
        pytest.raises(PoolError, match=r"no Ray cluster answers at 127\.0\.0\.1:9 .*same token"),
        WorkerPool(workers, []),
    ):
        pass
    assert "OMP_NUM_THREADS" in os.environ

"""Bits on two Ray nodes are those of one process, for every method."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from carried import plan, simulated
from ray_nodes import Watched, cluster, hands

from fedquilt import methods
from fedquilt.tools.simulation import agents, run
from fedquilt.tools.simulation.run import WorkBackend

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedquilt[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SOME = ("fedavg", "fedpews", "fedrep", "scaffold")
Carried = Callable[[agents.FleetPlan], tuple[Watched, WorkBackend]]


@pytest.fixture(scope="module")
def carried() -> Iterator[Carried]:
    with cluster() as nodes, contextlib.ExitStack() as stack:
        nodes.add("two")
        made: dict[str, tuple[Watched, WorkBackend]] = {}

        def find(given: agents.FleetPlan) -> tuple[Watched, WorkBackend]:
            engine = str(given.job.engine)
            if engine not in made:
                stack.close()  # the processors are free for another engine's workers
                made.clear()
                workers = Watched(engine)
                made[engine] = (workers, stack.enter_context(hands(workers, given)))
            return made[engine]

        yield find


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in methods.builtin_names()]
)
def test_bits_on_two_ray_nodes_are_those_of_one_process(name: str, tmp_path: Path, carried: Carried) -> None:
    given = plan(name, tmp_path)
    workers, made = carried(given)
    workers.nodes.clear()
    here = run.make_local_backend(given.load_devices()[0])[0]
    assert simulated(given, made, tmp_path / "ray") == simulated(given, here, tmp_path / "here")
    assert len(workers.machines) == 2
    assert workers.nodes

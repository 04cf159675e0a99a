"""One round loop, three carriers: a broker in memory, this process, a pool of workers; bits are equal for each method.

Methods are found by their files, so that `make nightly` tests a new one without an edit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from carried import plan, run_and_collect, simulated

from fedquilt import methods
from fedquilt.tools.simulation import agents, run
from fedquilt.tools.simulation.run import WorkBackend

QUICK = ("fedavg", "scaffold", "ditto", "genefl", "fedpews", "depthfl", "fedstitch")  # methods of `make test`
Pools = Callable[[str, int, agents.FleetPlan], WorkBackend]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with contextlib.ExitStack() as stack:
        made: dict[tuple[str, int], WorkBackend] = {}

        def find(engine: str, workers: int, given: agents.FleetPlan) -> WorkBackend:
            if (engine, workers) not in made:
                pool = run.open_pool_backend(given.job, given.load_devices()[0], workers=workers)
                made[engine, workers] = stack.enter_context(pool)[0]
            return made[engine, workers]

        yield find


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in methods.builtin_names()]
)
def test_cohorts_bytes_and_bits_are_equal_on_all_three_carriers(name: str, tmp_path: Path, pools: Pools) -> None:
    given = plan(name, tmp_path)
    started, _ = agents.run_fleet_virtually(given)
    linked = run_and_collect(given.home, started)
    assert linked.ended == "done"
    assert len(linked.states) == 3
    here, _ = run.make_local_backend(given.load_devices()[0])
    assert simulated(given, here, tmp_path / "here") == linked
    for workers in (1, 2):
        hands = pools(str(given.job.engine), workers, given)
        assert simulated(given, hands, tmp_path / f"pool-{workers}") == linked


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk"])
def test_what_a_codec_makes_is_equal_too(codec: str, tmp_path: Path, pools: Pools) -> None:
    given = plan("fedavg", tmp_path)
    coded = msgspec.structs.replace(given.job, wire=msgspec.structs.replace(given.job.wire, codec=codec))
    given = agents.FleetPlan(coded, given.bundle, given.home)
    started, _ = agents.run_fleet_virtually(given)
    linked = run_and_collect(given.home, started)
    assert linked.ended == "done"
    assert simulated(given, pools("numpy", 2, given), tmp_path / "pool") == linked

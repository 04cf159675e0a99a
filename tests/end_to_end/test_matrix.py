"""Every method on every kind of network: agents' processes, a real broker, a coordinator that ends between the rounds.

Methods are found by file, so that a new one is in by existing. `make test` runs one method of each kind of state, with
batch normalisation; the whole matrix is for `make nightly`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ordinary
import pytest
from federation import (
    DEVICES,
    FLEET,
    Agents,
    Federation,
    committed_hashes,
    count_rounds,
    list_networks,
    make_job,
    require_complete_run,
    run_virtually,
    sort_by_engine,
    write_digits,
)

from fedquilt import methods
from fedquilt.coordinator.rounds.events import AnyEvent, CohortSelected
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import ModelError
from fedquilt.tools import simulation

EVERY = sort_by_engine(methods.builtin_names())
QUICK = ("fedrep", "fedstitch")  # private layers, a search
NO_LINEAR = "LoRA finds no linear layer before"
UNFIT = {  # (method, network) -> what is said: adapters of linear layers that it lacks, no parts that could be left out
    **{(name, network): NO_LINEAR for name in ("fedlora", "fedsdg") for network in ("batch-norm", "recurrent")},
    **{(name, "recurrent"): "cannot be cut by" for name in ("depthfl", "fedepth")},
    **{
        (name, "recurrent"): "no hidden neuron of this network"
        for name in ("fedlps", "fedpews", "fedpews_fixed", "fjord", "heterofl")
    },
}


@pytest.fixture(scope="module")
def federation(lasting_broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three agents' processes for all tests here; each has one thread, as they share this machine."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    threads = torch.get_num_threads()
    with ordinary.made() as user, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        data = write_digits(user.folder / "digits.npz")
        boards = simulation.agents.FleetPlan(make_job("fedavg", "perceptron", data), Path(), Path()).make_agent_tables()
        agents = Agents(user, lasting_broker, boards)
        assert len(agents.names) == DEVICES == FLEET["devices"]
        yield Federation(lasting_broker, agents, data, tmp_path_factory.mktemp("bundles"))
        torch.set_num_threads(threads)


def require_same_bits(federation: Federation, method: str, network: str, folder: Path) -> None:
    plan = federation.plan(method, network, folder / "home")
    if (method, network) in UNFIT:
        with Store(plan.home) as store:
            with pytest.raises(ModelError, match=UNFIT[method, network]):
                plan.queue_or_resume(store)
            assert not store.readable_jobs()
        return
    found = federation.run_with_restarts(plan)
    require_complete_run(found, count_rounds(method))
    calm = run_virtually(plan, folder / "calm")
    require_complete_run(calm, count_rounds(method))
    assert committed_hashes(found) == committed_hashes(calm)


@pytest.mark.parametrize("method", [name for name in EVERY if name in QUICK])
def test_a_method_of_each_kind_trains_a_network_with_batch_norm(
    federation: Federation, method: str, tmp_path: Path
) -> None:
    """A method that stitches donors does that: some of the demo's have batch normalisation."""
    (network,) = list_networks(method, ["batch-norm"])
    require_same_bits(federation, method, network, tmp_path)


CELLS = [pytest.param(name, network, id=f"{name}-{network}") for name in EVERY for network in list_networks(name)]


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "network"), CELLS)
def test_every_method_trains_every_network(federation: Federation, method: str, network: str, tmp_path: Path) -> None:
    require_same_bits(federation, method, network, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedstitch"])
def test_an_agent_that_is_killed_in_the_second_round_costs_nobody_anything(
    federation: Federation, method: str, tmp_path: Path
) -> None:
    """kill -9 as round 1 is asked for; the agent comes back, and the bits are those of a calm run."""
    plan = federation.plan(method, *list_networks(method, ["batch-norm"]), tmp_path / "home")
    victim = federation.agents.names[0]

    def kill_once(fact: AnyEvent) -> None:
        if isinstance(fact, CohortSelected) and fact.round == 1 and victim in fact.devices:
            federation.agents.kill(victim)
            federation.agents.start(victim)

    found = federation.run_with_restarts(plan, kill_once)
    require_complete_run(found)
    assert committed_hashes(found) == committed_hashes(run_virtually(plan, tmp_path / "calm"))

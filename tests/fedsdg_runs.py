"""Runs of FedSDG on a small network, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedquilt import methods
from fedquilt.core import ClientContext, ClientResult, DeviceView, Task
from fedquilt.methods import fedsdg
from fedquilt.testing.toy_networks import deliver_task, image_members, run_method, toy_bundle, with_loaded_tensors
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation

torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")

from fedquilt.models.networks import registry  # noqa: E402

NETWORK = {
    "name": "vit",
    "channels": 1,
    "size": 8,
    "patch": 4,
    "width": 8,
    "depth": 2,
    "heads": 2,
    "classes": 3,
    "input": {"channels": 1, "size": 8},
}
WEIGHTS = {name: value.numpy().copy() for name, value in registry.load_network(NETWORK, seed=1).state_dict().items()}
QUICK = {"epochs": 1, "batch": 16, "rank": 2, "alpha": 4.0}
ENGINE = torch_engine.TorchEngine(1 << 40, base_bytes=0)
LAYERS = [f"blocks.{block}.{leaf}" for block in (0, 1) for leaf in ("attention.out_proj", "mlp.2")]


def bundle() -> Any:
    return toy_bundle(NETWORK, WEIGHTS)


class Played:
    """A run on toy devices: the states, what each task had and gave, in order, and what its rounds took."""

    def __init__(self, name: str, rounds: int = 2, devices: int = 2, **params: Any) -> None:
        self.method, self.worked = methods.load(name), list[tuple[ClientContext, ClientResult]]()
        self.rounds: list[SimulatedRound] = []

        def work(task: Task, site: ClientContext) -> ClientResult:
            answer = self.method.work(task, site)
            self.worked.append((with_loaded_tensors(task, site), answer))
            return answer

        def observe(simulation: Simulation, hands: WorkBackend) -> None:
            self.rounds = simulation.rounds

        self.states = run_method(
            name,
            bundle(),
            image_members(devices, 40),
            {**QUICK, **params},
            engine=ENGINE,
            method=replace(self.method, work=work),
            observe=observe,
            rounds=rounds,
        )


def asked(state: Any, local: Any = None, device: int = 0) -> tuple[Task, ClientContext]:
    """What one device gets now, with what it has kept."""
    member = image_members(4, 40)[device]
    method = methods.load("fedsdg")
    return deliver_task(method, method.send(state, DeviceView(member.device, None)), member, ENGINE, local=local)


def began(**params: Any) -> Any:
    return fedsdg.init(bundle(), fedsdg.Params(**{**QUICK, **params}), 0)

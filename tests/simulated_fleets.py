"""Simulated fleets on small tasks, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt import methods
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import Method
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toy_networks import make_job, point_members, toy_bundle, write_bundle
from fedquilt.tools.simulation import DeviceData, run
from fedquilt.tools.simulation.simulated_job import Simulation

SMALL = {"epochs": 2, "batch": 4, "lr": 0.1}
HEAVY = 1e10  # FLOPs of an example: seconds on any board


class Fleet:
    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.place, self._stack = place, stack
        self.engine = NumpyEngine(1 << 40, base_bytes=0)
        self._count = 0

    def begin(
        self,
        name: str = "fedavg",
        *,
        devices: int = 3,
        method: Method | None = None,
        home: str = "",
        flops: float = HEAVY,
        members: Sequence[DeviceData] = (),
        make: Callable[[str], Any] = SimulatedDevice.from_name,
        **table: Any,
    ) -> tuple[Simulation, run.WorkBackend]:
        self._count += 1
        made = toy_bundle()
        bundle = write_bundle(self.place / f"bundle-{flops:g}", replace(made, meta={**made.meta, "flops": flops}))
        load = methods.load if method is None else lambda name: method
        given = list(members) or point_members(devices, 13)
        hands, held = run.make_local_backend(given, load_method=load, engine=self.engine)
        wanted = make_job(name, table.pop("params", SMALL), **{"rounds": 2, **table})
        place = self.place / (home or f"home-{self._count}")
        simulation = Simulation(wanted, bundle, held, place, load_method=load, engine="numpy", create_board=make)
        return self._stack.enter_context(simulation), hands

    def played(self, *args: Any, **options: Any) -> Simulation:
        simulation, hands = self.begin(*args, **options)
        for _ in run.run_rounds(simulation, hands):
            pass
        return simulation


def facts(simulation: Simulation, kind: type[Any] | None = None) -> list[Any]:
    with Store(simulation.fleet.blob_store.folder.parent) as store:
        found: list[AnyEvent] = [fact for _, _, fact in store.read_events(simulation.run)]
    return [fact for fact in found if kind is None or isinstance(fact, kind)]

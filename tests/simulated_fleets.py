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
from fedquilt.testing.toy_networks import make_job, point_devices, toy_bundle, write_bundle
from fedquilt.tools.simulation import DeviceData, run
from fedquilt.tools.simulation.simulated_job import Simulation

SMALL = {"epochs": 2, "batch": 4, "lr": 0.1}
HEAVY = 1e10  # FLOPs of an example, seconds on all boards


class Fleet:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.place, self._stack = folder, stack
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
        create_board: Callable[[str], Any] = SimulatedDevice.from_name,
        **table: Any,
    ) -> tuple[Simulation, run.WorkBackend]:
        self._count += 1
        bundle_source = toy_bundle()
        bundle = write_bundle(
            self.place / f"bundle-{flops:g}", replace(bundle_source, meta={**bundle_source.meta, "flops": flops})
        )
        load_method = methods.load if method is None else lambda name: method
        devices_data = list(members) or point_devices(devices, 13)
        backend, held_out_counts = run.make_local_backend(devices_data, load_method=load_method, engine=self.engine)
        job = make_job(name, table.pop("params", SMALL), **{"rounds": 2, **table})
        home_folder = self.place / (home or f"home-{self._count}")
        simulation = Simulation(
            job,
            bundle,
            held_out_counts,
            home_folder,
            load_method=load_method,
            engine="numpy",
            create_board=create_board,
        )
        return self._stack.enter_context(simulation), backend

    def run_job(self, *args: Any, **options: Any) -> Simulation:
        simulation, backend = self.begin(*args, **options)
        for _ in run.run_rounds(simulation, backend):
            pass
        return simulation


def read_events(simulation: Simulation, kind: type[Any] | None = None) -> list[Any]:
    with Store(simulation.fleet.blob_store.folder.parent) as store:
        events: list[AnyEvent] = [event for _, _, event in store.read_events(simulation.run)]
    return [event for event in events if kind is None or isinstance(event, kind)]

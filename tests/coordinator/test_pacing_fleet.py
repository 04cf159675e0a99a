"""Agents on virtual time that send their updates in turn: a network with batch norm, and the bits without turns."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.background_worker import SynchronousWorker
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.settings import CoordinatorLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.models.local_training import NetworkState
from fedquilt.testing.toy_networks import write_images
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import agents

pytest.importorskip("torch")

NETWORK = {"name": "residual", "channels": 1, "classes": 10, "width": 4, "seed": 0}


class Watched(Server):
    """A coordinator that folds beside its loop, and two of whose boards send at a time."""

    most_here = 0  # updates at once that were sent or not folded
    waited = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(
            *given, worker=SynchronousWorker(large_bytes=0), limits=CoordinatorLimits(waiting_mb=0), **more
        )

    def step(self, now_s: float) -> float:
        due_s = super().step(now_s)
        queue = self._executor._transfers.queue
        Watched.waited = Watched.waited or bool(queue)
        Watched.most_here = max(Watched.most_here, queue._here + len(queue._sends))
        return due_s


def played(folder: Path, bundle: Path, data: Path) -> tuple[list[str], Any]:
    """States that a run of six boards came to, and the last one's model."""
    table = {
        "name": "j",
        "method": "fedavg",
        "rounds": 2,
        "params": {"batch": 8},
        "fleet": {"devices": 6},
        "data": {"path": str(data), "held": 0.2},
    }
    plan = agents.FleetPlan(settings.parse_job(table), bundle, folder)
    run, ended = agents.run_fleet_virtually(plan)
    assert ended == "done"
    with Store(plan.home) as store:
        facts = [fact for _, _, fact in store.read_events(run)]
        found = [fact.state for fact in facts if isinstance(fact, RoundCommitted)]
        assert sum(isinstance(fact, UpdateAccepted) for fact in facts) == 6 * len(found)
        path = store.depot.blob_path(found[-1].sha256)
        return [ref.sha256 for ref in found], tensors.unpack_state(path.read_bytes(), NetworkState).model


def test_turns_change_no_bit_of_a_network_with_batch_norm(tmp_path, monkeypatch):
    data = write_images(tmp_path / "data.npz", 8)
    prepare.prepare_bundle({"model": NETWORK, "input": {"channels": 1, "size": 8}}, tmp_path / "bundle")
    calm, model = played(tmp_path / "calm", tmp_path / "bundle", data)
    assert {array.ndim for name, array in model.items() if name.endswith("num_batches_tracked")} == {0}
    monkeypatch.setattr(agents, "Server", partial(Watched))
    assert played(tmp_path / "paced", tmp_path / "bundle", data)[0] == calm
    assert (Watched.waited, Watched.most_here) == (True, 2)

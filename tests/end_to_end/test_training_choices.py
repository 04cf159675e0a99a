"""Training by choices of [params] and code of the user, on agents, in this process and after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
from carried import DIGITS, NETWORK, Outcome, run_and_collect

from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs.job import required_packages
from fedquilt.formats import job_bundle
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import agents, run
from fedquilt.tools.simulation.simulated_job import Simulation

pytest.importorskip("torch")

OWN = """
import torch
import torch.nn.functional as F

def bounded(scores, y, most):
    return F.cross_entropy(scores, y, reduction="none").clamp(max=most)

def shift(x):
    return x.roll(int(torch.randint(3, ())) - 1, dims=-1)
"""


def test_agents_and_a_resumed_run_give_the_bits_of_a_calm_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    table = {
        "name": "chosen",
        "method": "fedavg",
        "rounds": 3,
        "params": {
            "batch": 8,
            "lr": 0.01,
            "loss": {"name": "own_training:bounded", "most": 5.0},
            "optimizer": "RMSprop",
            "schedule": {"name": "one_cycle", "over": "steps", "rise": 0.5},
            "augment": ["own_training:shift", {"name": "RandomHorizontalFlip", "p": 0.3}, "mixup"],
            "accumulate": 2,
            "ema": 0.5,
        },
        "cohort": {"size": 2},
        "model": NETWORK,
        "fleet": {"devices": 3, "boards": ["jetson-tx2"], "budgets": ["2GB"]},
        "data": {"path": str(DIGITS), "partition": "dirichlet", "limit": 120},
    }
    job = settings.parse_job(table)
    prepare.prepare_and_check(job, tmp_path / "bundle")
    packages = required_packages(job, job_bundle.load_bundle(tmp_path / "bundle"))
    assert list(packages) == ["own_training"]
    assert len(packages["own_training"].split()[-1]) == 64  # the sha256 that boards have to report
    given = agents.FleetPlan(job, tmp_path / "bundle", tmp_path / "linked")
    started, _ = agents.run_fleet_virtually(given)
    linked = run_and_collect(given.home, started)
    assert linked.ended == "done"
    assert len(set(linked.states)) == 3
    assert simulated(given, tmp_path / "calm") == linked
    assert simulated(given, tmp_path / "resumed", interrupted=True).states == linked.states


def simulated(given: agents.FleetPlan, home: Path, interrupted: bool = False) -> Outcome:
    devices, _ = given.load_devices()
    held = {member.device: len(member.held_out) for member in devices}
    hands, _ = run.make_local_backend(devices)
    for last in (0, None) if interrupted else (None,):
        with Simulation(given.job, given.bundle, held, home) as simulation:
            for number, _ in enumerate(run.run_rounds(simulation, hands)):
                if number == last:
                    break
            name = simulation.run
    return run_and_collect(home, name)

"""A small job on the demo's digits; what prepares a network needs torch."""

from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.tools.lab import demo

DIGITS = demo.HERE / "digits.npz"


@pytest.fixture
def job() -> fq.Job:
    """Three rounds of FedProx, two of four devices of two kinds in each, on a part of the digits."""
    pytest.importorskip("torch")
    return fq.Job(
        method="fedprox",
        params={"mu": 0.1, "lr": 0.2, "batch": 16},
        rounds=3,
        engine="numpy",
        model=fq.models.mlp(64, [8], 10),
        data=fq.Data(str(DIGITS), partition="dirichlet", alpha=1.0, limit=240),
        test={"split": "test", "limit": 100},
        cohort=fq.Cohort(size=2),
        fleet=fq.Fleet(4, boards=["jetson-tx2", "raspberry-pi-5"]),
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"

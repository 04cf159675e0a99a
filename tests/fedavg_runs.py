"""Runs of FedAvg and of methods that change one part of it, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import Bundle, Method
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.testing.toy_networks import point_devices, toy_bundle
from fedquilt.testing.toy_networks import run_method as run
from fedquilt.tools.simulation import DeviceData

SMALL = {"epochs": 2, "batch": 4, "lr": 0.1}


def numpy_one() -> NumpyEngine:
    return NumpyEngine(1 << 40, base_bytes=0)


def torch_one(budget_bytes: int = 1 << 40) -> Any:
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")  # before torch: it says how threads wait
    return module.TorchEngine(budget_bytes, base_bytes=0)


def play(
    name: str,
    engine: Any = None,
    bundle: Bundle | None = None,
    devices: list[DeviceData] | None = None,
    rounds: int = 3,
    method: Method | None = None,
    cohort: int = 0,
    **params: Any,
) -> list[Any]:
    """The states of a run on toy devices; `method`: a double of the method of that name."""
    return run(
        name,
        bundle or toy_bundle(),
        devices or point_devices(),
        {**SMALL, **params},
        engine=engine or numpy_one(),
        method=method,
        rounds=rounds,
        cohort={"size": cohort},
    )


def same_bits(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return tensors.encode_tensors(a) == tensors.encode_tensors(b)

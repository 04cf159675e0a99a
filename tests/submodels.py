"""Fleets whose devices have room for parts of a small network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from plain import budgeted

from fedquilt.core import Bundle, DeviceView, Examples, Method
from fedquilt.models.partial import masks
from fedquilt.testing.toy_networks import bundle_files, register_entry, run_method
from fedquilt.tools.simulation import DeviceData

torch = pytest.importorskip("torch")


NETWORK = {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": {"channels": 1, "size": 8}}
SMALL = {"epochs": 1, "batch": 4, "lr": 0.05}
MIXED = ("512MB", "2GB", "8GB")


@cache
def engine() -> Any:
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    return TorchEngine(1 << 40, base_bytes=0)


def bundle(network: dict[str, Any] | None = None) -> Bundle:
    """A network with its plan of masks, as `fedquilt prepare` writes it."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    table = network or NETWORK
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = registry.build_network(table)
    parts: dict[str, dict[str, np.ndarray]] = {
        "model": {key: value.numpy().copy() for key, value in module.state_dict().items()},
        "masks": {"json": masks.plan_to_array(dependency_trace.trace_mask_plan(module))},
    }
    meta = {"network": table, "flops": 1e6, "example_bytes": 10**6, **register_entry(table)}
    return Bundle(meta, bundle_files(parts), lambda name: parts[name])


def pictures(count: int = 3) -> list[DeviceData]:
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x, y = draws.integers(0, 255, (12, 8, 8)).astype(np.uint8), draws.integers(0, 3, 12)
        found.append(DeviceData(f"dev-{i}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def view(budget_bytes: int) -> DeviceView:
    return DeviceView("a", budgeted(budget_bytes))


def run(
    name: str,
    made: Bundle,
    rounds: int = 2,
    *,
    method: Method | None = None,
    budgets: Sequence[str] = ("512MB",),
    **params: Any,
) -> list[Any]:
    """The states of a run; devices have these budgets in turn."""
    return run_method(
        name,
        made,
        pictures(),
        {**SMALL, **params},
        engine=engine(),
        method=method,
        seed=5,
        rounds=rounds,
        fleet={"budgets": list(budgets)},
    )

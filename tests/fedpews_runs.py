"""Runs of FedPeWS, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedavg_runs import SMALL, torch_one

from fedquilt import methods
from fedquilt.core import Bundle
from fedquilt.testing.toy_networks import MLP_MASKS, point_members, toy_bundle
from fedquilt.testing.toy_networks import run_method as run
from fedquilt.tools.simulation import DeviceData

PLAN = MLP_MASKS
H = 5


def play(name: str, engine: Any = None, members: list[DeviceData] | None = None, **params: Any) -> list[Any]:
    """The states of three rounds on toy devices."""
    return play_on(toy_bundle(), name, engine, members, **params)


def play_on(
    bundle: Bundle, name: str, engine: Any = None, members: list[DeviceData] | None = None, **params: Any
) -> list[Any]:
    """Likewise of another network."""
    method, work = methods.load(name), params.pop("work", None)
    return run(
        name,
        bundle,
        members or point_members(),
        {**SMALL, **params},
        engine=engine or torch_one(),
        method=replace(method, work=work) if work else None,
        rounds=3,
    )


def begun(name: str = "fedpews", **params: Any) -> Any:
    method = methods.load(name)
    return method.init(toy_bundle(), method.params(**params), 0)

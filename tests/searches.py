"""Searches over toy donors, played to their end."""

from __future__ import annotations

from typing import Any

from joint_runs import SMALL, with_settings

from fedquilt.core import Method
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.testing.toy_networks import FakeRunner, build_donors, image_devices
from fedquilt.testing.toy_networks import run_method as run_of
from fedquilt.tools.simulation import DeviceData


def play(devices: list[DeviceData] | None = None, seed: int = 3, **changes: Any) -> list[SearchState]:
    return played(METHOD, devices, seed=seed, **changes)


def played(
    method: Method,
    devices: list[DeviceData] | None = None,
    *,
    seed: int = 3,
    rounds: int = 1000,
    cohort: int = 0,
    runner: FakeRunner | None = None,
    **changes: Any,
) -> list[SearchState]:
    """The states of a search by a double of the method. It ends by itself, or after so many rounds."""
    bundle, own = build_donors()
    return run_of(
        "fedstitch",
        bundle,
        image_devices() if devices is None else devices,
        engine=runner or own,
        method=with_settings(method, {**SMALL, **changes}),
        seed=seed,
        rounds=rounds,
        cohort={"size": cohort},
    )


FULL = play()

"""Runs of FedStitch with a joint head, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toy_tasks import deliver_task

from fedquilt.core import DeviceView, Method
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.search.state import PAPER, SearchSettings
from fedquilt.testing import toy_networks
from fedquilt.testing.toy_networks import FakeRunner, build_donors, image_devices, run_method
from fedquilt.tools.simulation import DeviceData

SMALL = {**toy_networks.SMALL_SEARCH, "screen": 3}


def played(
    devices: list[DeviceData] | None = None,
    *,
    cohort: int = 0,
    runner: FakeRunner | None = None,
    method: Any = METHOD,
    rounds: int = 1000,
    **changes: Any,
) -> list[SearchState]:
    bundle, own = build_donors()
    return run_method(
        "fedstitch",
        bundle,
        image_devices(8) if devices is None else devices,
        engine=runner or own,
        method=with_settings(method, {**SMALL, **changes}),
        seed=3,
        rounds=rounds,
        cohort={"size": cohort},
    )


def with_settings(method: Method, changes: Mapping[str, Any]) -> Method:
    """The method with these settings, also with those that only the mode of a job determines."""
    settings = SearchSettings(**{**changes, **(PAPER if changes.get("mode") == "paper" else {})})
    return replace(method, init=lambda bundle, params, seed: method.init(bundle, settings, seed))


FULL = played()


def narrow(state: SearchState, name: str, channels: int) -> stitched_network.Block:
    """A block with other channels."""
    return replace(state.stock.blocks[name], out_shape=(channels, 4, 4))


def gathering(**changes: Any) -> tuple[SearchState, Any, Any]:
    """A state that gathers, and one device's task and site."""
    bundle, runner = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "expansions": 0, **changes}), 3)
    return (
        state,
        *deliver_task(METHOD, METHOD.send(state, DeviceView("dev-0", None)), image_devices(1)[0], runner, seed=3),
    )

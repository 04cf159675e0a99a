"""Simulated fleets without messages.

The rounds and the store are those of the coordinator, and the devices run on virtual time. `fleet` is the executor,
`local_backend` runs the work requests of devices in this process, `pool` in worker processes, and
`run` combines these parts. `edge_agent.task_runner` makes the decisions of devices, and `edge_agent.task` runs their
tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from fedquilt.core import Examples, derive_seed


@dataclass(frozen=True)
class DeviceData:
    device: str
    train: Examples
    held_out: Examples


def draw_devices(seed: int, purpose: str, share: float, devices: Collection[str]) -> list[str]:
    """Return a random share of the devices, rounded up. The draw depends on `seed` and `purpose`."""
    count = math.ceil(share * len(devices) - 1e-9)
    return sorted(devices, key=lambda device: derive_seed(seed, purpose, device))[:count]

"""Simulated fleets without messages.

The rounds and the store are those of the coordinator, and the devices run on virtual time. `fleet` is the executor,
`local_backend` runs the work requests of devices in this process, `pool` in worker processes, and
`run` combines these parts. `edge_agent.task_runner` makes the decisions of devices, and `edge_agent.task` runs their
tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt.core import Examples


@dataclass(frozen=True)
class DeviceData:
    device: str
    train: Examples
    held_out: Examples

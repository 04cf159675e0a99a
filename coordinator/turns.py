"""Turns of waiting jobs: pure decisions from the stored jobs and how long each has been idle.

A job keeps its place as long as a device works on it. One that has waited PATIENCE_S for devices that do not
come gives way to the next in line, and is taken up again at its next turn; nothing of it is lost, as its log
is its whole state. The decision is made for any number of places, of which a coordinator has one today.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from fedquilt.coordinator.store import Row

PATIENCE_S: Final = 60.0  # time for which a job without working devices holds up those behind it


def mine(row: Row, only: str | None) -> bool:
    """Whether a coordinator takes a job up: the only one it serves, or any except those of simulated fleets."""
    return row.id == only if only is not None else row.origin != "fleet"


def served(
    rows: Sequence[Row], idle_s: Mapping[str, float], gave_way_s: Mapping[str, float], places: int = 1
) -> list[str]:
    """Ids of the jobs to serve now, at most `places`.

    Args:
        rows: the jobs this coordinator may serve, in the order in which they were queued.
        idle_s: served job -> seconds since a device last worked on it.
        gave_way_s: job -> when it last gave way to another.
        places: number of jobs served at once.
    """
    wanting = [row for row in rows if row.status in ("queued", "running")]
    busy = [row.id for row in wanting if idle_s.get(row.id, math.inf) < PATIENCE_S]
    idle = [row.id for row in wanting if row.id in idle_s and row.id not in busy]
    behind = sorted(
        (row for row in wanting if row.id not in idle_s),
        key=lambda row: (gave_way_s.get(row.id, -math.inf), row.status != "running"),
    )
    return [*busy, *(row.id for row in behind), *idle][:places]

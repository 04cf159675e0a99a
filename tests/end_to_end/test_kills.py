"""Random kills of every kind of process; `make nightly` (stage kills) has two hundred."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills


def test_some_kills_change_no_bit_and_lose_no_update(mosquitto: Callable[..., Any], tmp_path: Path) -> None:
    """Ditto, whose boards keep private state; the coordinator, agents, a task's process and Mosquitto die."""
    folder = tmp_path / "campaign"
    folder.mkdir()
    killed = kills.Campaign(folder, "ditto", random.Random(1), 4, rounds=16).play()
    assert killed.total() == 4
    assert killed.keys() == set(kills.KINDS)

"""Random kills of every kind of process; `make nightly` (stage kills) has two hundred."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import onlookers

ROUNDS = 7
KILLS = 4


def test_some_kills_change_no_bit_and_lose_no_update(mosquitto: Callable[..., Any], tmp_path: Path) -> None:
    """Ditto, whose boards keep private state; the coordinator, agents, a task's process and Mosquitto die."""
    folder = tmp_path / "campaign"
    folder.mkdir()
    killed = kills.Campaign(folder, "ditto", random.Random(1), KILLS, rounds=ROUNDS).play()
    assert killed.total() == KILLS
    assert killed.keys() == set(kills.KINDS)


def test_a_coordinator_dies_while_others_look_at_its_home(mosquitto: Callable[..., Any], tmp_path: Path) -> None:
    """They list, explain, check and save it all the time, and find it as a killed process has left it."""
    folder = tmp_path / "campaign"
    folder.mkdir()
    roll, kinds = random.Random(2), ("coordinator", "coordinator", "onlooker")
    killed = kills.Campaign(folder, "fedprox", roll, 3, rounds=ROUNDS, kinds=kinds, onlookers=2).play()
    assert killed == {"coordinator": 2, "onlooker": 1}
    assert (folder / "all.log").read_text().count(onlookers.LOOKED) >= 3


def test_after_kills_in_buffered_mode_each_state_follows_from_the_events(
    mosquitto: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "campaign"
    folder.mkdir()
    # devices do not wait for each other: a job of few rounds can end before all its kills
    killed = kills.Campaign(folder, "buffered", random.Random(3), KILLS, rounds=3 * ROUNDS).play()
    assert killed.total() == KILLS

"""A board that is unplugged is seen, by a real broker, coordinator and agent, by whoever looks at the home."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Processes
from waiting import until

from fedquilt import config
from fedquilt.coordinator.views import devices
from fedquilt.edge_agent.settings import BrokerSettings

SEEN_S = 25.0  # within which a board that is unplugged has to be seen
LOOKS_S = 6.0  # Mosquitto looks for silent clients as rarely as that, as measured


def test_the_usual_keepalive_is_short_enough() -> None:
    """A broker waits for one and a half times as long, then looks at its next turn."""
    assert 1.5 * BrokerSettings().keepalive_s + LOOKS_S < SEEN_S


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Nobody outlives the test."""
    made = Processes()
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


def test_a_board_that_says_nothing_any_more_is_offline_and_back_when_it_does(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes
) -> None:
    """Its process is stopped: its connections stay open, as those of a board whose cable is pulled."""
    broker, home = mosquitto(), tmp_path / "runs"
    table = {"device": "a", "home": str(tmp_path / "a"), "board": "jetson-nano", "labels": ["site=lab"]}
    (tmp_path / "a.toml").write_text(config.text({**table, "broker": {"url": broker.url, "keepalive_s": 5}}))
    processes.start("coordinator", tmp_path / "serve.log", "serve", "--home", str(home), "--broker", broker.url)
    processes.start("a", tmp_path / "a.log", "agent", str(tmp_path / "a.toml"))

    def states() -> list[tuple[str, tuple[str, ...]]]:
        return [(each.state, each.board.labels) for each in devices.look(home)]

    until(lambda: states() == [("idle", ("site=lab",))], "the board is online")
    processes.running["a"].send_signal(signal.SIGSTOP)
    until(lambda: states() == [("offline", ("site=lab",))], "the board is offline")
    processes.running["a"].send_signal(signal.SIGCONT)
    until(lambda: states() == [("idle", ("site=lab",))], "the board is online again")
    (found,) = devices.look(home)
    assert found.board.version
    assert found.board.skew_s is not None

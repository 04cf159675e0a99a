"""A board that is unplugged is seen, by a real broker, coordinator and agent, in the home, on the page, as a metric."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashes import Dashboard
from processes import Processes
from waiting import wait_until

from fedquilt.coordinator.views import devices
from fedquilt.edge_agent.settings import BrokerSettings
from fedquilt.formats import toml

PLACES = ("devices", "page", "metric")
SEEN_S = 25.0  # within which a board that is unplugged has to be seen
KEEPALIVE_S = int(os.environ.get("FEDQUILT_TEST_KEEPALIVE_S", "5"))  # 10 is the usual one; with -s times are printed
LOOKS_S = 6.0  # Mosquitto looks for silent clients as rarely as that, as measured


def test_the_usual_keepalive_is_short_enough() -> None:
    """A broker waits for one and a half times as long, then looks at its next turn."""
    assert 1.5 * BrokerSettings().keepalive_s + LOOKS_S < SEEN_S


def test_a_board_that_says_nothing_any_more_is_offline_and_back_when_it_does(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes
) -> None:
    """Its process is stopped: its connections stay open, as those of a board whose cable is pulled."""
    broker, home = mosquitto(), tmp_path / "runs"
    table = {"device": "a", "home": str(tmp_path / "a"), "board": "jetson-nano", "labels": ["site=lab"]}
    (tmp_path / "a.toml").write_text(
        toml.format_toml({**table, "broker": {"url": broker.url, "keepalive_s": KEEPALIVE_S}})
    )
    pytest.importorskip("prometheus_client", reason="metrics are an extra")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'fedquilt[web]'")
    log = tmp_path / "serve.log"
    words = ("--home", str(home), "--broker", broker.url, "--metrics", "127.0.0.1:0")
    processes.start("coordinator", log, "serve", *words)
    processes.start("a", tmp_path / "a.log", "agent", str(tmp_path / "a.toml"))
    metrics = wait_until(lambda: re.search(r"metrics at (\S+)", log.read_text()), "metrics are served")[1]

    def states() -> list[tuple[str, tuple[str, ...]]]:
        return [(each.state, each.board.labels) for each in devices.load_devices(home)]

    def metric() -> str:
        with urllib.request.urlopen(metrics, timeout=30) as answer:
            found = re.search(r'^fedquilt_board_online\{device="a"\} (\S+)', answer.read().decode(), re.MULTILINE)
        return found[1] if found else ""

    wait_until(lambda: states() == [("idle", ("site=lab",))], "the board is online")
    with Dashboard(home) as dash:

        def page() -> str:
            (board,) = dash.values("/api/fleet")["boards"]
            return str(board["state"])

        assert (page(), metric()) == ("idle", "1.0")
        processes.running["a"].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_until(lambda: states() == [("offline", ("site=lab",))], "the board is offline")
        seen_s = [time.monotonic() - stopped_s]
        wait_until(lambda: page() == "offline", "the page shows it")
        seen_s.append(time.monotonic() - stopped_s)
        wait_until(lambda: metric() == "0.0", "the metric says it")
        seen_s.append(time.monotonic() - stopped_s)
        told = ", ".join(f"{where} {after_s:.1f} s" for where, after_s in zip(PLACES, seen_s, strict=True))
        print(f"keepalive_s {KEEPALIVE_S}, stopped: offline after {told}")
        processes.running["a"].send_signal(signal.SIGCONT)
        wait_until(lambda: states() == [("idle", ("site=lab",))], "the board is online again")
        wait_until(lambda: page() == "idle", "the page shows that too")
    (found,) = devices.load_devices(home)
    assert found.board.version
    assert found.board.skew_s is not None

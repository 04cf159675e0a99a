"""What an agent says and does as it starts, and once as a real daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_agent import Site
from waiting import LIMIT_S

from fedquilt import wire
from fedquilt.core import JobError, Profile
from fedquilt.edge_agent.daemon import run_agent
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.upgrade.remote_settings import FILE, StoredSettings


def test_a_budget_that_no_engine_fits_is_told_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.start(budget="5MB")
    (said,) = [record.message for record in caplog.records if "budget" in record.message]
    assert said.startswith("d: the budget of 5 MB is less than any engine here holds by itself (numpy ")
    caplog.clear()
    site.start(budget="5GB")
    assert caplog.records == []


@pytest.mark.parametrize(("text", "said"), [(None, "mine.toml cannot be read"), ("board = 3", "board")])
def test_a_recorded_profile_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=said):
        run_agent(AgentSettings(device="d", home=str(tmp_path), profile=str(path)))


def test_a_daemon_introduces_itself_and_on_sigterm_says_goodbye(
    tmp_path: Path, embedded_broker: Any, stage: Any
) -> None:
    """A real process on a real broker has what was set from afar, ends with code 0, and stays known as offline."""
    settings = tmp_path / "agent.toml"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / FILE).write_bytes(wire.encode(StoredSettings(serial=1, set={"budget": "300MB"})))
    settings.write_text(
        f'device = "d"\nhome = "home"\nboard = "jetson-nano"\n[broker]\nurl = "{embedded_broker.url}"\n'
    )
    stage.join(embedded_broker.url, "watch", "fq/1/fleet/dev/d/up/#")

    def heard(leaf: str) -> list[bytes]:
        return [message.payload for message in stage.heard["watch"] if message.topic.endswith(f"up/{leaf}")]

    daemon = subprocess.Popen([sys.executable, "-m", "fedquilt.cli", "agent", str(settings)])
    try:
        stage.until(lambda: heard("profile"))
        assert wire.decode(heard("profile")[-1], Profile).budget_bytes == 300_000_000
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=LIMIT_S) == 0
    finally:
        daemon.kill()
        daemon.wait()

    def offline() -> bool:
        told = heard("presence")
        return bool(told) and not wire.decode(told[-1], wire.Presence).online

    stage.until(offline)

"""Settings that reach a real agent over its link, on virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_agent import Site

from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.upgrade.remote_settings import SettingsKind
from fedquilt.wire import DesiredRelease

OWN = agents.parse_settings({"device": "d", "fleet": "f", "home": "unused", "budget": "2GB", "labels": ["site=lab"]})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.kinds["settings"] = SettingsKind(OWN, 8 << 30, tmp_path / "d", lambda given: made.agent.apply_settings(given))
    made.start()
    return made


def send(site: Site, serial: int, back: bool = False, **settings: object) -> str:
    """Publish a release and wait for its end; what is told of it."""
    release = DesiredRelease(
        rollout="r", kind="settings", serial=serial, soak_s=1.0, settings=settings, is_rollback=back
    )
    site.say("settings", release, retain=True)
    site.run(10.0)
    told = site.all("installed")[-1]
    return f"{told.phase}: {told.reason}" if told.reason else str(told.phase)


def test_settings_hold_at_once_and_are_taken_back(site: Site) -> None:
    boots = {each.boot for each in site.all("presence")}
    assert send(site, 1, budget="1GB", labels=("+canary",), policy="max", max_w=7.0, telemetry_s=3.0) == "committed"
    profile = site.all("profile")[-1]
    assert (profile.budget_bytes, profile.labels) == (1_000_000_000, ("canary", "site=lab"))
    assert site.agent.settings.telemetry_s == 3.0
    assert site.agent.task_runner._power_manager.governor_policy.max_w == 7.0
    assert site.agent.task_runner.state.capabilities.budget_bytes == 1_000_000_000
    assert {each.boot for each in site.all("presence")} == boots

    assert send(site, 2, back=True) == "returned"
    assert site.all("profile")[-1].budget_bytes == 2_000_000_000
    assert site.all("profile")[-1].labels == ("site=lab",)


def test_more_than_agent_toml_allows_is_refused_by_the_board(site: Site) -> None:
    said = send(site, 1, budget="3GB")
    assert said.startswith("refused: budget = '3GB' is above this device's limit of 2000 MB")
    assert site.agent.settings.budget != "3GB"
    assert send(site, 2, budget="2GB") == "committed"

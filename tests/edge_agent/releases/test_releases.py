"""Releases on one agent, with a kind that the test has in its hands, on virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_agent import Site
from toy_kinds import ToyKind, release

from fedquilt.wire import Installed, Release


@pytest.fixture
def toy() -> ToyKind:
    return ToyKind()


@pytest.fixture
def site(tmp_path: Path, toy: ToyKind) -> Site:
    site = Site(tmp_path)
    site.kinds["model"] = toy
    site.start()
    return site


def deploy(site: Site, serial: int = 1, **changes: object) -> Release:
    """Publish a release of a blob of its own, as the coordinator does."""
    wanted = release(serial, site.depot.put(b"model %d" % serial), **changes)
    site.say("model", wanted, retain=True)
    return wanted


def phases(site: Site) -> list[str]:
    """Phases that were told, each once where it follows itself."""
    told = [each.phase for each in site.all("installed")]
    return [phase for at, phase in enumerate(told) if at == 0 or phase != told[at - 1]]


def last(site: Site) -> Installed:
    return site.all("installed")[-1]


def test_a_release_is_fetched_checked_swapped_soaked_and_committed(site: Site, toy: ToyKind) -> None:
    """Each phase is told, and the blob that runs with the last one."""
    wanted = deploy(site)
    assert wanted.blob is not None
    site.run(5.0)
    assert phases(site) == ["waiting", "fetching", "checking", "soaking"]
    assert toy.staged == b"model 1"
    site.run(10.0)
    assert (last(site).phase, last(site).current, last(site).name) == ("committed", wanted.blob.sha256, "v1")
    assert last(site).metrics == {"accuracy": 0.9}

"""Fixtures of releases: a toy kind, and a device that exchanges it."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_places import Place
from one_agent import Site
from toy_kinds import ToyKind


@pytest.fixture
def toy() -> ToyKind:
    return ToyKind()


@pytest.fixture
def site(tmp_path: Path, toy: ToyKind) -> Site:
    site = Site(tmp_path)
    site.kinds["model"] = toy
    site.start()
    return site


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)

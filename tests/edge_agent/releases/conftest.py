"""Fixtures of releases: a toy kind, and a device that exchanges it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_places import Place
from one_agent import Site
from toy_kinds import ToyKind


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Folder outside of /dev, where `make test` has the others and a confined process may write."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


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

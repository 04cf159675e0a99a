"""Fixtures of clocks: a board made of files, and its helper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clock_trees import Place

from fedquilt.edge_agent.clocks.helper import ClockHelper


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for line in made.lines:
        line.close()


@pytest.fixture
def helper(place: Place) -> Iterator[ClockHelper]:
    made = place.helper()
    yield made
    made.close()

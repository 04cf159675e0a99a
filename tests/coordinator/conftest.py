"""A job of one round, with devices whose every message a test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A job of one round."""
    made = Stage(tmp_path)
    yield made
    made.store.close()

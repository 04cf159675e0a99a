"""An agent against a coordinator that a test drives."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_agent import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)

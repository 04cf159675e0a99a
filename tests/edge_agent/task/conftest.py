"""A place for child processes to carry tasks out in."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)

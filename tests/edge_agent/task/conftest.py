"""A place for child processes to carry tasks out in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Place


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Folder outside of /dev, where `make test` has the others and a confined process may write."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)

"""A folder in which a page's commands run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import documents


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[documents.Shell]:
    shutil.copy(documents.DIGITS, tmp_path / "digits.npz")
    with documents.Shell(tmp_path) as made:
        yield made

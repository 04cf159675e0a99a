"""Processes of a federation, for every test here that starts some."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.end()

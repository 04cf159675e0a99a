"""What several tests of the coordinator begin with: a job driven by hand, and homes that are closed at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from by_hand import Stage

from fedquilt.coordinator.store import Store


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A job of one round."""
    made = Stage(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder, as so many processes would; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Store(tmp_path))

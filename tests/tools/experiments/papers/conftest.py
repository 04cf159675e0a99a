"""Runs of tables in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fedquilt.tools.experiments import comparison


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(
        play: Callable[..., Any], todo: Sequence[tuple[Any, ...]], workers: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        return ((index, play(*each)) for index, each in enumerate(todo))

    monkeypatch.setattr(comparison, "run_in_processes", run_here)

"""A runner in this process, with a board's folder of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import classifiers
import pytest

if TYPE_CHECKING:
    from runners import Running


@pytest.fixture
def models(tmp_path: Path) -> Path:
    place = tmp_path / "models"
    classifiers.write_classifier(place / "a" / "model.onnx")
    classifiers.write_classifier(place / "b" / "model.onnx", turned=True)
    classifiers.lead(place, "a")
    return place


@pytest.fixture
def running(models: Path) -> Iterator[Running]:
    from runners import Running  # not above: it needs ONNX Runtime, for which only test files skip

    found = Running(models)
    yield found
    found.close()

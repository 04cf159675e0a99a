"""Fixtures of upgrades: a board, and bundles of versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import upgrades
from upgrade_boards import Board


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., Path]:
    count = 0

    def make(says: str = "", **changes: Any) -> Path:
        nonlocal count
        count += 1
        house = [upgrades.toy(tmp_path / f"house-{count}", says)]
        return upgrades.pack(tmp_path / f"bundle-{count}.tar", house, **changes)

    return make

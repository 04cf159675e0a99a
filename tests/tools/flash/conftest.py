"""A board's root, and bundles for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from boards import JETSON, plant, wheel

from fedquilt.tools.flash import bundle
from fedquilt.tools.flash.install import Root
from fedquilt.tools.flash.targets import Target


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A JetPack 6 root with nothing of fedquilt."""
    return Root(plant(tmp_path / "root"), say=lambda line: None)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes bundles."""
    count = 0

    def make(
        files: Mapping[str, bytes] | None = None,
        target: Target = JETSON,
        wheels: tuple[Path, ...] | None = None,
        enrols: bool = False,
    ) -> Path:
        nonlocal count
        count += 1
        board = bundle.Board("orin-1", files or {"agent.toml": b'device = "orin-1"\n'}, 1_000_000_000, enrols)
        house = (wheel(tmp_path / "wheels", "toy"),) if wheels is None else wheels
        folder = tmp_path / f"bundle-{count}"
        bundle.write(bundle.contents(board, target, house, ""), folder)
        return folder

    return make

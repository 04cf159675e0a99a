"""Commands that install an extra, by the distribution that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt import extras


def test_a_board_is_told_its_own_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is without the extra, or a whole part is missing, which the other distribution has."""
    assert extras.installation_command("onnx") == "pip install 'fedquilt[onnx]'"
    folder = tmp_path / "fedquilt_board-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fedquilt-board\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert extras.installation_command("onnx") == "pip install 'fedquilt-board[onnx]'"
    assert extras.missing_message("torch.nn").endswith(
        "torch.nn, which is not installed: pip install 'fedquilt-board[train]'"
    )
    assert extras.installation_command("report") == "pip install 'fedquilt[report]'"
    assert extras.installation_command("") == "pip install 'fedquilt'"

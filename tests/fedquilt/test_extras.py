"""Commands that install an extra, by the distribution that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt import extras


def test_a_board_is_told_its_own_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is without the extra, or a whole part is missing, which the other distribution has."""
    assert extras.installation_command("onnx") == "pip install 'fedquilt[onnx]'"
    assert extras.missing_message("torch").endswith(
        "pip install 'fedquilt[train]' (for a CPU, add --extra-index-url https://download.pytorch.org/whl/cpu)"
    )
    (tmp_path / "fedquilt_board-1.0.dist-info").mkdir()
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "fedquilt" / "extras.py"))
    assert extras.installation_command("onnx") == "pip install 'fedquilt-board[onnx]'"
    assert extras.missing_message("torch.nn").endswith(
        "torch.nn, which is not installed: pip install 'fedquilt-board[train]'"
    )
    assert extras.installation_command("report") == "pip install 'fedquilt[report]'"
    assert extras.installation_command("") == "pip install 'fedquilt'"

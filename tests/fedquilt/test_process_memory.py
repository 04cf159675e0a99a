"""Modules that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fedquilt.host import process_resources


def test_a_deferred_module_is_executed_when_a_name_of_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrapped").mkdir()
    (tmp_path / "wrapped" / "__init__.py").touch()
    (tmp_path / "wrapped" / "late.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wrapped", "wrapped.late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    process_resources.import_on_use("wrapped.late")
    package = importlib.import_module("wrapped")
    late = importlib.import_module("wrapped.late")
    assert (package.late is late, (tmp_path / "wrapped" / "ran").exists()) == (True, False)
    with pytest.raises(AttributeError, match="none"):
        _ = late.none
    assert (tmp_path / "wrapped" / "ran").exists()
    assert package.late is not late
    assert late.Path is package.late.Path is Path


def test_a_module_that_is_there_is_not_deferred() -> None:
    process_resources.import_on_use("importlib")
    assert sys.modules["importlib"] is importlib

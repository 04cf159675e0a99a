"""Files of a folder that a runner answers to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import classifiers
from runners import Clock, Running, npy, png

from fedquilt.core import DataError
from fedquilt.tools.operations.runner.sources import FolderSource


def test_a_folder_is_answered_as_files_appear(running: Running, tmp_path: Path) -> None:
    """A file is answered once, and again when replaced; a half-written one waits, a damaged one is an error."""
    lines: list[dict[str, Any]] = []
    clock, place = Clock(), tmp_path / "in"
    place.mkdir()
    folder = FolderSource(running.service, place, lambda line: lines.append(json.loads(line)), clock)
    (place / "a.npy").write_bytes(npy(classifiers.image(250)))
    (place / "notes.txt").write_text("no image")
    folder.classify_new()
    folder.classify_new()
    assert [(each["file"], each["name"]) for each in lines] == [("a.npy", "day")]
    half = place / "b.png"
    half.write_bytes(png(4, 4)[:40])
    clock.now = half.stat().st_mtime
    folder.classify_new()
    assert len(lines) == 1
    half.write_bytes(png(4, 4))
    folder.classify_new()
    assert lines[-1]["file"] == "b.png"
    assert lines[-1]["name"] == "night"
    (place / "c.png").write_bytes(b"no image")
    clock.now = time.time() + 100
    folder.classify_new()
    folder.classify_new()
    assert len(lines) == 3
    assert "no PNG, JPEG, WebP or TIFF" in lines[-1]["error"]
    os.replace(place / "a.npy", place / "d.npy")
    folder.classify_new()
    assert lines[-1]["file"] == "d.npy"
    with pytest.raises(DataError, match="is no folder"):
        FolderSource(running.service, tmp_path / "absent", print)

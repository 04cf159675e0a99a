"""Finished runs in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import StoreError
from fedquilt.tools import kept


def test_a_run_is_found_again_and_one_of_another_shape_is_not(tmp_path: Path) -> None:
    """What an older version wrote counts as not there; no half-written file stays."""
    store = kept.Kept(tmp_path, list[int])
    assert store.find("a") is None
    store.keep("a", [1, 2])
    assert kept.Kept(tmp_path, list[int]).find("a") == [1, 2]
    assert kept.Kept(tmp_path, list[str]).find("a") is None
    assert [path.name for path in store.folder.iterdir()] == ["a.json"]


def test_a_key_changes_with_every_part_and_with_the_bundle(tmp_path: Path) -> None:
    """Where one part ends and the next begins counts too."""
    (tmp_path / "bundle.json").write_text("{}")
    keys = [kept.key(*parts, bundle=tmp_path) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"))]
    assert kept.key(b"ab", b"c", bundle=tmp_path) == keys[0]
    (tmp_path / "bundle.json").write_text("{1}")
    assert len({*keys, kept.key(b"ab", b"c", bundle=tmp_path)}) == 4


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """Here a file is in its place."""
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*out/runs"):
        kept.Kept(tmp_path / "out", list[int])

"""TOML in and out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquilt import tables
from fedquilt.core import JobError


def test_a_table_is_written_as_toml() -> None:
    """Scalars, lists, tables; None is left out."""
    table = {"device": "a", "cache": None, "data": {"share": 1, "alpha": 0.5, "names": ["x"], "y": None}}
    written = 'device = "a"\n\n[data]\nshare = 1\nalpha = 0.5\nnames = ["x"]\n'
    assert tables.text(table) == written


@given(st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | st.booleans() | st.text('aZ é\\"\n#=[]')))
def test_what_is_written_is_read_again(table: dict[str, object]) -> None:
    """Whatever the strings hold."""
    assert tables.parse(tables.text({**table, "t": table}), "here") == {**table, "t": table}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is absent, no text, or no TOML."""
    with pytest.raises(JobError, match=r"none\.toml: No such file"):
        tables.read(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    for content in (b"\xff\xfe", b"name = "):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"bad\.toml is not TOML"):
            tables.read(path)

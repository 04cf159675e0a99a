"""TOML in and out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from fedquilt import config
from fedquilt.coordinator import settings
from fedquilt.core import JobError


def test_a_table_is_written_as_toml() -> None:
    """Scalars, lists, tables; None is left out."""
    table = {"device": "a", "cache": None, "data": {"share": 1, "alpha": 0.5, "names": ["x"], "y": None}}
    written = 'device = "a"\n\n[data]\nshare = 1\nalpha = 0.5\nnames = [\n    "x",\n]\n'
    assert config.text(table) == written


@given(st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | st.booleans() | st.text('aZ é\\"\n#=[]')))
def test_what_is_written_is_read_again(table: dict[str, object]) -> None:
    """Whatever the strings hold."""
    assert config.parse(config.text({**table, "t": table}), "here") == {**table, "t": table}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is absent, no text, or no TOML."""
    with pytest.raises(JobError, match=r"none\.toml: No such file"):
        config.read(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    for content in (b"\xff\xfe", b"name = "):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"bad\.toml is not TOML"):
            config.read(path)


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=0)] = 0
    prefer: Literal["random", "energy"] = "random"


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    parts: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}


@dataclass(frozen=True)
class Plain:
    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError("lr is below 0")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "a", "iner": {}}, "keys of a job: name, inner, parts, named; did you mean 'inner'?"),
        ({"name": "a", "inner": {"sise": 1}}, "keys of [inner]: size, prefer; did you mean 'size'?"),
        ({"name": "a", "inner": {"zzzz": 1}}, "keys of [inner]: size, prefer"),
        ({"name": "a", "parts": [{}, {"prefers": 1}]}, "keys of [parts[1]]: size, prefer; did you mean 'prefer'?"),
        ({"name": "a", "named": {"x": {"sizes": 1}}}, "size, prefer; did you mean 'size'?"),
        ({"name": "a", "inner": {"prefer": "enrgy"}}, "there are: energy, random; did you mean 'energy'?"),
        ({"inner": {}}, "missing required field `name`; keys of a job: name, inner, parts, named"),
        ({"name": "a", "inner": {"size": -1}}, "Expected `int` >= 0 - at `$.inner.size`"),
    ],
)
def test_a_wrong_key_is_answered_with_the_keys_of_its_own_table(table: dict[str, object], said: str) -> None:
    """However deep it is, and with the nearest of them where one is near."""
    with pytest.raises(JobError) as caught:
        config.convert(table, Outer, "a job")
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"name": "My job"},
            "Expected `str` of small letters, digits, '.', '_' and '-', the first no mark, at most 40",
        ),
        ({"name": "job", "data": "x.npz"}, "Expected a table, got `str` - at `$.data`"),
        ({"name": "job", "fleet": {"boards": "jetson-nano"}}, "Expected a list, got `str` - at `$.fleet.boards`"),
    ],
)
def test_what_is_wanted_is_told_in_words(table: dict[str, object], said: str) -> None:
    """A stranger reads no regular expressions, and TOML has tables, not objects."""
    with pytest.raises(JobError) as caught:
        config.convert({"method": "fedavg", **table}, settings.Job, "a job")
    assert said in str(caught.value)


def test_a_part_of_a_job_says_which_it_is() -> None:
    """Its own name leads, also in front of what a struct says of itself."""
    with pytest.raises(JobError, match=r"^\[data\]: Object .*`sise`; keys of \[data\]: size, prefer; did you mean"):
        config.convert({"sise": 1}, Inner, "[data]")
    with pytest.raises(JobError, match=r"^\[params\]: lr is below 0"):
        config.convert({"lr": -1.0}, Plain, "[params]")
    assert config.convert({"size": 3}, Inner, "[data]") == Inner(3)

"""TOML in and out."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from fedquilt.coordinator import settings
from fedquilt.core import JobError
from fedquilt.edge_agent import settings as agent
from fedquilt.formats import toml


def test_a_table_is_written_as_toml():
    table = {"device": "a", "cache": None, "data": {"share": 1, "alpha": 0.5, "names": ["x"], "y": None}}
    written = 'device = "a"\n\n[data]\nshare = 1\nalpha = 0.5\nnames = [\n    "x",\n]\n'
    assert toml.format_toml(table) == written


@given(st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | st.booleans() | st.text('aZ é\\"\n#=[]')))
def test_what_is_written_is_read_again(table):
    assert toml.parse_toml(toml.format_toml({**table, "t": table}), "here") == {**table, "t": table}


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(JobError, match=r"none\.toml: No such file"):
        toml.read_toml(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    for content in (b"\xff\xfe", b"name = "):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"bad\.toml is not TOML"):
            toml.read_toml(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('x = { "line 99" = 1, "line 99" = 2 }', "here is not TOML"),
        ("mixed = True", "true and false are written in small letters"),
        ("name = Truest", "text is written in quotes"),
    ],
)
def test_what_is_no_toml_is_shown_with_its_fix(text, said):
    with pytest.raises(JobError, match=said):
        toml.parse_toml(text, "here")


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=0)] = 0
    prefer: Literal["random", "energy"] = "random"


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    parts: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "a", "iner": {}}, "did you mean 'inner'? Keys of a job: name, inner, parts, named"),
        ({"name": "a", "inner": {"sise": 1}}, "did you mean 'size'? Keys of [inner]: size, prefer"),
        ({"name": "a", "parts": [{}, {"prefers": 1}]}, "did you mean 'prefer'? Keys of [parts[1]]: size, prefer"),
        ({"name": "a", "named": {"x": {"sizes": 1}}}, "did you mean 'size'? Keys of [named[...]]: size, prefer"),
        ({"name": "a", "inner": {"prefer": "enrgy"}}, "did you mean 'energy'? There are: energy, random"),
        ({"inner": {}}, "key 'name' is missing: write name = ..."),
        ({"name": "a", "inner": {"size": -1}}, "[inner] size = -1: must be a whole number of at least 0"),
    ],
)
def test_a_wrong_key_is_answered_with_the_keys_of_its_own_table(table, said):
    with pytest.raises(JobError) as caught:
        toml.convert_table(table, Outer, "a job")
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"name": "My job"},
            "name = 'My job': must be text of at most 40 of a-z, 0-9, '.', '_' and '-', beginning with a letter",
        ),
        ({"name": "job", "data": "x.npz"}, "data = 'x.npz': must be a table"),
        ({"name": "job", "fleet": {"boards": []}}, "[fleet] boards = []: must be a list of at least 1 entry"),
        ({"name": "job", "fleet": {"devices": True}}, "[fleet] devices = true: must be a whole number"),
        ({"name": "job", "fleet": {"policy": 3}}, "[fleet] policy = 3: must be text in quotes"),
        ({"name": "job", "cohort": {"quorum": 2}}, "[cohort] quorum = 2: must be a number of at most 1"),
        ({"name": "job", "donors": [{}, 3]}, "donors[1] = 3: must be a table"),
        ({"name": "job", "compare": {"fedprox": 3}}, "compare: must be a table"),
    ],
)
def test_what_is_wanted_is_told_in_words(table, said):
    with pytest.raises(JobError) as caught:
        toml.convert_table({"method": "fedavg", **table}, settings.JobSettings, "a job")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"governor": {"policy": "fast"}}, "[governor] policy = 'fast'; there are: board, energy, max, paper"),
        ({"meter": 3}, "meter = 3: must be text in quotes or a table"),
        ({"data": {"path": "x", "per_class": "ten"}}, "[data]: per_class = 'ten': must be a whole number or a table"),
        (
            {"data": {"path": "x", "audio": {"rate": 0}}},
            "[data]: audio.rate = 0: must be a whole number of at least 1",
        ),
        (
            {"data": {"path": "x", "categories": {"a": "red"}}},
            "[data]: categories: 'red'; there are: auto or a list",
        ),
    ],
)
def test_a_boards_settings_are_refused_in_the_same_words(keys, said):
    with pytest.raises(JobError) as caught:
        agent.parse_settings({"device": "a", "home": "h", **keys})
    assert said in str(caught.value)
    assert not set("`$") & set(str(caught.value))


def test_a_file_that_a_windows_editor_has_saved_is_read(tmp_path):
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbfname = 'a'\n")
    assert toml.read_toml(file) == {"name": "a"}


@pytest.mark.parametrize("path", ["a\0b", "loop"])
def test_a_path_that_no_file_can_have_is_refused_by_name(tmp_path, path):
    (tmp_path / "loop").symlink_to("loop")
    for read, text in (
        (settings.load_job, "name = 'a'\nmethod = 'fedavg'\n[data]\n"),
        (agent.load_settings, "device = 'a'\nhome = 'h'\n[broker]\nurl = 'mqtt://b'\n[data]\n"),
    ):
        (tmp_path / "it.toml").write_text(f'{text}path = "{path.replace(chr(0), chr(92) + "u0000")}"\n')
        if path == "loop" and sys.version_info >= (3, 13):
            assert read(tmp_path / "it.toml")  # resolved as it stands, and refused when it is read
            continue
        with pytest.raises(JobError, match=r"it\.toml: .* is not a valid path"):
            read(tmp_path / "it.toml")

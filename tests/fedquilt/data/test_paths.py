"""Agent, doctor and readers name the same problem of a path of examples."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from fedquilt.core import DataError
from fedquilt.data.readers import open_reader
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import settings
from fedquilt.edge_agent.task import data_check
from fedquilt.edge_agent.task.memory_budget import MemoryLimit
from fedquilt.tools.boards.doctor import agent

CASES = {
    "flwers.csv": "no data at {path}; did you mean 'flowers.csv'?",
    "nowhere/flowers.csv": "no data at {path}: set [data] path to",
    "x" * 300: "no data at {path}: set [data] path to",
}
if os.geteuid():
    CASES["closed/flowers.csv"] = "this user may not read the data {path}"


@pytest.mark.parametrize("name", CASES)
def test_all_name_the_same_problem(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flowers.csv").touch()
    (tmp_path / "closed").mkdir(0)
    file = tmp_path / "agent.toml"
    file.write_text(f'device = "d"\nhome = "h"\n[data]\npath = "{name}"\n')
    loaded, expected = settings.load_settings(file), CASES[name].format(path=tmp_path / name)
    data_check.warn_of_unreadable_data(loaded, tmp_path, MemoryLimit(), 10**8)
    spec = DataSpec.parse(loaded.data)
    verdict = agent.check_examples(loaded, file)
    assert caplog.messages[0].startswith(expected)
    assert spec.find_path_problem() == caplog.messages[0] == getattr(verdict, "sentence", verdict)
    if len(name) < 255:  # formats are detected before the path is opened
        with pytest.raises(DataError) as raised:
            open_reader(spec)
        assert str(raised.value) == caplog.messages[0] or "Permission denied" in str(raised.value)


def test_a_table_without_data_and_readable_data_have_no_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flowers.csv").touch()
    assert DataSpec(path=str(tmp_path / "flowers.csv")).find_path_problem() == ""
    assert DataSpec(dataset="sklearn/iris").find_path_problem() == ""
    caplog.set_level(logging.WARNING)
    data_check.warn_of_unreadable_data(
        settings.parse_settings({"device": "d", "home": "h"}), tmp_path, MemoryLimit(), 1
    )
    assert not caplog.messages

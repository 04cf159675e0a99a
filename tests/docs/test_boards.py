"""docs/boards.md: its commands and files are ones that fedquilt takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedquilt import cli, tables
from fedquilt.edge_agent import settings
from fedquilt.tools.flash import targets

PAGE = (Path(__file__).parents[2] / "docs" / "boards.md").read_text()
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(command: str) -> None:
    """With options that there are; a target that is named is known."""
    program, *words = shlex.split(command)
    assert program == "fedquilt"
    options = cli.parser().parse_args(words)
    if getattr(options, "target", None) is not None:
        assert targets.find(options.target).python


def test_its_settings_are_valid() -> None:
    """As an agent reads them."""
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert settings.parse(tables.parse(text, "docs/boards.md")).device == "orin-07"


def test_its_table_of_targets_is_complete() -> None:
    """One that is added has to be told."""
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} >= set(targets.KNOWN)

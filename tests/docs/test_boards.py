"""docs/boards.md: its settings and targets are ones that fedquilt takes."""

import re
from pathlib import Path

from fedquilt.edge_agent import settings
from fedquilt.formats import toml
from fedquilt.tools.boards import targets
from fedquilt.tools.boards.flash import bundle

PAGE = (Path(__file__).parents[2] / "docs" / "boards.md").read_text()


def test_its_settings_are_valid():
    agent, service = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert settings.parse_settings(toml.parse_toml(agent, "docs/boards.md")).device == "orin-07"
    known = toml.convert_table(
        toml.parse_toml(service, "docs/boards.md"), bundle.CoordinatorSettings, "a coordinator's settings"
    )
    assert known.enrol.hosts == ("hub.site",)


def test_its_table_of_targets_is_complete():
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.M)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} >= set(targets.TARGETS)

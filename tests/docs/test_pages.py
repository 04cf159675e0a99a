"""Every command in the pages of docs/ is one that fedquilt takes, and every page is reached from the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from command_lines import parsed
from fedquilt.tools.flash import targets

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMANDS = [
    (page.name, line[2:])
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.S)
    for line in block.splitlines()
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_is_one(page: str, command: str) -> None:
    """With options that there are; a target that is named is known."""
    words = [word for word in shlex.split(command) if word != "sudo"]
    assert words[0] == "fedquilt"
    options = parsed(words[1:])
    if words[1] == "flash" and options["target"] is not None:
        assert targets.find(options["target"]).python


def test_every_page_is_linked_from_the_readme_and_every_link_leads_somewhere() -> None:
    """By the README, or by a page that is; pages and files that are named in links exist."""
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        links = {
            (page.parent / name).resolve() for page in new for name in re.findall(r"[\w./-]+\.md", page.read_text())
        }
        new = (links & set(PAGES)) - reached
    assert set(PAGES) <= reached
    for page in (ROOT / "README.md", *PAGES):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"

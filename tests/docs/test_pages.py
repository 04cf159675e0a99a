"""Every command in the pages is one that fedquilt takes, every page is in the index, and every link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

import documents
from command_lines import parsed
from fedquilt.tools.boards import targets

DOCS = documents.ROOT / "docs"
COMMANDS = [
    (page.relative_to(documents.ROOT).as_posix(), command)
    for page in [*sorted(DOCS.rglob("*.md")), documents.ROOT / "examples" / "README.md"]
    for command in documents.commands(page.relative_to(documents.ROOT).as_posix())
]
ELSEWHERE = ("python ", "pip ", "mosquitto ")  # other programs than fedquilt, which the pages' own tests run


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_is_one(page, command):
    if command.startswith(ELSEWHERE):
        return
    words = [word for word in shlex.split(command) if word != "sudo"]
    assert words[0] == "fedquilt"
    options = parsed(words[1:])
    if words[1:3] == ["board", "flash"] and options["target"] is not None:
        assert targets.find_target(options["target"], options["python"]).python


def test_every_page_is_in_the_index():
    for folder in (DOCS, DOCS / "methods"):
        index = (folder / "index.md").read_text()
        below = DOCS.rglob("*.md") if folder == DOCS else folder.glob("*.md")
        own = [page for page in below if folder != DOCS or page.parent.name != "methods"]
        for page in own:
            assert page.name == "index.md" or f"({page.relative_to(folder).as_posix()})" in index, page
    assert "docs/index.md" in (documents.ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.relative_to(documents.ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", text):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


@pytest.mark.parametrize("page", documents.pages(), ids=lambda page: page.relative_to(documents.ROOT).as_posix())
def test_every_row_belongs_to_a_table(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        head, *rows = table.splitlines()
        assert rows, head
        assert re.fullmatch(r"\|[ :|-]+", rows[0]), head

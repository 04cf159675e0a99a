"""docs/architecture.md: the files that it names are there, and its diagram is drawn from the coordinator's table."""

from __future__ import annotations

import re

import documents
from fedquilt.coordinator.rounds import events

PAGE = (documents.ROOT / "docs" / "architecture.md").read_text()


def test_the_diagram_of_a_job_is_the_tables() -> None:
    """Drawn from `coordinator/rounds/events.py`: paste `events.format_diagram()` into the page when it changes."""
    found = re.search(r"```mermaid\n(.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    assert found[1] == events.format_diagram()


def test_every_path_that_it_names_is_there() -> None:
    """Files and folders of the tree between backquotes; those below `edge_agent/` and `models/` by their own names."""
    tops = ("", "edge_agent", "models")
    for name in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", PAGE):
        assert any((documents.ROOT / top / name).exists() for top in tops), name


def test_it_names_every_folder_of_the_top() -> None:
    """And every one below `fedquilt/`."""
    top = [path for path in documents.ROOT.iterdir() if (path / "__init__.py").exists()]
    below = [path for path in (documents.ROOT / "fedquilt").iterdir() if (path / "__init__.py").exists()]
    for folder in top + [path for path in below if not path.is_symlink()]:
        assert f"`{folder.relative_to(documents.ROOT).as_posix()}/`" in PAGE, folder

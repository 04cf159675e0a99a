"""`make docs` builds the site without a warning, and nothing on it comes from the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import documents
import fedquilt

ATTRIBUTES = r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=documents.ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=documents.LIMIT_S * 2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_it(site):
    docs = documents.ROOT / "docs"
    for page in docs.rglob("*.md"):
        assert (site / page.relative_to(docs)).with_suffix(".html").exists(), page
    for name in ("contributing", "changelog", "examples"):
        assert (site / f"{name}.html").exists()


def test_nothing_comes_from_the_network(site):
    """No script, style, font or picture; links that a person follows may lead there."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(ATTRIBUTES, text), page
        assert 'class="mermaid"' not in text, page  # its script would be fetched
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_reference_describes_every_public_name(site):
    text = (site / "api.html").read_text()
    for name in fedquilt.__all__:
        assert f'id="fedquilt.{name}"' in text or f"fedquilt.{name}" in text, name
    assert text.count("doc-heading") > len(fedquilt.__all__)


def test_the_phases_of_a_job_are_a_table(site):
    text = (site / "architecture.html").read_text()
    assert "stateDiagram" not in text
    for line in documents.format_mermaid_diagram().splitlines():
        if found := re.match(r" +(\w+) --> (\w+): (.*)", line):
            assert f"<td>{found[1]}</td>\n<td>{found[3]}</td>\n<td>{found[2]}</td>" in text


def test_links_to_source_files_are_plain_text(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r"href=[\"']?[^\"' >]*\.(?:py|toml|md)[\"' >#]", page.read_text()), page

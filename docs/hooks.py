"""What the site needs beyond the pages: links between a checkout's files become links between the site's pages.

A link to a file that is no page, such as a source file, becomes plain text: the site does not have it. A link to
nothing fails the build. The diagram of a job's phases becomes a table, because the script that draws it would come
from the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MORE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that lie beside docs/."""
    for name, uri in MORE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page's links, outside code, and its diagram."""
    uri = page.file.src_uri
    source = next((ROOT / name for name, more in MORE.items() if more == uri), DOCS / uri)
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], source, uri), _drawn(fence[0])]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], source, uri)])


def _linked(text: str, source: Path, uri: str) -> str:
    return LINK.sub(lambda found: _link(found, source, uri), text)


def _link(found: re.Match[str], source: Path, uri: str) -> str:
    mark, label, path, anchor = found[1], found[2], found[3], found[4] or ""
    if not path or "://" in path:
        return found[0]
    target = (source.parent / path).resolve()
    if not target.exists():
        raise PluginError(f"{source.relative_to(ROOT)} links to {path}, and there is no such file")
    if target.is_dir() and (target / "index.md").exists():
        target /= "index.md"
    name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    if name in MORE:
        there = MORE[name]
    elif target.is_relative_to(DOCS) and target.is_file():
        there = target.relative_to(DOCS).as_posix()
    else:
        return label
    return f"{mark}[{label}]({os.path.relpath(there, os.path.dirname(uri) or '.')}{anchor})"


def _drawn(fence: str) -> str:
    if not fence.startswith("```mermaid"):
        return fence
    arrows = re.findall(r"^ *(\S+) --> (\S+?)(?:: (.*))?$", fence, re.MULTILINE)
    rows = [f"| {before} | {facts} | {after} |" for before, after, facts in arrows if "[*]" not in (before, after)]
    return "\n".join(["| phase | event | next phase |", "|---|---|---|", *rows])

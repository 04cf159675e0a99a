"""A page of HTML that needs nothing but itself: no script, no font, no picture from elsewhere; light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c1c1c;--ground:#fff;--soft:#666;--line:#dcdcdc;--card:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--ground:#16181c;--soft:#a0a4aa;--line:#363a40;--card:#1f2228}}
body{margin:0 auto;max-width:1040px;padding:24px 20px 60px;color:var(--ink);background:var(--ground);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 8px;border-bottom:1px solid var(--line);padding-bottom:4px}
p{margin:6px 0}.soft{color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:18px 0}
.tile{background:var(--card);border-radius:8px;padding:10px 14px;min-width:110px}
.tile b{display:block;font-size:20px}.tile span{color:var(--soft);font-size:12px}
.plots{display:flex;flex-wrap:wrap;gap:14px}.plots>*{flex:1 1 440px;min-width:0;max-width:500px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}
pre{font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
details{margin:8px 0}summary{cursor:pointer}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of parts that are HTML already."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def heading(text: str, soft: str = "") -> str:
    """The page's own."""
    return f"<h1>{escape(text)}</h1>" + (f'\n<p class="soft">{escape(soft)}</p>' if soft else "")


def section(title: str, *parts: str) -> str:
    """A headed part of the page; nothing without content."""
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *parts, "</section>"]) if any(parts) else ""


def tiles(found: Sequence[tuple[str, str]]) -> str:
    """(figure, what it is): the few that are looked for first."""
    each = [f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in found]
    return '<div class="tiles">' + "".join(each) + "</div>"


def plots(found: Sequence[str]) -> str:
    """Pictures beside each other where there is room."""
    return '<div class="plots">' + "\n".join(found) + "</div>" if found else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is of names, the rest of figures."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def wide(svg: str) -> str:
    """A picture that may be wider than the page."""
    return f'<div class="wide">{svg}</div>'


def text(sentence: str) -> str:
    return f'<p class="soft">{escape(sentence)}</p>'


def story(lines: Sequence[str], title: str = "", open_: bool = True) -> str:
    """Lines as they are; with a title they can be folded away."""
    body = f"<pre>{escape(chr(10).join(lines))}</pre>"
    return body if not title else f"<details{' open' * open_}><summary>{escape(title)}</summary>{body}</details>"

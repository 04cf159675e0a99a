"""`fedquilt methods`: what each method is, where it deviates from its paper, and its parameters, from its own file.

The pages of `docs/methods/` are these cards; `fedquilt methods --out docs/methods` writes them anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fedquilt import columns, disk, methods, plugins

Covering = Callable[[str], Iterable[tuple[str, str]]]
"""Command and page of docs/ of each table that runs a method."""

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One key of a job's [params]."""

    name: str
    kind: str
    default: Any
    about: str  # "" where the name says it all


@dataclasses.dataclass(frozen=True)
class Card:
    """One method."""

    name: str
    title: str
    about: str  # the file's docstring after its first line
    paper: str
    engines: tuple[str, ...]
    evaluates: bool  # whether `[check] every` works
    parameters: tuple[Parameter, ...]
    tables: tuple[tuple[str, str], ...]  # the command of each table that runs it, and where in docs/ what came out is


def card(name: str, covering: Covering = lambda name: ()) -> Card:
    """What a method's file says, with the tables that `covering` returns.

    Raises:
        JobError: there is no such method.
    """
    method = methods.load(name)
    title, _, about = (inspect.getdoc(methods.module(name)) or "").partition("\n")
    found = tuple(_parameters(method.params))
    return Card(
        name=name,
        title=title,
        about=about.strip(),
        paper=method.paper,
        engines=tuple(method.engines),
        evaluates=method.check is not None,
        parameters=found,
        tables=tuple(covering(name)),
    )


def lines(one: Card) -> list[str]:
    """The card as Markdown."""
    found = [f"# {one.name}", "", one.title, "", one.about, ""]
    found += [f'Runs on: {" or ".join(one.engines)}. In a job: `method = "{one.name}"`.']
    if not one.evaluates:
        found.append("It has no evaluation on held-out shares: leave `[check] every` 0.")
    if one.tables:
        told = ", ".join(f"`{command}` ([figures](../{page}))" for command, page in one.tables)
        found += ["", f"Compared in: {told}."]
    if one.parameters:
        found += ["", "| `[params]` | type | default | |", "|---|---|---|---|"]
        found += [f"| `{p.name}` | {p.kind} | `{_toml(p.default)}` | {p.about} |" for p in one.parameters]
    return found


def listed(names: Iterable[str], outside: Sequence[plugins.Plugin] = ()) -> list[str]:
    """Each method with its title, as a table; none of other packages is imported for it."""
    titles = {name: card(name).title for name in names}
    titles |= {each.name: f"of package {each.package} {each.version} ({each.target})" for each in outside}
    return columns.table([list(each) for each in titles.items()], "<~")


def index() -> list[str]:
    """The page that lists all methods, as Markdown."""
    found = [
        "# Methods",
        "",
        "Each page is written from the method's own file: its paper, what deviates from the paper, and",
    ]
    found += [
        "its parameters. [write-a-method.md](../write-a-method.md) says how to add one.",
        "",
        "| | |",
        "|---|---|",
    ]
    return found + [f"| [{name}]({name}.md) | {card(name).title} |" for name in methods.names()]


def write(folder: Path, covering: Covering) -> list[Path]:
    """A page for every method, and an index; pages of methods that are gone are removed.

    Raises:
        StoreError: the folder cannot be written.
    """
    with disk.doing(f"write {folder}", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        pages = {folder / f"{name}.md": "\n".join(lines(card(name, covering))) + "\n" for name in methods.names()}
        pages[folder / "index.md"] = "\n".join(index()) + "\n"
        for gone in set(folder.glob("*.md")) - set(pages):
            gone.unlink()
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
    return sorted(pages)


def main(name: str | None, out: Path | None, format: str, covering: Covering) -> None:
    """The verb."""
    if out is not None:
        print(f"{out}: {len(write(out, covering))} pages")
    elif format == "json":
        cards = [card(each, covering) for each in ([name] if name else methods.names())]
        print(msgspec.json.encode(cards[0] if name else cards).decode())
    else:
        own = methods.names()
        print("\n".join(lines(card(name, covering)) if name else [*listed(own, plugins.usable("method", own))]))
        for said in () if name else plugins.complaints("method", own):
            print(said, file=sys.stderr)


# -- parameters -----------------------------------------------------------------------------------


def _parameters(params: type) -> Iterable[Parameter]:
    """Inherited ones first, as in the dataclass."""
    hints = typing.get_type_hints(params, include_extras=True)
    about: dict[str, str] = {}
    for each in reversed(params.__mro__):
        if dataclasses.is_dataclass(each):
            about |= _comments(each)
    for field in dataclasses.fields(params):
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Parameter(field.name, _kind(hints[field.name]), default, about.get(field.name, ""))


def _comments(params: Any) -> dict[str, str]:
    """Comment behind each field in the source."""
    found: dict[str, str] = {}
    current = None
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(params)).readline):
        words = token.line.split()
        if token.type == tokenize.NAME and token.line.lstrip().startswith(f"{token.string}:"):
            current = token.string
        elif token.type == tokenize.NAME and words[:1] in (["def"], ["class"]):
            current = None
        elif token.type == tokenize.COMMENT and current and words[0] != "#":
            found[current] = token.string.lstrip("# ").replace("|", "\\|")
    return found


def _kind(hint: Any) -> str:
    """A type for people: `int >= 1`, `"sgd" or "adam"`."""
    if typing.get_origin(hint) is Annotated:
        plain, *extras = typing.get_args(hint)
        limits = [
            f"{sign} {getattr(extra, key):g}"
            for extra in extras
            for key, sign in SIGNS.items()
            if getattr(extra, key, None) is not None
        ]
        return " ".join([_kind(plain), ", ".join(limits)]).strip()
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(_toml(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) in (tuple, list):
        return f"list of {_kind(typing.get_args(hint)[0])}"
    if hint is float:
        return "number"
    return {int: "integer", bool: "true or false", str: "text"}.get(hint, str(getattr(hint, "__name__", hint)))


def _toml(value: Any) -> str:
    """A default as a job would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return f'"{value}"' if isinstance(value, str) else str(value)

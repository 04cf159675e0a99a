"""Descriptions of the methods, generated from their source files.

The pages in `docs/methods/` are written by `fedquilt methods --out docs/methods`.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fedquilt import methods, plugins
from fedquilt.console import table
from fedquilt.core import CODECS, Method, Traits
from fedquilt.host import disk

Covering = Callable[[str], Iterable[tuple[str, str]]]
"""Function from a method to the command, and the page in docs/, of each table that compares the method."""

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class MethodParameter:
    name: str
    kind: str
    default: Any
    about: str  # "" if the name is enough


@dataclasses.dataclass(frozen=True)
class MethodCard:
    name: str
    title: str
    about: str  # the file's docstring after its first line
    paper: str
    engines: tuple[str, ...]
    evaluates: bool  # whether `[check] every` works
    properties: tuple[tuple[str, str], ...]  # what `Method` and `Traits` state, as name and words
    parameters: tuple[MethodParameter, ...]
    tables: tuple[tuple[str, str], ...]  # command of each table that runs the method, and the page with its results


def make_card(name: str, covering: Covering = lambda name: ()) -> MethodCard:
    method = methods.load(name)
    title, _, about = (inspect.getdoc(methods.method_module(name)) or "").partition("\n")
    parameters = tuple(_list_parameters(method.params))
    return MethodCard(
        name=name,
        title=title,
        about=about.strip(),
        paper=method.paper,
        engines=tuple(method.engines),
        evaluates=method.check is not None,
        properties=tuple(_list_properties(method)),
        parameters=parameters,
        tables=tuple(covering(name)),
    )


def format_card(card: MethodCard, common: Sequence[MethodParameter] = ()) -> list[str]:
    """Return the page of a method as lines of Markdown. FedAvg's page explains the parameters `common`."""
    lines = [f"# {card.name}", "", card.title, "", card.about, ""]
    lines += [f'Runs on: {" or ".join(card.engines)}. In a job: `method = "{card.name}"`.']
    if not card.evaluates:
        lines.append("It has no evaluation on held-out shares: leave `[check] every` 0.")
    if card.tables:
        table_links = ", ".join(f"`{command}` ([figures](../{page}))" for command, page in card.tables)
        lines += ["", f"Compared in: {table_links}."]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {words} |" for name, words in card.properties)]
    if rows := [parameter for parameter in card.parameters if parameter not in common]:
        lines += ["", "| `[params]` | type | default | |", "|---|---|---|---|"]
        lines += [f"| `{p.name}` | {p.kind} | `{_format_default(p.default)}` | {p.about} |" for p in rows]
    if names := [f"`{parameter.name}`" for parameter in card.parameters if parameter in common]:
        subject = "The other" if rows else "Its"
        lines += ["", f"{subject} `[params]` are explained on [FedAvg's page](fedavg.md): {', '.join(names)}."]
    return lines


def format_method_table(names: Iterable[str], installed_plugins: Sequence[plugins.Plugin] = ()) -> list[str]:
    titles = {name: make_card(name).title for name in names}
    titles |= {p.name: f"of package {p.package} {p.version} ({p.target})" for p in installed_plugins}
    return table.format_table([list(row) for row in titles.items()], "<~")


def format_index() -> list[str]:
    return [
        "# Methods",
        "",
        "Each page is written from the method's own file: its paper, what deviates from the paper, and",
        "its parameters. [write-a-method.md](../write-a-method.md) says how to add one.",
        "",
        "| | |",
        "|---|---|",
        *(f"| [{name}]({name}.md) | {make_card(name).title} |" for name in methods.builtin_names()),
    ]


def write_pages(folder: Path, covering: Covering) -> list[Path]:
    """Write a page for each method and an index, delete other pages, and return the paths."""
    with disk.disk_errors(f"write {folder}", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        common = make_card("fedavg").parameters
        pages = {
            folder / f"{name}.md": "\n".join(format_card(make_card(name, covering), () if name == "fedavg" else common))
            + "\n"
            for name in methods.builtin_names()
        }
        pages[folder / "index.md"] = "\n".join(format_index()) + "\n"
        for obsolete in set(folder.glob("*.md")) - set(pages):
            obsolete.unlink()
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
    return sorted(pages)


def write_or_print_pages(name: str | None, out: Path | None, format: str, covering: Covering) -> None:
    """Write all pages into `out` if given. Otherwise print the page of `name`, or a table of all methods."""
    if out is not None:
        print(f"{out}: {len(write_pages(out, covering))} pages")
    elif format == "json":
        cards = [make_card(method, covering) for method in ([name] if name else methods.builtin_names())]
        print(msgspec.json.encode(cards[0] if name else cards).decode())
    elif name:
        print("\n".join(table.format_markdown(format_card(make_card(name, covering)))))
    else:
        builtin = methods.builtin_names()
        print("\n".join(format_method_table(builtin, plugins.usable_plugins("method", builtin))))
        for conflict in plugins.name_conflicts("method", builtin):
            print(conflict, file=sys.stderr)


def _list_properties(method: Method) -> Iterable[tuple[str, str]]:
    traits, aggregation = method.traits, method.aggregation
    yield "paper", re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", method.paper)
    yield "a device sends", traits.sent_data
    fallback = "starts without it" if traits.replaces_private_state else "declines"
    private = f"{traits.private_data}; a device that lost it {fallback}" if traits.private_data else "-"
    yield "stays on the device", private
    if "onnx" not in method.engines:  # other methods predict their work block by block
        yield "passes over an example in an epoch", _format_passes(traits)
        yield "memory beside plain SGD", _format_copies(traits.model_copies)
    is_sum = traits.per_device_data == ""
    yield "the coordinator keeps in a round", "sums" if is_sum else f"sums, and {traits.per_device_data}"
    yield "[sites](../scale.md#sites) forward", "sums" if aggregation.check_sums else "single updates"
    refused = {*traits.refused_codecs, *([codec for codec in CODECS if codec != "raw"] if traits.exact_updates else [])}
    yield "codecs", ", ".join(f"`{codec}`" for codec in CODECS if codec not in refused)
    yield "predictions, `task`", ", ".join(f'`"{task}"`' for task in traits.prediction_tasks)
    combinations = {
        "networks by memory tier, `[model.tier]`": traits.tier_networks,
        "buffered rounds, [`[cohort] mode`](../jobs.md#rounds-without-stragglers)": aggregation.change is not None,
        "[differential privacy](../privacy.md)": aggregation.change is not None and aggregation.change.supports_noise,
        "unequal epochs in rounds [planned for energy](../energy.md)": traits.unequal_epochs,
        "a rollout with each device's own network": method.personal_model is not None,
    }
    if traits.frozen_weights:
        yield "needs trained weights for", traits.frozen_weights
    yield "works with", "; ".join(name for name, works in combinations.items() if works) or "-"


def _format_passes(traits: Traits) -> str:
    passes = traits.training_passes
    trainings = (
        f"`{passes}` times" if isinstance(passes, str) else {1: "once", 2: "twice"}.get(passes, f"{passes} times")
    )
    forward = f", and {traits.forward_passes} more forward" if traits.forward_passes else ""
    return f"{trainings} forward and backward{forward}"


def _format_copies(copies: int | str) -> str:
    if isinstance(copies, str):
        return f"a copy of the model if `{copies}` is above 0"
    return {0: "-", 1: "a copy of the model"}.get(copies, f"{copies} copies of the model")


def _list_parameters(params: type) -> Iterable[MethodParameter]:
    hints = typing.get_type_hints(params, include_extras=True)
    comments: dict[str, str] = {}
    for dataclass_type in reversed(params.__mro__):
        if dataclasses.is_dataclass(dataclass_type):
            comments |= _read_field_comments(dataclass_type)
    for field in dataclasses.fields(params):
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield MethodParameter(field.name, _format_type(hints[field.name]), default, comments.get(field.name, ""))


def _read_field_comments(params: Any) -> dict[str, str]:
    comments: dict[str, str] = {}
    current = None
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(params)).readline):
        words = token.line.split()
        if token.type == tokenize.NAME and token.line.lstrip().startswith(f"{token.string}:"):
            current = token.string
        elif token.type == tokenize.NAME and words[:1] in (["def"], ["class"]):
            current = None
        elif token.type == tokenize.COMMENT and current and words[0] != "#":
            comments[current] = token.string.lstrip("# ").replace("|", "\\|")
    return comments


def _format_type(hint: Any) -> str:
    # such as `int >= 1`, `"sgd" or "adam"`
    if typing.get_origin(hint) is Annotated:
        plain, *extras = typing.get_args(hint)
        limits = [
            f"{sign} {_format_number(getattr(extra, key))}"
            for extra in extras
            for key, sign in SIGNS.items()
            if getattr(extra, key, None) is not None
        ]
        return " ".join([_format_type(plain), ", ".join(limits)]).strip()
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(_format_default(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_format_type(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) in (tuple, list):
        return f"list of {_format_type(typing.get_args(hint)[0])}"
    if hint is float:
        return "number"
    if typing.get_origin(hint) is Mapping:
        return "table"
    return {int: "integer", bool: "true or false", str: "text"}.get(hint, str(getattr(hint, "__name__", hint)))


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _format_default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_default, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)

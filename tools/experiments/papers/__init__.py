"""`fedquilt reproduce`: tables of the papers run again here, the paper's numbers beside ours.

One module for each paper, found by its file: `TABLES` (names of tables as keys), `COVERS` (table -> the methods that
it runs), `PAGE` (of docs/, where what came out stands), `run` and `lines`; `picture` where there is one to draw, and
`WITHOUT_DATA`, the tables among them that need no folder although others do. `run` takes `columns` where a table's
may be run alone. Its docstring says how it is done and what differs from the paper; that is printed with every table.

    run(table, seeds, rounds, say, ...) -> dict   # and `data`, where it needs a folder; `figures` in it are claims
    lines(result) -> list[str]                    picture(result) -> str   # SVG
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fedquilt import columns as layout
from fedquilt import disk
from fedquilt.core import JobError


def modules() -> dict[str, ModuleType]:
    """Table -> the module that runs it, in order of names."""
    found: dict[str, ModuleType] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        found |= dict.fromkeys(getattr(module, "TABLES", ()), module)
    return dict(sorted(found.items()))


def catalogue(known: dict[str, ModuleType]) -> list[dict[str, Any]]:
    """What there is, and whether it can take a folder of data."""
    return [
        {"table": name, "about": _about(module).partition("\n")[0], "takes_data": takes_data(name, module)}
        for name, module in known.items()
    ]


def takes_data(table: str, module: ModuleType) -> bool:
    return "data" in _takes(module) and table not in getattr(module, "WITHOUT_DATA", ())


def covering(method: str, known: Mapping[str, ModuleType]) -> list[tuple[str, str]]:
    """(command, page of docs/) of every table that runs the method."""
    return [
        (f"fedquilt reproduce {name}" + " --data FOLDER" * takes_data(name, module), module.PAGE)
        for name, module in known.items()
        if method in module.COVERS[name]
    ]


def listed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The catalogue for people, by papers."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["about"], []).append(row["table"] + " (--data FOLDER)" * row["takes_data"])
    wide = layout.width()
    return [
        line
        for about, names in found.items()
        for line in (*textwrap.wrap(about, wide, break_on_hyphens=False), *(f"  {name}" for name in names))
    ]


def run(
    table: str,
    known: dict[str, ModuleType],
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """One table's result, with what its module says of itself as "about".

    Args:
        seeds: None: the module's own.
        rounds: fewer than the paper's; None: as many. Claims are checked only then.
        folder: data; a table that wants some says so.
        columns: these alone, of a table that has some; None: all.

    Raises:
        JobError: an unknown table or column, or data for one that makes its own.
        FedquiltError: what the runs raise, also that data is wanted.
    """
    if table not in known:
        raise JobError(f"table {table!r} is unknown; there are: {', '.join(known) or 'none'}")
    module = known[table]
    given: dict[str, Any] = {"rounds": rounds, "say": say}
    if takes_data(table, module):
        given["data"] = folder
    elif folder is not None:
        raise JobError(f"{table} makes its own data: leave --data out")
    if columns and "columns" not in _takes(module):
        raise JobError(f"{table} is run as a whole: leave --columns out")
    if columns:
        given["columns"] = columns
    chosen = tuple(seeds) if seeds else tuple(getattr(module, "SEEDS", (0, 1, 2)))
    return {**module.run(table, chosen, **given), "about": _about(module)}


def main(
    table: str | None,
    *,
    seeds: Sequence[int] | None,
    rounds: int | None,
    folder: Path | None,
    columns: Sequence[str] | None,
    out: Path | None,
    picture: Path | None,
    format: str,
) -> int:
    """List the tables, or run one and print it; 1 when one of its claims did not come out.

    Raises:
        JobError: a picture is wanted of a table that has none.
    """
    known = modules()
    if table in known and picture is not None and not hasattr(known[table], "picture"):
        raise JobError(f"{table} has no picture: leave --picture out")
    if table is None:
        rows = catalogue(known)
        print(msgspec.json.encode(rows).decode() if format == "json" else "\n".join(listed(rows)))
        return 0
    result = run(table, known, seeds=seeds, rounds=rounds, folder=folder, columns=columns, say=_say)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    print(text if format == "json" else "\n".join([*known[table].lines(result), "", result["about"]]))
    for file, content in ((out, lambda: text + "\n"), (picture, lambda: known[table].picture(result))):
        if file is not None:
            disk.write(file, content())
    claims = result.get("figures") or {}
    return 0 if all(claim["reached"] for claim in claims.values()) else 1


def _takes(module: ModuleType) -> set[str]:
    return set(inspect.signature(module.run).parameters)


def _about(module: ModuleType) -> str:
    return inspect.getdoc(module) or ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

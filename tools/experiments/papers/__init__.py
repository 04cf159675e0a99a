"""`fedquilt reproduce`: the papers' tables with our numbers beside the papers', and grids of a user's own.

A table is a grid of jobs in TOML (`grid`), run by the machinery of `fedquilt compare`. Code for a table is in a module
of the same name: `look` and functions that play a row (`cells.play`), the function named by the grid's `run`,
`lines(result)` for the text, and `picture(result)` for an SVG.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import columns as layout
from fedquilt import disk, progress
from fedquilt.core import JobError
from fedquilt.tools.experiments.papers import cells, grid, results
from fedquilt.tools.experiments.papers.grid import Table

KEPT: Final = Path("fedquilt-compare")


def tables() -> dict[str, Table]:
    """The papers' tables by name, sorted."""
    return dict(sorted((name, table) for file in grid.HERE.glob("*.toml") for name, table in grid.tables(file).items()))


def find(name: str, known: Mapping[str, Table]) -> Table:
    """Find a paper's table by its name, or read the table in a file NAME.toml.

    Raises:
        JobError: there is no such table, or the file cannot be read or holds several tables.
    """
    if name in known:
        return known[name]
    if not name.endswith(".toml"):
        raise JobError(f"table {name!r} is unknown; there are: {', '.join(known) or 'none'}, and files NAME.toml")
    found = grid.tables(Path(name))
    if len(found) > 1:
        raise JobError(f"{name} has {len(found)} tables, and a file of your own holds one: leave [tables] out")
    return next(iter(found.values()))


def catalogue(known: Mapping[str, Table]) -> list[dict[str, Any]]:
    """Name and title of each table, and whether it takes a folder of data."""
    return [
        {"table": name, "about": table.grid.about.partition("\n")[0], "takes_data": table.takes_data}
        for name, table in known.items()
    ]


def methods_of(table: Table) -> tuple[str, ...]:
    """Methods that a table runs."""
    found = table.grid
    jobs = [found.job_of(points, row, 0, None) for points in found.columns.values() for row in found.rows.values()]
    return found.covers or tuple(dict.fromkeys(job["method"] for job in jobs))


def covering(method: str) -> list[tuple[str, str]]:
    """Command and page of docs/ of every table that runs the method."""
    return [
        (f"fedquilt reproduce {name}" + " --data FOLDER" * table.takes_data, table.grid.page)
        for name, table in tables().items()
        if method in methods_of(table)
    ]


def listed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The catalogue as text, grouped by title."""
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
    table: Table,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    out: Path = KEPT,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a table, and return its result with the file's description under "about".

    Args:
        table: one of `tables`, or of the user's own file.
        seeds: None: the table's own.
        rounds: of every run; None: the table's own, the only case in which claims are judged.
        folder: the data that `Table.takes_data` asks for.
        columns: names of the columns to run; None: all.
        rows: names of the rows to run, with the claims that compare these alone; None: all.
        out: where finished runs are kept; they are not repeated.
        say: takes lines about the progress.

    Raises:
        JobError: a column or row is unknown or cannot be chosen, the table takes no data, or a run has failed that may
            not, or all have.
        FedquiltError: a bundle cannot be made.
    """
    if folder is not None and not table.takes_data:
        raise JobError(f"{table.name} makes its own data: leave --data out")
    there = table.grid.columns
    if columns and len(there) == 1:
        raise JobError(f"{table.name} is run as a whole: leave --columns out")
    if rows and not table.grid.job:
        raise JobError(f"{table.name} is computed without a run: leave --rows out")
    if odd := sorted(set(columns or ()) - there.keys()):
        raise JobError(f"{table.name} has no column {odd[0]!r}; it has: {', '.join(there)}")
    found = table.filled(folder)
    found = found.only(rows) if rows else found
    chosen, wanted = tuple(seeds or found.seeds), [name for name in there if name in (columns or there)]
    if found.run:
        made = getattr(cells.module(table.code), found.run)(table.name, found, chosen, rounds, out, say)
        return {**made, "about": found.about}
    todo = cells.cells(found, table.code, str(table.file), chosen, rounds, wanted, out)
    runs = cells.played_all([cell.case for cell in todo], out, say, may_fail=found.may_fail)
    return {**results.result(table.name, found, todo, runs, chosen, rounds), "about": found.about}


def lines(table: Table, result: Mapping[str, Any]) -> list[str]:
    """A table's result as text, by its own code if that has `lines`."""
    own: Callable[[Mapping[str, Any]], list[str]] | None = getattr(cells.module(table.code), "lines", None)
    return results.lines(table.grid, result) if own is None else own(result)


def main(
    name: str | None,
    *,
    seeds: Sequence[int] | None,
    rounds: int | None,
    folder: Path | None,
    columns: Sequence[str] | None,
    rows: Sequence[str] | None,
    out: Path | None,
    picture: Path | None,
    kept: Path = KEPT,
    format: str,
) -> int:
    """List the tables, or run one and print its result.

    Returns:
        1 if one of the table's claims does not hold, else 0.

    Raises:
        JobError: a picture is asked of a table that has none; also what `find` and `run` raise.
    """
    known = tables()
    if name is None:
        every = catalogue(known)
        print(msgspec.json.encode(every).decode() if format == "json" else "\n".join(listed(every)))
        return 0
    table = find(name, known)
    draw: Any = getattr(cells.module(table.code), "picture", None)
    if picture is not None and draw is None:
        raise JobError(f"{name} has no picture: leave --picture out")
    options: dict[str, Any] = {"seeds": seeds, "rounds": rounds, "folder": folder, "columns": columns, "rows": rows}
    result = run(table, **options, out=kept, say=progress.LINE.say)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    print(text if format == "json" else "\n".join([*lines(table, result), "", result["about"].strip()]))
    for file, content in ((out, lambda: text + "\n"), (picture, lambda: draw(result))):
        if file is not None:
            disk.write(file, content())
    return 0 if all(claim["reached"] for claim in (result.get("figures") or {}).values()) else 1

"""Tables of papers with our results, and grids of jobs defined by users: jobs in TOML (`grid`)."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.console import progress
from fedquilt.console import table as layout
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.lab.papers import cells, grid, results
from fedquilt.tools.lab.papers.grid import GridTable

KEPT: Final = Path("fedquilt-compare")


def load_tables() -> dict[str, GridTable]:
    return dict(
        sorted((name, table) for file in grid.HERE.glob("*.toml") for name, table in grid.read_tables(file).items())
    )


def find_table(name: str, known: Mapping[str, GridTable]) -> GridTable:
    """Return a paper's table by name, or the table in a file NAME.toml."""
    if name in known:
        return known[name]
    if not name.endswith(".toml"):
        raise JobError(f"table {name!r} is unknown; there are: {', '.join(known) or 'none'}, and files NAME.toml")
    found = grid.read_tables(Path(name))
    if len(found) > 1:
        raise JobError(f"{name} has {len(found)} tables, and a file of your own holds one: leave [tables] out")
    return next(iter(found.values()))


def make_catalogue(known: Mapping[str, GridTable]) -> list[dict[str, Any]]:
    return [
        {"table": name, "about": table.grid.about.partition("\n")[0], "takes_data": table.takes_data}
        for name, table in known.items()
    ]


def list_methods(table: GridTable) -> tuple[str, ...]:
    found = table.grid
    jobs = [found.make_job(points, row, 0, None) for points in found.columns.values() for row in found.rows.values()]
    return tuple(dict.fromkeys(job["method"] for job in jobs))


def find_tables_of_method(method: str) -> list[tuple[str, str]]:
    """Return the command and the page of each table with this method."""
    return [
        (f"fedquilt lab reproduce {name}" + " --data FOLDER" * table.takes_data, table.grid.page)
        for name, table in load_tables().items()
        if method in list_methods(table)
    ]


def format_catalogue(rows: Sequence[dict[str, Any]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["about"], []).append(row["table"] + " (--data FOLDER)" * row["takes_data"])
    wide = layout.line_width()
    return [
        line
        for about, names in found.items()
        for line in (*textwrap.wrap(about, wide, break_on_hyphens=False), *(f"  {name}" for name in names))
    ]


def run_table(
    table: GridTable,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    out: Path = KEPT,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a table, and return its result with the description of the file under "about"."""
    if folder is not None and not table.takes_data:
        raise JobError(f"{table.name} makes its own data: leave --data out")
    there = table.grid.columns
    if columns and len(there) == 1:
        raise JobError(f"{table.name} is run as a whole: leave --columns out")
    if odd := sorted(set(columns or ()) - there.keys()):
        raise JobError(f"{table.name} has no column {odd[0]!r}; it has: {', '.join(there)}")
    found = table.fill_marks(folder)
    found = found.select_rows(rows) if rows else found
    chosen, wanted = tuple(seeds or found.seeds), [name for name in there if name in (columns or there)]
    todo = cells.make_cells(found, str(table.file), chosen, rounds, wanted, out)
    runs = cells.run_all_cases([cell.case for cell in todo], out, say, may_fail=found.may_fail)
    with toml.prefix_errors(f"{table.file}, table {table.name}"):
        return {**results.make_result(table.name, found, todo, runs, chosen, rounds), "about": found.about}


def list_or_run_tables(
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
    """List the tables, or run one and print its result. Return 1 if a claim fails, otherwise 0."""
    known = load_tables()
    if name is None:
        every = make_catalogue(known)
        print(msgspec.json.encode(every).decode() if format == "json" else "\n".join(format_catalogue(every)))
        return 0
    table = find_table(name, known)
    options: dict[str, Any] = {"seeds": seeds, "rounds": rounds, "folder": folder, "columns": columns, "rows": rows}
    result = run_table(table, **options, out=kept, say=progress.LINE.print_lines)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    lines = [*results.format_result(table.grid, result), "", result["about"].strip()]
    print(text if format == "json" else "\n".join(lines))
    if out is not None:
        disk.write_output(out, text + "\n")
    if picture is not None:
        disk.write_output(picture, results.draw_picture(table.grid, result))
    return 0 if all(claim["reached"] for claim in result["figures"].values()) else 1

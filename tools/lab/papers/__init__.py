"""Tables of papers with our results, and grids of jobs defined by users: jobs in TOML (`grid`)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.console import progress
from fedquilt.console import table as layout
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.experiments import comparison
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.experiments.tables import confidence_interval
from fedquilt.tools.lab.papers import cells
from fedquilt.tools.lab.papers import grid as grids
from fedquilt.tools.lab.papers.cells import GridCell, read_value
from fedquilt.tools.lab.papers.grid import ClaimSpec, Grid, GridColumn, GridTable
from fedquilt.tools.report import plots

KEPT: Final = Path("fedquilt-compare")


@cache
def load_tables() -> dict[str, GridTable]:
    return dict(
        sorted((name, table) for file in grids.HERE.glob("*.toml") for name, table in grids.read_tables(file).items())
    )


def find_table(name: str, known: Mapping[str, GridTable]) -> GridTable:
    """Return a paper's table by name, or the table in a file NAME.toml."""
    if name in known:
        return known[name]
    if not name.endswith(".toml"):
        raise JobError(f"table {name!r} is unknown; there are: {', '.join(known) or 'none'}, and files NAME.toml")
    found = grids.read_tables(Path(name))
    if len(found) > 1:
        raise JobError(f"{name} has {len(found)} tables, and a file of your own holds one: leave [tables] out")
    return next(iter(found.values()))


def find_tables_of_method(method: str) -> list[tuple[str, str]]:
    return [
        (f"fedquilt lab reproduce {name}" + " --data FOLDER" * table.takes_data, table.grid.page)
        for name, table in load_tables().items()
        if method in table.grid.methods
    ]


def format_catalogue(rows: Sequence[dict[str, Any]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["about"], []).append("  " + row["table"] + " (--data FOLDER)" * row["takes_data"])
    lines = []
    for about, names in found.items():
        lines += [*textwrap.wrap(about, layout.line_width(), break_on_hyphens=False), *names]
    return lines


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
    runs, failed = comparison.run_cases([cell.case for cell in todo], out, cells.run_case, say, parallel=True)
    if failed and not (found.may_fail and runs):
        raise JobError(f"{len(failed)} of {len(todo)} runs failed, the others are kept in {out / 'runs'}: {failed[0]}")
    with toml.prefix_errors(f"{table.file}, table {table.name}"):
        return {**make_result(table.name, found, todo, runs, chosen, rounds), "about": found.about}


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
        every = [
            {"table": each, "about": table.grid.about.partition("\n")[0], "takes_data": table.takes_data}
            for each, table in known.items()
        ]
        print(msgspec.json.encode(every).decode() if format == "json" else "\n".join(format_catalogue(every)))
        return 0
    table = find_table(name, known)
    options: dict[str, Any] = {"seeds": seeds, "rounds": rounds, "folder": folder, "columns": columns, "rows": rows}
    result = run_table(table, **options, out=kept, say=progress.LINE.print_lines)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    lines = [*format_result(table.grid, result), "", result["about"].strip()]
    print(text if format == "json" else "\n".join(lines))
    if out is not None:
        disk.write_output(out, text + "\n")
    if picture is not None:
        disk.write_output(picture, draw_picture(table.grid, result))
    return 0 if all(claim["reached"] for claim in result["figures"].values()) else 1


def make_result(
    name: str,
    grid: Grid,
    cells: Sequence[GridCell],
    runs: Mapping[ComparisonCase, SeedRun],
    seeds: Sequence[int],
    rounds: int | None,
) -> dict[str, Any]:
    """Return the result of a table for JSON.

    Returns:
        "columns" (column, row, then "values" per seed, "paper" and "runs"), "figures" (judged claims), "told"
        (reported comparisons without a claim), "table" and "seeds".
    """
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        papers = [point.paper.get(cell.row, {}) for point in grid.columns[cell.column]]
        entry = found.setdefault(cell.column, {}).setdefault(
            cell.row,
            {
                "rounds": cell.case.settings.rounds,
                "target": cell.target,
                "values": {key: [] for key in grid.value_names},
                "paper": {key: value for paper in (grid.rows[cell.row].paper, *papers) for key, value in paper.items()},
                "runs": [],
            },
        )
        run = runs.get(cell.case)
        entry["runs"].append(msgspec.to_builtins(run))
        for key, values in entry["values"].items():
            values.append(None if run is None else read_value(run, key, cell.target))
    judged = judge_claims(grid, found)
    return {
        "table": name,
        "seeds": list(seeds),
        "columns": found,
        "figures": {key: told for key, (claim, told) in judged.items() if not claim.told} if rounds is None else {},
        "told": {key: told for key, (claim, told) in judged.items() if claim.told},
    }


def judge_claims(grid: Grid, found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[ClaimSpec, dict[str, Any]]]:
    """Judge all claims for their rows and columns. Return claims and verdicts by name."""
    judged = {}
    for claim in grid.claims:
        other = claim.over or claim.of
        for row in [row for row in claim.list_rows(grid.rows) if row != other]:
            by_column = {
                column: values
                for column, rows in found.items()
                if column in (claim.columns or found)
                and (values := compute_claim_values(claim, rows[row], rows.get(other)))
            }
            if claim.worst and by_column:
                by_column = {"": [max(each) for each in zip(*by_column.values(), strict=True)]}
            limits = {"at_most": claim.at_most, "at_least": 0.0 if claim.told else claim.at_least}
            for column, values in by_column.items():
                name = claim.name.replace("{column}", column).replace("{row}", row)
                judged[name] = (claim, judge_claim(values, claim.unit, **limits))
    return judged


def compute_claim_values(claim: ClaimSpec, row: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[float]:
    """Return a claim's value for each seed in one column, or [] if a run lacks the value.

    A target that was never reached counts as one round more than were run.
    """

    def get_values(row: Mapping[str, Any]) -> list[float | None]:
        never = row["rounds"] + 1 if claim.value == "rounds_to" else None
        return [never if value is None else value for value in row["values"][claim.value]]

    mine = get_values(row)
    theirs = [0.0] * len(mine) if other is None else get_values(other)
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None]
    if len(pairs) < len(mine):
        return []
    if claim.of and any(b == 0 for _, b in pairs):
        raise JobError(
            f"claim {claim.name!r}: of = {claim.of!r}: its {claim.value} is 0, and has no percentages: "
            f"write over = {claim.of!r}"
        )
    return [100 * a / b if claim.of else claim.scale * (a - b) for a, b in pairs]


def judge_claim(
    values: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """Judge a claim about the mean over seeds of a paired difference or a ratio.

    A claim holds if the whole 95 % interval of the mean (Student's t) is on the claimed side, and is not shown if the
    interval crosses the limit.

    Returns:
        "value", the mean, "low" and "high", its 95 % interval or None with one seed, "verdict" ("holds", "not shown",
        "against", or "one seed: no interval"), and "reached", whether the claim holds.
    """
    limit, side = (at_most, -1) if at_least is None else (at_least, 1)
    assert limit is not None
    assert values
    mean = round(statistics.fmean(values), 3) + 0.0  # not -0.0, which is printed with its sign
    found: dict[str, Any] = {"value": mean, "low": None, "high": None, "unit": unit}
    found["at_least" if side > 0 else "at_most"] = limit
    verdict = "one seed: no interval"
    if len(values) > 1:
        low, high = confidence_interval(values)
        found |= {"low": round(low, 3), "high": round(high, 3)}
        ends = sorted((side * (low - limit), side * (high - limit)))
        verdict = "holds" if ends[0] > 0 else "against" if ends[1] < 0 else "not shown"
    return {**found, "seeds": len(values), "verdict": verdict, "reached": verdict == "holds"}


# -- text -----------------------------------------------------------------------------------------


def format_result(grid: Grid, result: Mapping[str, Any]) -> list[str]:
    told = [f"seeds {', '.join(map(str, result['seeds']))}"] if result["seeds"] else []
    if any(row["paper"] for rows in result["columns"].values() for row in rows.values()):
        told.append("the paper's in brackets")
    found = [f"{result['table']}: {'; '.join(told)}"]
    for column, rows in result["columns"].items():
        about = ", ".join(point.about for point in grid.columns[column] if point.about)
        ran = f"{next(iter(rows.values()))['rounds']} rounds" if result["seeds"] else ""
        found += ["", ", ".join(filter(None, [column, about, ran]))] if column or ran else [""]
        kept = [
            show
            for show in grid.show
            if show.value == "rounds_to" or any(_has_value(row["values"][show.value]) for row in rows.values())
        ]
        cells = [["", *(show.title for show in kept)]]
        for name, row in rows.items():
            cells.append([name, *(_format_cell(show, row) for show in kept)])
        found += layout.format_table(cells, "<>")
    found += [
        "",
        *(f"{name}: {format_claim(each)}" for name, each in result["told"].items()),
        *format_judged_claims(result),
    ]
    return found if found[-1] else found[:-1]


def format_claim(found: Mapping[str, Any]) -> str:
    sign = "+" if found.get("at_least") == 0 else ""
    mean, unit = f"{found['value']:{sign}.2f}", f" {found['unit']}" if found["unit"] else ""
    if found["low"] is None:
        return f"{mean}{unit}, {found['verdict']}"
    return f"{mean} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]{unit}: {found['verdict']}"


def format_judged_claims(result: Mapping[str, Any]) -> list[str]:
    found = []
    for name, each in result["figures"].items():
        limit = f"at most {each['at_most']:g}" if "at_most" in each else f"above {each['at_least']:g}"
        found.append(f"{'ok ' if each['reached'] else 'NOT'} {name:44} {format_claim(each)} (claimed: {limit})")
    return found


def _has_value(values: Sequence[Any]) -> bool:
    return any(value is not None for value in values)


def _format_cell(show: GridColumn, row: Mapping[str, Any]) -> str:
    values, paper = row["values"][show.value], row["paper"].get(show.value)
    own = (
        format_spread(values, show.scale, show.digits, show.each)
        if _has_value(values) or show.value == "rounds_to"
        else ""
    )
    if paper is None:
        return own
    theirs = "never" if not paper else f"{paper[0]:g}" + "".join(f" ± {sd:g}" for sd in paper[1:])
    return f"{own} ({theirs})"


def format_spread(values: Sequence[Any], scale: float, digits: int, each: bool) -> str:
    """Return mean and standard deviation over seeds as text, or with `each` the value of each seed."""
    if each:
        return ", ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values)
    known = [scale * value for value in values if value is not None]
    if not known:
        return ""
    deviation = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{deviation}"


def draw_picture(grid: Grid, result: Mapping[str, Any]) -> str:
    """Return an SVG with a plot for each shown value: a line for each row and column, a dot for each seed."""
    drawn = []
    for show in [show for show in grid.show if show.value != "rounds_to"]:
        lines = [
            plots.DotRow(", ".join(filter(None, [row, column])), [show.scale * value for value in known])
            for column, rows in result["columns"].items()
            for row, entry in rows.items()
            if (known := [value for value in entry["values"][show.value] if value is not None])
        ]
        if lines:
            drawn.append(plots.plot_dots(lines, f"{result['table']}: {show.title}", show.title))
    return plots.render_file(*drawn)

"""Tables of papers with our results, and grids of jobs defined by users: jobs in TOML (`grid`)."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.console import progress
from fedquilt.console import table as layout
from fedquilt.core import DataError, JobError
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.experiments import comparison
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import SeedRun
from fedquilt.tools.experiments.tables import confidence_interval
from fedquilt.tools.lab.papers import cells
from fedquilt.tools.lab.papers import grid as grids
from fedquilt.tools.lab.papers.cells import GridCell, read_value
from fedquilt.tools.lab.papers.grid import TO_TARGET, ClaimSpec, Grid, GridColumn, GridRow, GridTable

CACHE_FOLDER: Final = Path("fedquilt-compare")


@cache
def load_tables() -> dict[str, GridTable]:
    return dict(
        sorted((name, table) for file in grids.HERE.glob("*.toml") for name, table in grids.read_tables(file).items())
    )


def find_table(name: str, tables: Mapping[str, GridTable]) -> GridTable:
    """Return a paper's table by name, or the table in a file NAME.toml. Raise JobError if there is none."""
    if name in tables:
        return tables[name]
    if not name.endswith(".toml"):
        raise JobError(f"unknown table {name!r}: choose one of {', '.join(tables) or 'none'}, or a file NAME.toml")
    own_tables = grids.read_tables(Path(name))
    if len(own_tables) > 1:
        raise JobError(f"{name} has {len(own_tables)} tables: write one table per file, without [tables]")
    return next(iter(own_tables.values()))


def find_tables_of_method(method: str) -> list[tuple[str, str]]:
    """Return the command and the page in docs/ of each paper's table that uses a method."""
    return [
        (f"fedquilt lab reproduce {name}" + " --data FOLDER" * table.takes_data, table.grid.page)
        for name, table in load_tables().items()
        if method in table.grid.methods
    ]


def format_catalogue(rows: Sequence[dict[str, Any]]) -> list[str]:
    names_by_description: dict[str, list[str]] = {}
    for row in rows:
        names_by_description.setdefault(row["about"], []).append(
            "  " + row["table"] + " (--data FOLDER)" * row["takes_data"]
        )
    lines = []
    for description, names in names_by_description.items():
        lines += [*textwrap.wrap(description, layout.line_width(), break_on_hyphens=False), *names]
    return lines


def run_table(
    table: GridTable,
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    folder: Path | None = None,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    out: Path = CACHE_FOLDER,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a table, and return the result of `make_result` with the description of the file under "about".

    `folder` has the data that fedquilt does not include. Rows and columns whose data are missing are left out, with the
    reasons under "left_out". `out` gets runs and starting weights, which are reused. With `rounds`, claims are not
    judged. Raise JobError if an option does not fit or a run fails, and DataError if all data are missing.
    """
    if folder is not None and not table.takes_data:
        raise JobError(f"table {table.name} needs no --data: leave it out")
    all_columns = table.grid.columns
    if columns and len(all_columns) == 1:
        raise JobError(f"table {table.name} has one column: leave out --columns")
    grid, missing = table.fill_marks(folder), table.find_missing_data(folder)
    row_names = choose_names(f"row of table {table.name}", rows, grid.rows, missing)
    column_names = choose_names(f"column of table {table.name}", columns, all_columns, missing)
    grid, chosen_seeds = grid.select_rows(row_names), tuple(seeds or grid.seeds)
    grid_cells = cells.make_cells(grid, str(table.file), chosen_seeds, rounds, column_names, out)
    runs, failed = comparison.run_cases([cell.case for cell in grid_cells], out, cells.run_case, report, parallel=True)
    if failed and not (grid.may_fail and runs):
        raise JobError(
            f"{len(failed)} of {len(grid_cells)} runs failed, results of the others are in {out / 'runs'}: {failed[0]}"
        )
    with toml.prefix_errors(f"{table.file}, table {table.name}"):
        result = make_result(table.name, grid, grid_cells, runs, chosen_seeds, rounds)
    return {**result, "about": grid.about, "left_out": missing}


def choose_names(kind: str, words: Sequence[str] | None, names: Iterable[str], missing: Mapping[str, str]) -> list[str]:
    """Return the chosen names in the order of `words`, or without `words` all names that are not missing.

    Raise JobError if a word is unknown, and DataError if a chosen name or every name is missing.
    """
    chosen_names = grids.match_names(kind, words, names) if words else [name for name in names if name not in missing]
    if reasons := [missing[name] for name in chosen_names or names if name in missing]:
        raise DataError(reasons[0])
    return [name for name in names if name in chosen_names]


def list_or_run_tables(
    name: str | None,
    *,
    seeds: Sequence[int] | None,
    rounds: int | None,
    folder: Path | None,
    columns: Sequence[str] | None,
    rows: Sequence[str] | None,
    out: Path | None,
    cache_folder: Path = CACHE_FOLDER,
    format: str,
) -> int:
    """List the tables, or run one and write its JSON. Return 1 if a claim fails, otherwise 0."""
    tables = load_tables()
    if name is None:
        rows_of_list = [
            {"table": table_name, "about": table.grid.about.partition("\n")[0], "takes_data": table.takes_data}
            for table_name, table in tables.items()
        ]
        is_json = format == "json"
        print(msgspec.json.encode(rows_of_list).decode() if is_json else "\n".join(format_catalogue(rows_of_list)))
        return 0
    table = find_table(name, tables)
    options: dict[str, Any] = {"seeds": seeds, "rounds": rounds, "folder": folder, "columns": columns, "rows": rows}
    result = run_table(table, **options, out=cache_folder, report=progress.LINE.print_lines)
    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    lines = [*format_result(table.grid, result), "", result["about"].strip()]
    print(text if format == "json" else "\n".join(lines))
    if out is not None:
        disk.write_output(out, text + "\n")
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
        "columns" (by column and row: "values" for each seed, "paper" and "runs"), "figures" (judged claims, {} with
        other `rounds` than the table's), "told" (comparisons without a claim), "table" and "seeds".
    """
    columns: dict[str, dict[str, Any]] = {}
    for cell in cells:
        papers = [point.paper.get(cell.row, {}) for point in grid.columns[cell.column]]
        entry = columns.setdefault(cell.column, {}).setdefault(
            cell.row,
            {
                "rounds": cell.case.settings.rounds,
                "target": cell.target,
                "values": {key: [] for key in grid.value_names},
                "paper": {key: value for paper in (grid.rows[cell.row].paper, *papers) for key, value in paper.items()},
                "runs": [],
            },
        )
        run, target = runs.get(cell.case), find_target(cell, grid, cells, runs)
        entry["runs"].append(msgspec.to_builtins(run))
        for key, values in entry["values"].items():
            has_target = key not in TO_TARGET or target is not None
            values.append(read_value(run, key, target) if run is not None and has_target else None)
    for rows in columns.values():
        rows |= {name: pick_best_runs(row, rows) for name, row in grid.rows.items() if row.best_of}
    judged = judge_claims(grid, columns)
    return {
        "table": name,
        "seeds": list(seeds),
        "columns": columns,
        "figures": {key: verdict for key, (claim, verdict) in judged.items() if not claim.told}
        if rounds is None
        else {},
        "told": {key: verdict for key, (claim, verdict) in judged.items() if claim.told},
    }


def find_target(
    cell: GridCell, grid: Grid, cells: Sequence[GridCell], runs: Mapping[ComparisonCase, SeedRun]
) -> float | None:
    """Return the target of a cell's column, or with `target_row` that share of the row's final accuracy."""
    if not grid.target_row or cell.target is None:
        return cell.target
    seed = cell.case.settings.seed
    for other in cells:
        if (other.column, other.row, other.case.settings.seed) == (cell.column, grid.target_row, seed):
            value = read_value(runs[other.case], "test") if other.case in runs else None
            return None if value is None else cell.target * value
    return None


def pick_best_runs(row: GridRow, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a row with `best_of`. For each seed the entry has the run with the least `best_by`."""
    candidates = [rows[name] for name in row.best_of]

    def find_best(index: int) -> Mapping[str, Any]:
        return min(candidates, key=lambda entry: _infinite_if_none(entry["values"][row.best_by][index]))

    best_entries = [find_best(index) for index in range(len(candidates[0]["runs"]))]
    values = {
        key: [entry["values"][key][index] for index, entry in enumerate(best_entries)]
        for key in candidates[0]["values"]
    }
    runs = [entry["runs"][index] for index, entry in enumerate(best_entries)]
    return {**candidates[0], "values": values, "paper": {}, "runs": runs}


def _infinite_if_none(value: float | None) -> float:
    return math.inf if value is None else value


def judge_claims(grid: Grid, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[ClaimSpec, dict[str, Any]]]:
    """Return each claim and its verdict by claim name. Claims that lack a run are left out."""
    judged = {}
    for claim in grid.claims:
        baseline = claim.over or claim.of
        for row in [row for row in claim.list_rows(grid.rows) if row != baseline]:
            by_column = {
                column: values
                for column, rows in columns.items()
                if column in (claim.columns or columns)
                and (values := compute_claim_values(claim, rows[row], rows.get(baseline)))
            }
            if claim.worst and by_column:
                by_column = {"": [max(values) for values in zip(*by_column.values(), strict=True)]}
            limits = {"at_most": claim.at_most, "at_least": 0.0 if claim.told else claim.at_least}
            for column, values in by_column.items():
                name = claim.name.replace("{column}", column).replace("{row}", row)
                verdict = judge_claim(values, claim.unit, **limits)
                claimed_columns = [column] if column in columns else columns
                if any(misses_target(claim, columns[claimed_column][row]) for claimed_column in claimed_columns):
                    verdict |= {"verdict": "target not reached with each seed", "reached": False}
                judged[name] = (claim, verdict)
    return judged


def misses_target(claim: ClaimSpec, row: Mapping[str, Any]) -> bool:
    """Return whether some seed never reached the target, so that the mean of seconds or joules is too small."""
    return claim.value in ("seconds_to", "energy_j_to") and None in row["values"][claim.value]


def compute_claim_values(claim: ClaimSpec, row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[float]:
    """Return a claim's value for each seed in one column, or [] if a run lacks the value.

    A target never reached counts as one round more than were run, or as the seconds or joules of the whole run. Raise
    JobError for a percentage of a baseline of 0.
    """

    def get_values(row: Mapping[str, Any]) -> list[float | None]:
        values = row["values"][claim.value]
        return [get_value_at_end(row, index) if value is None else value for index, value in enumerate(values)]

    def get_value_at_end(row: Mapping[str, Any], index: int) -> float | None:
        if claim.value == "rounds_to":
            return int(row["rounds"]) + 1
        if claim.value not in TO_TARGET or row["runs"][index] is None:
            return None
        marks = row["runs"][index]["marks"]
        return marks[-1][claim.value.removesuffix("_to")] if marks else None

    values = get_values(row)
    baseline_values = [0.0] * len(values) if baseline is None else get_values(baseline)
    pairs = [(a, b) for a, b in zip(values, baseline_values, strict=True) if a is not None and b is not None]
    if len(pairs) < len(values):
        return []
    if claim.of and any(b == 0 for _, b in pairs):
        raise JobError(
            f"claim {claim.name!r}: of = {claim.of!r} has {claim.value} = 0, so percentages are undefined: write "
            f"over = {claim.of!r}"
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
    mean = round(statistics.fmean(values), 3) + 0.0  # replaces -0.0 by 0.0
    figure: dict[str, Any] = {"value": mean, "low": None, "high": None, "unit": unit}
    figure["at_least" if side > 0 else "at_most"] = limit
    verdict = "one seed: no interval"
    if len(values) > 1:
        low, high = confidence_interval(values)
        figure |= {"low": round(low, 3), "high": round(high, 3)}
        margins = sorted((side * (low - limit), side * (high - limit)))
        verdict = "holds" if margins[0] > 0 else "against" if margins[1] < 0 else "not shown"
    return {**figure, "seeds": len(values), "verdict": verdict, "reached": verdict == "holds"}


def format_result(grid: Grid, result: Mapping[str, Any]) -> list[str]:
    title_notes = [f"seeds {', '.join(map(str, result['seeds']))}"] if result["seeds"] else []
    if any(row["paper"] for rows in result["columns"].values() for row in rows.values()):
        title_notes.append("numbers of the paper in brackets")
    lines = [f"{result['table']}: {'; '.join(title_notes)}"]
    for column, rows in result["columns"].items():
        description = ", ".join(point.about for point in grid.columns[column] if point.about)
        ran = f"{next(iter(rows.values()))['rounds']} rounds" if result["seeds"] else ""
        lines += ["", ", ".join(filter(None, [column, description, ran]))] if column or ran else [""]
        shown = [
            shown_column
            for shown_column in grid.show
            if shown_column.value in TO_TARGET
            or any(_has_value(row["values"][shown_column.value]) for row in rows.values())
        ]
        cells = [["", *(shown_column.title for shown_column in shown)]]
        for name, row in rows.items():
            cells.append([name, *(_format_cell(shown_column, row) for shown_column in shown)])
        lines += layout.format_table(cells, "<>")
    if left_out := result.get("left_out"):
        lines += ["", *(f"left out: {name} ({reason})" for name, reason in left_out.items())]
    lines += [
        "",
        *(f"{name}: {format_claim(comparison)}" for name, comparison in result["told"].items()),
        *format_judged_claims(result),
    ]
    return lines if lines[-1] else lines[:-1]


def format_claim(claim: Mapping[str, Any]) -> str:
    sign = "+" if claim.get("at_least") == 0 else ""
    mean, unit = f"{claim['value']:{sign}.2f}", f" {claim['unit']}" if claim["unit"] else ""
    if claim["low"] is None:
        return f"{mean}{unit}, {claim['verdict']}"
    return f"{mean} [{claim['low']:{sign}.2f}, {claim['high']:{sign}.2f}]{unit}: {claim['verdict']}"


def format_judged_claims(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, claim in result["figures"].items():
        limit = f"at most {claim['at_most']:g}" if "at_most" in claim else f"above {claim['at_least']:g}"
        lines.append(f"{'ok ' if claim['reached'] else 'NOT'} {name:44} {format_claim(claim)} (claimed: {limit})")
    return lines


def _has_value(values: Sequence[Any]) -> bool:
    return any(value is not None for value in values)


def _format_cell(column: GridColumn, row: Mapping[str, Any]) -> str:
    values, paper = row["values"][column.value], row["paper"].get(column.value)
    measured = (
        format_spread(values, column.scale, column.digits, column.each)
        if _has_value(values) or column.value in TO_TARGET
        else ""
    )
    if paper is None:
        return measured
    published = "never" if not paper else f"{paper[0]:g}" + "".join(f" ± {sd:g}" for sd in paper[1:])
    return f"{measured} ({published})"


def format_spread(values: Sequence[Any], scale: float, digits: int, each_seed: bool) -> str:
    """Return mean and standard deviation over seeds as text, or with `each_seed` the value of each seed."""
    if each_seed:
        return ", ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values)
    numbers = [scale * value for value in values if value is not None]
    if not numbers:
        return ""
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{deviation}"

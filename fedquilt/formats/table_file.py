"""Tables as files for other programs: CSV, or JSON with an object for each row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.core import JobError
from fedquilt.host.disk import disk_errors


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a .csv or .json file. Raise JobError for another suffix, and StoreError if writing fails.

    In CSV an unknown value is an empty cell, and the values of a list are separated by semicolons.
    """
    if path.suffix not in (".csv", ".json"):
        raise JobError(f"{path} is neither CSV nor JSON: name a file that ends with .csv or .json")
    text = _encode_csv(columns, rows) if path.suffix == ".csv" else json.dumps(list(rows), indent=1) + "\n"
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _encode_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_format_cell(row[name]) for name in columns] for row in rows)
    return file.getvalue()


def _format_cell(value: Any) -> Any:
    return ";".join(map(str, value)) if isinstance(value, list | tuple) else value

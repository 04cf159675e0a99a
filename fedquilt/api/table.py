"""Tables of results by column, for pandas, polars and printing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from fedquilt import extras
from fedquilt.formats import toml

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

SHOWN = 40  # most rows printed in full; of more, the first and the last


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, with None for unknown values.

    Iteration yields rows as dictionaries. `pandas.DataFrame(table.columns)` and `polars.DataFrame(table.columns)`
    accept the columns.

    Attributes:
        columns: Values of each column, by name.
    """

    columns: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of a column.

        Raises:
            KeyError: If there is no such column.
        """
        if name not in self.columns:
            raise KeyError(f"no column {name!r}{toml.describe_choices(name, self.columns)}")
        return self.columns[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))

    def to_pandas(self) -> pd.DataFrame:
        """Convert to a pandas data frame. Unknown values become NaN or None.

        Raises:
            JobError: If pandas is not installed.
        """
        return extras.load_optional("pandas").DataFrame(dict(self.columns))

    def to_polars(self) -> pl.DataFrame:
        """Convert to a polars data frame. Unknown values become null.

        Raises:
            JobError: If polars is not installed.
        """
        return extras.load_optional("polars").DataFrame(dict(self.columns), strict=False)

    def __repr__(self) -> str:
        cells = self._format_rows()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in cells)

    def _repr_html_(self) -> str:
        head, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._format_rows()]
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{rows}</tbody></table>"

    def _format_rows(self) -> list[list[str]]:
        body = [[_format_cell(value) for value in row.values()] for row in self]
        if len(body) > SHOWN:
            body = [*body[: SHOWN // 2], ["..."] * len(self.columns), *body[-SHOWN // 2 :]]
        return [list(self.columns), *body]


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

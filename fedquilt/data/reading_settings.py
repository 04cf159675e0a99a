"""Settings by which files became training examples, stored in the bundle and the exported model.

They are the `[data]` keys on how a file is read, with a table's columns and a vocabulary's tokens listed. A release
check, `model run` and `model serve` apply them, so that equal files become equal examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import DataError
from fedquilt.data.spec import HOW, TABLES, DataSpec

SETTINGS: Final = frozenset(HOW) - {"column"} | {"x", "y"}


def reading_settings(spec: DataSpec) -> dict[str, Any]:
    """Return the settings of a [data] table that decide how files become examples, as plain values.

    Raises:
        DataError: If the data are on this machine and cannot be read.
    """
    plain = msgspec.to_builtins(spec)
    found = {key: plain[key] for key in SETTINGS if getattr(spec, key) != getattr(DataSpec(path="."), key)}
    if spec.text is not None and Path(str(spec.text.vocabulary)).is_file():
        from fedquilt.data.tokens import Tokenizer

        found["text"] = {**found["text"], "vocabulary": list(Tokenizer.load(spec.text.vocabulary).numbers)}
    if spec.audio is None and spec.text is None and (columns := _input_columns(spec)):
        found["x"] = list(columns)
    return found


def spec_with_settings(settings: Mapping[str, Any], table: Mapping[str, Any]) -> DataSpec:
    return DataSpec.parse({**table, **settings})


def _input_columns(spec: DataSpec) -> tuple[str, ...]:
    from fedquilt.data.readers import table

    path = Path(spec.path)
    try:
        file = table.find_table(path, msgspec.structs.replace(spec, split="train")) if spec.path else path
    except DataError:  # a folder without a table
        return ()
    if file.suffix.lower() not in TABLES or not file.is_file():
        return ()
    return table.column_roles(file, table.read_column_names(file), spec).x

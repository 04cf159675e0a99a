"""Settings for reading examples, measured on the training data and stored.

Category words and the depth of grey images are measured once, when the job is read, and stored in the job, so that the
bundle, all devices and the test set use the same settings. The bundle and an exported model store the `[data]` keys on
how a file is read, with the columns of a table and the tokens of a vocabulary listed, so that a release check,
`model run` and `model serve` make equal examples of equal files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.core import DataError, JobError
from fedquilt.data.spec import AUTO, HOW, TABLES, DataSpec
from fedquilt.formats import toml

MAX_CATEGORIES: Final = 256  # words of a column; columns with more words contain names or texts


def complete_data_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a [data] table with measured category words in place of "auto", and the depth of grey images."""
    return _add_image_depth(_add_category_words(table))


def format_agent_settings(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of agent.toml's [data] table for the categories and depth of a job."""
    lines = []
    if categories := table.get("categories"):
        category_lists = (
            f"{toml.key_text(column)} = {json.dumps(list(categories_), ensure_ascii=False)}"
            for column, categories_ in categories.items()
        )
        lines.append(f"categories = {{ {', '.join(category_lists)} }}")
    if depth := table.get("depth"):
        lines.append(f"depth = {depth}")
    return lines


def _add_category_words(table: Mapping[str, Any]) -> dict[str, Any]:
    categories = table.get("categories")
    columns = (
        [column for column, categories_ in categories.items() if categories_ == AUTO]
        if isinstance(categories, Mapping)
        else []
    )
    if not columns:
        return dict(table)
    from fedquilt.data import readers

    spec = DataSpec.parse({**table, "categories": {}})
    if not spec.path:
        raise JobError(f'[data] categories = "{AUTO}" needs a table at a path, not {spec.source_name}: list the words')
    categories_by_column = readers.category_words(
        Path(spec.path), msgspec.structs.replace(spec, split="train"), columns
    )
    for column, categories_ in categories_by_column.items():
        if not categories_ or len(categories_) > MAX_CATEGORIES:
            problem = (
                f"has {len(categories_)} different words, more than {MAX_CATEGORIES}" if categories_ else "is empty"
            )
            raise DataError(f"{spec.source_name}: column {column!r} {problem}: leave the column out of [data] x")
    assert isinstance(categories, Mapping)
    return {
        **table,
        "categories": {
            **categories,
            **{column: list(categories_) for column, categories_ in categories_by_column.items()},
        },
    }


def _add_image_depth(table: dict[str, Any]) -> dict[str, Any]:
    path = table.get("path")
    if "depth" in table or not isinstance(path, str) or not Path(path).is_dir():
        return table
    from fedquilt.data import readers

    depth = readers.measure_image_depth(DataSpec.parse({**table, "categories": {}}))
    return {**table, "depth": depth} if depth else table


READING_KEYS: Final = frozenset(HOW) - {"column"} | {"x", "y"}


def reading_settings(spec: DataSpec) -> dict[str, Any]:
    """Return the [data] settings that decide how files become examples, as plain values."""
    plain = msgspec.to_builtins(spec)
    settings = {key: plain[key] for key in READING_KEYS if getattr(spec, key) != getattr(DataSpec(path="."), key)}
    if spec.text is not None and Path(str(spec.text.vocabulary)).is_file():
        from fedquilt.data.readers.text import Tokenizer

        settings["text"] = {**settings["text"], "vocabulary": list(Tokenizer.load(spec.text.vocabulary).numbers)}
    if spec.audio is None and spec.text is None and (columns := _input_columns(spec)):
        settings["x"] = list(columns)
    return settings


def spec_with_settings(settings: Mapping[str, Any], table: Mapping[str, Any]) -> DataSpec:
    """Return a checked [data] table in which stored reading settings replace its own, or raise JobError."""
    return DataSpec.parse({**table, **settings})


def input_names(spec: DataSpec) -> tuple[str, ...]:
    """Return the names of a table's inputs, "column=category" for categories, or () for other data."""
    if isinstance(spec.x, str) or spec.audio is not None or spec.text is not None:
        return ()
    from fedquilt.data.readers.table import feature_names

    return feature_names(spec, spec.x)


def target_names(spec: DataSpec, outputs: int) -> tuple[str, ...]:
    columns = spec.y if isinstance(spec.y, tuple) else (spec.y or "y",)
    names = spec.labels if spec.task == "labels" and spec.labels else columns
    if len(names) == outputs:
        return names
    prefix = "" if spec.task == "labels" else f"{names[0]} "
    return tuple(f"{prefix}{index}" for index in range(outputs))


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

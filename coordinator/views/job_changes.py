"""Differences between the settings of a job's runs, as short texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.storage.rows import UnreadableRow
from fedquilt.coordinator.storage.store import StoredJob

MAX_CHARACTERS: Final = 60
NAMES: Final = {"cohort.start_devices": "devices"}  # of keys that users do not set
UNNAMED_TABLES: Final = ("params", "model")  # whose keys stand alone


def describe_changes(rows: Sequence[StoredJob | UnreadableRow]) -> dict[str, str]:
    """Return the settings of each run that differ from the previous run of its name."""
    latest: dict[str, JobSettings] = {}
    changes: dict[str, str] = {}
    for row in rows:
        if isinstance(row, StoredJob):
            if (previous := latest.get(row.job.name)) is not None and (text := _describe_change(previous, row.job)):
                changes[row.id] = text
            latest[row.job.name] = row.job
    return changes


def _describe_change(old: JobSettings, new: JobSettings) -> str:
    old_values, new_values = dict(_flatten(msgspec.to_builtins(old))), dict(_flatten(msgspec.to_builtins(new)))
    texts = [
        f"{_name(key)} {_format_value(value)}" for key, value in new_values.items() if old_values.get(key) != value
    ]
    texts += [f"no {_name(key)}" for key in old_values.keys() - new_values.keys()]
    text = ", ".join(dict.fromkeys(texts))
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(path: str) -> str:
    table, _, key = path.partition(".")
    return key if table in UNNAMED_TABLES else NAMES.get(path, path)


def _format_value(value: Any) -> str:
    return value.rpartition("/")[2] if isinstance(value, str) else str(value)  # paths are long

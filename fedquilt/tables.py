"""TOML in and out: job files, agents' settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.core import JobError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: Path) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        JobError: unreadable, or not TOML.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from None


def parse(text: str, where: str) -> dict[str, Any]:
    """The table in TOML text; `where` is what an error names.

    Raises:
        JobError: not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{where} is not TOML: {error}") from None


def text(table: Mapping[str, Any]) -> str:
    """A table of scalars, lists and tables, as TOML; None is left out of it and of its own tables."""
    plain = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict | None)]
    parts = ["\n".join(plain)]
    for key, value in table.items():
        if isinstance(value, dict):
            inner = [f"{k} = {_value(v)}" for k, v in value.items() if v is not None]
            parts.append("\n".join([f"\n[{key}]", *inner]))
    return "\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)  # JSON's strings and numbers are TOML's

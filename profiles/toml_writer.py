"""Conversion of a profile to TOML that `fedquilt.profiles` reads back unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from fedquilt.profiles import BoardProfile, add_checksum


def format_board(board: BoardProfile) -> str:
    table = msgspec.to_builtins(board)
    known = {key: value for key, value in table.items() if value is not None}
    facts = ("board", "title", "memory_bytes", "idle_w")
    parts = [_format_table({key: known[key] for key in facts if key in known})]
    parts += [f"[sources.{_format_key(key)}]\n{_format_table(source)}" for key, source in known["sources"].items()]
    parts += [f"[clocks.{axis}]\n{_format_table(steps)}" for axis, steps in known.get("clocks", {}).items() if steps]
    parts += [f"[{key}]\n{_format_table(known[key])}" for key in ("model", "thermal") if key in known]
    parts += [f"[workloads.{_format_key(key)}]\n{_format_table(times)}" for key, times in known["workloads"].items()]
    parts += [f"[[points]]\n{_format_table(point)}" for point in known["points"]]
    return add_checksum("\n".join(parts))


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _format_value(name)


def _format_table(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_format_value(value)}\n" for key, value in table.items() if value is not None)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_format_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format_value(each) for each in value) + "]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)
    # JSON strings are TOML strings, except for DEL and surrogate pairs, which TOML writes as characters
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")

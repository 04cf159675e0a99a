"""A profile as TOML that `fedquilt.profiles.parse` reads back to the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from fedquilt.profiles import Board, signed


def text(board: Board) -> str:
    """The whole file, in the order of those that ship: facts, sources, clocks, model, points."""
    table = msgspec.to_builtins(board)
    known = {key: value for key, value in table.items() if value is not None}
    facts = ("board", "title", "memory_bytes", "idle_w")
    parts = [_lines({key: known[key] for key in facts if key in known})]
    parts += [f"[sources.{_key(key)}]\n{_lines(source)}" for key, source in known["sources"].items()]
    parts += [f"[clocks.{axis}]\n{_lines(steps)}" for axis, steps in known.get("clocks", {}).items() if steps]
    parts += [f"[{key}]\n{_lines(known[key])}" for key in ("model", "thermal") if key in known]
    parts += [f"[workloads.{_key(key)}]\n{_lines(times)}" for key, times in known["workloads"].items()]
    parts += [f"[[points]]\n{_lines(point)}" for point in known["points"]]
    return signed("\n".join(parts))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _lines(table: Mapping[str, Any]) -> str:
    """One `key = value` a line; what is None is left out."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**63 else repr(value)
    # JSON's strings are TOML's, but for surrogate pairs, which TOML writes as what they stand for, and DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")

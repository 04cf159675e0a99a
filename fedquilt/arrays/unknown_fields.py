"""Check that reading a stored state with another version of the program loses no fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec


def require_known_fields(stored: Any, read: Any, at: str) -> None:
    """Check that every field of a stored state is in the object made from it.

    Fields missing in `stored` get their defaults.

    Args:
        stored: State as JSON.
        read: Dataclass or struct made from the state.
        at: Path within the state, for errors.

    Raises:
        ValueError: If a stored field is unknown.
    """
    if not _has_fields(stored):
        return
    if is_dataclass(read) or isinstance(read, msgspec.Struct):
        known = read.__struct_fields__ if isinstance(read, msgspec.Struct) else [each.name for each in fields(read)]
        if unknown := sorted(stored.keys() - set(known)):
            raise ValueError(f"{at} holds {', '.join(unknown)}: it is of another version of fedquilt")
        pairs = [(value, getattr(read, name), f"{at}.{name}") for name, value in stored.items() if _has_fields(value)]
    elif isinstance(read, Mapping):
        parts = {str(key): value for key, value in read.items()}
        inner = {key: value for key, value in stored.items() if _has_fields(value) and key in parts}
        pairs = [(value, parts[key], f"{at}[{key!r}]") for key, value in inner.items()]
    elif isinstance(read, tuple | list) and isinstance(stored, list):
        both = enumerate(zip(stored, read, strict=True))
        pairs = [(value, part, f"{at}[{i}]") for i, (value, part) in both if _has_fields(value)]
    else:
        return
    for value, part, place in pairs:
        require_known_fields(value, part, place)


def _has_fields(stored: Any) -> bool:
    return isinstance(stored, dict | list)

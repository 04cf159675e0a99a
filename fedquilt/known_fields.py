"""Check that nothing of a stored state is lost when a program of another version reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec


def require(stored: Any, read: Any, at: str) -> None:
    """Check that all fields in `stored` have a place in `read`. A field that `stored` lacks has its default there.

    Args:
        stored: a state as JSON.
        read: the dataclass or struct that was made of it.
        at: path within the state, for errors.

    Raises:
        ValueError: names the fields that have no place, and where they are.
    """
    if not _inner(stored):
        return
    if is_dataclass(read) or isinstance(read, msgspec.Struct):
        known = read.__struct_fields__ if isinstance(read, msgspec.Struct) else [each.name for each in fields(read)]
        if unknown := sorted(stored.keys() - set(known)):
            raise ValueError(f"{at} holds {', '.join(unknown)}: it is of another version of fedquilt")
        pairs = [(value, getattr(read, name), f"{at}.{name}") for name, value in stored.items() if _inner(value)]
    elif isinstance(read, Mapping):
        parts = {str(key): value for key, value in read.items()}
        inner = {key: value for key, value in stored.items() if _inner(value) and key in parts}
        pairs = [(value, parts[key], f"{at}[{key!r}]") for key, value in inner.items()]
    elif isinstance(read, tuple | list) and isinstance(stored, list):
        both = enumerate(zip(stored, read, strict=True))
        pairs = [(value, part, f"{at}[{i}]") for i, (value, part) in both if _inner(value)]
    else:
        return
    for value, part, place in pairs:
        require(value, part, place)


def _inner(stored: Any) -> bool:
    """Whether a part of a state has parts of its own, which most have not."""
    return isinstance(stored, dict | list)

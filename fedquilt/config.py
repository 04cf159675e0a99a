"""TOML files: reading and writing tables, and converting them to structs with errors that name the mend."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from fedquilt.core import JobError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_PATH: Final = re.compile(r"at `\$([^`]*)`")  # end of msgspec's sentences
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_PATTERN: Final = re.compile(r"matching regex '(.*)'(?= - at|$)")
_NAMES: Final = re.compile(
    r"[\^\\A]*\[a-z0-9\]\[a-z0-9\._-\]\{0,(\d+)\}\\*Z"
)  # what names are made of; after the first
_WORDS: Final = {"`object`": "a table", "`array`": "a list", "got `null`": "got nothing"}  # JSON's in TOML's
_CHOICE: Final = re.compile(r"Invalid enum value '([^']*)'")


def read(path: Path) -> dict[str, Any]:
    """Read the table in a TOML file.

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
    """Read the table in TOML text; errors name `where`.

    Raises:
        JobError: not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{where} is not TOML: {error}") from None


def text(table: Mapping[str, Any]) -> str:
    """Format a table as TOML; keys with the value None are left out."""
    import tomli_w  # only writers of settings need it

    return tomli_w.dumps(_written(table))


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _written(each) for key, each in value.items() if each is not None}
    return [_written(each) for each in value] if isinstance(value, list | tuple) else value


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix errors of a job with `where`, a file or a table, unless they name it already."""
    try:
        yield
    except JobError as error:
        said = str(error)
        raise JobError(said if said.startswith(where) else f"{where}: {said}") from None


def convert(table: Any, kind: type[T], where: str) -> T:
    """Convert a table to a struct; `where` is its name in errors: "a job", or of a part "[data]".

    Raises:
        JobError: says what is wrong; for an unknown key or word, which exist and which is the nearest.
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        said = _explained(str(error), kind, where)
        raise JobError(f"{where}: {said}" if where.startswith("[") else said) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Suffix "; did you mean ...?" with the nearest known word; "" if none is near."""
    import difflib

    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _explained(said: str, kind: type, where: str) -> str:
    """Sentence of msgspec, with the values possible in that place."""
    if (pattern := _PATTERN.search(said)) and (name := _NAMES.fullmatch(pattern[1])):
        made = f"of small letters, digits, '.', '_' and '-', the first no mark, at most {int(name[1]) + 1}"
        said = said.replace(pattern[0], made)
    for json, toml in _WORDS.items():
        said = said.replace(json, toml)
    match = _PATH.search(said)
    path = match[1] if match else ""
    options = _there(kind, path)
    if (word := _CHOICE.search(said)) is not None:
        known = [str(value) for one in options for value in getattr(one, "values", ())]
        return f"{said}; there are: {', '.join(known)}{nearest(word[1], known)}"
    if "unknown field" not in said and "missing required field" not in said:
        return said
    keys = [field.encode_name for one in options for field in getattr(one, "fields", ())]
    hint = nearest(unknown[1], keys) if (unknown := _UNKNOWN.search(said)) else ""
    inner = path.lstrip(".")
    place = where if not inner else f"{where} {inner}" if where.startswith("[") else f"[{inner}]"
    return f"{said}; keys of {place}: {', '.join(keys)}{hint}"


def _there(kind: type, path: str) -> list[Any]:
    """Types possible at a path such as ".sources[0]"; none if it leads into something without keys."""
    from msgspec import inspect

    found = _options(inspect.type_info(kind))
    for step in _STEP.finditer(path):
        inner: list[Any] = []
        for one in found:
            if step[1] is not None:
                inner += [field.type for field in getattr(one, "fields", ()) if field.encode_name == step[1]]
            else:
                inner += [getattr(one, name) for name in ("item_type", "value_type") if hasattr(one, name)]
        found = [option for each in inner for option in _options(each)]
    return found


def _options(one: Any) -> list[Any]:
    return list(getattr(one, "types", (one,)))  # all types of a union

"""TOML files: reading and writing tables, and converting them to structs with errors that name the mend."""

from __future__ import annotations

import json
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

_PATH: Final = re.compile(r"(?: - )?at `\$([^`]*)`$")  # end of msgspec's sentences
_STEP: Final = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_CHOICE: Final = re.compile(r"Invalid enum value (.*)")
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `[^`]*`)?")
_PATTERN: Final = re.compile(r" matching regex '(.*)'")
_NAMES: Final = re.compile(
    r"[\^\\A]*\[a-z0-9\]\[a-z0-9\._-\]\{0,(\d+)\}\\*Z"
)  # what names are made of; after the first
_LENGTH: Final = re.compile(r" of length (>=|<=)? ?(.*)")
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
_LIMITS: Final = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def read(path: Path) -> dict[str, Any]:
    """Read the table in a TOML file.

    Raises:
        JobError: unreadable, or not TOML.
    """
    try:
        return parse(path.read_text(encoding="utf-8-sig"), str(path))  # Windows' editors begin a file with a mark
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from None


def absolute(path: str, folder: Path) -> str:
    """A path of a settings file as an absolute one; a relative one begins at the file's `folder`.

    Raises:
        JobError: no file can have this path: it holds a NUL, or links that lead in a circle.
    """
    try:
        return str((folder / path).resolve())
    except (ValueError, RuntimeError, OSError) as error:
        raise JobError(f"{path!r} is no path of a file or folder ({error}): write another one") from None


def parse(text: str, where: str) -> dict[str, Any]:
    """Read the table in TOML text; errors name `where`.

    Raises:
        JobError: not TOML.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise JobError(f"{where} is not TOML: {error}") from None


def text(table: Mapping[str, Any]) -> str:
    """Format a table as TOML; keys with the value None are left out."""
    import tomli_w  # only writers of settings need it

    return tomli_w.dumps(_written(table))


def key_text(name: str) -> str:
    """Return a key as TOML writes it: bare, or quoted where it has other than letters, digits, "-" and "_"."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


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
        said = _explained(str(error), table, kind, where)
        raise JobError(f"{where}: {said}" if where.startswith("[") else said) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Suffix "; did you mean ...?" with the nearest known word, small and capital letters alike; "" if none is near."""
    import difflib

    words = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(word.casefold(), list(words), 1)
    return f"; did you mean {words[found[0]]!r}?" if found else ""


def _explained(said: str, table: Any, kind: type, where: str) -> str:
    """Sentence of msgspec in plain words: the key and its value as written, and which values are possible."""
    path = match[1] if (match := _PATH.search(said)) else ""
    said = said[: match.start()] if match else said
    options = _there(kind, path)
    if (key := _UNKNOWN.fullmatch(said) or _MISSING.fullmatch(said)) is not None:
        keys = [field.encode_name for one in options for field in getattr(one, "fields", ())]
        unknown = _UNKNOWN.fullmatch(said) is not None
        inner = path.lstrip(".")
        place = where if not inner else f"{where} {inner}" if where.startswith("[") else f"[{inner}]"
        what = f"there is no key {key[1]!r}" if unknown else f"key {key[1]!r} is missing"
        return f"{what}; keys of {place}: {', '.join(keys)}{nearest(key[1], keys) if unknown else ''}"
    place = _place(path, where)
    value = _value(table, path)
    given = place if value is _NOWHERE else f"{place} = {_shown(value)}" if place else _shown(value)
    if (word := _CHOICE.fullmatch(said)) is not None:
        known = [str(each) for one in options for each in getattr(one, "values", ()) if each != ""]
        more = " or a list" if any(hasattr(one, "item_type") for one in options) else ""
        near = nearest(word[1].strip("'"), known)
        return f"{given if value is not _NOWHERE else f'{place}: {word[1]}'}: there are: {', '.join(known)}{more}{near}"
    if (wanted := _EXPECTED.fullmatch(said)) is not None:
        return f"{given}: {_wanted(wanted[1], wanted[2])}"
    return f"{place}: {said}" if place else said


def _wanted(kinds: str, limit: str) -> str:
    """What msgspec expects, in words: "`int` >= 1" is "a whole number of at least 1 is wanted"."""
    words = " or ".join(_KINDS.get(each, each) for each in kinds.split(" | ") if each != "null")
    if (pattern := _PATTERN.fullmatch(limit)) and (name := _NAMES.fullmatch(pattern[1])):
        made = f"small letters, digits, '.', '_' and '-', the first no mark, at most {int(name[1]) + 1}"
        return f"{words} of {made}, is wanted"
    if (length := _LENGTH.fullmatch(limit)) is not None:
        count = f"{_LIMITS[length[1]].removeprefix('of ')} " if length[1] else ""
        return f"{words} of {count}{length[2]} {'entry' if length[2] == '1' else 'entries'} is wanted"
    mark, _, number = limit.strip().partition(" ")
    if mark in _LIMITS:
        return f"{words} {_LIMITS[mark]} {number.removesuffix('.0')} is wanted"
    return f"{words}{limit} is wanted"


def _place(path: str, where: str) -> str:
    """A path such as ".cohort.size" as a person writes it: "[cohort] size"; within a named part "audio.rate"."""
    inner = path.lstrip(".").replace("[...]", "")
    table, _, key = inner.rpartition(".")
    return inner if where.startswith("[") or not table else f"[{table}] {key}"


_NOWHERE: Final = object()


def _value(table: Any, path: str) -> Any:
    """What stands at a path; `_NOWHERE`: msgspec does not say where exactly, as in "[...]"."""
    for step in _STEP.finditer(path):
        try:
            table = table[step[1]] if step[1] is not None else table[int(step[2])]
        except (LookupError, TypeError, ValueError):
            return _NOWHERE
    return table


def _shown(value: Any, most: int = 60) -> str:
    """A value as an error quotes it."""
    said = str(value).lower() if isinstance(value, bool) else repr(value)
    return said if len(said) <= most else f"{said[: most - 3]}..."


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

"""Reading and writing of TOML tables, and conversion to structs with clear errors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_NAMES: Final = re.compile(r"[\^\\A]*\[a-z0-9\]\[a-z0-9\._-\]\{0,(\d+)\}\\*Z")  # the pattern of `core.Name`
_LENGTH: Final = re.compile(r" of length (>=|<=)? ?(.*)")
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}
_LIMITS: Final = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8-sig"), str(path))  # Windows' editors begin a file with a mark
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}{suggest_file(path) or ': name a TOML file'}") from None
    except UnicodeDecodeError:
        raise JobError(f"{path} is not TOML, because it is not text in UTF-8: name a TOML file") from None


def absolute_path(path: str, folder: Path) -> str:
    try:
        return str((folder / path).resolve())
    except (ValueError, RuntimeError, OSError) as error:
        raise JobError(f"{path!r} is not a valid path ({error}): correct it") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return the table of a TOML text, or raise JobError. `source` names the text in the error."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise JobError(f"{source} has too many nested values ({error}): simplify it") from None
    except tomllib.TOMLDecodeError as error:
        line_match = re.search(r"\(at line (\d+)", str(error))
        line = text.split("\n")[int(line_match[1]) - 1].strip() if line_match else ""
        match = re.fullmatch(r"[\w.-]+\s*=\s*([A-Za-z].*)", line)
        is_truth_value = match is not None and re.match(r"(?i)(true|false)\b", match[1]) is not None
        problem = "true and false are written in small letters" if is_truth_value else "text is written in quotes"
        fix = f": {problem}" if match else ""
        raise JobError(f"{source} is not TOML: {error}{f', in {_quote_value(line)}' if line else ''}{fix}") from None


def format_toml(table: Mapping[str, Any]) -> str:
    import tomli_w  # only writers of settings need it

    return tomli_w.dumps(_drop_none(table))


def key_text(name: str) -> str:
    """Return a TOML key, in quotes unless all characters are letters, digits, "-" or "_"."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else format_value(name)


def format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key_text(key)} = {format_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    # JSON strings are TOML strings, except for DEL, which TOML does not permit as a character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _drop_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _drop_none(item) for key, item in value.items() if item is not None}
    return [_drop_none(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Add a prefix to each JobError in a `with` block, unless the error already has the prefix."""
    try:
        yield
    except JobError as error:
        text = str(error)
        raise JobError(text if text.startswith(prefix) else f"{prefix}: {text}") from None


def convert_table(table: Any, kind: type[T], source: str) -> T:
    """Return a table as a struct, or raise JobError. Errors name the table `source`, such as "[data]"."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        explanation = _explain_conversion_error(str(error), table, kind, source)
        raise JobError(f"{source}: {explanation}" if source.startswith("[") else explanation) from None


def suggest_nearest(word: str, choices: Iterable[str]) -> str:
    """Return a "did you mean ...?" suffix with the nearest choice, or "" if no choice is similar.

    Case and the leading dashes of options are ignored.
    """
    import difflib

    choices_by_word = {choice.casefold().lstrip("-"): choice for choice in choices}
    matches = difflib.get_close_matches(word.casefold().lstrip("-"), list(choices_by_word), 1)
    return f"; did you mean {choices_by_word[matches[0]]!r}?" if matches else ""


def describe_choices(word: str, choices: Iterable[str], title: str = "there are:") -> str:
    """Return a suffix that lists the choices, the most similar one first. Long lists are cut."""
    names = list(choices)
    near = suggest_nearest(word, names)
    names_text = _join_names(names, 60 if near else 150) or "none"
    return f"{near} {title[0].upper()}{title[1:]} {names_text}" if near else f"; {title} {names_text}"


def suggest_file(path: Path) -> str:
    """Return a "did you mean ...?" suffix with the file of the same folder whose name is nearest, or ""."""
    try:
        if path.is_symlink() and not path.exists():
            return f": {path} is a link to {os.readlink(path)}, which does not exist"
        file_names = [] if path.exists() else [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return suggest_nearest(path.name, file_names)


def _join_names(names: Sequence[str], room: int) -> str:
    joined = [repr(name) if "," in name else name for name in names]
    while len(", ".join(joined)) > room:
        joined.pop()
    return ", ".join(joined) + (f" and {len(names) - len(joined)} more" if len(joined) < len(names) else "")


def _explain_conversion_error(message: str, table: Any, kind: type, source: str) -> str:
    """Return msgspec's error message as a sentence with key, value, and the permitted keys or values."""
    path = match[1] if (match := _PATH.search(message)) else ""
    message = message[: match.start()] if match else message
    options = _types_at_path(kind, path)
    if (key := _UNKNOWN.fullmatch(message) or _MISSING.fullmatch(message)) is not None:
        keys = [field.encode_name for option in options for field in getattr(option, "fields", ())]
        unknown = _UNKNOWN.fullmatch(message) is not None
        inner = path.lstrip(".")
        key_text = source if not inner else f"{source} {inner}" if source.startswith("[") else f"[{inner}]"
        if not unknown:
            return f"key {key[1]!r} is missing: write {key[1]} = ..." + (f" in {key_text}" if inner else "")
        return f"there is no key {key[1]!r}" + describe_choices(key[1], keys, f"keys of {key_text}:")
    key_text = _format_key(path, source)
    value = _value_at_path(table, path)
    assignment = (
        key_text if value is _NOWHERE else f"{key_text} = {_quote_value(value)}" if key_text else _quote_value(value)
    )
    if (choice_match := _CHOICE.fullmatch(message)) is not None:
        listed_choices = [str(choice) for option in options for choice in getattr(option, "values", ()) if choice != ""]
        alternative = " or a list" if any(hasattr(option, "item_type") for option in options) else ""
        choices = describe_choices(choice_match[1].strip("'"), listed_choices)
        return f"{assignment if value is not _NOWHERE else f'{key_text}: {choice_match[1]}'}{choices}{alternative}"
    if (expected_match := _EXPECTED.fullmatch(message)) is not None:
        return f"{assignment}: {_describe_expected(expected_match[1], expected_match[2])}"
    return f"{key_text}: {message}" if key_text else message


def _describe_expected(kinds: str, limit: str) -> str:
    """Return msgspec's expectation in words: "`int` >= 1" is "must be a whole number of at least 1"."""
    kind_names = " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null")
    if (pattern := _PATTERN.fullmatch(limit)) and (name := _NAMES.fullmatch(pattern[1])):
        description = f"at most {int(name[1]) + 1} of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
        return f"must be text of {description}"
    if (length := _LENGTH.fullmatch(limit)) is not None:
        count = f"{_LIMITS[length[1]].removeprefix('of ')} " if length[1] else ""
        return f"must be {kind_names} of {count}{length[2]} {'entry' if length[2] == '1' else 'entries'}"
    operator, _, number = limit.strip().partition(" ")
    if operator in _LIMITS:
        return f"must be {kind_names} {_LIMITS[operator]} {number.removesuffix('.0')}"
    return f"must be {kind_names}{limit}"


def _format_key(path: str, source: str) -> str:
    """Return a path such as ".cohort.size" as "[cohort] size", or "audio.rate" within a named table."""
    inner = path.lstrip(".").replace("[...]", "")
    table, _, key = inner.rpartition(".")
    return inner if source.startswith("[") or not table else f"[{table}] {key}"


_NOWHERE: Final = object()


def _value_at_path(table: Any, path: str) -> Any:
    for step in _STEP.finditer(path):
        try:
            table = table[step[1]] if step[1] is not None else table[int(step[2])]
        except (LookupError, TypeError, ValueError):
            return _NOWHERE
    return table


def _quote_value(value: Any, max_characters: int = 60) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


def _types_at_path(kind: type, path: str) -> list[Any]:
    from msgspec import inspect

    types = _union_members(inspect.type_info(kind))
    for step in _STEP.finditer(path):
        inner: list[Any] = []
        for candidate in types:
            if step[1] is not None:
                inner += [field.type for field in getattr(candidate, "fields", ()) if field.encode_name == step[1]]
            else:
                inner += [getattr(candidate, name) for name in ("item_type", "value_type") if hasattr(candidate, name)]
        types = [option for inner_type in inner for option in _union_members(inner_type)]
    return types


def _union_members(kind: Any) -> list[Any]:
    return list(getattr(kind, "types", (kind,)))  # all types of a union

"""Every value that the type of a field allows, at its extremes: what a device may put into its messages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from fedquilt import wire
from fedquilt.coordinator.updates import sites
from fedquilt.core import BlobRef, EvaluationSums, OperatingPoint, Profile, Rates, Update, Usage

MESSAGES = (
    wire.Presence,
    Profile,
    wire.Claim,
    wire.Progress,
    wire.Telemetry,
    wire.ReleaseStatus,
    Update,
    wire.ChunkRequest,
    wire.BlobManifest,
    wire.MissingBlob,
    wire.UploadProgress,
    wire.Hello,
)
"""Messages that devices send."""

PARTS = (OperatingPoint, Rates, Usage, EvaluationSums, BlobRef, sites.SiteUpdatePart)
"""Structs within them, or within a blob that a site sends."""

LONG = 3000  # of a text without a limit
LARGE = 1_000_000  # that no honest device of a test has of anything
MANY = 40  # entries of a collection: a message has 64 KiB


def fields() -> Iterator[tuple[type, str]]:
    """Every field of every message of a device."""
    for kind in (*MESSAGES, *PARTS):
        for name in kind.__struct_fields__:
            yield kind, name


def extremes(kind: type, name: str) -> list[Any]:
    """Extreme values of a field."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    (field,) = [each for each in info.fields if each.name == name]
    return list(_values(field.type))


def _values(kind: inspect.Type) -> Iterator[Any]:
    match kind:
        case inspect.BoolType():
            yield from (False, True)
        case inspect.NoneType():
            yield None
        case inspect.IntType(ge=least, le=most):
            yield from (-(2**63) if least is None else least, 2**63 - 1 if most is None else most)
            yield from (LARGE,) if most is None or most >= LARGE else ()
        case inspect.FloatType(ge=least, gt=above, le=most):
            low = least if least is not None else above
            yield from (-1e308 if low is None else low, 1e308 if most is None else most, 5e-324)
            yield from (float(LARGE),) if most is None or most >= LARGE else ()
        case inspect.StrType(pattern=pattern, max_length=most):
            yield from _texts(pattern, LONG if most is None else min(most, LONG))
        case inspect.BytesType():
            yield from (b"", b"\0", b"\xff" * LONG, b"\x01" * LONG, b"\0\xff\xff\xff\x7f\x01")
        case inspect.TupleType(item_types=types):
            for values in zip(*map(_values, types), strict=False):
                yield values
        case inspect.LiteralType(values=values):
            yield from values
        case inspect.UnionType(types=types):
            for each in types:
                yield from _values(each)
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            count = MANY if most is None else min(most, MANY)
            if not least:
                yield ()
            for value in _values(item):
                yield (value,) * count
        case inspect.DictType(value_type=item, max_length=most):
            yield {}
            for value in _values(item):
                yield {f"k{number}": value for number in range(min(most or MANY, MANY))}
        case inspect.StructType(cls=cls):
            yield from _structs(cls)
        case _:
            raise NotImplementedError(kind)


def _structs(cls: type) -> Iterator[Any]:
    plain = sample(cls)
    yield plain
    for name in cls.__struct_fields__:
        for value in extremes(cls, name):
            yield msgspec.structs.replace(plain, **{name: value})


def _texts(pattern: str | None, most: int) -> Iterator[str]:
    known = {
        None: ["", "\0\x1b[2J\n", "x" * most],
        r"^([0-9a-f]{64})?\Z": ["", "f" * 64],
        r"^[0-9a-f]{64}\Z": ["0" * 64, "f" * 64],
        r"^([0-9a-f]{64})*\Z": ["", "f" * 64 * 40],
        r"^([0-9a-f]{16})?\Z": ["", "f" * 16],
        r"^[a-z0-9][a-z0-9._-]{0,63}\Z": ["a", "z", "0" * 64],
    }
    yield from known.get(pattern) or ["a=b"]


def sample(cls: type) -> Any:
    """A struct with a plain value in each field that has no default."""
    given: dict[str, Any] = {}
    for each in inspect.type_info(cls).fields:  # type: ignore[union-attr]
        if each.required:
            given[each.name] = next(_values(each.type))
    return cls(**given)


def changed(message: Any, roll: random.Random, share: float) -> Any:
    """The message with an extreme value in a share of its fields."""
    names = [name for name in message.__struct_fields__ if roll.random() < share]
    return msgspec.structs.replace(message, **{name: roll.choice(extremes(type(message), name)) for name in names})

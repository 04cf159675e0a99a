"""A method made of another, with some of its parts replaced."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from fedquilt import config
from fedquilt.core import JobError, Method


def method(base: Method | ModuleType, **parts: Any) -> Method:
    """A method that is `base` but for the parts given, to be named METHOD in a module of yours.

    Args:
        base: a method, or a module of `fedquilt.methods` such as `fedquilt.fedavg`.
        parts: fields of `fedquilt.core.Method`: mostly `paper`, `params` (a frozen dataclass) and `work`.

    Raises:
        JobError: an unknown part, or params that are no frozen dataclass; says the mend.
    """
    made = getattr(base, "METHOD", base)
    if not isinstance(made, Method):
        raise JobError(
            f"{getattr(base, '__name__', base)!r} is no method: give a Method, or a module such as fq.fedavg"
        )
    known = [each.name for each in dataclasses.fields(Method)]
    for name in parts:
        if name not in known:
            raise JobError(f"a method has no part {name!r}; there are: {', '.join(known)}{config.nearest(name, known)}")
    for name in ("params", "state"):
        if name in parts and not _frozen(parts[name]):
            raise JobError(
                f"{name} = {parts[name]!r}: a frozen dataclass is wanted, @dataclass(frozen=True) above its class"
            )
    return dataclasses.replace(made, **parts)


def _frozen(kind: object) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]

"""A method made of another, with some of its parts replaced."""

from __future__ import annotations

import dataclasses
import sys
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


def name_of(given: object) -> object:
    """What a job names a method object by: "fedavg" of one of ours, "module:NAME" of one that a module of yours holds.

    A job is written into logs and bundles and read by other processes, which import the method by this name. What is
    neither a method nor a module with one is returned as it is.

    Raises:
        JobError: no module that another process could import holds the object; says the mend.
    """
    found = getattr(given, "METHOD", given) if isinstance(given, ModuleType) else given
    if not isinstance(found, Method):
        return given
    places = [
        (module.__name__, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and getattr(module, "__spec__", None) is not None
        for name, value in list(vars(module).items())
        if value is found and module.__name__ != "__main__"
    ]
    if not places:
        raise JobError(
            "method: the object is in no module that the simulation's processes could import, as one of a notebook or "
            "of the script that runs is: put it into a file, mine.py, as METHOD = ..., and give mine.METHOD"
        )
    ours = "fedquilt.methods."
    home, name = min(places, key=lambda place: (not place[0].startswith(ours), place))
    return home.removeprefix(ours) if home.startswith(ours) and name == "METHOD" else f"{home}:{name}"


def _frozen(kind: object) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]

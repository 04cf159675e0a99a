"""Methods derived from other methods by replacing some fields."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

from fedquilt.core import JobError, Method
from fedquilt.formats import toml


def method(base: Method | ModuleType, **parts: Any) -> Method:
    """Return a copy of a method with some fields replaced.

    A job can name the result if a module stores it, usually as METHOD.

    Args:
        base: A method, or a module of `fedquilt.methods` such as `fedquilt.fedavg`.
        parts: Fields of `fedquilt.core.Method`, mostly `paper`, `params` (a frozen dataclass) and `work`.

    Returns:
        The new method.

    Raises:
        JobError: If `base` is not a method, a field is unknown, or a type is not a frozen dataclass.
    """
    made = getattr(base, "METHOD", base)
    if not isinstance(made, Method):
        raise JobError(
            f"{getattr(base, '__name__', base)!r} is no method: give a Method, or a module such as fq.fedavg"
        )
    known = [each.name for each in dataclasses.fields(Method)]
    for name in parts:
        if name not in known:
            raise JobError(f"a method has no part {name!r}{toml.describe_choices(name, known)}")
    for name in ("params", "state"):
        if name in parts and not _is_frozen_dataclass(parts[name]):
            raise JobError(
                f"{name} = {parts[name]!r}: a frozen dataclass is wanted, @dataclass(frozen=True) above its class"
            )
    return dataclasses.replace(made, **parts)


def importable_name(given: object) -> object:
    """Return the name under which another process can import a method object.

    A built-in method has a short name such as "fedavg", any other "module:NAME". Jobs are written into logs and
    bundles, so other processes import the method by this name.

    Args:
        given: A method, a module with METHOD, or any other value.

    Returns:
        The name. A value that is not a method is returned unchanged.

    Raises:
        JobError: If no importable module contains the method.
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


def _is_frozen_dataclass(kind: object) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    return bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]

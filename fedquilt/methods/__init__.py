"""Federated methods, one file each.

A new file in this folder is a new method. Other packages add methods by an entry point in the group `fedquilt.methods`,
and a job can also name a method as `module:name`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from functools import cache
from types import ModuleType

from fedquilt import plugins
from fedquilt.core import JobError, Method


def builtin_names() -> list[str]:
    """Return the sorted names of the methods in this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def plugin_names() -> list[str]:
    """Return the sorted names of methods in other packages, without importing any."""
    return plugins.plugin_names("method")


def method_module(name: str) -> ModuleType:
    """Return the module of a method, whose docstring describes the method.

    Raises:
        JobError: If there is no such method, or if it fails to load.
    """
    load(name)
    plugin = plugins.find_plugin("method", name, builtin_names())
    return importlib.import_module(f"fedquilt.methods.{name}" if plugin is None else plugin.target.partition(":")[0])


def required_plugins(name: str) -> dict[str, str]:
    """Return the plug-in module of a method with its version and digest, or {} if built in.

    Raises:
        JobError: If there is no such method.
    """
    return plugins.required_modules("method", name, builtin_names())


@cache  # called for every task, and searching the folder takes longer than a small task
def load(name: str) -> Method:
    """Import and return a method by the name of its file, of an entry point, or as `module:name`.

    Raises:
        JobError: If there is no such method, if its import fails, or if it is not a `Method`.
    """
    builtin = builtin_names()
    plugin = plugins.find_plugin("method", name, builtin)
    if plugin is None:
        method = importlib.import_module(f"fedquilt.methods.{name}").METHOD
        assert isinstance(method, Method)
        return method
    method = plugins.import_plugin(plugin)
    if not isinstance(method, Method):
        raise plugins.wrong_kind_error(plugin, "a fedquilt.core.Method", method)
    for field_name in ("params", "state"):
        field_type = getattr(method, field_name)
        if not (isinstance(field_type, type) and dataclasses.is_dataclass(field_type)):
            raise JobError(
                f"{plugin}: `{field_name}` is {field_type!r} instead of a frozen dataclass: correct {plugin.target}"
            )
    return method

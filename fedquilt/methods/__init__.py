"""Federated methods, one file each, found by file name; those of other packages by entry point or `module:name`.

Adding a method here is adding a file. Outside, it is a package with an entry point in the group `fedquilt.methods`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from functools import cache
from types import ModuleType

from fedquilt import plugins
from fedquilt.core import JobError, Method


def names() -> list[str]:
    """Names of our own methods, sorted: the files in this folder except shared ones such as `_by_width.py`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def outside() -> list[str]:
    """Names of the methods that other packages offer, sorted; none is imported."""
    return plugins.names("method")


def module(name: str) -> ModuleType:
    """Module of a method, whose docstring describes it.

    Raises:
        JobError: as `load`.
    """
    load(name)
    plugin = plugins.find("method", name, names())
    return importlib.import_module(f"fedquilt.methods.{name}" if plugin is None else plugin.target.partition(":")[0])


def needs(name: str) -> dict[str, str]:
    """Packages a device needs beside fedquilt to run a method: see `plugins.needs`.

    Raises:
        JobError: there is no such method.
    """
    return plugins.needs("method", name, names())


@cache  # called for every task, and searching the folder takes longer than a small task
def load(name: str) -> Method:
    """Load a method by name: `methods/<name>.py`, an entry point of another package, or `module:name`.

    Raises:
        JobError: there is none, or it fails at import or is no method; gives the mend.
    """
    own = names()
    plugin = plugins.find("method", name, own)
    if plugin is None:
        method = importlib.import_module(f"fedquilt.methods.{name}").METHOD
        assert isinstance(method, Method)
        return method
    method = plugins.imported(plugin)
    if not isinstance(method, Method):
        raise plugins.refused(plugin, "a fedquilt.core.Method", method)
    for part in ("params", "state"):
        kind = getattr(method, part)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise JobError(
                f"{plugin}: its `{part}` is {kind!r}, and a frozen dataclass is wanted: mend {plugin.target}"
            )
    return method

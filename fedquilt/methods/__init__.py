"""One file per federated method, found by its file name; those of other packages by entry point or `module:name`.

Adding a method here is adding a file; outside it is a package with an entry point in the group `fedquilt.methods`.
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
    """Our own methods, sorted: the files in this folder but for those that several share, such as `_by_width.py`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def outside() -> list[str]:
    """The methods that other packages give, sorted; none is imported."""
    return plugins.names("method")


def module(name: str) -> ModuleType:
    """The module of a method, whose docstring tells of it.

    Raises:
        JobError: as `load`.
    """
    load(name)
    plugin = plugins.find("method", name, names())
    return importlib.import_module(f"fedquilt.methods.{name}" if plugin is None else plugin.target.partition(":")[0])


def needs(name: str) -> dict[str, str]:
    """What a device has to have beside fedquilt to run a method: see `plugins.needs`.

    Raises:
        JobError: there is no such method.
    """
    return plugins.needs("method", name, names())


@cache  # it is asked for with every task, and looking through the folder takes longer than a small one
def load(name: str) -> Method:
    """The method of that name: `methods/<name>.py`, an entry point's of another package, or `module:name`.

    Raises:
        JobError: there is none, or what there is fails at import or is no method; says the mend.
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

"""One file per federated method, found by its file name. Adding a method is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from fedquilt import config
from fedquilt.core import JobError, Method


def names() -> list[str]:
    """The methods there are, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@cache  # it is asked for with every task, and looking through the folder takes longer than a small one
def load(name: str) -> Method:
    """The method in `methods/<name>.py`.

    Raises:
        JobError: there is no such file.
    """
    if name not in names():
        hint = config.nearest(name, names())
        raise JobError(f"method {name!r} is unknown; there are: {', '.join(names())}{hint}")
    method = importlib.import_module(f"fedquilt.methods.{name}").METHOD
    assert isinstance(method, Method)
    return method

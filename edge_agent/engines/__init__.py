"""Engines: what runs a client half's arithmetic. One per file, heavy imports stay there.

Engine "x" is class `XEngine` of `x_engine.py`, made with the budget of its process in bytes. An engine of another
package is what its entry point in `fedquilt.engines` names: a class or function that takes the same.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from fedquilt import plugins
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.core import Engine

# engine -> (the library it stands on, the extra that brings it); asked before anything heavy is imported
NEEDS: Final = {"numpy": ("numpy", ""), "onnx": ("onnxruntime", "[onnx]"), "torch": ("torch", "[train]")}


def available() -> tuple[str, ...]:
    """The engines whose library is installed here, sorted, then those of other packages. Imports none of them."""
    own = tuple(name for name, (library, _) in NEEDS.items() if find_spec(library) is not None)
    return (*own, *(name for name in plugins.names("engine") if name not in NEEDS))


def make(name: str, budget_bytes: int) -> Engine:
    """The engine of that name; imports its library.

    Args:
        budget_bytes: the most this process may hold resident.

    Raises:
        JobError: unknown, or not installed; says what to install. Or a plug-in that is none: see `plugins`.
    """
    if (plugin := plugins.find("engine", name, tuple(NEEDS))) is not None:
        made = plugins.imported(plugin)
        if not callable(made):
            raise plugins.refused(plugin, "a class or function that takes a budget in bytes", made)
        return made(budget_bytes)
    library, extra = NEEDS[name]
    if find_spec(library) is None:
        raise JobError(f"engine {name!r} needs {library}, which is not installed: pip install 'fedquilt{extra}'")
    module = importlib.import_module(f"{__name__}.{name}_engine")
    return getattr(module, f"{name.capitalize()}Engine")(budget_bytes)

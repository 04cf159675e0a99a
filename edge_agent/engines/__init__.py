"""Engines run the arithmetic of a client half. One per file, which also has the heavy imports.

Engine "x" is class `XEngine` of `x_engine.py`, made with the budget of its process in bytes. An engine of another
package is a class or function with the same argument, named by its entry point in `fedquilt.engines`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from fedquilt import plugins
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.core import Engine

# engine -> (its library, the extra that installs it); tested before anything heavy is imported
NEEDS: Final = {"numpy": ("numpy", ""), "onnx": ("onnxruntime", "[onnx]"), "torch": ("torch", "[train]")}

READ_BY_TASK: Final = frozenset({"numpy", "torch"})
"""Engines of which a task reads its bundles itself, and compares them with their hashes. ONNX Runtime opens graphs, and
the files that these name, by their paths; an engine of another package may."""


def available() -> tuple[str, ...]:
    """Engines whose library is installed here, sorted, then those of other packages. Imports none of them."""
    own = tuple(name for name, (library, _) in NEEDS.items() if find_spec(library) is not None)
    return (*own, *(name for name in plugins.names("engine") if name not in NEEDS))


def make(name: str, budget_bytes: int) -> Engine:
    """Make an engine; imports its library.

    Args:
        name: one of `available`.
        budget_bytes: most that this process may hold resident.

    Raises:
        JobError: unknown, or not installed; says what to install. Or a plug-in that is no engine: see `plugins`.
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

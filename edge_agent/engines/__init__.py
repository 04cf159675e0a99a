"""Engines, which do the arithmetic of a method's client half. Heavy imports are in their modules.

Engine "x" is class `XEngine` of `x_engine.py` or `x/engine.py` and takes the memory budget of its process in bytes. An
engine of another package is a class or function with the same argument, an entry point in `fedquilt.engines`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from fedquilt import extras, plugins
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.core import Engine

# engine -> its library and the extra that installs the library
NEEDS: Final = {"numpy": ("numpy", ""), "onnx": ("onnxruntime", "onnx"), "torch": ("torch", "train")}

READ_BY_TASK: Final = frozenset({"numpy", "torch"})
"""Engines whose bundles are read and verified by the task itself. ONNX Runtime opens graphs, and the files named in
graphs, by their paths. Engines of other packages may do so."""


def available_engines() -> tuple[str, ...]:
    """Return the installed engines, sorted, then the engines of plug-ins. No engine is imported."""
    installed = tuple(name for name, (library, _) in NEEDS.items() if find_spec(library) is not None)
    return (*installed, *(name for name in plugins.plugin_names("engine") if name not in NEEDS))


def create_engine(name: str, budget_bytes: int) -> Engine:
    """Return a new engine. Raise JobError if the engine's library is missing or a plug-in is invalid."""
    if (plugin := plugins.find_plugin("engine", name, tuple(NEEDS))) is not None:
        factory = plugins.import_plugin(plugin)
        if not callable(factory):
            raise plugins.wrong_kind_error(plugin, "a class or function that takes a budget in bytes", factory)
        return factory(budget_bytes)
    library, extra = NEEDS[name]
    if find_spec(library) is None:
        raise JobError(f"engine {name!r} needs {library}, which is not installed: {extras.installation_command(extra)}")
    module = importlib.import_module(f"{__name__}.torch.engine" if name == "torch" else f"{__name__}.{name}_engine")
    return getattr(module, f"{name.capitalize()}Engine")(budget_bytes)

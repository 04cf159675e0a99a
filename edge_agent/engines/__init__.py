"""Engines: what runs a client half's arithmetic. One per file, heavy imports stay there.

Engine "x" is class `XEngine` of `x_engine.py`, made with the budget of its process in bytes.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.core import Engine

# engine -> (the library it stands on, the extra that brings it); asked before anything heavy is imported
NEEDS: Final = {"numpy": ("numpy", ""), "onnx": ("onnxruntime", "[onnx]"), "torch": ("torch", "[train]")}


def available() -> tuple[str, ...]:
    """The engines whose library is installed here, sorted. Imports none of them."""
    return tuple(name for name, (library, _) in NEEDS.items() if find_spec(library) is not None)


def make(name: str, budget_bytes: int) -> Engine:
    """The engine of that name; imports its library.

    Args:
        budget_bytes: the most this process may hold resident.

    Raises:
        JobError: unknown, or not installed; says what to install.
    """
    if name not in NEEDS:
        raise JobError(f"engine {name!r} is unknown; there are: {', '.join(NEEDS)}")
    library, extra = NEEDS[name]
    if find_spec(library) is None:
        raise JobError(f"engine {name!r} needs {library}, which is not installed: pip install 'fedquilt{extra}'")
    module = importlib.import_module(f"{__name__}.{name}_engine")
    return getattr(module, f"{name.capitalize()}Engine")(budget_bytes)

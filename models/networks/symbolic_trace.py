"""Symbolic traces of networks by torch.fx. Imports torch."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fedquilt.core import ModelError
from fedquilt.core.errors import first_line

_TORCH = Path(torch.__file__).parent


class _PathTracer(fx.Tracer):  # type: ignore[misc]
    """Tracer that stores the path of the module whose forward pass failed."""

    failed = ""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a module, and record the path of the innermost module that cannot be traced."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def trace_network(model: nn.Module, what: str, fix: str) -> fx.GraphModule:
    """Trace a network with torch.fx, or raise ModelError with `what`, the untraceable place and `fix`."""
    tracer = _PathTracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the network's own code makes of a symbolic value
        module = model.get_submodule(tracer.failed)
        named = f"module {tracer.failed!r}" if tracer.failed else "the network's own forward()"
        reason = first_line(error)
        raise ModelError(
            f"{what} cannot be traced: {named} ({type(module).__name__}{_error_location(error)}) stops "
            f"torch.fx: {reason}; "
            f"rewrite that place without branches on values, or {fix}"
        ) from None
    return fx.GraphModule(model, graph)


def _error_location(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _TORCH not in Path(each.filename).parents]
    last = frames[-1]
    return "" if Path(last.filename) == Path(__file__) else f", {Path(last.filename).name}, line {last.lineno}"

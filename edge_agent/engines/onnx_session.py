"""The one place where ONNX Runtime is given a graph: every session is made here, of a graph that has been checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from fedquilt import graph_check
from fedquilt.core import ModelError
from fedquilt.graph_check import Graph

CPU: Final = ("CPUExecutionProvider",)
REMEMBERED: Final = 4096  # graphs whose check is not repeated while their file is the same

_checked: OrderedDict[tuple[Path, int, int, int], Graph] = OrderedDict()


def checked(graph: Path) -> Graph:
    """What a graph says of itself, once `fedquilt.graph_check` has found nothing that is not permitted.

    Raises:
        ModelError: there is no such graph, or it may not be run; says why, with the graph's name.
    """
    try:
        found = graph.stat()
    except OSError:
        raise ModelError(f"there is no graph {graph}") from None
    key = (graph, found.st_ino, found.st_size, found.st_mtime_ns)
    if key not in _checked:
        _checked[key] = _named(graph.name[:12], lambda: graph_check.of_file(graph))
        while len(_checked) > REMEMBERED:
            _checked.popitem(last=False)
    return _checked[key]


def session(graph: Path | bytes, options: Any = None, providers: Sequence[Any] = CPU) -> Any:
    """An `onnxruntime.InferenceSession` of a file, or of bytes with all weights inside; it falls back to nothing.

    Raises:
        ModelError: the graph may not be run; says why.
    """
    if isinstance(graph, bytes):
        _named("in memory", lambda: graph_check.of_bytes(graph))
        return ort.InferenceSession(graph, options, providers=list(providers), enable_fallback=0)
    checked(graph)
    return ort.InferenceSession(str(graph), options, providers=list(providers), enable_fallback=0)


def _named(name: str, check: Callable[[], Graph]) -> Graph:
    try:
        return check()
    except ModelError as error:
        raise ModelError(f"graph {name} cannot be run: {error}") from None

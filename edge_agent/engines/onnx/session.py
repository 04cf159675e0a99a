"""Creation of ONNX Runtime sessions, only for graphs that were checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from fedquilt.core import ModelError
from fedquilt.onnx import graph_check
from fedquilt.onnx.graph_check import CheckedGraph

CPU: Final = ("CPUExecutionProvider",)
REMEMBERED: Final = 4096  # graphs whose check is not repeated while their file is the same

_checked: OrderedDict[tuple[Path, int, int, int], CheckedGraph] = OrderedDict()


def check_graph(graph: Path) -> CheckedGraph:
    """Return a graph's description after checking that the graph is permitted.

    Raises:
        ModelError: If the graph is missing or not permitted. The text names the graph.
    """
    try:
        found = graph.stat()
    except OSError:
        raise ModelError(f"there is no graph {graph}") from None
    key = (graph, found.st_ino, found.st_size, found.st_mtime_ns)
    if key not in _checked:
        _checked[key] = _name_graph_in_error(graph.name[:12], lambda: graph_check.check_file(graph))
        while len(_checked) > REMEMBERED:
            _checked.popitem(last=False)
    return _checked[key]


def create_session(graph: Path | bytes, options: Any = None, providers: Sequence[Any] = CPU) -> Any:
    """Return an `onnxruntime.InferenceSession` for a file, or for bytes with all weights inside.

    Raises:
        ModelError: If the graph is not permitted.
    """
    if isinstance(graph, bytes):
        _name_graph_in_error("in memory", lambda: graph_check.check_bytes(graph))
        return ort.InferenceSession(graph, options, providers=list(providers), enable_fallback=0)
    check_graph(graph)
    return ort.InferenceSession(str(graph), options, providers=list(providers), enable_fallback=0)


def _name_graph_in_error(name: str, check: Callable[[], CheckedGraph]) -> CheckedGraph:
    try:
        return check()
    except ModelError as error:
        raise ModelError(f"graph {name} cannot be run: {error}") from None

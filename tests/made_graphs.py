"""ONNX files as other exporters write them: products with ones, of which a test sets one property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="graphs are written with onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

FLOAT, INT32, INT64, HALF, BFLOAT16 = (
    getattr(TensorProto, name) for name in ("FLOAT", "INT32", "INT64", "FLOAT16", "BFLOAT16")
)
Axes = Sequence[int | str | None] | None


def value(name: str, axes: Axes = ("n", 3), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, axes)


def product(
    shape: Axes = ("n", 6),
    *,
    kind: int = FLOAT,
    inputs: Sequence[Any] = (),
    output: Any = None,
    nodes: Callable[[str], Sequence[Any]] | None = None,
    size: int = 6,
    opsets: Sequence[tuple[str, int]] = (("", 17),),
    ir_version: int = 8,
) -> Any:
    """A model from "x" to "y": the product with ones (size, 3), after a cast where "x" is of another type.

    Args:
        shape: declared shape of "x".
        kind: type of "x".
        inputs: more inputs.
        output: declared "y", or None for (n, 3).
        nodes: nodes from "x" to the name that it is called with, instead of the cast.
        size: of the last axis that the weights take.
        opsets: imported domains with their versions.
        ir_version: of the file.
    """
    before = nodes("f") if nodes else [helper.make_node("Cast", ["x"], ["f"], to=FLOAT)]
    graph = helper.make_graph(
        [*before, helper.make_node("MatMul", ["f", "w"], ["y"])],
        "g",
        [value("x", shape, kind), *inputs],
        [output or value("y")],
        [numpy_helper.from_array(np.ones((size, 3), np.float32), "w")],
    )
    imports = [helper.make_opsetid(*each) for each in opsets]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def pooled(into: str) -> list[Any]:
    return [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], [into])]


def two_files(folder: Path, graph: Any = None, location: str = "model.onnx.data") -> Path:
    onnx.save(
        product() if graph is None else graph,
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    if location != "model.onnx.data":
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for entry in model.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = location
        (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"

"""Linear networks in ONNX files whose quality on handwritten digits is known, and the data of a board with digits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.edge_agent.task import memory_budget

DIGITS = Path(__file__).parents[1] / "tools/lab/demo/digits.npz"
LABELS = tuple(map(str, range(10)))
INPUT = {"channels": 1, "size": 8}


def board_data(**changes: Any) -> dict[str, Any]:
    """The [data] table of a board with a tenth of the digits, a fifth of them held out."""
    return {"path": str(DIGITS), "partition": "iid", "share": 0, "shares": 10, **changes}


def fitting_budget_bytes() -> int:
    """A budget of 512 MB beside what other tests have left in this process."""
    process = os.getpid()
    memory_budget.reset_peak(process)
    peak, resident = memory_budget.read_peak_bytes(process), memory_budget.resident_bytes(process)
    return 512_000_000 + 2 * (peak or 0) - (resident or 0)


def centres() -> tuple[np.ndarray, np.ndarray]:
    """Weights (64, 10) and biases (10,) of the classifier by the nearest mean of a class: right nine times of ten."""
    with np.load(DIGITS) as held:
        x, y = held["x_train"].astype(np.float32).reshape(-1, 64) / 255, held["y_train"]
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    return 2 * means.T, -np.square(means).sum(axis=1)


def network(
    *,
    turned: int = 0,
    size: int = 8,
    labels: tuple[str, ...] = LABELS,
    gain: float = 1.0,
    facts: bool = True,
    count: str | int = "n",
) -> bytes:
    """The classifier's ONNX file.

    Args:
        turned: so many of the classes are named for others: this is how it becomes a bad one.
        size: of the images that it takes; other sizes are cut to 8 x 8 within.
        labels: of its classes, which are the first ones of the digits.
        gain: of its scores: another file with the same answers.
        facts: the file says its labels and its input.
        count: of the examples that it takes at once.
    """
    from onnx import TensorProto, helper, numpy_helper

    weights, biases = centres()
    order = np.arange(10)
    order[:turned] = np.roll(order[:turned], 1)
    weights = (gain * weights[:, order][:, : len(labels)]).astype(np.float32)
    biases = (gain * biases[order][: len(labels)]).astype(np.float32)
    value = helper.make_tensor_value_info
    cut = [numpy_helper.from_array(np.array(each, np.int64), name) for name, each in (("from", [0, 0]), ("to", [8, 8]))]
    axes = numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    graph = helper.make_graph(
        [
            helper.make_node("Slice", ["x", "from", "to", "axes"], ["cut"]),
            helper.make_node("Flatten", ["cut"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w", "b"], ["scores"]),
        ],
        "net",
        [value("x", TensorProto.FLOAT, [count, 1, size, size])],
        [value("scores", TensorProto.FLOAT, [count, len(labels)])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(biases, "b"), *cut, axes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if facts:
        said = {"labels": json.dumps(labels), "input": json.dumps({**INPUT, "size": size})}
        helper.set_model_props(model, said)
    payload: bytes = model.SerializeToString()
    return payload

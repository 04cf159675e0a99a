"""Small networks in ONNX files as `fedquilt model export` writes them, whose answers are known."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

LABELS = ("night", "day")


def write_classifier(
    path: Path,
    *,
    labels: tuple[str, ...] = LABELS,
    gain: float = 1.0,
    turned: bool = False,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """A network that tells dark images of 4 x 4 pixels from bright ones: gain * (0.5 - mean), gain * (mean - 0.5).

    Args:
        path: of the file.
        labels: its two labels.
        gain: makes another file of the same answers' order.
        turned: answers the other way round.
        facts: what the file says of itself; None: its labels and its input, as a stitched network's does.
    """
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    sign = -gain if turned else gain
    weights, bias = np.array([[-sign, sign]], np.float32), np.array([sign / 2, -sign / 2], np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["mean"]),
            helper.make_node("Gemm", ["mean", "w", "b"], ["scores"]),
        ],
        "net",
        [value("x", TensorProto.FLOAT, ["n", 1, 4, 4])],
        [value("scores", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    usual = {"labels": json.dumps(labels), "input": json.dumps({"channels": 1, "size": 4})}
    helper.set_model_props(model, usual if facts is None else dict(facts))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def lead(models: Path, to: str) -> None:
    """Let `current` lead to another model's folder, as a board does: by the rename of a link made beside it."""
    part = models / "current.part"
    part.unlink(missing_ok=True)
    part.symlink_to(to)
    os.replace(part, models / "current")


def image(level: int, size: int = 4) -> np.ndarray:
    """A grey image of one brightness, (size, size) uint8."""
    return np.full((size, size), level, np.uint8)

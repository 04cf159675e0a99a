"""An exported file takes raw numbers in bare ONNX Runtime, and gives what the training engine computes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="a network is exported by torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime

from fedquilt.arrays import tensors
from fedquilt.core import DataError
from fedquilt.data import inputs
from fedquilt.models.networks import onnx_file, onnx_scaling
from fedquilt.tools.artefacts import graph_interface, prepare
from fedquilt.tools.artefacts.predictions import predict_examples

ROWS = [("area", "kind", "price", "loud", "warm")] + [
    (100.0 + 7 * row, ("flat", "house")[row % 2], 180000.0 + 997 * row, row % 2, row % 3 // 2) for row in range(12)
]
DATA: dict[str, Any] = {"x": ["area", "kind"], "categories": {"kind": ["flat", "house"]}}
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"y": "kind", "x": ["area"], "labels": ["flat", "house"]}, "a score for each class"),
    "labels": ({**DATA, "y": ["loud", "warm"], "task": "labels"}, "a score above 0 for each label that applies: loud"),
    "regression": (
        {**DATA, "y": "price", "task": "regression", "target": {"mean": [185000.0], "std": [3500.0]}},
        "price",
    ),
}


def raw_inputs(columns: list[str]) -> np.ndarray:
    table = [dict(zip(ROWS[0], row, strict=True)) for row in ROWS[1:]]
    values = {"area": lambda row: row["area"], "flat": lambda row: row["kind"] == "flat"}
    values["house"] = lambda row: row["kind"] == "house"
    return np.array([[values[column.removeprefix("kind=")](row) for column in columns] for row in table], np.float32)


@pytest.mark.parametrize("task", TASKS)
def test_bare_onnx_runtime_gives_the_predictions_of_the_training_engine(tmp_path: Path, task: str) -> None:
    data, described = TASKS[task]
    with (tmp_path / "houses.csv").open("w", newline="") as file:
        csv.writer(file).writerows(ROWS)
    columns = ["area"] if task == "classes" else ["area", "kind=flat", "kind=house"]
    outputs = {"classes": 2, "labels": 2, "regression": 1}[task]
    job = {
        "model": {"name": "mlp", "inputs": len(columns), "hidden": [4], "classes": outputs, "task": task},
        "input": {"standardise": True},
        "data": {"path": str(tmp_path / "houses.csv"), **data},
    }
    bundle = prepare.prepare_bundle(job, tmp_path / "bundle")
    network = bundle.meta["network"]
    weights = tensors.decode_tensors((tmp_path / "bundle" / "blobs" / bundle.files["model"].sha256).read_bytes())
    model = tmp_path / "net.onnx"
    model.write_bytes(onnx_file.export_network(network, weights, bundle.meta["reading"]))

    session = onnxruntime.InferenceSession(model)
    raw = raw_inputs(columns)
    (bare,) = session.run(None, {"x": raw})
    predicted = predict_examples(model, tmp_path / "houses.csv", ["kind", "area"])
    kept = [(row["kind"], float(row["area"])) for row in predicted.to_rows()]
    assert kept == [(dict(zip(ROWS[0], row, strict=True))["kind"], row[ROWS[0].index("area")]) for row in ROWS[1:]]
    with pytest.raises(DataError, match=r"houses.csv has no column 'id' to keep: choose from .*area"):
        predict_examples(model, tmp_path / "houses.csv", ["id"])
    np.testing.assert_allclose(predicted.outputs, bare, rtol=1e-5, atol=1e-5)

    hidden = np.maximum(inputs.prepare_inputs(raw, network["input"]) @ weights["1.weight"].T + weights["1.bias"], 0)
    learned = hidden @ weights["3.weight"].T + weights["3.bias"]
    target = data.get("target", {"mean": [0.0], "std": [1.0]})
    np.testing.assert_allclose(bare, learned * target["std"] + target["mean"], rtol=1e-5, atol=1e-5)
    assert bare.std() > 0

    first, second = graph_interface.describe_interface(model)
    assert first == f"input x: float32 (n, {len(columns)}), {', '.join(columns)}"
    assert second.startswith(f"output y: float32 (n, {outputs}), {described}")


@pytest.mark.parametrize(
    ("table", "shape"),
    [
        ({"mean": [1.0, 2.0], "std": [2.0, 4.0]}, (2,)),
        ({"mean": [5.0]}, (3,)),
        ({"mean": [1.0, 2.0], "std": [2.0, 4.0]}, (3, 2)),
        ({"channels": 3, "size": 2, "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.25, 0.5]}, (3, 2, 2)),
    ],
)
def test_the_graph_standardises_as_training_does(table: dict[str, Any], shape: tuple[int, ...]) -> None:
    scale = onnx_scaling.input_scale(table, shape)
    assert scale is not None
    stored = np.random.default_rng(0).random((2, *shape), np.float32)
    if "channels" in table:
        stored = stored.transpose(0, 2, 3, 1)
    outside = inputs.prepare_inputs(stored, onnx_scaling.outside_input(table))
    np.testing.assert_array_equal((outside - scale.mean) / scale.std, inputs.prepare_inputs(stored, table))


def test_a_series_in_one_row_repeats_the_scale_of_its_channels() -> None:
    scale = onnx_scaling.input_scale({"mean": [1.0, 2.0], "std": [2.0, 4.0]}, (6,))
    assert scale is not None
    assert scale.to_table() == {"mean": [1.0, 2.0] * 3, "std": [2.0, 4.0] * 3}


def test_a_scale_that_changes_nothing_adds_nothing() -> None:
    assert onnx_scaling.input_scale({"channels": 1, "size": 4}, (1, 4, 4)) is None
    assert json.dumps(onnx_scaling.outside_input({"mean": [1.0], "std": [2.0]})) == "{}"

"""Predictions of exported networks, for each task."""

from __future__ import annotations

import json
from pathlib import Path

import classifiers
import made_graphs
import numpy as np
import onnx
import pytest

from fedquilt.core import DataError, ModelError, evaluation
from fedquilt.tools.artefacts.predictions import PredictedExamples, predict_examples, print_predictions

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


LEVELS = np.array([10, 30, 200, 250], np.uint8)  # brightness of four images


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return classifiers.write_classifier(tmp_path / "net.onnx")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image", reason="image files are written and read by Pillow")
    for name, level, size in (("day/a.png", 250, 9), ("night/b.PNG", 200, 3), ("found/c.png", 10, 4)):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True)
        image.fromarray(np.full((size, size, 3), level, np.uint8)).save(path)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def accuracy(predicted: PredictedExamples) -> float | None:
    sums = predicted.evaluate().get("")
    return None if sums is None else evaluation.main_metric_value(sums)


def predicted_classes(predicted: PredictedExamples) -> list[object]:
    return [answer.prediction for answer in predicted.answers]


def test_a_folder_of_images_is_classified_and_its_subfolders_tell_the_truth(model: Path, folder: Path) -> None:
    """b is bright but lies under "night"; nothing is known of c; the score of a is 250/255 - 0.5."""
    predicted = predict_examples(model, folder)
    assert [(row["example"], row["prediction"], row["label"]) for row in predicted.to_rows()] == [
        ("day/a.png", "day", "day"),
        ("found/c.png", "night", None),
        ("night/b.PNG", "day", "night"),
    ]
    assert predicted.answers[0].score == pytest.approx(250 / 255 - 0.5, abs=1e-6)
    assert accuracy(predicted) == 0.5


def test_a_network_in_two_files_is_run_as_one(model: Path, tmp_path: Path) -> None:
    from fedquilt.tools.operations.inference_server.service import ModelSwitcher

    (tmp_path / "two").mkdir()
    two = made_graphs.two_files(tmp_path / "two", made_graphs.onnx.load(model))
    x = npz(tmp_path / "a.npz", x=np.broadcast_to(LEVELS[:, None, None], (4, 8, 8)))
    assert predict_examples(two, x).to_rows() == predict_examples(model, x).to_rows()
    found = ModelSwitcher(two).current.network.compute_scores(np.zeros((1, 1, 4, 4), np.float32))
    assert found.tolist() == [[0.5, -0.5]]
    assert sorted(path.name for path in two.parent.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_an_npz_is_classified_in_order_and_in_batches(model: Path, tmp_path: Path) -> None:
    """200 images in four levels, two dark and two bright, with and without labels."""
    x = np.broadcast_to(np.tile(LEVELS, 50)[:, None, None], (200, 8, 8))
    predicted = predict_examples(model, npz(tmp_path / "a.npz", x=x))
    assert predicted_classes(predicted) == ["night", "night", "day", "day"] * 50
    assert predicted.names == [str(i) for i in range(200)]
    assert accuracy(predicted) is None
    labelled = npz(tmp_path / "b.npz", x_test=x, y_test=np.tile([0, 1, 1, 1], 50))
    assert accuracy(predict_examples(model, labelled)) == 0.75


@pytest.mark.parametrize(("night", "said"), [(-np.inf, None), (np.inf, "not finite"), (np.nan, "not finite")])
def test_a_label_may_score_minus_infinity_and_nothing_else_that_is_not_finite(
    model: Path, tmp_path: Path, night: float, said: str | None
) -> None:
    made = onnx.load(model)
    (bias,) = [tensor for tensor in made.graph.initializer if tensor.name == "b"]
    bias.raw_data = np.array([night, -0.5], np.float32).tobytes()
    onnx.save(made, model)
    source = npz(tmp_path / "x.npz", x=np.full((2, 4, 4), 10, np.uint8))
    if said is None:
        assert predicted_classes(predict_examples(model, source)) == ["day", "day"]
    else:
        with pytest.raises(ModelError, match=said):
            predict_examples(model, source)


def test_what_is_printed_tells_wrong_answers_and_the_share_of_right_ones(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = npz(tmp_path / "a.npz", x=np.broadcast_to(LEVELS[:2, None, None], (2, 4, 4)), y=np.array([0, 1]))
    assert print_predictions(model, source, "text") == 0
    *lines, metrics = capsys.readouterr().out.splitlines()
    assert lines == [
        "example  prediction   score  label",
        "0        night       0.4608  night",
        "1        night       0.3824  day",
        "score: the network's output for the predicted class, not a probability",
    ]
    assert metrics == "accuracy 50.00 % of 2 examples, balanced accuracy 50.00 %"
    print_predictions(model, source, "json")
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"]["accuracy"] == 0.5
    assert told["examples"] == predict_examples(model, source).to_rows()


NETWORK = {"name": "cnn", "classes": 2, "input": {"channels": 1, "size": 4}}
SOFTMAX = float(1 / np.exp([-1.0, 0.0]).sum())  # of outputs 0.5 and -0.5
BRIGHT = 1 - 0.5  # both outputs of a white image, with opposite signs


@pytest.mark.parametrize(
    ("task", "reading", "y", "rows", "csv", "metrics"),
    [
        (
            "classes",
            {},
            [1, 0],
            [
                {"prediction": "1", "score": BRIGHT, "probability": SOFTMAX, "label": "1"},
                {"prediction": "0", "score": BRIGHT, "probability": SOFTMAX, "label": "0"},
            ],
            ["example,prediction,score,probability,label", f"0,1,0.5,{SOFTMAX},1", f"1,0,0.5,{SOFTMAX},0"],
            {"accuracy": 1.0},
        ),
        (
            "labels",
            {"y": ["dark", "bright"]},
            [[0, 1], [1, 1]],
            [
                {"prediction": ["bright"], "score": {"dark": -BRIGHT, "bright": BRIGHT}, "label": ["bright"]},
                {"prediction": ["dark"], "score": {"dark": BRIGHT, "bright": -BRIGHT}, "label": ["dark", "bright"]},
            ],
            [
                "example,prediction,score dark,score bright,label",
                "0,bright,-0.5,0.5,bright",
                "1,dark,0.5,-0.5,dark;bright",
            ],
            {"label_accuracy": 0.75, "exact_match": 0.5},
        ),
        (
            "regression",
            {"y": ["cold", "warm"]},
            [[-1.5, 0.5], [0.5, 0.5]],
            [
                {"prediction": {"cold": -BRIGHT, "warm": BRIGHT}, "label": {"cold": -1.5, "warm": 0.5}},
                {"prediction": {"cold": BRIGHT, "warm": -BRIGHT}, "label": {"cold": 0.5, "warm": 0.5}},
            ],
            ["example,cold,warm,true cold,true warm", "0,-0.5,0.5,-1.5,0.5", "1,0.5,-0.5,0.5,0.5"],
            {"cold": {"rmse": 0.5**0.5, "mae": 0.5, "r2": 0.5}, "warm": {"rmse": 0.5**0.5, "mae": 0.5}},
        ),
    ],
)
def test_each_task_has_its_predictions_in_rows_csv_and_json(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    task: str,
    reading: dict,
    y: list,
    rows: list,
    csv: list,
    metrics: dict,
) -> None:
    facts = {"network": json.dumps({**NETWORK, "task": task}), "reading": json.dumps({"task": task, **reading})}
    model = classifiers.write_classifier(tmp_path / "net.onnx", facts=facts)
    images = np.stack([classifiers.image(255), classifiers.image(0)])
    labels = np.array(y, np.float32 if task == "regression" else np.int64)
    source = npz(tmp_path / "a.npz", x=images, y=labels)
    print_predictions(model, source, "json", tmp_path / "out.csv")
    told = json.loads(capsys.readouterr().out)
    assert told["examples"] == [{"example": str(number), **row} for number, row in enumerate(rows)]
    for name, value in metrics.items():
        kept = {key: told["metrics"][name][key] for key in value} if isinstance(value, dict) else told["metrics"][name]
        assert kept == pytest.approx(value)
    assert (tmp_path / "out.csv").read_text().splitlines() == csv


def test_what_cannot_be_predicted_says_why(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = npz(tmp_path / "good.npz", x=np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(ModelError, match="has no labels in its metadata: use a file written by `fedquilt"):
        predict_examples(classifiers.write_classifier(tmp_path / "other.onnx", facts={}), good)
    with pytest.raises(ModelError, match=r"absent\.onnx: the file cannot be read"):
        predict_examples(tmp_path / "absent.onnx", good)
    with pytest.raises(DataError, match="does not exist: name a folder or a file of"):
        predict_examples(model, tmp_path / "absent")
    with pytest.raises(DataError, match="has no files that the network reads"):
        predict_examples(model, empty)
    with pytest.raises(DataError, match="name their array 'x_test' or 'x'"):
        predict_examples(model, npz(tmp_path / "a.npz", z=np.zeros(3)))
    with pytest.raises(DataError, match=r"b\.npz: labels run from 0 to 2, the network predicts 2 classes"):
        predict_examples(model, npz(tmp_path / "b.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 2])))
    with pytest.raises(DataError, match=r"cannot read .*c\.npz"):
        predict_examples(model, npz(tmp_path / "c.npz", x=np.array([{}, {}])))
    (empty / "broken.png").write_bytes(b"no png")
    pytest.importorskip("PIL", reason="a damaged image is told by Pillow")
    with pytest.raises(DataError, match=r"cannot read the image .*broken\.png"):
        predict_examples(model, empty)

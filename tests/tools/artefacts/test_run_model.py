"""Exported networks on images."""

from __future__ import annotations

import json
from pathlib import Path

import classifiers
import made_graphs
import numpy as np
import onnx
import pytest

from fedquilt.core import DataError, ModelError
from fedquilt.tools.artefacts.classifier import Prediction, compute_accuracy, print_predictions, run_model

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


def test_a_folder_of_images_is_classified_and_its_subfolders_tell_the_truth(model: Path, folder: Path) -> None:
    """b is bright but lies under "night"; nothing is known of c; the score of a is 250/255 - 0.5."""
    rows = run_model(model, folder)
    assert [(row.image, row.label, row.truth) for row in rows] == [
        ("day/a.png", "day", "day"),
        ("found/c.png", "night", None),
        ("night/b.PNG", "day", "night"),
    ]
    assert rows[0].score == pytest.approx(250 / 255 - 0.5, abs=1e-6)
    assert compute_accuracy(rows) == 0.5


def test_a_network_in_two_files_is_run_as_one(model: Path, tmp_path: Path) -> None:
    from fedquilt.tools.operations.inference_server.service import ModelSwitcher

    (tmp_path / "two").mkdir()
    two = made_graphs.two_files(tmp_path / "two", made_graphs.onnx.load(model))
    x = npz(tmp_path / "a.npz", x=np.broadcast_to(LEVELS[:, None, None], (4, 8, 8)))
    assert run_model(two, x) == run_model(model, x)
    found = ModelSwitcher(two).current.network.compute_scores(np.zeros((1, 1, 4, 4), np.float32))
    assert found.tolist() == [[0.5, -0.5]]
    assert sorted(path.name for path in two.parent.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_an_npz_is_classified_in_order_and_in_batches(model: Path, tmp_path: Path) -> None:
    """200 images in four levels, two dark and two bright, with and without labels."""
    x = np.broadcast_to(np.tile(LEVELS, 50)[:, None, None], (200, 8, 8))
    rows = run_model(model, npz(tmp_path / "a.npz", x=x))
    assert [row.label for row in rows] == ["night", "night", "day", "day"] * 50
    assert [row.image for row in rows] == [str(i) for i in range(200)]
    assert compute_accuracy(rows) is None
    assert (
        compute_accuracy(run_model(model, npz(tmp_path / "b.npz", x_test=x, y_test=np.tile([0, 1, 1, 1], 50)))) == 0.75
    )


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
        assert [row.label for row in run_model(model, source)] == ["day", "day"]
    else:
        with pytest.raises(ModelError, match=said):
            run_model(model, source)


def test_what_is_printed_tells_wrong_answers_and_the_share_of_right_ones(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = npz(tmp_path / "a.npz", x=np.broadcast_to(LEVELS[:2, None, None], (2, 4, 4)), y=np.array([0, 1]))
    assert print_predictions(model, source, "text") == 0
    assert capsys.readouterr().out.splitlines() == [
        "example  prediction  score  label",
        "0        night       0.461  night",
        "1        night       0.382  day",
        "score: the network's output for the predicted label, not a probability",
        "50.0% of 2 examples are classified correctly",
    ]
    print_predictions(model, source, "json")
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"] == 0.5
    assert Prediction(**told["images"][1]) == run_model(model, source)[1]


def test_a_trained_network_has_numbers_for_labels(tmp_path: Path) -> None:
    x = np.broadcast_to(LEVELS[:, None, None], (4, 4, 4))
    table = {"name": "cnn", "classes": 2, "input": {"channels": 1, "size": 4}}
    model = classifiers.write_classifier(tmp_path / "trained.onnx", facts={"network": json.dumps(table)})
    rows = run_model(model, npz(tmp_path / "a.npz", x=x, y=np.array([0, 0, 1, 1])))
    assert [(row.label, row.truth) for row in rows] == [("0", "0"), ("0", "0"), ("1", "1"), ("1", "1")]
    model = classifiers.write_classifier(
        tmp_path / "numbers.onnx", facts={"network": json.dumps({**table, "task": "regression"})}
    )
    with pytest.raises(ModelError, match="predicts regression: use a network that predicts classes"):
        run_model(model, tmp_path / "a.npz")


def test_what_cannot_be_classified_says_why(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = npz(tmp_path / "good.npz", x=np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(ModelError, match="has no labels in its metadata: use a file written by `fedquilt"):
        run_model(classifiers.write_classifier(tmp_path / "other.onnx", facts={}), good)
    with pytest.raises(ModelError, match=r"absent\.onnx: the file cannot be read"):
        run_model(tmp_path / "absent.onnx", good)
    with pytest.raises(DataError, match="does not exist: name a folder or a file of"):
        run_model(model, tmp_path / "absent")
    with pytest.raises(DataError, match="has no files that the network reads"):
        run_model(model, empty)
    with pytest.raises(DataError, match="name their array 'x_test' or 'x'"):
        run_model(model, npz(tmp_path / "a.npz", z=np.zeros(3)))
    with pytest.raises(DataError, match="the labels are not 2 integers from 0 to 1"):
        run_model(model, npz(tmp_path / "b.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 2])))
    with pytest.raises(DataError, match=r"cannot read .*c\.npz"):
        run_model(model, npz(tmp_path / "c.npz", x=np.array([{}, {}])))
    (empty / "broken.png").write_bytes(b"no png")
    pytest.importorskip("PIL", reason="a damaged image is told by Pillow")
    with pytest.raises(DataError, match=r"cannot read the image .*broken\.png"):
        run_model(model, empty)

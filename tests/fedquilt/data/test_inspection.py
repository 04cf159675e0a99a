"""What inspection finds in data, and the tables that it writes for a job."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from example_files import needs_torchvision

from fedquilt.core import DataError
from fedquilt.data import examples, inspection
from fedquilt.data.inspection import inspect_data
from fedquilt.data.readers import images
from fedquilt.data.reading_settings import complete_data_table
from fedquilt.data.spec import DataSpec

HEAD = "customer_id,email,country,empty,age,plan,income,stays"
ROWS = [
    "7,a@x,FR,,31,pro,1000,yes",
    "3,b@x,FR,,,basic,2500,no",
    "9,c@x,FR,,45,,1500,yes",
    "4,d@x,FR,,39,basic,2500,no",
    "5,e@x,FR,,52,pro,1500,yes",
    "1,f@x,FR,,28,basic,2000,no",
]


@pytest.fixture
def customers(tmp_path: Path) -> str:
    (tmp_path / "own.csv").write_text("\n".join([HEAD, *ROWS]) + "\n")
    return str(tmp_path / "own.csv")


def test_a_table_with_words_gaps_ids_and_addresses(customers):
    found = inspect_data(customers, "stays")
    assert found.data == {
        "path": customers,
        "y": "stays",
        "x": ["age", "plan", "income"],
        "labels": ["no", "yes"],
        "categories": {"plan": "auto"},
        "fill": {"age": 39.0, "plan": 0.0},
    }
    assert (found.shape, found.outputs, found.examples, found.input) == ((4,), 2, 6, {"standardise": True})
    assert found.notes == (
        f"{customers}: 6 examples",
        "numbers: age, income",
        "categories, an input for each word: plan (2)",
        "left out: customer_id (looks like ids), email (looks like personal data), country (has only one value), "
        "empty (is empty)",
        "missing: age in 1 of 6 rows, filled with the median 39",
        "missing: plan in 1 of 6 rows, no category",
        "numbers are standardised: mean 0, standard deviation 1",
        "predicted: 2 classes (no 3, yes 3)",
    )


def test_its_tables_read_the_file(customers):
    read = examples.load_split(DataSpec.parse(complete_data_table(inspect_data(customers, "stays").data)))
    assert read.x[1:3].tolist() == [[39, 1, 0, 2500], [45, 0, 0, 1500]]
    assert read.y.tolist() == [1, 0, 1, 0, 1, 0]


def test_numbers_to_predict_are_scaled(tmp_path):
    lines = [f"{number % 3 / 2},{number * 10}" for number in range(25)]
    (tmp_path / "own.csv").write_text("\n".join(["a,price", *lines]) + "\n")
    found = inspect_data(str(tmp_path / "own.csv"), "price")
    assert (found.data["task"], found.data["target"], found.outputs) == (
        "regression",
        {"mean": [120.0], "std": [72.111]},
        1,
    )
    y = examples.load_split(DataSpec.parse(found.data)).y
    assert y.shape == (25, 1)
    assert y[[0, 12], 0] == pytest.approx([-120 / 72.111, 0])


@pytest.mark.parametrize(
    ("words", "labels"),
    [(["0", "1", "2"], None), (["1", "2", "3"], ["1", "2", "3"]), (["0.0", "10.0", "9.0"], ["0.0", "9.0", "10.0"])],
)
def test_classes_that_are_numbers_are_named_unless_they_are_counted_from_0(tmp_path, words, labels):
    lines = [f"{row % 4},{words[row % 3]}" for row in range(12)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y", *lines]) + "\n")
    found = inspect_data(str(tmp_path / "own.csv"))
    assert found.data.get("labels") == labels
    assert found.outputs == 3


def test_labels_that_differ_only_in_case_are_noted(tmp_path):
    lines = [f"{row},{('Iris', 'iris', 'rose')[row % 3]}" for row in (0, 1, 2, 5, 4, 3, 6)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y", *lines]) + "\n")
    note = "labels Iris and iris differ only in case: write them alike if they are one class"
    assert note in inspect_data(str(tmp_path / "own.csv")).notes


def test_columns_with_the_same_problem_are_named_together(tmp_path):
    (tmp_path / "own.csv").write_text("a;b;y\n1,5;2,5;0\n2,5;3,5;1\n")
    problem = re.escape(f"has no usable input column (a, b ({inspection.COMMA_PROBLEM})): add others")
    with pytest.raises(DataError, match=problem):
        inspect_data(str(tmp_path / "own.csv"))


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (range(40, 52), "looks like ids"),
        ([f"2024-01-{day:02d}" for day in range(1, 13)], "looks like dates"),
        ([f"{day}.3.2024 10:30" for day in (1, 2, 3)] * 9, "looks like dates"),
        ([f"note {number}" for number in range(12)], "looks like ids, names or texts"),
        ([f"{number},5" for number in range(12)], inspection.COMMA_PROBLEM),
        (["1,5", "2", "2,5"] * 4, inspection.COMMA_PROBLEM),
    ],
)
def test_a_column_that_no_network_learns_from_is_left_out(tmp_path, numbers, why):
    lines = [f"{row % 4};{value};{row % 2}" for row, value in enumerate(numbers)]
    (tmp_path / "own.csv").write_text("\n".join(["a;b;y", *lines]) + "\n")
    found = inspect_data(str(tmp_path / "own.csv"))
    assert found.data["x"] == ["a"]
    assert f"left out: b ({why})" in found.notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1,5", "2", "2,5"], "column 'y' has numbers with a decimal comma"),
        (["0", "1", "1.0"], "1 and 1.0 are the same number: write each class in one way"),
        (["0", "1", "inf"], "4 of 12 labels are NaN or infinity: leave these examples out"),
    ],
)
def test_labels_of_a_table_that_are_written_in_two_ways_are_refused(tmp_path, words, said):
    lines = [f"{row % 4};{words[row % 3]}" for row in range(12)]
    (tmp_path / "own.csv").write_text("\n".join(["a;y", *lines]) + "\n")
    with pytest.raises(DataError, match=said):
        inspect_data(str(tmp_path / "own.csv"))


def test_many_classes_that_count_from_0_need_no_names(tmp_path):
    lines = [f"{row % 7},{row % 300}" for row in range(6000)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y", *lines]) + "\n")
    found = inspect_data(str(tmp_path / "own.csv"))
    assert ("labels" in found.data, found.outputs) == (False, 300)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.arange(12).reshape(-1, 1) % 3, r"shape \(12, 1\), but a class is one label .*: save y\.reshape\(-1\)"),
        (np.array([["cat"], ["dog"]] * 6), r"shape \(12, 1\), but a class is one label .*: save y\.reshape\(-1\)"),
        (np.eye(3)[np.arange(12) % 3], r"shape \(12, 3\) with exactly one 1 in each row.*: save y\.argmax\(axis=1\)"),
        (np.array([0.5, np.nan] * 6), "6 of 12 labels are NaN or infinity: leave these examples out"),
        (np.zeros((12, 2, 2)), r"labels have shape \(12, 2, 2\): save one label, or a row of them, for each"),
        (np.zeros(0), r"has no labels \(shape \(0,\)\): add an example with a label"),
    ],
)
def test_labels_of_an_array_that_fit_no_task_are_refused(tmp_path, y, said):
    np.savez(tmp_path / "own.npz", x=np.zeros((len(y), 2), np.float32), y=y)
    with pytest.raises(DataError, match=said):
        inspect_data(str(tmp_path / "own.npz"))


def test_truth_values_are_classes_and_names_may_stand_for_whole_numbers(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((12, 2), np.float32), y=np.arange(12) % 3 == 0)
    found = inspect_data(str(tmp_path / "own.npz"))
    assert found.data["labels"] == ["False", "True"]
    assert examples.load_split(DataSpec.parse(found.data)).y.tolist() == [1, 0, 0] * 4
    np.savez(tmp_path / "own.npz", x=np.zeros((12, 2), np.float32), y=np.arange(12) % 2)
    assert examples.load_split(DataSpec.parse(found.data)).y.tolist() == [0, 1] * 6
    with pytest.raises(DataError, match=r"label '0' is not in \[data\] labels \(1, 2\)"):
        examples.load_split(DataSpec.parse({**found.data, "labels": ["1", "2"]}))


def test_images_with_gaps_are_measured_without_them(tmp_path):
    x = np.full((12, 8, 8), 0.5, np.float32)
    x[::2, 0, 0] = 0.50001
    x[3, 1, 1] = np.nan
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(12) % 2)
    found = inspect_data(str(tmp_path / "own.npz"))
    assert (found.data["fill"], found.input["mean"]) == (0.5, [0.5])
    assert 0 < found.input["std"][0] < 1e-5
    np.savez(tmp_path / "own.npz", x=np.full_like(x, np.nan), y=np.arange(12) % 2)
    with pytest.raises(DataError, match="all inputs of 12 examples are NaN"):
        inspect_data(str(tmp_path / "own.npz"))


def test_whole_numbers_with_a_sign_are_no_images_and_a_number_alone_is_no_example(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.arange(12 * 64).reshape(12, 8, 8), y=np.arange(12) % 2)
    assert inspect_data(str(tmp_path / "own.npz")).input == {"standardise": True}
    np.savez(tmp_path / "own.npz", x=np.arange(12.0), y=np.arange(12) % 2)
    with pytest.raises(DataError, match=r"examples have shape \(12,\): save x\.reshape\(-1, 1\)"):
        inspect_data(str(tmp_path / "own.npz"))


def test_arrays_with_words_for_labels(tmp_path):
    y = np.array(["rose", "iris", "lily"] * 4)
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    x[0, 1] = np.nan
    np.savez(tmp_path / "own.npz", sizes=x, kind=y)
    found = inspect_data(str(tmp_path / "own.npz"), "kind")
    assert found.data == {
        "path": str(tmp_path / "own.npz"),
        "y": "kind",
        "x": "sizes",
        "labels": ["iris", "lily", "rose"],
        "fill": 12.0,
    }
    assert "missing: 1 of 24 numbers, filled with the median of all, 12" in found.notes
    assert examples.load_split(DataSpec.parse(found.data)).y.tolist() == [2, 0, 1] * 4
    np.savez(tmp_path / "test.npz", sizes=np.zeros((1, 2)), kind=np.array(["oak"]))
    with pytest.raises(DataError, match=r"label 'oak' is not in \[data\] labels \(iris, lily, rose\)"):
        examples.load_split(DataSpec.parse({**found.data, "path": str(tmp_path / "test.npz")}))


def test_test_pictures_of_another_size_are_scaled_as_the_others(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for split, side in (("train", 20), ("test", 24)):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            image.new("L", (side, side), 3 * ord(name) - 200).save(tmp_path / split / name / "1.png")
    found = inspect_data(str(tmp_path))
    assert (found.data["labels"], found.data["size"]) == (["a", "b"], 20)
    assert examples.load_split(DataSpec.parse({**found.data, "split": "test"})).x.shape[1:3] == (20, 20)


def test_one_picture_of_another_size_is_found_and_does_not_shrink_the_others(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(300):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        side = 2 if number == 299 else 24
        image.new("L", (side, side), number % 250).save(tmp_path / "ab"[number % 2] / f"{number}.png")
    assert inspect_data(str(tmp_path)).data["size"] == 24


def test_a_picture_whose_header_claims_too_many_pixels_is_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("L", (8, 8)).save(tmp_path / "a" / "1.png")
    head = bytearray((tmp_path / "a" / "1.png").read_bytes())
    head[16:24] = struct.pack(">II", 20000, 20000)
    head[29:33] = struct.pack(">I", zlib.crc32(head[12:29]))
    (tmp_path / "a" / "1.png").write_bytes(head)
    for look in (images.measure_sizes, images.require_supported_files, images.measure_grey_depth):
        with pytest.raises(DataError, match=r"cannot read the image .*1\.png: .*400000000 pixels"):
            look([tmp_path / "a" / "1.png"])


def test_a_data_set_of_scikit_learn_by_name():
    pytest.importorskip("sklearn")
    found = inspect_data("sklearn/iris")
    assert (found.data, found.shape, found.outputs) == ({"dataset": "sklearn/iris"}, (4,), 3)
    assert inspect_data("sklearn/diabetes").data["task"] == "regression"
    with pytest.raises(DataError, match="scikit-learn has no data set 'irs'; did you mean 'iris'"):
        inspect_data("sklearn/irs")


@needs_torchvision
def test_a_data_set_of_torchvision_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = Path("torchvision/MNIST/raw")
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, 20, 28, 28) + bytes(range(20)) * 784
        )
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 20) + bytes([0, 1]) * 10)
    found, files = inspect_data("torchvision/MNIST"), inspect_data(str(raw))
    assert found.data == {"dataset": "MNIST", "path": "torchvision", "download": True}
    assert (found.input, found.examples, found.outputs) == (files.input, 20, 2)
    assert (files.data, files.input["size"]) == ({"path": str(raw)}, 28)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("", "name the column to predict, as in --label stays; columns: customer_id"),
        ("stay", r"has no column 'stay' .*; did you mean 'stays'\? It has "),
        ("age", "column 'age' is missing in 1 of 6 rows: leave these rows out"),
        ("email", "6 different labels in 6 examples are too many for classes"),
    ],
)
def test_a_label_that_cannot_be_predicted_is_named_with_the_fix(customers, label, said):
    with pytest.raises(DataError, match=said):
        inspect_data(customers, label)


def test_data_that_are_not_there_or_have_no_columns(tmp_path):
    with pytest.raises(DataError, match=r"no data at none\.csv: name a CSV"):
        inspect_data("none.csv")
    with pytest.raises(DataError, match="has no images"):
        inspect_data(str(tmp_path), "kind")
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
        image.new("L", (8, 8)).save(tmp_path / name / "1.png")
    with pytest.raises(DataError, match="has no columns to choose from: leave --label out"):
        inspect_data(str(tmp_path), "kind")

"""Rows of CSV and Parquet files: what is read, how users are kept apart, and what is said of a bad file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.views import scores
from fedquilt.core import DataError, JobError
from fedquilt.data import examples, readers, reading_settings
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import settings as agent
from fedquilt.formats import toml
from fedquilt.tools.simulation.agents import FleetPlan


def spec(path: Path, **keys: Any) -> DataSpec:
    return DataSpec.parse({"path": str(path), **keys})


def written(folder: Path, text: str | bytes, name: str = "pumps.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"x": ["a", "a"]}, "x: 'a'"),
        ({"x": ["a", "b"], "y": ["c", "d", "c"], "task": "regression"}, "y: 'c'"),
        ({"labels": ["on", "off", "on"]}, "labels: 'on'"),
        ({"categories": {"colour": ["red", "red"]}}, r"categories\.colour: 'red'"),
    ],
)
def test_what_is_named_twice_is_refused(keys, where):
    """A column would be taken twice, and of a word's two classes or inputs one would never occur."""
    with pytest.raises(JobError, match=rf"\[data\]: {where} is named twice; name it once"):
        spec(Path("pumps.csv"), **keys)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_separators_and_a_byte_order_mark_are_understood(mark, tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf" + "x,y\r\n1,0\r\n\r\n2,1\r\n".replace(",", mark).encode())
    reader = readers.open_reader(spec(path))
    assert reader.y.tolist() == [0, 1]
    assert reader.take(np.array([1])).tolist() == [[2.0]]


def test_a_parquet_file_is_read_as_a_csv_file_is(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"age": [1.5, 2.0, None, 4.0], "ok": [True, False, True, True], "failed": [0, 1, 1, 0]})
    parquet.write_table(table, tmp_path / "pumps.parquet")
    reader = readers.open_reader(spec(tmp_path / "pumps.parquet", y="failed", fill=9))
    assert reader.take(np.arange(4)).tolist() == [[1.5, 1], [2, 0], [9, 1], [4, 1]]
    assert reader.y.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match=r"pumps\.parquet, row 3, column 'age': the value is missing"):
        readers.open_reader(spec(tmp_path / "pumps.parquet", y="failed"))
    with pytest.raises(DataError, match=r"cannot read .*bad\.parquet"):
        readers.open_reader(spec(written(tmp_path, "no", "bad.parquet")))


def test_labels_are_words_numbers_or_several(tmp_path):
    path = written(tmp_path, "x,kind,a,b,faults\n1,on,0,1,hot;loose\n2,off,1,0,\n")
    of = {"x": "x"}
    assert readers.open_reader(spec(path, **of, y="kind", labels=["off", "on"])).y.tolist() == [1, 0]
    numbers = readers.open_reader(spec(path, **of, y=["a", "b"], task="regression")).y
    assert (numbers.tolist(), numbers.dtype) == ([[0, 1], [1, 0]], np.float32)
    labels = readers.open_reader(spec(path, **of, y=["a", "b"], task="labels")).y
    assert (labels.tolist(), labels.dtype) == ([[0, 1], [1, 0]], np.uint8)
    words = readers.open_reader(spec(path, **of, y="faults", task="labels", labels=["hot", "wet", "loose"])).y
    assert words.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_windows_lie_within_one_users_rows(tmp_path):
    rows = "\n".join(f"{'a' if i < 5 else 'b'},{i},{int(i >= 3)}" for i in range(9))
    path = written(tmp_path, f"user,x,y\n{rows}\n")
    windows = {"steps": 3, "stride": 2}
    reader = readers.open_reader(spec(path, x="x", column="user", windows=windows))
    assert reader.shape == (3, 1)
    assert reader.take(np.arange(len(reader.y)))[:, :, 0].tolist() == [[0, 1, 2], [2, 3, 4], [5, 6, 7]]
    assert reader.y.tolist() == [0, 1, 1]
    assert reader.owner.tolist() == ["a", "a", "b"]
    numbers = readers.open_reader(spec(path, x="x", task="regression", windows={"steps": 9}))
    assert numbers.y.tolist() == [[1.0]]
    with pytest.raises(DataError, match=r"no 6 consecutive rows of one user \(9 rows\): lower \[data\.windows\] steps"):
        readers.open_reader(spec(path, x="x", column="user", windows={"steps": 6}))


# -- splits by a user's column --------------------------------------------------------------------


def test_each_device_has_all_rows_of_its_own_users(tmp_path):
    users = ["10", "9", "2", "10", "2", "9", "1", "1"]
    path = written(tmp_path, "u,x,y\n" + "".join(f"{user},{row},0\n" for row, user in enumerate(users)))
    found = examples.load_all_shares(spec(path, x="x", column="u", partition="column", shares=2, held=0.5))
    rows = [sorted([*train.x[:, 0].tolist(), *held.x[:, 0].tolist()]) for train, held in found]
    assert rows == [[2, 4, 6, 7], [0, 1, 3, 5]]  # users 1 and 2, then 9 and 10
    arrays = {"x": np.arange(8), "y": np.zeros(8, int), "u": np.array(users)}
    np.savez(tmp_path / "same.npz", **arrays)
    again = examples.load_all_shares(spec(tmp_path / "same.npz", column="u", partition="column", shares=2, held=0.5))
    assert [sorted([*train.x.tolist(), *held.x.tolist()]) for train, held in again] == rows


def test_fewer_users_than_devices_are_an_error(tmp_path):
    """As a device without examples would be; so is a table of users that there is not."""
    path = written(tmp_path, "u,x,y\na,1,0\nb,2,1\n")
    with pytest.raises(DataError, match=r"column 'u' has 2 users for 3 devices: simulate at most 2"):
        examples.load_all_shares(spec(path, column="u", partition="column", shares=3))
    with pytest.raises(JobError, match='partition = "column" requires column'):
        spec(path, partition="column")
    with pytest.raises(DataError, match=r"has no column 'who' \(\[data\] column\); it has u, x, y"):
        readers.open_reader(spec(path, column="who"))


# -- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        (
            "x,y\n1,0\ntwo,1\n",
            {},
            r"a\.csv, line 3, column 'x': 'two' is not a number: .*categories = { x = \[\"1\", \"two\"\]",
        ),
        (
            "x,y\n1,0\n,1\n",
            {},
            r"line 3, column 'x': the value is missing: write a number or leave the row out, or train with",
        ),
        ("x,y\n1,0\ninf,1\n", {}, r"line 3, column 'x': 'inf' is not a finite number"),
        ("x,y\n1,0\n2\n", {}, r"a\.csv, line 3: 1 values for the 2 columns of line 1"),
        ("x,x,y\n1,0,1\n", {}, r"line 1: two columns are called 'x'"),
        ("x,label\n1,0\n", {}, r"a\.csv has no column 'y' \(\[data\] y\); it has x, label"),
        ("temp,y\n1,0\n", {"x": ["tmp"]}, r"has no column 'tmp' \(\[data\] x\); did you mean 'temp'\? It has temp, y"),
        ("x,y\n", {}, r"a\.csv has a header but no rows"),
        ("", {}, r"a\.csv is empty"),
        ('x,y\n1,0\n"2,1\n3,1\n', {}, r"a\.csv, line 3: unexpected end of data: correct this line's quotes"),
        ("x;y\n0,5;1\n", {}, r"a\.csv, line 2, column 'x': '0,5' is not a number: write it with a point, 0\.5$"),
        ('x,y\n"1,0\n', {}, r"a\.csv, line 2: unexpected end of data: correct this line's quotes"),
        (
            "x,y\n1,hot\n2,cold\n",
            {},
            r"line 2, column 'y': 'hot' is not the number of a class: .*labels = \[\"cold\", \"hot\"\]",
        ),
        ("x,y\n1,0.5\n", {}, r"'0\.5' is not the number of a class: .*task = 'regression'"),
        ("x,y\n1,wet\n", {"labels": ["dry"]}, r"line 2, column 'y': 'wet' is not in \[data\] labels \(dry\)"),
        ("x,y\n1,hot\n", {"task": "regression"}, r"line 2, column 'y': 'hot' is not a number"),
        ("x,a,b\n1,0,2\n", {"task": "labels", "y": ["a", "b"]}, r"line 2, column 'b': '2' is neither 0 nor 1"),
        (
            "x,y\n1,a;b\n",
            {"task": "labels", "labels": ["a"]},
            r"line 2, column 'y': 'b' is not in \[data\] labels \(a\)",
        ),
        ("x,y\n1,a\n", {"task": "labels"}, r"list columns of 0 and 1 as \[data\] y, or the words"),
        (
            "c,y\nred,0\n",
            {"categories": {"c": ["blue"]}},
            r"line 2, column 'c': 'red' is not a category \(blue\)",
        ),
        ("x,y\n1,0\n".encode("utf-16"), {}, r"a\.csv is not text in UTF-8 but probably in UTF-16: .*iconv -f UTF-16"),
        ("größe,y\n1,0\n".encode("latin-1"), {}, r"a\.csv is not text in UTF-8 \(perhaps Latin-1\): .*iconv -f LATIN1"),
        (b"x,y\n" + b"1,0\n" * 9000 + "ä,1\n".encode("latin-1"), {}, r"a\.csv is not text in UTF-8"),
    ],
)
def test_a_bad_table_is_told_with_line_column_and_mend(text, keys, said, tmp_path):
    with pytest.raises(DataError, match=said):
        readers.open_reader(spec(written(tmp_path, text, "a.csv"), **keys))


def test_a_table_of_one_split_has_no_test_set(tmp_path):
    """So that nobody is tested on what devices train on; a folder has a table for each split."""
    path = written(tmp_path, "x,y\n1,0\n", "train.csv")
    with pytest.raises(DataError, match=r"is a single table without a split 'test': put train\.csv and test\.csv"):
        readers.open_reader(spec(path, split="test"))
    assert len(readers.open_reader(spec(tmp_path)).y) == 1


@pytest.mark.parametrize("keys", [{"partition": "dirichlet"}, {"per_class": 3}, {"groups": [[0], [1]]}])
def test_what_goes_by_classes_is_refused_for_other_tasks(keys):
    with pytest.raises(JobError, match=r"task = 'regression' has no classes, which .* requires"):
        spec(Path("a.csv"), task="regression", **keys)


def test_numbers_and_labels_come_from_arrays_too(tmp_path):
    """An .npz has labels of the same shapes; NaN among inputs may be filled."""
    x = np.array([[1.0, np.nan], [2.0, 3.0]], np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0.5, 1.5]))
    train = examples.load_split(spec(tmp_path / "a.npz", task="regression", fill=7))
    assert train.x.tolist() == [[1, 7], [2, 3]]
    assert train.y.tolist() == [[0.5], [1.5]]
    with pytest.raises(DataError, match=r"\(for numbers to predict set \[data\] task = 'regression'\)"):
        readers.open_reader(spec(tmp_path / "a.npz"))
    with pytest.raises(DataError, match=r"task = 'labels' requires 0 or 1, not 0\.5"):
        readers.open_reader(spec(tmp_path / "a.npz", task="labels"))
    with pytest.raises(DataError, match=r"or set .* fill to a number"):
        examples.load_split(spec(tmp_path / "a.npz", task="regression"))


# -- test sets ------------------------------------------------------------------------------------


def test_a_test_table_of_its_own_is_read_as_the_devices_is(tmp_path):
    written(tmp_path, "a,kind\n1,on\n2,off\n", "all.csv")
    written(tmp_path, "a,kind\nNA,off\n", "other.csv")
    how = {"y": "kind", "labels": ["on", "off"], "fill": 5.0}
    data = {"path": str(tmp_path / "all.csv"), **how, "partition": "iid", "held": 0.5}
    job = settings.parse_job(
        {"name": "j", "method": "fedavg", "data": data, "test": {"path": str(tmp_path / "other.csv")}}
    )
    table = scores.make_test_table(job)
    assert table == {"path": str(tmp_path / "other.csv"), "split": "train", **how}
    found = examples.load_split(DataSpec.parse(table))
    assert (found.x.tolist(), found.y.tolist()) == ([[5.0]], [1])


def test_the_test_split_of_a_folder_of_tables_keeps_its_columns(tmp_path):
    table = {"name": "j", "method": "fedavg", "data": {"path": str(tmp_path), "y": "kind", "labels": ["on"]}}
    found = scores.make_test_table(settings.parse_job(table))
    assert (found["split"], found["y"], found["labels"]) == ("test", "kind", ["on"])
    arrays = {**table, "data": {"path": str(tmp_path / "a.npz"), "y": "kind"}}
    with pytest.raises(JobError, match=r"y is missing: .* y = 'kind' for its own split"):
        scores.make_test_table(settings.parse_job(arrays))


# -- words that a job leaves to its data ----------------------------------------------------------


JOB = """name = "pumps"
method = "fedavg"
engine = "numpy"
[model]
name = "mlp"
inputs = 4
hidden = []
classes = 2
[data]
path = "pumps"
y = "failed"
x = ["age", "material"]
categories = { material = "auto" }
fill = 0
partition = "iid"
[fleet]
devices = 4
"""


def left_to_the_data(folder: Path) -> Path:
    """A job file, and beside it a training and a test split; the latter lacks words that the former has."""
    (folder / "pumps").mkdir()
    rows = "".join(f"{number},{word},{number % 2}\n" for number, word in enumerate(["steel", "NA", "iron", "bronze"]))
    written(folder / "pumps", f"age,material,failed\n{rows}", "train.csv")
    written(folder / "pumps", "age,material,failed\n1,iron,0\n", "test.csv")
    return written(folder, JOB, "job.toml")


def test_words_that_are_left_to_the_data_are_those_of_the_training_split(tmp_path):
    job = settings.load_job(left_to_the_data(tmp_path))
    assert job.data["categories"] == {"material": ["bronze", "iron", "steel"]}
    tables = FleetPlan(job, tmp_path / "bundle", tmp_path / "runs").make_agent_tables()
    assert [table["data"]["categories"] for table in tables] == [job.data["categories"]] * 4
    devices = [examples.load_share(DataSpec.parse(table["data"])) for table in tables]
    assert {train.x.shape[1] + held.x.shape[1] for train, held in devices} == {8}
    test = examples.load_split(DataSpec.parse(scores.make_test_table(job)))
    assert test.x.tolist() == [[1, 0, 1, 0]]
    written(tmp_path / "pumps", "age,material,failed\n1,wood,0\n", "test.csv")
    with pytest.raises(DataError, match=r"'wood' is not a category \(bronze, iron, steel\)"):
        examples.load_split(DataSpec.parse(scores.make_test_table(job)))


def test_the_bundle_and_a_job_in_python_have_the_words_too(tmp_path, capsys, monkeypatch):
    file = left_to_the_data(tmp_path)
    assert main(["prepare", str(file)]) == 0
    line = 'categories = { material = ["bronze", "iron", "steel"] }'
    assert f"for [data] of each device's agent.toml:\n  {line}\n" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    keys = {"y": "failed", "x": ["age", "material"], "categories": {"material": "auto"}}
    job = fq.Job(method="fedavg", data=fq.Data("pumps", **keys))
    assert job.data["categories"] == {"material": ["bronze", "iron", "steel"]}


def test_the_line_for_agent_toml_quotes_columns_and_words_as_toml_does():
    categories = {"Größe": ["S", 'the "L"'], "a.b; c": ["1\n2"], "plain-1": ["ä"]}
    (line,) = reading_settings.format_agent_settings({"categories": categories})
    assert toml.parse_toml(line, "agent.toml") == {"categories": categories}


def test_a_board_has_to_list_its_words():
    table = {"device": "a", "home": "a", "data": {"path": "own.csv", "categories": {"material": "auto"}}}
    with pytest.raises(JobError, match=r'categories\.material = "auto" is only possible in a job file: list the words'):
        agent.parse_settings(table)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("age,kind,failed\n1,a,0\n", "has no column 'material'"),
        ("age,material,failed\n1,NA,0\n", "column 'material' is empty"),
        (
            "age,material,failed\n" + "".join(f"1,name{row},0\n" for row in range(300)),
            "has 300 different words, more than 256: leave the column out",
        ),
    ],
)
def test_what_makes_no_category_is_said(rows, said, tmp_path):
    file = left_to_the_data(tmp_path)
    written(tmp_path / "pumps", rows, "train.csv")
    with pytest.raises(DataError, match=said):
        settings.load_job(file)

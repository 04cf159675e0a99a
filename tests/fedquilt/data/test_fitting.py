"""Data that a network cannot take are told before anything runs, not by every board."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import DataError
from fedquilt.data import compatibility
from fedquilt.data.readers import ExampleReader
from fedquilt.data.readers.base import describe_class_problem
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml

MLP = {"name": "mlp", "inputs": 16, "hidden": [4], "classes": 3}
PICTURES = {"name": "plain", "channels": 1, "classes": 3, "input": {"channels": 1, "size": 8}}
SERIES: dict[str, Any] = {
    "input": {"mean": [0.0], "std": [1.0]},
    "labels": ["a", "b", "c"],
    "donors": {"wide": {"blocks": ["wide.0"]}},
    "blocks": {"wide.0": {"in_shape": [20, 3]}},
}


def stored(path: Path, *shape: int, most: int = 2) -> DataSpec:
    """A file of twelve examples of this shape, with labels up to `most`."""
    np.savez(path, x=np.zeros((12, *shape), np.float32), y=np.arange(12) % (most + 1))
    return DataSpec(path=str(path))


@pytest.mark.parametrize(
    ("meta", "shape", "most", "said"),
    [
        ({"network": MLP}, (4, 4), 2, ""),
        ({"network": MLP}, (4, 5), 2, r"\(4, 5\) have 20 values each, but network 'mlp' takes 16"),
        ({"network": MLP}, (4, 4), 3, r"labels run from 0 to 3, but network 'mlp' predicts 3 classes \(0 to 2\)"),
        ({"network": PICTURES}, (5, 7, 3), 2, ""),
        ({"network": PICTURES}, (64,), 2, r"shape \(64,\), but the job's \[input\] is for images"),
        ({"network": {"name": "exits", "of": PICTURES}}, (8, 8), 3, "predicts 3 classes"),
        ({"network": {"name": "mine:Net"}}, (2, 3, 4, 5), 99, ""),
        (
            {"input": {"channels": 1, "size": 8}, "labels": ["a", "b"], "donors": {}},
            (8, 8),
            2,
            "has labels for 2 classes",
        ),
        (SERIES, (20, 3), 2, ""),
        (SERIES, (24, 3), 2, r"shape \(24, 3\), but donor 'wide' takes shape \(20, 3\)"),
    ],
)
def test_what_headers_and_labels_tell_is_told(tmp_path, meta, shape, most, said):
    """With the file, what it holds and what is taken; a network of a user's own may take anything."""
    spec = stored(tmp_path / "own.npz", *shape, most=most)
    if not said:
        compatibility.open_compatible_data(meta, spec)
        return
    with pytest.raises(DataError, match=f"own.npz: .*{said}"):
        compatibility.open_compatible_data(meta, spec)


@pytest.mark.parametrize(
    ("task", "y", "said"),
    [
        ("classes", np.full(12, 1), "all 12 training examples have class 1"),
        ("regression", np.full(12, 2.5), r"all 12 training examples have label 2\.5"),
        ("labels", np.tile([1, 0, 1], (12, 1)), "all 12 training examples have label 1, 0, 1"),
    ],
)
def test_one_label_for_all_training_examples_is_refused(tmp_path, task, y, said):
    """A constant would score 100 %. A test set may have one label alone; so may a device's share."""
    np.savez(tmp_path / "own.npz", x=np.zeros((12, 16)), y=y, x_test=np.zeros((12, 16)), y_test=y)
    table = {"path": str(tmp_path / "own.npz"), "task": task}
    meta = {"network": {**MLP, "task": task, "classes": y.shape[1] if y.ndim > 1 else 3 if task == "classes" else 1}}
    with pytest.raises(DataError, match=rf"own.npz: {said}, so there is nothing to learn"):
        compatibility.open_compatible_data(meta, DataSpec.parse(table))
    compatibility.open_compatible_data(meta, DataSpec.parse({**table, "split": "test"}))


@pytest.mark.parametrize("words", [["simulate", "--link", "embedded"], ["simulate"], ["compare", "--seeds", "0"]])
def test_commands_refuse_data_that_do_not_fit_and_leave_no_run(tmp_path, capsys, words):
    first = tensors.encode_tensors(numpy_engine.init_tensors(MLP, seed=0))
    job_bundle.write_bundle(tmp_path / "job.bundle", {"network": MLP, "flops": 100}, {"model": first})
    stored(tmp_path / "own.npz", 4, 5)
    table = {"name": "a", "method": "fedavg", "engine": "numpy", "data": {"path": "own.npz", "partition": "iid"}}
    (tmp_path / "job.toml").write_text(toml.format_toml(table))
    home = ["--out" if words[0] == "compare" else "--home", str(tmp_path / "out")]
    assert main([words[0], str(tmp_path / "job.toml"), *words[1:], *home]) == DataError.exit_code
    told = capsys.readouterr()
    assert told.err.count("have 20 values each") == 1
    assert "round" not in told.out
    if words[0] == "simulate":
        with Store(tmp_path / "out") as store:
            assert store.readable_jobs() == []


def test_prepare_says_it_where_the_data_are_here(tmp_path, capsys):
    """Where they lie on the boards alone, it cannot be said."""
    pytest.importorskip("torch", reason="preparing builds the network")
    stored(tmp_path / "own.npz", 4, 5)
    table = {"name": "a", "method": "fedavg", "model": MLP, "data": {"path": "own.npz"}}
    (tmp_path / "job.toml").write_text(toml.format_toml(table))
    assert main(["prepare", str(tmp_path / "job.toml")]) == DataError.exit_code
    assert "have 20 values each" in capsys.readouterr().err
    (tmp_path / "own.npz").unlink()
    assert main(["prepare", str(tmp_path / "job.toml")]) == 0


LABELS = {
    "counted from 1": ([1, 2, 3], "the labels are counted from 1: subtract 1 from each label"),
    "a share of those": ([1, 3], "the labels are counted from 1: subtract 1 from each label"),
    "-1 and 1": ([-1, 1], "the labels are -1 and 1: write 0 for -1"),
    "gaps": ([0, 2, 5], "the labels have gaps: number the 3 classes from 0 to 2"),
    "below 0": ([-2, 0, 4], "there are labels below 0: number the 3 classes from 0 to 2"),
    "more classes": ([0, 1, 2, 3], "there are 4 classes: set [model] classes = 4, and prepare again"),
    "right": ([0, 2], ""),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_no_network_of_three_classes_takes_are_named_with_the_fix(case):
    """A table can name its classes in the job instead."""
    labels, said = LABELS[case]
    y = np.repeat(np.array(labels), 4)
    assert describe_class_problem(y, 3) == said
    in_table = describe_class_problem(y, 3, is_table=True)
    assert ("set [data] labels = " in in_table) == bool(said) * (case != "more classes")


def test_labels_of_a_table_work_once_the_job_names_them_as_the_error_says(tmp_path):
    for numbers, classes in (([1, 2, 3], 3), ([-1, 1], 2)):
        (tmp_path / "t.csv").write_text("p,y\n" + "\n".join(f"0.{n},{numbers[n % len(numbers)]}" for n in range(12)))
        spec, meta = (
            DataSpec(path=str(tmp_path / "t.csv")),
            {"network": {"name": "mlp", "inputs": 1, "classes": classes}},
        )
        with pytest.raises(DataError) as raised:
            compatibility.open_compatible_data(meta, spec)
        given = str(raised.value).split("set [data] labels = ")[1].split("]")[0] + "]"
        named = DataSpec(path=spec.path, labels=tuple(json.loads(given)))
        assert set(compatibility.open_compatible_data(meta, named).y) == set(range(classes))


def scaled(path: Path, factor: float) -> tuple[ExampleReader, DataSpec]:
    x = np.random.default_rng(0).normal(size=(60, 3)) * [1.0, factor, 0.0]
    np.savez(path, x=x, y=np.arange(60) % 3)
    spec = DataSpec(path=str(path))
    return compatibility.open_compatible_data({"network": {**MLP, "inputs": 3}}, spec), spec


def test_features_of_unequal_scales_are_warned_of_unless_the_network_standardises(tmp_path):
    large, small = scaled(tmp_path / "large.npz", 500.0), scaled(tmp_path / "small.npz", 50.0)
    (said,) = compatibility.data_warnings({"network": MLP}, *large)
    assert "features differ in scale by a factor of 374 (number 1 by 410, number 0 by 1.1)" in said
    assert said.endswith(": set [input] standardise = true, and prepare again")
    assert compatibility.data_warnings({"network": MLP}, *small) == []
    assert compatibility.data_warnings({"network": {**MLP, "input": {"mean": [0.0], "std": [1.0]}}}, *large) == []


def test_a_class_0_that_never_occurs_is_warned_of(tmp_path):
    np.savez(tmp_path / "one.npz", x=np.zeros((12, 3)), y=1 + np.arange(12) % 3)
    spec, meta = DataSpec(path=str(tmp_path / "one.npz")), {"network": {**MLP, "inputs": 3, "classes": 4}}
    (said,) = compatibility.data_warnings(meta, compatibility.open_compatible_data(meta, spec), spec)
    assert said.endswith("no example has class 0; the labels are counted from 1: subtract 1 from each label")

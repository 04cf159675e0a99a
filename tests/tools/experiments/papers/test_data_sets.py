"""Data sets that tables write as users have them, and the job of `simulate` for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import JobError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments.evaluation import load_test_set
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import data_sets


def test_a_fifth_of_the_rows_that_the_seed_draws_is_the_test_set() -> None:
    first, second = data_sets.split_rows(10, 0), data_sets.split_rows(10, 1)
    assert sorted([*first["train"], *first["test"]]) == list(range(10))
    assert (len(first["test"]), len(second["test"])) == (2, 2)
    assert first["test"].tolist() != second["test"].tolist()


@pytest.mark.parametrize(
    ("name", "shape", "classes"), [("customers", (11,), 2), ("series", (48, 2), 3), ("images", (28, 28, 3), 10)]
)
def test_the_job_is_that_of_simulate_and_reads_both_sets(
    tmp_path: Path, name: str, shape: tuple[int, ...], classes: int
) -> None:
    if name == "images":
        pytest.importorskip("PIL")
    job = data_sets.make_simulate_job(name, 0, tmp_path)
    train, test = examples.load_split(DataSpec.parse(job.data)), load_test_set(job)
    assert (train.x.shape[1:], test.x.shape[1:]) == (shape, shape)
    assert job.model["classes"] == len(np.unique(train.y)) == classes
    assert 0.19 < len(test) / (len(train) + len(test)) < 0.21
    assert (job.name, job.method, job.rounds) == ("job", "fedavg", 30)


def test_a_column_of_a_grid_may_be_a_data_set(tmp_path: Path) -> None:
    table = papers.load_tables()["tables"]
    result = papers.run_table(table, seeds=[0], rounds=2, columns=["customers"], rows=["simulate"], out=tmp_path)
    (run,) = result["columns"]["customers"]["simulate"]["runs"]
    (accuracy,) = result["columns"]["customers"]["simulate"]["values"]["test"]
    assert 0.5 < accuracy == run["marks"][-1]["test"]
    with pytest.raises(JobError, match="data set 'custmers' is unknown; did you mean 'customers'"):
        data_sets.make_simulate_job("custmers", 0, tmp_path)


def test_baselines_are_trained_on_the_columns_of_the_job(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    result = papers.run_table(
        papers.load_tables()["tables"], seeds=[0], columns=["diabetes"], rows=["linear", "forest"], out=tmp_path
    )
    values = {row: cell["values"]["test"] for row, cell in result["columns"]["diabetes"].items()}
    assert all(0.3 < value < 0.7 for (value,) in values.values())

"""Grids of jobs in TOML: what a table's jobs are, where its data lie, and what is said of a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.core import DataError, JobError
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import grid

GRID = """
about = "What it is."
[job]
name = "made"
method = "fedavg"
rounds = 10
params = { lr = 0.1, batch = 4 }
data = { path = "$digits" }
[axes.rate]
low = { job.params.lr = 0.01, shares.batch = 0.5 }
high.job.params.lr = 1.0
[axes.split]
iid.job.data.partition = "iid"
[rows]
plain = {}
pulled = { like = "plain", more = 2, job = { method = "fedprox", params.mu = 0.1 } }
short = { like = "pulled", fixed = true, job.rounds = 1 }
"""


def made(folder: Path, text: str = GRID) -> grid.GridTable:
    (folder / "made.toml").write_text(text)
    return grid.read_tables(folder / "made.toml")["made"]


def test_a_run_is_the_job_changed_by_its_axes_and_its_row(tmp_path: Path) -> None:
    found = made(tmp_path).fill_marks(None)
    assert list(found.columns) == ["low, iid", "high, iid"]
    points = found.columns["low, iid"]
    jobs = {name: found.make_job(points, row, 7, None) for name, row in found.rows.items()}
    assert jobs["plain"]["params"] == {"lr": 0.01, "batch": 5}
    assert jobs["pulled"]["params"] == {"lr": 0.01, "batch": 5, "mu": 0.1}
    assert [jobs[name]["rounds"] for name in ("plain", "pulled", "short")] == [10, 12, 3]
    assert jobs["plain"]["data"] == {"path": str(grid.DIGITS), "partition": "iid", "seed": 7}
    assert all(settings.parse_job(job).seed == 7 for job in jobs.values())
    fewer = [found.make_job(points, row, 7, 4) for row in found.rows.values()]
    assert [(job["rounds"], job["params"]["batch"]) for job in fewer] == [(4, 2), (6, 2), (3, 2)]


def test_tables_of_one_file_share_what_stands_outside_of_them(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        GRID + '[tables.first]\nseeds = [4]\n[tables.second]\nlike = "first"\njob.rounds = 3\nrows.pulled.more = 0\n'
    )
    first, second = (table.grid for table in grid.read_tables(tmp_path / "two.toml").values())
    assert (first.seeds, first.job["rounds"], first.rows["pulled"].more) == ((4,), 10, 2)
    assert (second.seeds, second.job["rounds"], second.rows["pulled"].more) == ((4,), 3, 0)
    assert second.rows["pulled"].job["method"] == "fedprox"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[colour]", r"made\.toml, table made: there is no key 'colour'; keys of the table: about, job, rows"),
        ("[rows.odd]\nmor = 1", r"made\.toml, table made: there is no key 'mor'; .*did you mean 'more'\?"),
        (
            "[[claims]]\nname = 'x'\nvalue = 'test'\nrow = 'plan'\nat_least = 0",
            r"no 'plan'; did you mean 'plain'\? There are: ",
        ),
        (
            "[[claims]]\nname = 'x'\nvalue = 'test'\nrow = 'plain'",
            r"the claim 'x' requires one of at_least and at_most",
        ),
        (
            "[[claims]]\nname = 'x'\nvalue = 'test'\ncolumns = ['lo']\nat_most = 1",
            r"column of the claim 'x': there is no",
        ),
        ("[axes.rate.mid]\npaper.plein.test = [1.0]", r"row of the paper's numbers in 'mid, iid': there is no 'plein'"),
        ("[[show]]\nvalue = 'tset'\ntitle = 'x'", r"value: there is no 'tset'; did you mean 'test'\? There are: "),
        ("[[show]]\nvalue = 'test@x'\ntitle = 'x'", r"value 'test@x': a number of rounds is wanted after @"),
        ("[[show]]\nvalue = 'metric'\ntitle = 'x'", r"value: there is no 'metric'; there are: rounds_to, "),
        (
            "[[show]]\nvalue = 'rounds_to'\ntitle = 'x'",
            r"'rounds_to': column 'low, iid' has no target: write target = 0\.9 in \[axes\.AXIS\.POINT\]",
        ),
        ("[rows.odd]\nalone = -1", r"rows\.odd\.alone = -1: write a number of devices, at least 0"),
        ("[rows.odd]\naway = -2", r"rows\.odd\.away = -2: write a number of devices"),
        ("[rows.odd]\nmembers = [3]", r"rows\.odd\.members = \[3\]: write the first device and one past the last"),
        ("[rows.odd]\nmembers = [3, 3]", r"rows\.odd\.members = \[3, 3\]: write"),
        ("[rows.odd]\nmembers = [-2, 3]", r"rows\.odd\.members = \[-2, 3\]: write"),
        ("[rows.odd]\nplay = 'alone'", r"'alone' names a function, and only the papers' tables have code"),
        ("[rows.odd]\nlike = 'none'", r"made\.toml: odd: like = 'none': there is no such table beside it"),
        ("[rows.a]\nlike = 'b'\n[rows.b]\nlike = 'a'", r"like = 'a'"),
    ],
)
def test_a_wrong_file_is_told_with_its_place_and_the_mend(tmp_path: Path, wrong: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        _ = made(tmp_path, GRID + wrong).grid


def test_a_wrong_job_names_the_file_and_the_row(tmp_path: Path) -> None:
    table = made(tmp_path, GRID + "[rows.odd]\njob.params.momentun = 1")
    with pytest.raises(JobError, match=r"made\.toml, row 'odd': .*momentun: fedavg has no such parameter.*momentum"):
        papers.run_table(table, out=tmp_path)


def test_rounds_that_are_no_number_are_named(tmp_path: Path) -> None:
    table = made(tmp_path, GRID.replace("rounds = 10", "rounds = 'ten'"))
    with pytest.raises(JobError, match=r"job\.rounds = 'ten': write a whole number"):
        papers.run_table(table, out=tmp_path)


def test_mnist_is_found_where_its_files_or_torchvision_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="t1 needs --data: a folder with MNIST's files"):
        grid.resolve_mark("t1", "mnist", "", None)
    with pytest.raises(DataError, match=r"there is no MNIST in .*train-images-idx3-ubyte, .*MNIST/raw below it"):
        grid.resolve_mark("t", "mnist", "", tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    assert grid.resolve_mark("t", "mnist", "", tmp_path) == {"path": str(tmp_path)}
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    with pytest.raises(DataError, match=r"no MNIST in .*raw"):
        grid.resolve_mark("t", "mnist", "", tmp_path)
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"")
    assert grid.resolve_mark("t", "mnist", "", tmp_path) == {"path": str(raw)}


def test_cifar_and_weights_are_found_or_what_is_wanted_is_said(tmp_path: Path) -> None:
    """CIFAR-10 as a file or as torchvision puts it."""
    with pytest.raises(DataError, match=r"there is no CIFAR-10 in .*: cifar10\.npz, or torchvision's folder"):
        grid.resolve_mark("t", "cifar", "", tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert grid.resolve_mark("t", "cifar", "", tmp_path) == {"path": str(tmp_path), "dataset": "CIFAR10"}
    (tmp_path / "cifar10.npz").write_bytes(b"")
    assert grid.resolve_mark("t", "cifar", "", tmp_path) == {"path": str(tmp_path / "cifar10.npz")}
    with pytest.raises(DataError, match=r"no resnet\*\.pt in .*weights"):
        grid.resolve_mark("t", "weights", "resnet", tmp_path)


def test_marks_and_paths_in_a_file_become_places(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    table = made(tmp_path, GRID + "[rows.own]\njob.data.path = 'x.npz'\n[rows.big]\njob.data.path = '$cifar'")
    assert table.takes_data
    assert not made(tmp_path).takes_data
    rows = table.fill_marks(tmp_path).rows
    assert rows["own"].job["data"] == {"path": str((tmp_path / "x.npz").resolve())}
    assert rows["big"].job["data"] == {"path": str(tmp_path), "dataset": "CIFAR10"}
    with pytest.raises(JobError, match=r"\$mnits is unknown; there are: \$digits, \$mnist"):
        made(tmp_path, GRID.replace("$digits", "$mnits")).fill_marks(tmp_path)

"""Tables of runs: the papers' own, listed and found by method; and a grid of a user's own from file to verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.core import DataError, JobError, StoreError
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import cells, grid

DOCS = Path(__file__).parents[4] / "docs"
OWN = """
about = "What it is.\\n\\nHow it is done."
seeds = [4, 5]
show = [
  { value = "rounds_to", title = "to 90 %", digits = 0, each = true },
  { value = "test", title = "end", scale = 100.0 },
]
claims = [
  { name = "{row} at {column}", value = "test", over = "still", scale = 100.0, unit = "points", at_least = 0.0 },
  { name = "bytes", value = "up_bytes", row = "moves", of = "still", worst = true, unit = "%", at_most = 101.0 },
  { name = "to 90 %", value = "rounds_to", row = "still", over = "moves", told = true },
]
[job]
name = "made"
method = "fedavg"
engine = "numpy"
rounds = 2
check.every = 1
params = { lr = 0.3, batch = 16 }
model = { name = "mlp", inputs = 64, hidden = [8], classes = 10 }
fleet.devices = 2
data = { path = "$digits", limit = 200 }
[axes.split]
all = { job.data.partition = "iid", target = 0.0, paper.moves = { test = [90.5, 1.25], rounds_to = [] } }
none = { job.data.partition = "shards", target = 1.0 }
[rows]
still.job.params.lr = 1e-9
moves = {}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path / "own.toml"


def test_the_papers_tables_are_right_and_each_of_their_jobs_is_too(tmp_path: Path) -> None:
    for name in ("cifar10.npz", "t10k-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "weights").mkdir()
    for name in ("mobilenet_v2", "squeezenet1_1"):
        (tmp_path / "weights" / f"{name}.pt").write_bytes(b"")
    for name, table in papers.load_tables().items():
        found = table.fill_marks(tmp_path if table.takes_data else None)
        assert found.about.strip().partition("\n")[0].endswith((".", "?", ":")), name
        assert all(callable(cells.find_function(each)) for each in found.function_names)
        for points in found.columns.values():
            for row in found.rows.values():
                settings.parse_job(found.make_job(points, row, 0, None))


def test_tables_cover_methods_that_there_are_and_their_pages_exist() -> None:
    for table in papers.load_tables().values():
        covered = table.grid.methods
        assert covered
        assert set(covered) <= set(methods.builtin_names())
        page, _, anchor = table.grid.page.partition("#")
        headings = [line.lstrip("# ") for line in (DOCS / page).read_text().splitlines() if line.startswith("#")]
        assert not anchor or anchor in [heading.lower().replace(",", "").replace(" ", "-") for heading in headings]


def test_a_method_is_told_the_commands_of_the_tables_that_run_it() -> None:
    assert papers.find_tables_of_method("fedlora") == [
        ("fedquilt lab reproduce fedsdg --data FOLDER", "training.md#fedsdg")
    ]
    assert papers.find_tables_of_method("fedpews")[0] == (
        "fedquilt lab reproduce fedpews-table2",
        "training.md#fedpews",
    )
    assert papers.find_tables_of_method("scaffold") == []


def test_without_a_table_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "reproduce"]) == 0
    shown = capsys.readouterr().out.splitlines()
    at = shown.index("  fedpews-table2")
    assert shown[at + 1] == "  fedpews-table6"
    assert shown[at - 1].endswith("numbers.")
    assert main(["lab", "reproduce", "--format", "json"]) == 0
    rows = {row["table"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fedpews-table2"]["takes_data"] is False
    assert rows["genefl"]["takes_data"] is True


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["table-99"],
            2,
            "unknown table 'table-99': choose one of budgets, buffered, class-priors, codecs, fedpews-table2",
        ),
        (["none.toml"], 2, "cannot read none.toml"),
        (["genefl", "--data", ".", "--columns", "a"], 2, "genefl has one column: leave out --columns"),
        (["fedpews-table2", "--columns", "64k"], 2, "'64k' is unknown; there are: 32k-1.0"),
        (["fedpews-table6", "--rows", "FedPros"], 2, "'FedPros' is unknown; did you mean 'FedProx'? There are: "),
        (["fedpews-table2", "--data", "."], 2, "table fedpews-table2 needs no --data: leave it out"),
        (["fedsdg"], 3, "table fedsdg needs data: add --data with a folder that contains MNIST's files"),
        (["fedstitch"], 3, "fedstitch needs data: add --data"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_run(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "reproduce", *words]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / papers.CACHE_FOLDER).exists()


def test_a_relative_folder_of_data_is_one_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "train-images-idx3-ubyte").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def fill(table: grid.GridTable, *, folder: Path, **options: Any) -> None:
        asked.append(table.fill_marks(folder).job["data"]["path"])
        raise JobError("that is all")

    monkeypatch.setattr(papers, "run_table", fill)
    assert main(["lab", "reproduce", "codecs", "--data", "fake"]) == 2
    assert asked == [str(tmp_path / "fake")], capsys.readouterr().err


def test_a_grid_of_ones_own_is_run_shown_and_judged(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lab", "reproduce", str(own), "--kept", str(tmp_path / "kept"), "--out", str(tmp_path / "result.json")]
    code = main(words)
    first = json.loads((tmp_path / "result.json").read_text())
    shown = capsys.readouterr()
    assert re.search(r"run 8 of 8: .*, seed 5, accuracy ", shown.err)  # two processes end in any order
    assert code == (0 if all(claim["reached"] for claim in first["figures"].values()) else 1)
    assert set(first["figures"]) == {"moves at all", "moves at none", "bytes"}
    assert (first["figures"]["bytes"]["value"], first["figures"]["bytes"]["verdict"]) == (100.0, "holds")
    assert first["told"]["to 90 %"]["value"] == 0.0
    values = {row: of["values"] for row, of in first["columns"]["none"].items()}
    assert values["still"]["rounds_to"] == values["moves"]["rounds_to"] == [None, None]
    assert first["columns"]["all"]["moves"]["values"]["rounds_to"] == [1, 1]
    assert [run["seed"] for run in first["columns"]["all"]["moves"]["runs"]] == [4, 5]
    assert values["moves"]["test"] > values["still"]["test"]
    text = shown.out.splitlines()
    assert "all, 2 rounds" in text
    assert any(line.startswith("moves") and "1, 1 (never)" in line and "(90.5 ± 1.25)" in line for line in text)
    assert any(line.startswith("still") and "-, -" in line for line in text)
    assert text[-1] == "How it is done."
    assert main(words) == code
    assert "8 of 8 runs are in" in capsys.readouterr().err
    again = json.loads((tmp_path / "result.json").read_text())
    assert again == first


@pytest.mark.usefixtures("runs_here")
def test_fewer_rounds_or_columns_are_run_and_nothing_is_claimed(own: Path, tmp_path: Path) -> None:
    table = grid.read_tables(own)["own"]
    result = papers.run_table(table, seeds=[1], rounds=1, columns=["none"], out=tmp_path / "kept")
    assert (result["seeds"], list(result["columns"]), result["figures"]) == ([1], ["none"], {})
    assert {row["rounds"] for row in result["columns"]["none"].values()} == {1}


@pytest.mark.usefixtures("runs_here")
def test_chosen_rows_are_run_and_claims_that_compare_others_are_left_out(own: Path, tmp_path: Path) -> None:
    table = grid.read_tables(own)["own"]
    result = papers.run_table(table, seeds=[1], columns=["none"], rows=["moves"], out=tmp_path / "kept")
    assert (list(result["columns"]["none"]), result["figures"], result["told"]) == (["moves"], {}, {})
    assert table.grid.select_rows(["moves", "still"]) == table.grid


@pytest.mark.usefixtures("runs_here")
def test_devices_that_train_alone_have_the_mean_of_the_worst_tenth(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN + "each = { alone = 2 }\nfar = { members = [2, 4] }\n")
    table = grid.read_tables(own)["own"]
    options: dict[str, Any] = {"seeds": [4], "columns": ["all"], "out": tmp_path / "kept"}
    (run,) = papers.run_table(table, rows=["each"], **options)["columns"]["all"]["each"]["runs"]
    found = run["figures"]
    assert 0 <= found["worst_decile"] < found["mean"] < 1
    assert found["worst_decile"] <= found["held"] <= 2 * found["mean"] - found["worst_decile"]
    with pytest.raises(JobError, match=r"members = \[2, 4\], but the job has 2 devices"):
        papers.run_table(table, rows=["far"], **options)


@pytest.mark.usefixtures("runs_here")
def test_a_run_that_fails_is_named_and_the_others_are_kept(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN + '[rows.large]\njob.fleet.budgets = ["1MB"]\n')
    table = grid.read_tables(own)["own"]
    with pytest.raises(JobError, match=r"1 of 3 runs failed, results of the others are in .*runs: all large, seed 4: "):
        papers.run_table(table, seeds=[4], columns=["all"], out=tmp_path / "kept")
    assert len(list((tmp_path / "kept" / "runs").glob("*.json"))) == 2


@pytest.mark.usefixtures("runs_here")
def test_a_table_whose_runs_may_fail_has_no_value_for_those_that_did(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = '[rows.large]\njob.fleet.budgets = ["1MB"]\n'
    own.write_text("may_fail = true\n" + OWN + large)
    table = grid.read_tables(own)["own"]
    result = papers.run_table(table, seeds=[4], columns=["all"], out=tmp_path / "kept")
    rows = result["columns"]["all"]
    assert rows["large"]["values"]["test"] == [None]
    assert rows["moves"]["values"]["test"] != [None]
    own.write_text("may_fail = true\n" + OWN.replace("[job]", '[job]\nfleet.budgets = ["1MB"]', 1))
    with pytest.raises(JobError, match="2 of 2 runs failed"):
        papers.run_table(grid.read_tables(own)["own"], seeds=[4], columns=["all"], out=tmp_path / "kept")


def test_names_whose_data_are_missing_are_left_out_unless_they_are_asked_for() -> None:
    missing = {"b": "no CIFAR-10 in x"}
    assert papers.choose_names("row", None, ["a", "b"], missing) == ["a"]
    assert papers.choose_names("row", ["c", "a"], ["a", "b", "c"], missing) == ["a", "c"]
    for words, names in ((["b"], ["a", "b"]), (None, ["b"])):
        with pytest.raises(DataError, match="no CIFAR-10 in x"):
            papers.choose_names("row", words, names, missing)


@pytest.mark.usefixtures("runs_here")
def test_what_is_left_out_is_shown_with_the_reason(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN + "[rows.big]\njob.data.path = '$cifar'\n")
    table = grid.read_tables(own)["own"]
    result = papers.run_table(table, seeds=[4], rounds=1, columns=["none"], out=tmp_path / "kept")
    assert list(result["columns"]["none"]) == ["still", "moves"]
    (line,) = (line for line in papers.format_result(table.grid, result) if line.startswith("left out"))
    assert line.startswith("left out: big (table own needs data: add --data with a folder that contains CIFAR-10")


def told(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    claim = {"value": 1.0, "low": 0.5, "high": 1.5, "at_least": 2.0, "unit": "", "verdict": "against"}
    figures = {"rounds saved": {**claim, "reached": reached}}
    result = {"table": "t", "seeds": [0], "columns": {}, "figures": figures, "told": {}, "about": "What it is."}
    monkeypatch.setattr(papers, "run_table", lambda table, **options: result)


def test_a_file_of_the_result_is_written_and_the_result_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"seeds": None, "rounds": None, "folder": None, "columns": None, "rows": None}
    options["format"] = "text"
    for reached in (True, False):
        told(monkeypatch, reached)
        place = tmp_path / "new" / "folder" / f"{reached}.json"
        assert papers.list_or_run_tables("fedsdg", **options, out=place) == (0 if reached else 1)
        assert json.loads(place.read_text())["about"] == "What it is."
        assert "What it is." in capsys.readouterr().out
    (tmp_path / "no").write_text("a file is in the folder's place")
    with pytest.raises(StoreError, match="cannot write"):
        papers.list_or_run_tables("fedsdg", **options, out=tmp_path / "no" / "p.json")
    assert "What it is." in capsys.readouterr().out

"""Grids of jobs: their files, the values of their runs, and claims about these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.core import DataError, JobError
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import tables
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import cells, grid
from fedquilt.tools.lab.papers.grid import ClaimSpec, Grid, GridRow

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
            r"'plan' is unknown; did you mean 'plain'\? There are: ",
        ),
        (
            "[[claims]]\nname = 'x'\nvalue = 'test'\nrow = 'plain'",
            r"claim 'x' must have one of at_least and at_most",
        ),
        (
            "[[claims]]\nname = 'x'\nvalue = 'test'\ncolumns = ['lo']\nat_most = 1",
            r"column of the claim 'x': 'lo' is unknown",
        ),
        ("[axes.rate.mid]\npaper.plein.test = [1.0]", r"row of the paper's numbers in 'mid, iid': 'plein' is unknown"),
        ("[[show]]\nvalue = 'tset'\ntitle = 'x'", r"value: 'tset' is unknown; did you mean 'test'\? There are: "),
        ("[[show]]\nvalue = 'test@x'\ntitle = 'x'", r"value 'test@x': write a number of rounds after @"),
        ("[[show]]\nvalue = 'metric'\ntitle = 'x'", r"value: 'metric' is unknown; there are: rounds_to, "),
        (
            "[[show]]\nvalue = 'rounds_to'\ntitle = 'x'",
            r"'rounds_to': column 'low, iid' has no target: write target = 0\.9 in \[axes\.AXIS\.POINT\]",
        ),
        ("[rows.odd]\nalone = -1", r"rows\.odd\.alone = -1: write a number of devices, at least 0"),
        ("[rows.odd]\naway = -2", r"rows\.odd\.away = -2: write a number of devices"),
        (
            "[rows.odd]\nmembers = [3]",
            r"rows\.odd\.members = \[3\] is invalid: write the first device and one past the last",
        ),
        ("[rows.odd]\nmembers = [3, 3]", r"rows\.odd\.members = \[3, 3\] is invalid: write"),
        ("[rows.odd]\nmembers = [-2, 3]", r"rows\.odd\.members = \[-2, 3\] is invalid: write"),
        ("[rows.odd]\nplay = 'alone'", r"function 'alone': only the papers' tables can name functions"),
        ("[rows.odd]\nlike = 'none'", r"made\.toml: odd: like = 'none' names no table of the same level"),
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
    with pytest.raises(DataError, match="table t1 needs data: add --data with a folder that contains MNIST's files"):
        grid.resolve_mark("t1", "mnist", "", None)
    with pytest.raises(DataError, match=r"no MNIST in .*train-images-idx3-ubyte, .*MNIST/raw below"):
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
    with pytest.raises(DataError, match=r"no CIFAR-10 in .*: put cifar10\.npz or torchvision's cifar-10"):
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
    with pytest.raises(JobError, match=r"unknown \$mnits: choose one of \$digits, \$mnist"):
        made(tmp_path, GRID.replace("$digits", "$mnits")).fill_marks(tmp_path)


def test_rows_and_columns_without_their_files_keep_their_marks_and_are_named(tmp_path: Path) -> None:
    text = GRID + "[axes.split.cifar]\njob.data.path = '$cifar'\n[rows.big]\npretrain.data.path = '$mnist'"
    table = made(tmp_path, text)
    missing = table.find_missing_data(None)
    assert list(missing) == ["big", "low, cifar", "high, cifar"]
    assert missing["big"].endswith("table made needs data: add --data with a folder that contains MNIST's files")
    assert "no CIFAR-10 in" in table.find_missing_data(tmp_path)["low, cifar"]
    found = table.fill_marks(None)
    assert found.axes["split"]["cifar"].job["data"]["path"] == "$cifar"
    assert found.job["data"]["path"] == str(grid.DIGITS)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["low, iid"], ["low, iid"]),
        (["low", " iid", "high"], ["low, iid", "high"]),  # as a command line divides them
        (["high", "low", "iid"], ["high", "low, iid"]),
    ],
)
def test_names_with_commas_are_found_in_the_words_of_a_command_line(words: list[str], names: list[str]) -> None:
    assert grid.match_names("column", words, ["low, iid", "high"]) == names
    with pytest.raises(JobError, match="column: 'odd' is unknown"):
        grid.match_names("column", [*words, "odd"], ["low, iid", "high"])


def test_pretraining_gives_weights_to_the_network_or_else_to_each_donor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "pretrain_weights", lambda job, pretrain: {"wide": np.zeros(job["model"]["width"])})
    pretrain = grid.PretrainSettings(data={"path": "x"})
    donors = [{"name": name, "network": {"name": "plain", "width": width}} for name, width in (("a", 2), ("b", 3))]
    job = cells.pretrain_networks({"donors": donors}, pretrain, tmp_path)
    files = [Path(donor["weights"]) for donor in job["donors"]]
    assert [tensors.decode_tensors(file.read_bytes())["wide"].shape for file in files] == [(2,), (3,)]
    model = cells.pretrain_networks({"model": {"width": 4}, "donors": donors}, pretrain, tmp_path)["model"]
    assert tensors.decode_tensors(Path(model["weights"]).read_bytes())["wide"].shape == (4,)


def run(tests: Sequence[float | None], *, first: int = 1, **figures: float) -> SeedRun:
    marks = [
        EvaluationPoint(
            rounds=rounds,
            test=test,
            held=None,
            mean=None,
            worst_decile=None,
            seconds=None,
            real_s=0.0,
            down_bytes=0,
            up_bytes=10 * rounds,
            energy_j=None,
        )
        for rounds, test in enumerate(tests, first)
    ]
    return SeedRun(method="fedavg", seed=0, params={}, devices=2, tested=4, marks=tuple(marks), figures=figures)


@pytest.mark.parametrize(
    ("tests", "target", "rounds"),
    [([0.5, 0.99, 0.9, 1.0], 0.99, 2), ([0.99], 0.99, 1), ([0.989999, 0.5], 0.99, None), ([None, 1.0], 0.99, 2)],
)
def test_the_first_round_that_reaches_the_target_counts_from_one(
    tests: Sequence[float | None], target: float, rounds: int | None
) -> None:
    assert cells.read_value(run(tests), "rounds_to", target) == rounds


def test_a_value_is_that_of_the_last_evaluation_or_of_the_one_that_is_named() -> None:
    curve = run([0.1, 0.4, 0.7], first=0, share=25.0, up_bytes=7.0)
    assert [cells.read_value(curve, name) for name in ("test", "test@0", "test@1", "test@9")] == [0.7, 0.1, 0.4, None]
    assert (cells.read_value(curve, "up_bytes@1"), cells.read_value(curve, "up_bytes")) == (10, 7.0)
    assert (cells.read_value(curve, "share"), cells.read_value(curve, "unknown")) == (25.0, None)
    assert cells.read_value(run([]), "test") is None


def test_a_claim_holds_if_the_whole_interval_is_on_its_side() -> None:
    """Of 1, 2 and 3 the mean is 2 and the interval, with 4.303 at 2 degrees of freedom, 2 -+ 2.48."""
    low, high = tables.confidence_interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5))
    shown = papers.judge_claim([1.0, 2.0, 3.0], "points", at_least=0.0)
    assert (shown["verdict"], shown["reached"]) == ("not shown", False)  # though every seed is ahead
    assert (shown["value"], shown["low"], shown["high"]) == (2.0, -0.484, 4.484)
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=0.0)["verdict"] == "holds"
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=1.9)["verdict"] == "not shown"
    assert papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=2.5)["verdict"] == "against"
    assert papers.judge_claim([1.9, 2.0, 2.1], "%", at_most=2.5)["verdict"] == "holds"
    assert papers.judge_claim([1.9, 2.0, 2.1], "%", at_most=1.5)["verdict"] == "against"
    assert papers.judge_claim([0.0, 0.0], "", at_least=0.0)["verdict"] == "not shown"


def test_one_seed_has_no_interval_and_shows_nothing() -> None:
    alone = papers.judge_claim([50.0], "points", at_least=0.0)
    assert (alone["verdict"], alone["reached"], alone["low"]) == ("one seed: no interval", False, None)
    (line,) = papers.format_judged_claims({"figures": {"ahead": alone}})
    assert line.startswith("NOT ahead")
    assert "+50.00 points, one seed: no interval" in line


def test_claims_are_told_with_their_intervals() -> None:
    figures = {"ahead": papers.judge_claim([1.9, 2.0, 2.1], "points", at_least=0.0)}
    (ahead,) = papers.format_judged_claims({"figures": figures})
    assert " ".join(ahead.split()) == "ok ahead +2.00 [+1.75, +2.25] points: holds (claimed: above 0)"


def test_quantiles_are_students() -> None:
    for freedom, right in ((1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)):
        assert tables.t_quantile(freedom) == pytest.approx(right, abs=1e-3)


PEWS: Grid = papers.load_tables()["fedpews-table2"].grid


def rows(base: list[int | None], pews: list[int | None], finals: list[float], rounds: int = 500) -> dict[str, Any]:
    return {
        name: {
            "rounds": rounds,
            "target": 0.99,
            "values": {"rounds_to": reached, "test": finals},
            "paper": dict(PEWS.axes["column"]["3.2k-0.1"].paper[name]),
            "runs": [],
        }
        for name, reached in (("FedAvg", base), ("FedAvg+PeWS", pews))
    }


def figures(*columns: Any) -> dict[str, Any]:
    """What the claims of FedPeWS's Table 2 come to in the column "32k-1.0"."""
    return {name: told for name, (_, told) in papers.judge_claims(PEWS, {"32k-1.0": rows(*columns)}).items()}


def test_a_claim_may_be_of_every_row_of_a_ratio_and_of_the_worst_column() -> None:
    """A row that does not tell the value is left out; what is only told is judged by 0."""
    made = Grid(
        about="x",
        rows={name: GridRow() for name in ("base", "good", "mute")},
        claims=(
            ClaimSpec("{row} in {column}", "test", over="base", scale=100.0, unit="points", told=True),
            ClaimSpec("share", "test", row="good", of="base", worst=True, unit="%", at_most=250.0),
        ),
    )

    def column(*values: float) -> dict[str, Any]:
        each = {"base": [0.1, 0.2], "good": list(values), "mute": [None, None]}
        return {name: {"rounds": 1, "values": {"test": known}, "paper": {}} for name, known in each.items()}

    found = papers.judge_claims(made, {"a": column(0.2, 0.3), "b": column(0.1, 0.6)})
    assert {name: told["value"] for name, (_, told) in found.items()} == {
        "good in a": 10.0,
        "good in b": 20.0,
        "share": 250.0,
    }
    assert [told["at_least"] for claim, told in found.values() if claim.told] == [0.0, 0.0]


def test_nothing_is_a_percentage_of_nothing() -> None:
    spec = ClaimSpec("{share} of {row}", "up_bytes", row="a", of="b", unit="%", at_most=90.0)
    grid = Grid(about="x", rows={"a": GridRow(), "b": GridRow()}, claims=(spec,))

    def column(b: float) -> dict[str, Any]:
        each = {"a": [5.0], "b": [b]}
        return {"": {name: {"rounds": 1, "values": {"up_bytes": known}, "paper": {}} for name, known in each.items()}}

    assert list(papers.judge_claims(grid, column(10.0))) == ["{share} of a"]
    with pytest.raises(JobError, match=r"of = 'b' has up_bytes = 0, so percentages are undefined: write over = 'b'"):
        papers.judge_claims(grid, column(0.0))


def test_the_text_has_the_papers_numbers_beside_ours() -> None:
    result = {
        "table": "fedpews-table2",
        "seeds": [0, 1],
        "columns": {"3.2k-0.1": rows([None, 371], [301, 300], [0.99, 0.98])},
        "figures": {},
        "told": {},
    }
    text = papers.format_result(PEWS, result)
    assert text[:3] == [
        "fedpews-table2: seeds 0, 1; numbers of the paper in brackets",
        "",
        "3.2k-0.1, eta_g 0.1, tau 0.1, target 99 %, 500 rounds",
    ]
    base, pews = text[4:]
    assert " ".join(base.split()) == "FedAvg -, 371 (371) 98.50 ± 0.71 (97.33 ± 3.89)"
    assert " ".join(pews.split()) == "FedAvg+PeWS 301, 300 (301 ± 10.59) 98.50 ± 0.71 (99.66 ± 0.19)"


def test_a_spread_is_that_of_several_seeds() -> None:
    assert papers.format_spread([0.995], 100.0, 2, False) == "99.50"
    assert papers.format_spread([0.99, 0.98], 100.0, 2, False) == "98.50 ± 0.71"
    assert papers.format_spread([0.99, None], 100.0, 0, True) == "99, -"
    assert papers.format_spread([None], 1.0, 0, False) == ""


def seed_run(seed: int, *marks: tuple[int, float]) -> SeedRun:
    points = [
        EvaluationPoint(
            rounds=rounds,
            test=test,
            held=None,
            mean=None,
            worst_decile=None,
            seconds=10.0 * rounds,
            real_s=0.0,
            down_bytes=0,
            up_bytes=0,
            energy_j=2.0 * rounds,
        )
        for rounds, test in marks
    ]
    return SeedRun(method="fedavg", seed=seed, params={}, devices=2, tested=9, marks=tuple(points))


RELATIVE = """
about = "What it is."
target_row = "whole"
seeds = [4, 5]
show = [{ value = "seconds_to", title = "s" }, { value = "energy_j_to", title = "J" }]
claims = [
  { name = "{row}", value = "seconds_to", row = "other", of = "best", unit = "%", at_most = 50.0 },
]
[job]
name = "made"
method = "fedavg"
engine = "numpy"
rounds = 10
check.every = 1
model = { name = "mlp", inputs = 64, hidden = [8], classes = 10 }
data = { path = "$digits" }
[axes.split]
iid = { target = 0.5, job.data.partition = "iid" }
[rows]
whole = {}
late.job.cohort.deadline_s = 9.0
other.job.cohort.deadline_s = 8.0
best = { best_of = ["whole", "late"], best_by = "seconds_to" }
"""


def test_a_target_may_be_a_share_of_a_row_and_a_row_the_best_of_others(tmp_path: Path) -> None:
    table = made(tmp_path, RELATIVE).fill_marks(None)
    found = cells.make_cells(table, "made.toml", (4, 5), None, ["iid"], tmp_path)
    assert [(cell.row, cell.case.settings.seed) for cell in found] == [
        (row, seed) for seed in (4, 5) for row in ("whole", "late", "other")
    ]
    marks = {
        ("whole", 4): [(1, 0.1), (5, 0.5), (10, 0.8)],  # the target is 0.4
        ("late", 4): [(1, 0.3), (7, 0.4)],
        ("other", 4): [(1, 0.2), (2, 0.41)],
        ("whole", 5): [(9, 0.3), (10, 0.6)],  # the target is 0.3
        ("late", 5): [(1, 0.1), (3, 0.31)],
        ("other", 5): [(1, 0.29)],  # never reached
    }
    runs = {cell.case: seed_run(4, *marks[cell.row, cell.case.settings.seed]) for cell in found}
    result = papers.make_result("made", table, found, runs, (4, 5), None)
    values = {row: entry["values"] for row, entry in result["columns"]["iid"].items()}
    assert {row: each["seconds_to"] for row, each in values.items()} == {
        "whole": [50.0, 90.0],
        "late": [70.0, 30.0],
        "other": [20.0, None],
        "best": [50.0, 30.0],
    }
    assert values["best"]["energy_j_to"] == [10.0, 6.0]
    assert result["figures"]["other"]["value"] == pytest.approx(
        (40 + 100 * 10 / 30) / 2, abs=0.01
    )  # 10 s, the whole run
    assert result["figures"]["other"]["verdict"] == "target not reached with each seed"
    assert not result["figures"]["other"]["reached"]
    assert papers.format_result(table, result)
    chosen = table.select_rows(["best"])
    assert list(chosen.rows) == ["whole", "late", "best"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('target_row = "whole"', 'target_row = "all"'), "target_row: 'all' is unknown"),
        (('["whole", "late"]', '["early"]'), "rows.best.best_of: 'early' is unknown"),
        (("target = 0.5, ", ""), "value 'seconds_to': column 'iid' has no target"),
    ],
)
def test_a_relative_target_without_its_row_is_refused(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        made(tmp_path, RELATIVE.replace(*change)).fill_marks(None)


def test_times_may_be_those_of_a_larger_network(tmp_path: Path) -> None:
    table = made(tmp_path, RELATIVE.replace("seeds =", "flops = 3e9\nseeds =")).fill_marks(None)
    (folder, other) = (
        cells.make_bundles(
            [(table.make_job(table.columns["iid"], table.rows["whole"], 4, None), None)], tmp_path, flops
        )[0]
        for flops in (table.flops, 0.0)
    )
    assert job_bundle.load_bundle(folder).meta["flops"] == 3e9
    assert "layers" not in job_bundle.load_bundle(folder).meta
    assert job_bundle.load_bundle(other).meta["flops"] < 1e4
    assert job_bundle.load_bundle(folder).load("model").keys() == job_bundle.load_bundle(other).load("model").keys()


def test_an_interrupted_bundle_with_other_times_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path, RELATIVE).fill_marks(None)
    job = table.make_job(table.columns["iid"], table.rows["whole"], 4, None)
    with monkeypatch.context() as patch:
        patch.setattr(job_bundle, "load_bundle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cells.make_pretrained_bundle(job, None, tmp_path / "start", 3e9)
    assert not (tmp_path / "start" / "bundle" / "bundle.json").exists()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt

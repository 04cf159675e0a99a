"""Methods beside each other: which runs there are, that none is made twice, and what the table says."""

from __future__ import annotations

import json
import operator
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

import fedquilt
from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import FedquiltError, JobError, StoreError, UpdateError
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import comparison, run_cache, single_run, tables
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun
from fedquilt.tools.report import rendering
from fedquilt.tools.simulation import agents, machines

DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [8], "classes": 10}
TABLE: dict[str, Any] = {
    "name": "digits",
    "method": "fedavg",
    "rounds": 2,
    "engine": "numpy",
    "params": {"lr": 0.2, "batch": 16},
    "fleet": {"devices": 3, "boards": ["jetson-nano"]},
    "data": {"path": str(DIGITS), "partition": "dirichlet", "alpha": 1.0},
    "compare": {"fedprox": {"mu": 0.1}},
}
JOB = settings.parse_job(TABLE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(tmp_path / "job.bundle", {"network": NETWORK, "flops": 1200}, {"model": first})
    return tmp_path / "job.bundle"


def mark(rounds: int, accuracy: float | None, **changes: Any) -> EvaluationPoint:
    known = {
        "test": accuracy,
        "held": 0.5,
        "mean": 0.5,
        "worst_decile": 0.25,
        "seconds": 2.0 * rounds,
        "real_s": 1.0 * rounds,
        "down_bytes": 600_000 * rounds,
        "up_bytes": 400_000 * rounds,
        "energy_j": 10.0 * rounds,
    }
    return EvaluationPoint(rounds=rounds, **{**known, **changes})


def made(method: str, seed: int, *accuracies: float, **changes: Any) -> SeedRun:
    marks = tuple(mark(number, value, **changes) for number, value in enumerate(accuracies, 1))
    return SeedRun(method=method, seed=seed, params={}, devices=3, tested=100, marks=marks)


def test_there_is_a_run_for_each_seed_and_method(folder: Path) -> None:
    jobs = [case.settings for case in comparison.make_cases(JOB, folder, seeds=[1, 0])]
    assert [(job.seed, job.method) for job in jobs] == [(0, "fedavg"), (0, "fedprox"), (1, "fedavg"), (1, "fedprox")]
    assert [job.data["seed"] for job in jobs] == [0, 0, 1, 1]
    assert jobs[0].params == {"lr": 0.2, "batch": 16}
    assert jobs[1].params == {"lr": 0.2, "batch": 16, "mu": 0.1}
    assert {job.check.every for job in jobs} == {1}
    assert len({case.cache_key for case in comparison.make_cases(JOB, folder, seeds=[1, 0])}) == 4


def test_a_key_changes_with_what_the_run_depends_on_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    (case,) = comparison.make_cases(JOB, folder, ["fedavg"], [0])
    (other,) = comparison.make_cases(JOB, folder, ["fedavg"], [0], changes={"fedavg": {"lr": 0.3}})
    (longer,) = comparison.make_cases(JOB, folder, ["fedavg"], [0], rounds=3)
    (same,) = comparison.make_cases(msgspec.structs.replace(JOB, compare={}), folder, ["fedavg"], [0])
    limit = settings.JobLimits(max_joules=1.0)
    (limited,) = comparison.make_cases(msgspec.structs.replace(JOB, stop=limit), folder, ["fedavg"], [0])
    assert limited.cache_key != case.cache_key
    assert len({case.cache_key, other.cache_key, longer.cache_key}) == 3
    assert same.cache_key == case.cache_key
    shutil.copytree(folder, tmp_path / "moved")
    moved = msgspec.structs.replace(case, folder=str(tmp_path / "moved"))
    assert moved.cache_key == case.cache_key
    made = job_bundle.load_bundle(folder)
    files = {name: (folder / "blobs" / ref.sha256).read_bytes() for name, ref in made.files.items()}
    job_bundle.write_bundle(tmp_path / "moved", {**made.meta, "note": "another"}, files)
    assert moved.cache_key != case.cache_key


def test_an_engine_of_a_package_runs_every_method(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.plugins, "plugin_names", lambda kind: ("quick",))
    cases = comparison.make_cases(msgspec.structs.replace(JOB, engine="quick"), folder, ["fedprox", "fedsq"], [0])
    assert [case.settings.engine for case in cases] == ["quick", "quick"]


def test_another_methods_parameters_are_left_out_and_its_own_unknown_ones_refused(folder: Path) -> None:
    job = settings.parse_job({**TABLE, "method": "fedprox", "params": {"mu": 0.5, "lr": 0.1}, "compare": {}})
    assert comparison.merge_params(job, "fedavg", {}) == {"lr": 0.1}
    assert comparison.merge_params(job, "fedprox", {"mu": 0.7}) == {"mu": 0.7, "lr": 0.1}
    with pytest.raises(JobError, match="fedavg has no such parameter"):
        comparison.make_cases(JOB, folder, ["fedavg"], [0], changes={"fedavg": {"mu": 1.0}})


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ("scaffold", ["momentum"]),
        ("pfedme", ["momentum"]),
        ("perfedavg", ["momentum"]),
        ("fedpews", ["momentum", "weight_decay"]),
        ("fedprox", []),
    ],
)
def test_shared_parameters_that_another_method_refuses_have_its_defaults(
    folder: Path, method: str, refused: list[str]
) -> None:
    params = {"lr": 0.1, "batch": 16, "momentum": 0.9, "weight_decay": 0.03}
    job = settings.parse_job({**TABLE, "params": params, "compare": {}})
    [case] = comparison.make_cases(job, folder, [method], [0])
    assert case.settings.params == {key: value for key, value in params.items() if key not in refused}
    lines = comparison.describe_other_params(job, [case])
    text = f"{method} runs without {', '.join(f'{key} {params[key]}' for key in refused)} of [params], which it refuses"
    assert [line.startswith(text) for line in lines] == [bool(refused)]
    assert ("fedprox runs with mu 0.01; --set fedprox.PARAM=VALUE" in lines[0]) == (method == "fedprox")
    assert not comparison.describe_other_params(job, comparison.make_cases(job, folder, [job.method], [0]))
    for key in refused:
        with pytest.raises(JobError, match=key):
            comparison.make_cases(job, folder, [method], [0], changes={method: {key: params[key]}})


@pytest.mark.parametrize(
    ("job", "names", "changes", "said"),
    [
        (JOB, ["fedavgg"], {}, r"is unknown; did you mean 'fedavg'\? There are: "),
        (msgspec.structs.replace(JOB, compare={"nosuch": {}}), ["fedavg"], {}, "'nosuch' is unknown"),
        (msgspec.structs.replace(JOB, data={}), ["fedavg"], {}, r"no \[data\]"),
        (JOB, ["fedavg"], {"fedprox": {"mu": 1.0}}, "fedprox is not compared"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    folder: Path, job: JobSettings, names: list[str], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError, match=said):
        comparison.make_cases(job, folder, names, [0], changes=changes)


def test_parameters_of_the_command_line_are_toml_values() -> None:
    assert comparison.parse_changes(["fedprox.mu=0.1", "fedopt.optimizer=adam", 'fedopt.name="x y"', "a.b=[1, 2]"]) == {
        "fedprox": {"mu": 0.1},
        "fedopt": {"optimizer": "adam", "name": "x y"},
        "a": {"b": [1, 2]},
    }
    for odd in ("mu=0.1", "fedprox.mu", "fedprox.=1", ".mu=1", "fedprox.mu="):
        with pytest.raises(JobError, match="write METHOD"):
            comparison.parse_changes([odd])


def player(played: list[ComparisonCase]) -> Callable[[ComparisonCase, Callable[[int], None]], SeedRun]:
    def play(case: ComparisonCase, tell: Callable[[int], None]) -> SeedRun:
        played.append(case)
        tell(1)
        job = case.settings
        if job.method == "fedprox" and job.seed == 1:
            raise UpdateError("the loss has exploded")
        return made(job.method, job.seed, 0.5)

    return play


def test_a_finished_run_is_not_made_again(folder: Path, tmp_path: Path) -> None:
    todo = comparison.make_cases(JOB, folder, ["fedavg", "fedprox"], [0, 1])
    first: list[ComparisonCase] = []
    said: list[str] = []
    runs, failed = comparison.run_cases(todo, tmp_path / "out", player(first), said.append)
    assert (len(first), len(runs), failed) == (4, 3, ["fedprox, seed 1: the loss has exploded"])
    second: list[ComparisonCase] = []
    again, _ = comparison.run_cases(todo, tmp_path / "out", player(second), said.append)
    assert [(case.settings.method, case.settings.seed) for case in second] == [("fedprox", 1)]
    assert again == runs
    assert "3 of 4 runs are in" in said[4]
    more: list[ComparisonCase] = []
    comparison.run_cases(
        comparison.make_cases(JOB, folder, ["fedavg"], [0, 1, 2]), tmp_path / "out", player(more), said.append
    )
    assert [case.settings.seed for case in more] == [2]
    (tmp_path / "out" / "runs" / f"{todo[0].cache_key}.json").write_text("{")
    last: list[ComparisonCase] = []
    comparison.run_cases(todo[:1], tmp_path / "out", player(last), said.append)
    assert last == todo[:1]


def test_a_compared_job_stops_early(folder: Path) -> None:
    table = {**TABLE, "rounds": 9, "params": {"lr": 1e-9}, "stop": {"patience": 2}, "check": {"every": 1}}
    (case,) = comparison.make_cases(settings.parse_job(table), folder, ["fedavg"], [0])
    run = single_run.run_seed(case.settings, folder, lambda done: None)
    assert [mark.rounds for mark in run.marks] == [1, 2, 3]
    assert run.marks[-1].held is not None


def test_an_interrupted_comparison_keeps_what_was_finished(folder: Path, tmp_path: Path) -> None:
    todo = comparison.make_cases(JOB, folder, ["fedavg", "fedprox"], [0])
    played: list[ComparisonCase] = []

    def interrupted(case: ComparisonCase, tell: Callable[[int], None]) -> SeedRun:
        if played:
            raise KeyboardInterrupt
        return player(played)(case, tell)

    with pytest.raises(KeyboardInterrupt):
        comparison.run_cases(todo, tmp_path / "out", interrupted, lambda line: None)
    assert len(list((tmp_path / "out" / "runs").glob("*.json"))) == 1


def test_the_table_has_means_and_deviations_over_seeds() -> None:
    """0.8 and 0.9: mean 0.85, sd 0.0707; of one seed there is no sd."""
    avg, prox = tables.make_rows([made("fedavg", 0, 0.5, 0.8), made("fedavg", 1, 0.95, 0.9), made("p", 0, 0.4)], None)
    assert avg["accuracy"] == pytest.approx(0.85)
    assert avg["sd"] == pytest.approx(0.0707, abs=1e-4)
    assert avg["best"] == pytest.approx((0.8 + 0.95) / 2)
    assert avg["in_all"] == {"rounds": 2.0, "bytes": 2e6, "energy_j": 20.0, "seconds": 4.0, "real_s": 2.0}
    assert (prox["sd"], prox["worst_decile"]) == (None, 0.25)


def test_methods_are_compared_with_the_first_by_differences_paired_by_seed() -> None:
    """Differences of 0.1, 0.1 and 0.2: mean 0.1333, sd 0.0577, and t is 4.303 for three."""
    values = {"fedavg": (0.8, 0.9, 0.7), "fedprox": (0.9, 1.0, 0.9), "scaffold": (0.5,)}
    runs = [made(name, seed, value) for name, seeds in values.items() for seed, value in enumerate(seeds)]
    result = tables.make_result("j", runs, None)
    [difference] = result["differences"]
    assert (difference["method"], difference["first"], difference["seeds"]) == ("fedprox", "fedavg", 3)
    assert difference["interval"] == pytest.approx([-0.0101, 0.2768], abs=1e-4)
    line = "fedprox minus fedavg: 95 % interval [-1.01, +27.68] points of accuracy, paired by 3 seeds"
    assert line in tables.make_table_notes(result)


def test_costs_to_a_target_are_those_of_the_first_evaluation_that_reached_it() -> None:
    """Rounds 2 and 1, that is 1.5; a seed that never got there counts in "reached" alone."""
    runs = [made("fedavg", 0, 0.5, 0.8, 0.7), made("fedavg", 1, 0.9, 0.1), made("fedavg", 2, 0.1, 0.2)]
    (row,) = tables.make_rows(runs, 0.8)
    assert row["reached"] == 2
    assert row["to_target"] == {"rounds": 1.5, "bytes": 1.5e6, "energy_j": 15.0, "seconds": 3.0, "real_s": 1.5}
    (never,) = tables.make_rows(runs, 0.99)
    assert (never["reached"], never["to_target"]["rounds"]) == (0, None)
    shown = "\n".join(tables.format_table(tables.make_result("j", runs, 0.8)))
    assert "2 of 3" in shown
    assert "to 80 %" in shown


def test_what_one_run_does_not_know_has_no_mean() -> None:
    runs = [made("fedavg", 0, 0.5), made("fedavg", 1, 0.5, energy_j=None)]
    (row,) = tables.make_rows(runs, None)
    assert row["in_all"]["energy_j"] is None
    assert "accuracy-energy.svg" not in tables.make_plots(runs, None)
    assert "accuracy-rounds.svg" in tables.make_plots(runs, None)


def test_on_held_out_shares_a_test_set_does_not_count() -> None:
    """What is compared of methods that leave each device a network of its own: here 0.5 of 0.9."""
    runs, note = comparison.select_scores([made("fedavg", 0, 0.9), made("local", 0, 0.9)])
    assert [(row["accuracy"], row["reached"]) for row in tables.make_rows(runs, 0.8)] == [(0.5, 0)] * 2
    assert note == "on held-out shares, because the networks of local differ by device"


def test_a_method_without_scores_on_held_out_shares_keeps_the_test_set() -> None:
    blind = msgspec.structs.replace(made("afl", 0, 0.7), marks=(mark(1, 0.7, held=None),))
    runs, note = comparison.select_scores([blind, made("local", 0, 0.9)])
    assert [row["accuracy"] for row in tables.make_rows(runs, None)] == [0.7, 0.9]
    assert "on the test set, because afl has no scores on held-out shares" in note


def test_nothing_that_ended_is_a_table_of_nothing(tmp_path: Path) -> None:
    found = tables.make_result("j", [], None, ["fedavg, seed 0: no"])
    assert tables.format_table(found) == ["no run has finished"]
    tables.write_files(found, [], tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text())["failed"] == ["fedavg, seed 0: no"]
    assert "fedavg, seed 0: no" in (tmp_path / "compare.html").read_text()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_packages_of_a_report_the_table_is_printed_all_the_same(
    package: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(comparison, "run_seed", lambda job, *_, **options: made(job.method, job.seed, 0.5, 0.75))
    monkeypatch.setitem(sys.modules, package, None)
    rendering._make_template_environment.cache_clear()  # which a test before may have filled
    options: dict[str, Any] = {"names": ["fedavg"], "seeds": [0]}
    assert comparison.compare_and_print(JOB, folder, out, **options) == 0
    shown = capsys.readouterr().out
    assert "75.00" in shown
    said = f"no report: this needs {package}, which is not installed: pip install 'fedquilt[report]'"
    assert shown.splitlines()[-1] == said
    (result_file,) = out.glob("digits-*/*")
    assert comparison.compare_and_print(JOB, folder, out, **options, format="json") == 0
    told = capsys.readouterr()
    assert len(list(out.glob("digits-*/compare.json"))) == 2
    assert json.loads(told.out) == json.loads(result_file.read_text())
    assert said in told.err


def test_the_command_compares_on_a_real_fleet_and_goes_on_where_it_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedquilt.formats import toml

    job = tmp_path / "job.toml"
    job.write_text(toml.format_toml({key: value for key, value in TABLE.items() if key != "compare"}))
    words = ["compare", str(job), "--methods", "fedavg", "fedprox", "--seeds", "0"]
    words += ["--set", "fedprox.mu=0.1", "--target", "0.2", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--format", "json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert "run 2 of 2: " in shown.err
    assert [row["method"] for row in result["table"]] == ["fedavg", "fedprox"]
    assert result["accuracy_on"] == "test set"
    fedavg, fedprox = result["runs"]
    assert fedprox["params"]["mu"] == 0.1
    assert (fedavg["tested"], fedavg["devices"]) == (450, 3)
    assert [each["rounds"] for each in fedavg["marks"]] == [1, 2]
    assert fedavg["marks"][1]["test"] > 0.2
    assert fedavg["marks"][1]["energy_j"] > fedavg["marks"][0]["energy_j"] > 0
    assert fedavg["marks"][1]["down_bytes"] > 0
    assert 0 <= fedavg["marks"][1]["worst_decile"] <= fedavg["marks"][1]["mean"] <= 1
    assert result["table"][0]["reached"] == 1
    (result_file,) = (tmp_path / "out").glob("*/compare.json")
    for plot in result_file.parent.glob("*.svg"):
        ElementTree.fromstring(plot.read_text())
    assert json.loads(result_file.read_text()) == result
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "2 of 2 runs are in" in shown.err
    assert "fedprox" in shown.out
    assert main(["compare", str(job), "--methods", "fedsgd"]) == 2
    assert "is unknown; did you mean 'fedsdg'? There are: " in capsys.readouterr().err


def test_the_command_prepares_a_bundle_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedquilt.formats import toml

    job = tmp_path / "job.toml"
    job.write_text(toml.format_toml({**TABLE, "compare": {}, "rounds": 1, "model": NETWORK}))
    words = ["compare", str(job), "--methods", "fedavg", "fedsq", "--seeds", "0", "--workers", "1", "--format", "json"]
    assert main([*words, "--out", str(tmp_path / "out")]) in (0, 1)  # 1 without torch
    shown = capsys.readouterr()
    assert json.loads(shown.out)["table"][0]["method"] == "fedavg"
    assert "job.bundle: 2 files" in shown.err
    assert "fedsq runs on torch" in shown.err


def test_a_method_with_a_network_for_each_device_moves_the_comparison_to_held_out_shares(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedquilt.formats import toml

    (tmp_path / "job.toml").write_text(toml.format_toml({**TABLE, "compare": {}, "rounds": 1}))
    words = ["compare", str(tmp_path / "job.toml"), "--seeds", "0", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--methods", "fedavg", "local", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy_on"] == "held-out shares"
    assert "the networks of local differ by device" in result["note"]
    assert result["note"] in tables.format_table(result)
    (page,) = (tmp_path / "out").glob("*/compare.html")
    assert result["note"] in page.read_text()
    assert [row["accuracy"] for row in result["table"]] == [row["held"] for row in result["table"]]
    assert main([*words, "--methods", "fedavg", "--format", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["accuracy_on"] == "test set"
    assert alone["table"][0]["accuracy"] != alone["table"][0]["held"] == result["table"][0]["held"]


def test_data_without_a_test_split_is_compared_on_held_out_shares(folder: Path, tmp_path: Path) -> None:
    import numpy as np

    stored = np.load(DIGITS)
    np.savez(tmp_path / "own.npz", x_train=stored["x_train"][:200], y_train=stored["y_train"][:200])
    data = {"path": str(tmp_path / "own.npz"), "partition": "iid"}
    job = settings.parse_job({**TABLE, "data": data, "rounds": 1, "compare": {}})
    (case,) = comparison.make_cases(job, folder, seeds=[0])
    run = single_run.run_seed(case.settings, folder, lambda done: None)
    assert (run.tested, run.marks[0].test) == (0, None)
    assert run.marks[0].held is not None
    from fedquilt.core import DataError

    odd = msgspec.structs.replace(job, test={"path": str(tmp_path / "none.npz")})
    with pytest.raises(DataError, match=r"none\.npz"):
        single_run.run_seed(odd, folder, lambda done: None)


def test_a_key_changes_with_every_part_and_with_the_bundle(tmp_path: Path) -> None:
    job_bundle.write_bundle(tmp_path, {}, {})
    keys = [
        run_cache.make_key(*parts, bundle=tmp_path, data=()) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"))
    ]
    assert run_cache.make_key(b"ab", b"c", bundle=tmp_path, data=()) == keys[0]
    job_bundle.write_bundle(tmp_path, {}, {"model": b"weights"})
    (blob,) = (tmp_path / "blobs").iterdir()
    for weights in (b"weights", b"Weights"):
        blob.write_bytes(weights)
        keys.append(run_cache.make_key(b"ab", b"c", bundle=tmp_path, data=()))
    assert len(set(keys)) == 5
    (tmp_path / "blobs" / ("0" * 64)).write_bytes(b"of a bundle that was here before")
    assert run_cache.make_key(b"ab", b"c", bundle=tmp_path, data=()) == keys[-1]


def test_a_bundle_that_is_gone_or_damaged_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"has no bundle: .*prepare"):
        run_cache.make_key(b"job", bundle=tmp_path, data=())
    job_bundle.write_bundle(tmp_path, {}, {"model": b"weights"})
    next((tmp_path / "blobs").iterdir()).unlink()
    with pytest.raises(JobError, match=r"file 'model' .* is missing"):
        run_cache.make_key(b"job", bundle=tmp_path, data=())
    (tmp_path / "bundle.json").write_bytes(b"{")
    with pytest.raises(JobError, match=r"bundle\.json is damaged"):
        run_cache.make_key(b"job", bundle=tmp_path, data=())


def test_a_key_changes_with_the_content_of_the_data_and_not_with_their_dates(tmp_path: Path) -> None:
    job_bundle.write_bundle(tmp_path, {}, {})
    (tmp_path / "data" / "deep").mkdir(parents=True)
    file = tmp_path / "data" / "deep" / "labels"
    file.write_bytes(b"0123")
    os.utime(file, (1e9, 1e9))

    def of(path: Path) -> str:
        return run_cache.make_key(b"job", bundle=tmp_path, data=[path])

    first, whole = of(file), of(tmp_path / "data")
    os.utime(file, (2e9, 2e9))
    assert (of(file), of(tmp_path / "data")) == (first, whole)
    file.write_bytes(b"3210")
    os.utime(file, (1e9, 1e9))
    assert of(file) != first
    assert of(tmp_path / "data") != whole
    file.write_bytes(b"0123")
    file.rename(tmp_path / "data" / "deep" / "others")
    assert of(tmp_path / "data") != whole
    assert of(tmp_path / "none") not in (first, whole)


def test_a_settled_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of a comparison asks for the same data; a file that was just written is read again."""
    file = tmp_path / "data.npz"
    file.write_bytes(b"0123")
    read: list[Path] = []
    whole = run_cache.REAL.hash_file
    monkeypatch.setattr(type(run_cache.REAL), "hash_file", lambda disk, path: read.append(path) or whole(path))
    fresh = {run_cache.compute_content_digest(file) for _ in range(2)}
    monkeypatch.setattr(run_cache, "SETTLED_S", -1e9)
    settled = {run_cache.compute_content_digest(file) for _ in range(2)}
    assert (fresh == settled, len(settled), len(read)) == (True, 1, 3)
    file.write_bytes(b"3210")
    assert run_cache.compute_content_digest(file) not in settled


def test_a_jobs_data_are_in_two_tables_and_in_each_of_several_sources() -> None:
    table = {
        "data": {"sources": [{"path": "/a", "labels_from": 0}, {"path": "/b", "labels_from": 5}]},
        "test": {"path": "/t"},
    }
    assert run_cache.list_data_paths(msgspec.json.encode(table)) == [Path("/a"), Path("/b"), Path("/t")]
    assert run_cache.list_data_paths(msgspec.json.encode({"data": {"dataset": "fedpews-32k"}})) == []


@pytest.mark.parametrize("dataset", ["fedpews-32k", "fedpews-3.2k", "sklearn/iris"])
def test_a_built_in_data_set_is_no_plugin_and_another_unknown_one_is_refused(dataset: str) -> None:
    table = {"method": "fedavg", "data": {"dataset": dataset}, "test": {"dataset": dataset, "split": "test"}}
    assert run_cache.list_plugin_versions(msgspec.json.encode(table)) == b""
    with pytest.raises(JobError, match="data set 'none' is unknown"):
        run_cache.list_plugin_versions(msgspec.json.encode({**table, "data": {"dataset": "none"}}))


def test_a_key_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop.py").write_text("a = 1")
    monkeypatch.setattr(fedquilt, "__file__", str(tmp_path / "package" / "__init__.py"))
    code = run_cache.compute_code_digest
    monkeypatch.setattr(machines, "compute_code_digest", machines.compute_code_digest.__wrapped__)
    found = [code()]
    assert code() == found[0]
    (tmp_path / "elsewhere" / "loop.py").write_text("a = 2")
    found.append(code())
    monkeypatch.setattr(fedquilt, "__version__", "0.0.0")
    found.append(code())
    monkeypatch.setattr(machines.metadata, "version", lambda name: "9")
    found.append(code())
    assert len(set(found)) == 4
    (tmp_path / "elsewhere" / "notes.txt").write_text("no code")
    assert code() == found[-1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*out/runs"):
        run_cache.RunCache(tmp_path / "out")


def test_each_result_comes_with_the_number_of_its_run() -> None:
    assert dict(comparison.run_in_processes(operator.floordiv, [(9, 3), (8, 2)], workers=2)) == {0: 3, 1: 4}
    assert list(comparison.run_in_processes(operator.floordiv, [])) == []


def test_what_a_run_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        dict(comparison.run_in_processes(operator.floordiv, [(1, 0)]))


RUNS = """
import os, signal, sys, time
from pathlib import Path
from fedquilt.tools.experiments import comparison
from fedquilt.tools.simulation.pool import ScratchFolder

def play(number):
    with ScratchFolder():
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    list(comparison.run_in_processes(play, [(0,), (1,)], workers=1))
"""


def test_runs_that_are_ended_clean_up_and_begin_no_others(tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS)
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "runs.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (130, -signal.SIGINT)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_process_that_is_killed_is_told_in_a_sentence() -> None:
    with pytest.raises(FedquiltError, match=r"one of 2 run processes ended unexpectedly .* fewer cores"):
        dict(comparison.run_in_processes(os._exit, [(9,), (9,)], workers=2))

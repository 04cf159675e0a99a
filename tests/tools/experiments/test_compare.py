"""Methods beside each other: which runs there are, that none is made twice, and what the table says."""

from __future__ import annotations

import json
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

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import JobError, UpdateError
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import comparison, single_run, tables
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.experiments.single_run import EvaluationPoint, SeedRun
from fedquilt.tools.simulation import agents

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
    first = tensors.encode_tensors(engine.init_tensors(NETWORK, seed=0))
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


def test_a_method_that_an_engine_cannot_run_gets_one_of_its_own(folder: Path) -> None:
    (prox, sq) = comparison.make_cases(JOB, folder, ["fedprox", "fedsq"], [0])
    assert (prox.settings.engine, sq.settings.engine) == ("numpy", None)


def test_another_methods_parameters_are_left_out_and_its_own_unknown_ones_refused(folder: Path) -> None:
    job = settings.parse_job({**TABLE, "method": "fedprox", "params": {"mu": 0.5, "lr": 0.1}, "compare": {}})
    assert comparison.merge_params(job, "fedavg", {}) == {"lr": 0.1}
    assert comparison.merge_params(job, "fedprox", {"mu": 0.7}) == {"mu": 0.7, "lr": 0.1}
    with pytest.raises(JobError, match="fedavg has no such parameter"):
        comparison.make_cases(JOB, folder, ["fedavg"], [0], changes={"fedavg": {"mu": 1.0}})


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
        with pytest.raises(JobError, match="wanted METHOD"):
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


def test_the_line_of_a_run_has_the_score_of_the_table(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for others, told in (([], "90.0 %"), (["local"], "50.0 %")):
        todo = comparison.make_cases(JOB, folder, ["fedavg", *others], [0])
        comparison.run_cases(todo, tmp_path / told, lambda case, tell: made(case.settings.method, 0, 0.9), said.append)
        assert {line.partition(", accuracy ")[2] for line in said} == {told}
        said.clear()


def test_runs_on_other_labels_are_made_anew(folder: Path, tmp_path: Path) -> None:
    import numpy as np

    stored = dict(np.load(DIGITS))
    np.savez(tmp_path / "own.npz", **stored)
    job = settings.parse_job({**TABLE, "data": {"path": str(tmp_path / "own.npz"), "partition": "iid"}, "rounds": 1})
    todo = comparison.make_cases(job, folder, ["fedavg"], [0])

    def play(case: ComparisonCase, tell: Callable[[int], None]) -> SeedRun:
        return single_run.run_seed(case.settings, Path(case.folder), tell)

    said: list[str] = []
    before, _ = comparison.run_cases(todo, tmp_path / "out", play, said.append)
    np.savez(tmp_path / "own.npz", **{**stored, "y_test": np.random.default_rng(0).permutation(stored["y_test"])})
    said.clear()
    after, _ = comparison.run_cases(todo, tmp_path / "out", play, said.append)
    assert after[todo[0]].marks[-1].test != before[todo[0]].marks[-1].test
    assert "1 other runs in" in said[0]


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


def test_without_a_test_set_accuracy_is_on_held_out_shares() -> None:
    run = msgspec.structs.replace(made("fedavg", 0, 0.9), tested=0, marks=(mark(1, None, held=0.6),))
    found = tables.make_result("j", [run], None)
    assert (found["table"][0]["accuracy"], found["accuracy_on"]) == (0.6, "held-out shares")


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
    assert tables.format_table(found) == ["no run has come to an end"]
    tables.write_files(found, [], tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text())["failed"] == ["fedavg, seed 0: no"]
    assert "fedavg, seed 0: no" in (tmp_path / "compare.html").read_text()


def test_a_smaller_table_does_not_replace_a_larger_one(tmp_path: Path) -> None:
    larger = [made("fedavg", 0, 0.5, 0.6), made("fedprox", 0, 0.5, 0.6)]
    tables.write_files(tables.make_result("j", larger, None), larger, tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    told = tables.write_files(tables.make_result("j", larger[:1], None), larger[:1], tmp_path)
    assert "held more (fedprox with seed 0)" in told[0]
    assert {path.name: path.read_bytes() for path in (tmp_path / "earlier-1").iterdir()} == kept
    shorter = [made("fedavg", 0, 0.5)]
    tables.write_files(tables.make_result("j", shorter, None), shorter, tmp_path)
    assert (tmp_path / "earlier-2" / "compare.html").exists()
    whole = [made("fedavg", 0, 0.5, 0.6), made("fedavg", 1, 0.5)]
    assert tables.write_files(tables.make_result("j", whole, None), whole, tmp_path)[0].endswith("compare.json")
    assert not (tmp_path / "earlier-3").exists()


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
    for plot in (tmp_path / "out").glob("*.svg"):
        ElementTree.fromstring(plot.read_text())
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == result
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "2 of 2 runs are in" in shown.err
    assert "fedprox" in shown.out
    assert main(["compare", str(job), "--methods", "fedsgd"]) == 2
    assert "is unknown; did you mean 'fedsdg'? There are: " in capsys.readouterr().err


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
    assert result["note"] in (tmp_path / "out" / "compare.html").read_text()
    assert [row["accuracy"] for row in result["table"]] == [row["held"] for row in result["table"]]
    assert main([*words, "--methods", "fedavg", "--format", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["accuracy_on"] == "test set"
    assert alone["table"][0]["accuracy"] != alone["table"][0]["held"] == result["table"][0]["held"]


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in (signal.SIGTERM, signal.SIGHUP)),
        signal.SIGINT,
        signal.SIGKILL,
    ],
)
def test_a_comparison_that_is_killed_leaves_no_folders_behind(
    folder: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    """Before its first round, when all its folders are there; after kill -9 the next comparison removes them."""
    from fedquilt.formats import toml

    (tmp_path / "job.toml").write_text(toml.format_toml({**TABLE, "compare": {}, "rounds": 1}))
    place = tmp_path / "temporary"
    place.mkdir()
    words = ["compare", str(tmp_path / "job.toml"), "--seeds", "0", "--workers", "1"]
    words += ["--out", str(tmp_path / "out")]
    killed = (
        "import os, signal, sys; from fedquilt import cli; from fedquilt.tools.experiments import comparison\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in a shell's background it is ignored
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # likewise under nohup
        "finished = comparison.run_cases\n"
        f"killed = lambda *shown: os.kill(os.getpid(), {int(kind)})\n"
        "comparison.run_cases = lambda todo, out, player, say: finished(todo, out, player, say, killed)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMPDIR": str(place)}
        return subprocess.run(
            [sys.executable, *command, *words], env=environment, capture_output=True, text=True, check=False
        )

    ended = run("-c", killed)
    assert ended.returncode == (130 if kind == signal.SIGINT else -kind)
    assert "Traceback" not in ended.stderr
    left = list(place.iterdir())
    assert bool(left) == (kind == signal.SIGKILL)
    if left:
        assert run("-m", "fedquilt.cli").returncode == 0
        assert list(place.iterdir()) == []


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

"""`fedquilt simulate`: from a file to a job, a run, a report and predictions, in one command each."""

import re
from pathlib import Path

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import jobs, main
from fedquilt.coordinator.rounds.events import RoundCommitted
from fedquilt.coordinator.storage.store import Store
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.simulation import agents


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        f"{2 * (row % 3) + rng.normal(0, 0.2):.2f},{rng.normal():.2f},{'red' if row % 2 else 'blue'},"
        f"{('iris', 'lily', 'rose')[row % 3]}"
        for row in range(120)
    ]
    (tmp_path / "flowers.csv").write_text("\n".join(["length,width,colour,kind", *rows]) + "\n")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    told = capsys.readouterr()
    return told.out + told.err


def test_one_command_from_a_table_to_a_report_and_an_exported_network_that_reads_the_table(capsys, here):
    for package in ("jinja2", "torch", "onnxruntime"):
        pytest.importorskip(package)
    said = run(capsys, "simulate", "flowers.csv", "--label", "kind")
    assert "predicted: 3 classes (iris 40, lily 40, rose 40)" in said
    assert "fedavg trains mlp (inputs 4, hidden [32], classes 3), 30 rounds, 10 devices" in said
    (page,) = here.glob("job-*.html")
    assert f"{page.name}: the report" in said
    assert f"<h1>{page.stem}</h1>" in page.read_text()
    assert fq.Run.open(here / "fedquilt-runs", "job").rounds()["accuracy"][-1] > 0.95
    run(capsys, "model", "export", "job", "--out", "flowers.onnx")
    assert "rose" in run(capsys, "model", "run", "flowers.onnx", "flowers.csv")


def test_a_second_time_changes_no_job_and_another_label_needs_force(capsys, monkeypatch):
    monkeypatch.setattr(agents, "run_fleet_virtually", lambda plan, **options: ("", "stopped"))
    run(capsys, "simulate", "flowers.csv", "--label", "kind", code=9)
    written = Path("job.toml").read_bytes()
    assert "job.bundle: " not in run(capsys, "simulate", "flowers.csv", "--label", "kind", code=9)
    said = run(capsys, "simulate", "flowers.csv", "--label", "colour", code=6)
    fixes = "add --out flowers.toml, run it by `fedquilt simulate job.toml`, or add --force"
    assert f"job.toml exists already with other content: {fixes}" in said
    assert Path("job.toml").read_bytes() == written


@pytest.mark.parametrize("verb", ["simulate", "run"])
def test_a_job_is_prepared_when_it_has_changed(capsys, monkeypatch, verb):
    monkeypatch.setattr(jobs, "run_to_end", lambda *given: 0)
    monkeypatch.setattr(agents, "run_fleet_virtually", lambda plan, **options: ("", "done"))
    run(capsys, "init", "--data", "flowers.csv", "--label", "kind")
    assert "job.bundle: 2 files" in run(capsys, verb, "job.toml")
    assert "job.bundle: " not in run(capsys, verb, "job.toml")
    table = toml.read_toml(Path("job.toml"))
    table["model"]["hidden"] = [5]
    Path("job.toml").write_text(toml.format_toml(table))
    assert "job.bundle: 2 files" in run(capsys, verb, "job.toml")
    assert job_bundle.load_bundle(Path("job.bundle")).meta["network"]["hidden"] == [5]


def test_options_of_data_are_refused_with_a_job(capsys):
    Path("job.toml").write_text('name = "a"\nmethod = "fedavg"\n')
    for words in (("--label", "kind"), ("--out", "other.toml"), ("--force",)):
        assert "--label, --out and --force require data" in run(capsys, "simulate", "job.toml", *words, code=2)


def test_other_data_begin_another_run(capsys, here, monkeypatch):
    """A run that resumed on other data would be of two data sets."""
    from fedquilt.tools.simulation import agents

    monkeypatch.setattr(agents, "run_on_virtual_time", lambda *given, **options: None)
    run(capsys, "init", "--data", "flowers.csv", "--label", "kind")
    for count in (1, 1, 2):
        if count == 2:
            lines = Path("flowers.csv").read_text().splitlines()
            Path("flowers.csv").write_text("\n".join([*lines, lines[-1]]) + "\n")
        main(["simulate", "job.toml"])
        with Store(here / "fedquilt-runs") as store:
            assert len(store.readable_jobs()) == count


def simulate_small_job(capsys: pytest.CaptureFixture[str], rounds: int, **changes: object) -> str:
    if not Path("job.toml").exists():
        run(capsys, "init", "--data", "flowers.csv", "--label", "kind", "--rounds", "2")
    table = toml.read_toml(Path("job.toml")) | changes | {"rounds": rounds, "engine": "numpy"}
    Path("job.toml").write_text(toml.format_toml(table))
    return run(capsys, "simulate", "job.toml")


def test_a_run_ends_with_its_test_result(capsys):
    assert "\ntest accuracy" not in simulate_small_job(capsys, 1)
    said = simulate_small_job(capsys, 2, test={"path": "flowers.csv"})
    assert re.search(r"\ntest accuracy [0-9.]+ % on 120 examples\n", said)


def test_an_interrupted_run_continues_and_a_changed_job_begins_a_new_one(capsys, here):
    simulate_small_job(capsys, 2)
    with Store(here / "fedquilt-runs") as store:
        (row,) = store.readable_jobs()
        events = [event for _, _, event in store.read_events(row.id)]
        unfinished = store.add_job(row.job, row.bundle, "virtual")
        for event in events[: next(i for i, event in enumerate(events) if isinstance(event, RoundCommitted)) + 1]:
            store.append_event(unfinished, event)
        store.set_status(unfinished, "running")
        plan = agents.FleetPlan(row.job, row.bundle, here / "fedquilt-runs")
        assert plan.describe_start(store, unfinished) == f"continues {unfinished} at round 2"
    assert "job.toml or its data changed: a new run, creating 10 devices" in simulate_small_job(capsys, 3)
    with Store(here / "fedquilt-runs") as store:
        store.set_status(unfinished, "done")
    assert ": creating 10 devices" in simulate_small_job(capsys, 1)


@pytest.mark.parametrize("words", [("simulate", "flowers.csv"), ("init", "--data", "flowers.csv")])
def test_more_devices_than_the_examples_suffice_for_are_refused_before_a_job_is_written(capsys, words):
    said = run(capsys, *words, "--label", "kind", "--devices", "61", code=2)
    assert "flowers.csv: 120 examples are too few for 61 devices: use --devices 60 or fewer" in said
    assert not Path("job.toml").exists()


@pytest.mark.parametrize("verb", ["run", "prepare", "compare"])
def test_data_in_place_of_a_job_name_the_command_that_writes_one(capsys, verb):
    said = run(capsys, verb, "flowers.csv", code=2)
    assert "flowers.csv is no job file (.toml): `fedquilt init --data flowers.csv` writes one for data" in said


def test_no_name_is_no_data(capsys):
    assert "no data at '': name a CSV" in run(capsys, "simulate", "", code=3)

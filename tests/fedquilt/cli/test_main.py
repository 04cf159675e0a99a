"""The command: every error is one clear line and a documented exit code."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import plain
import pytest
from opened import opened

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import (
    CohortSelected,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    UpdateAccepted,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import BlobRef, JobError, Usage
from fedquilt.formats import job_bundle, toml

BLOB = BlobRef(sha256="a" * 64, size=1)

JOB = 'name = "digits"\nmethod = "fedavg"\n'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    model = tensors.encode_tensors({"1.weight": np.zeros((2, 2), np.float32), "1.bias": np.zeros(2, np.float32)})
    network = {"name": "mlp", "inputs": 2, "hidden": [], "classes": 2}
    job_bundle.write_bundle(tmp_path / "job.bundle", {"network": network, "flops": 1}, {"model": model})
    return path


def failed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "simulate"])
def test_a_method_that_cannot_train_the_bundles_network_is_refused_before_it_is_queued(job, capsys, verb):
    data = job.with_name("data.npz")
    np.savez(data, x_train=np.zeros((8, 2), np.float32), y_train=np.arange(8) % 2)
    job.write_text(f'name = "digits"\nmethod = "fedlora"\n[data]\npath = "{data}"\n')
    home = job.with_name("runs")
    code, said = failed(capsys, verb, str(job), "--home", str(home))
    assert code == 4
    assert "LoRA finds no linear layer before the classifier " in said
    with Store(home) as store:
        assert not store.all_jobs()


@pytest.mark.parametrize("verb", ["run", "lab partition"])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('[data]\npath = "x.npz"\npartion = "iid"\n', "[data]: there is no key 'partion'"),
        ('[data]\npath = "x.npz"\n[test]\nspilt = "all"\n', "[test]: there is no key 'spilt'"),
    ],
)
def test_a_wrong_table_of_a_job_names_the_file(tmp_path, capsys, verb, more, said):
    """Also what only simulated boards, or an evaluation, would read of it."""
    path = tmp_path / "job.toml"
    path.write_text(JOB + more)
    code, told = failed(capsys, *verb.split(), str(path))
    assert code == 2
    assert told.startswith(f"fedquilt: {path}: {said}")
    assert "; did you mean" in told


@pytest.mark.parametrize("verb", ["prepare", "run"])
def test_what_cannot_be_prepared_names_the_job_file(tmp_path, capsys, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    code, told = failed(capsys, verb, str(path))
    assert (code, told.count(str(path))) == (2, 1)
    assert f"{path}: the job has neither [model] nor [[donors]] to prepare" in told


def test_runs_are_listed_and_told_for_people_and_programs(tmp_path, capsys):
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        for fact in (JobStarted(BLOB), CohortSelected(0, 0, ("dev-1",)), JobEnded("failed", "nobody came")):
            store.append_event(run, fact)
        store.set_status(run, "failed")
    assert main(["ls", "--home", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "failed"
    assert main(["ls", "--home", str(tmp_path)]) == 0
    assert run in capsys.readouterr().out
    assert main(["logs", "digits", "--home", str(tmp_path)]) == 0
    assert "failed: nobody came" in capsys.readouterr().out
    assert main(["logs", "digits", "--home", str(tmp_path), "--format", "json", "--follow"]) == 0
    kinds = [json.loads(line)["fact"]["type"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["JobStarted", "CohortSelected", "JobEnded"]


def test_energy_is_told_with_what_is_above_idle_and_its_error(tmp_path, capsys):
    usage = Usage(energy_j=8.0, idle_j=3.0, energy_error_j=0.5, energy_source="rapl", wall_s=1.0)
    update = plain.update(weight=4.0, usage=usage)
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        for fact in (JobStarted(BLOB), CohortSelected(0, 0, ("a",)), UpdateAccepted(0, update)):
            store.append_event(run, fact)
        store.set_status(run, "done")
    assert main(["logs", run, "--home", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "update from a: 1.00 s, 8.00 J (5.00 J above idle, ± 0.5 J)" in shown
    assert "for 1 task: 8.00 J per task" in shown
    assert main(["ls", "--home", str(tmp_path), "--format", "json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["energy_j"], row["net_j"], row["example_j"], row["round_j"]) == (8.0, 5.0, 2.0, [8.0])


def test_stopping_a_run_that_no_coordinator_runs_stops_it_here(tmp_path, capsys):
    """Nobody else would; and whoever follows it hears that nobody serves."""
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        assert main(["logs", run, "--follow", "--home", str(tmp_path)]) == 130
        assert "no coordinator is running for" in capsys.readouterr().err
        assert main(["stop", run, "--home", str(tmp_path)]) == 0
        assert store.stored_status(run) == "stopped"
    assert "no coordinator was running" in capsys.readouterr().out


def test_a_bundle_of_another_model_is_refused(job, capsys):
    """An edited job file with an old bundle would train the old network."""
    from fedquilt.coordinator.settings import require_matching_bundle
    from fedquilt.formats import job_bundle as bundles

    table = {"name": "digits", "method": "fedavg", "model": {"name": "mlp", "inputs": 2, "hidden": [4], "classes": 2}}
    with pytest.raises(JobError, match="prepared for another job"):
        require_matching_bundle(settings.parse_job(table), bundles.load_bundle(job.with_name("job.bundle")))
    table["model"]["hidden"] = []
    require_matching_bundle(settings.parse_job(table), bundles.load_bundle(job.with_name("job.bundle")))


def test_a_result_written_to_a_device_is_written_through(tmp_path, job):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Store(tmp_path / "runs") as store:
        run = store.add_job(settings.load_job(job), job.with_name("job.bundle"))
        opened(store, run)
        read = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        assert main(["model", "export", run, "--home", str(tmp_path / "runs"), "--out", str(pipe)]) == 0
        reader.join(timeout=120)
    assert pipe.is_fifo()
    assert tensors.decode_tensors(read[0]).keys() == {"1.weight", "1.bias"}


def test_an_export_of_an_unfinished_run_says_that_it_is_none_of_its_results(tmp_path, job, capsys):
    words = ["--home", str(tmp_path / "runs"), "--out", str(tmp_path / "w.safetensors")]
    with Store(tmp_path / "runs") as store:
        run = store.add_job(settings.load_job(job), job.with_name("job.bundle"))
        state = opened(store, run).job_state.state
        assert state is not None
        for event in (CohortSelected(0, 0, ("a",)), RoundClosed(0), RoundCommitted(0, state, False, {})):
            store.append_event(run, event)
        store.set_status(run, "stopped")
        assert main(["model", "export", run, *words]) == 0
        assert capsys.readouterr().out.endswith(f"; no final result: {run} is stopped, after 1 of at most 10 rounds\n")
        store.set_status(run, "done")
        assert main(["model", "export", run, *words]) == 0
        assert "final" not in capsys.readouterr().out


def test_help_documents_every_exit_code(capsys):
    from fedquilt import core

    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.split("exit codes:")[1]
    errors = [e for e in vars(core).values() if isinstance(e, type) and issubclass(e, core.FedquiltError)]
    for code in {error.exit_code for error in errors}:
        assert f"{code} " in shown


def test_a_run_that_cannot_be_read_is_listed_as_such_and_hides_no_other(tmp_path, capsys):
    """It has a metric that is no number; whoever asks for it is told why."""
    null = (
        '{"type":"RoundCommitted","round":0,"state":{"sha256":"%s","size":1},"finished":false,"metrics":{"loss":null}}'
    )
    with Store(tmp_path) as store:
        odd, fine = (
            store.add_job(settings.parse_job({"name": name, "method": "fedavg"}), tmp_path) for name in ("odd", "fine")
        )
        with store.open_transaction():
            store._rows.append_events([(odd, 0.0, null % ("a" * 64))])
        for fact in (JobStarted(BLOB), CohortSelected(0, 0, ("dev-1",)), JobEnded("failed", "nobody came")):
            store.append_event(fine, fact)
        store.set_status(fine, "failed")
    home = ["--home", str(tmp_path)]
    assert main(["ls", *home]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert fine in first
    assert odd in second
    assert "cannot be read" in second
    for words in (["logs", fine], ["why", fine], ["report", fine, "--out", str(tmp_path / "page.html")]):
        assert main([*words, *home]) == 0
    capsys.readouterr()
    for words in (["logs", odd], ["why", odd], ["model", "export", odd, "--out", str(tmp_path / "w")], ["report", odd]):
        code, said = failed(capsys, *words, *home)
        assert code != 0
        assert "cannot be read by this version" in said


def test_a_reader_that_goes_away_is_no_matter_for_words(tmp_path):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedquilt.cli", "init", "--out", str(tmp_path / "job.toml")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=buffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (MemoryError("Unable to allocate 46.6 TiB"), 7, "this machine has too little memory: Unable to allocate 46.6"),
        (
            PermissionError(13, "Permission denied", "x.toml"),
            6,
            "Permission denied: x.toml; change the owner or the permissions",
        ),
    ],
)
def test_what_the_machine_refuses_ends_with_a_sentence_and_its_code(capsys, monkeypatch, raised, code, said):
    def fail(path):
        raise raised

    monkeypatch.setattr(toml, "read_toml", fail)
    ended, told = failed(capsys, "prepare", "x.toml")
    assert ended == code
    assert told.startswith(f"fedquilt: {said}")
    assert len(told.splitlines()) == 1


def test_a_letter_that_the_output_lacks_is_replaced(tmp_path):
    with Store(tmp_path) as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
        for fact in (JobStarted(BLOB), JobEnded("failed", "Größe")):
            store.append_event(run, fact)
    words = [sys.executable, "-m", "fedquilt.cli", "logs", "digits", "--home", str(tmp_path)]
    done = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii:strict"}, capture_output=True, text=True)
    assert "failed: Gr??e" in done.stdout, done.stderr

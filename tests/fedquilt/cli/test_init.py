"""`fedquilt init`: what it writes is prepared and run as it is, whatever the method; questions are for terminals."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.core import ModelError
from fedquilt.formats import job_bundle, toml
from fedquilt.host import torchvision_compat

PREPARED = ("fedavg", "depthfl", "fedlora", "fjord", "genefl")  # methods of each kind of parts in a bundle


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_of_nothing_but_defaults(capsys):
    assert main(["init"]) == 0
    assert "wrote job.toml\nnext: `fedquilt simulate job.toml`" in capsys.readouterr().out
    job = settings.load_job(Path("job.toml"))
    assert (job.method, job.rounds, job.fleet.devices, job.check.every) == ("fedavg", 30, 10, 1)
    assert (job.model["inputs"], job.model["classes"]) == (64, 10)
    assert job.data["path"] == str(Path("digits.npz").resolve())


@pytest.mark.parametrize(
    "method", [name for name in methods.builtin_names() if "onnx" not in methods.load(name).engines]
)
def test_what_it_writes_is_a_job_with_all_parameters(method):
    pytest.importorskip("torch", reason="some methods' parts are prepared with torch")
    assert main(["init", "--method", method, "--rounds", "2", "--out", "jobs/one.toml"]) == 0
    assert settings.load_job(Path("jobs/one.toml")).rounds == 2
    if method in PREPARED:
        assert main(["prepare", "jobs/one.toml"]) == 0
    text = Path("jobs/one.toml").read_text()
    assert all(f"{name} " in text for name in methods.load(method).params.__dataclass_fields__)


def test_a_job_with_donors_is_prepared(here, monkeypatch):
    torch = pytest.importorskip("torch", reason="donors are cut by torch")
    pytest.importorskip("onnx", reason="donors are cut into ONNX graphs")
    try:
        models = torchvision_compat.import_torchvision().models
    except ModelError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCH_HOME", str(here / "torch"))
    kept = here / "torch" / "hub" / "checkpoints"
    kept.mkdir(parents=True)
    for architecture in ("mobilenet_v2", "squeezenet1_1"):
        file = models.get_model_weights(architecture).DEFAULT.url.rpartition("/")[2]
        torch.save(models.get_model(architecture).state_dict(), kept / file)
    assert main(["init", "--method", "fedstitch", "--out", "jobs/one.toml"]) == 0
    assert main(["prepare", "jobs/one.toml"]) == 0
    job, made = settings.load_job(Path("jobs/one.toml")), job_bundle.load_bundle(Path("jobs/one.bundle"))
    assert (job.rounds, len(job.labels), job.model) == (200, 10, {})
    assert list(made.meta["donors"]) == ["mobilenet", "squeezenet"]
    assert made.meta["blocks"]["mobilenet.0"]["in_shape"] == [3, 64, 64]


def test_what_it_writes_runs_on_a_fleet(capsys):
    rng = np.random.default_rng(0)
    np.savez("mine.npz", x_train=rng.random((60, 5), np.float32), y_train=np.arange(60) % 3)
    words = ["--data", "mine.npz", "--devices", "3", "--rounds", "2", "--method", "fedprox"]
    assert main(["init", *words, "--out", "jobs/My Job.toml"]) == 0
    table = toml.read_toml(Path("jobs/My Job.toml"))
    assert (table["name"], table["data"]["path"]) == ("my-job", "../mine.npz")
    assert (table["model"]["inputs"], table["model"]["classes"], table["fleet"]["devices"]) == (5, 3, 3)
    assert main(["simulate", "jobs/My Job.toml"]) == 0
    assert "done" in capsys.readouterr().out


def test_lines_of_defaults_are_the_defaults():
    assert main(["init"]) == 0
    text = Path("job.toml").read_text()
    loose = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
    Path("loose.toml").write_text(loose)
    job, given = settings.load_job(Path("loose.toml")), settings.load_job(Path("job.toml"))
    assert settings.parse_params(job) == settings.parse_params(given)
    assert (job.seed, job.cohort, job.check) == (given.seed, given.cohort, given.check)


def test_nothing_is_written_over(capsys):
    Path("job.toml").write_text("mine")
    assert main(["init"]) == 6
    assert "job.toml exists already" in capsys.readouterr().err
    assert Path("job.toml").read_text() == "mine"
    assert not Path("digits.npz").exists()
    Path("job.toml").unlink()
    Path("digits.npz").write_text("mine")
    assert main(["init"]) == 6
    assert "digits.npz exists already" in capsys.readouterr().err
    assert (Path("digits.npz").read_text(), Path("job.toml").exists()) == ("mine", False)
    assert main(["init", "--force"]) == 0
    assert settings.load_job(Path("job.toml"))


def test_what_cannot_be_is_refused_before_anything_is_written(capsys):
    np.savez("vectors.npz", x_train=np.zeros((6, 5), np.float32), y_train=np.arange(6) % 3)
    assert main(["init", "--method", "fedprx"]) == 2
    assert "did you mean 'fedprox'?" in capsys.readouterr().err
    assert main(["init", "--method", "fedstitch", "--data", "vectors.npz"]) == 2
    assert "examples of vectors.npz have shape (5,): write your own [[donors]]" in capsys.readouterr().err
    assert main(["init", "--data", "none.npz"]) == 3
    assert list(Path().iterdir()) == [Path("vectors.npz")]


def test_a_terminal_is_asked():
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "fedquilt.cli", "init", "--rounds", "3"]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, b"scaffold\n\nmany\n7\n")
        _, told = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, told
    assert b"methods" in told
    assert b"whole number" in told
    job = settings.load_job(Path("job.toml"))
    assert (job.method, job.rounds, job.fleet.devices) == ("scaffold", 3, 7)

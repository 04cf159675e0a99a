"""A broken job file says what is wrong, where, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.core import JobError


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_job_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    """Only name and method are needed."""
    job = settings.load(write(tmp_path, 'name = "digits"\nmethod = "fedavg"\n[params]\nlr = 0.1\n'))
    assert (job.rounds, job.cohort.quorum) == (10, 1.0)
    assert settings.params(job).lr == 0.1


def test_paths_are_taken_from_the_job_files_folder(tmp_path: Path) -> None:
    """So that a job can be moved together with its data."""
    (tmp_path / "x.npz").touch()
    job = settings.load(write(tmp_path, 'name = "j"\nmethod = "fedavg"\n[data]\npath = "x.npz"\n'))
    assert job.data["path"] == str(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not TOML"),
        ('name = "j"\nmethod = "fedavgg"\n', "there are: depthfl, ditto, fedavg"),
        ('name = "j"\nmethod = "fedavg"\nround = 3\n', "`round`"),
        ('name = "j"\nmethod = "fedavg"\nrounds = "3"\n', "$.rounds"),
        ('name = "J/../x"\nmethod = "fedavg"\n', "$.name"),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlearning_rate = 1\n', "it has epochs"),
        ('name = "j"\nmethod = "fedavg"\n[params]\nlr = "fast"\n', "[params] of fedavg"),
        ('name = "j"\nmethod = "fedavg"\nengine = "onnx"\n', "runs on torch or numpy"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nquorum = 2.0\n', "$.cohort.quorum"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nmin_battery = 20\n', "$.cohort.min_battery"),
        ('name = "j"\nmethod = "fedavg"\n[cohort]\nprefer = "mine"\n', "$.cohort.prefer"),
        ('name = "j"\nmethod = "fedavg"\n[stop]\nmax_joules = 0\n', "$.stop.max_joules"),
        ('name = "j"\nmethod = "fedavg"\n[stop]\nmax_hours = 1\n', "max_hours"),
    ],
)
def test_a_broken_job_file_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """The file, the key and what is expected."""
    path = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        settings.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    """With the reason of the operating system."""
    with pytest.raises(JobError, match="No such file"):
        settings.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("fedavg", {"batch": 0}, "`int` >= 1 - at `$.batch`"),
        ("fedavg", {"lr": -1.0}, "$.lr"),
        ("fedavg", {"lr": float("nan")}, "lr: not a finite number"),
        ("fedprox", {"mu": -5.0}, "$.mu"),
        ("fedstitch", {"depth": 1}, "$.depth"),
    ],
)
def test_a_parameter_out_of_range_is_refused_before_anything_runs(method: str, params: dict, said: str) -> None:
    """The range is the parameter's own."""
    with pytest.raises(JobError) as caught:
        settings.parse({"name": "j", "method": method, "params": params})
    assert said in str(caught.value)


def test_limits_from_the_command_line_replace_the_jobs_own_where_they_are_given() -> None:
    """The others stay."""
    job = settings.parse({"name": "j", "method": "fedavg", "stop": {"max_joules": 5.0, "max_bytes": 9}})
    assert settings.limited(job, None, None, None) == job
    assert settings.limited(job, 7.0, None, 60.0).stop == settings.Stop(7.0, 9, 60.0)

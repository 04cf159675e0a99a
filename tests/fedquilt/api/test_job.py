"""A job in Python is exactly what a job file holds, and what is wrong with one is said as the command says it."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fedquilt as fq
from fedquilt.coordinator import settings
from fedquilt.data.spec import DataSpec
from fedquilt.formats import toml

DIGITS = Path(settings.__file__).parents[1] / "tools" / "lab" / "demo" / "digits.npz"


def job(**changes: Any) -> fq.Job:
    table: dict[str, Any] = {
        "method": "fedprox",
        "params": {"mu": 0.1, "lr": 0.2},
        "model": fq.models.mlp(64, [32], 10),
        "data": fq.Data(str(DIGITS), partition="dirichlet", alpha=0.4),
        "cohort": fq.Cohort(size=5, deadline="predicted"),
        "fleet": fq.Fleet(10, boards=["jetson-nano", "raspberry-pi-5"]),
    }
    return fq.Job(**{**table, **changes})


def test_its_keys_and_defaults_are_those_of_a_job_file():
    """A key that a job file gains or loses is gained or lost here too. Only the name has a default."""
    plain = settings.JobSettings(name="job", method="fedavg")
    assert {each.name for each in dataclasses.fields(fq.Job)} == set(settings.JobSettings.__struct_fields__)
    assert fq.Job(method="fedavg").settings == plain


def test_a_job_reads_as_it_was_written(tmp_path):
    path = job().write(tmp_path / "job.toml")
    assert fq.Job.read(path) == job()
    assert settings.load_job(path) == job().settings
    written = toml.read_toml(path)
    assert written["cohort"] == {"size": 5, "deadline": "predicted"}
    assert "rounds" not in written


def test_relative_paths_are_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job(data=fq.Data("digits.npz")).data == {"path": str(tmp_path / "digits.npz")}


def test_a_replaced_method_keeps_the_parameters_that_it_has():
    assert job().replace(method="scaffold").params == {"lr": 0.2}
    assert job().replace(method="scaffold", params={"server_lr": 0.5}).params == {"server_lr": 0.5}
    assert job().replace(rounds=3) == job(rounds=3)
    with pytest.raises(fq.JobError, match="fedavg has no such parameter"):
        job(method="fedavg")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: job(round=3), r"a job has no key 'round'; did you mean 'rounds'\? There are: method, name, "),
        (lambda: fq.Job(), r"the job has no method"),
        (lambda: job(rounds=0), "rounds = 0: must be a whole number of at least 1"),
        (lambda: job(params={"muu": 1.0}), r"\[params\] muu: fedprox has no such parameter; .*did you mean 'mu'\?"),
        (
            lambda: fq.Cohort(siz=3),
            r"\[cohort\]: there is no key 'siz'; did you mean 'size'\? Keys of \[cohort\]: mode, ",
        ),
        (
            lambda: fq.Fleet(1, ["a"], ["1GB"], "max", None, ["lab"], ["1MB/s"], None, "more"),
            r"\[fleet\] got 9 values for 8 keys: give devices",
        ),
        (lambda: fq.Fleet(4, devices=5), r"\[fleet\]: devices is given twice, 4 by position and 5 by name"),
        (lambda: fq.Data(), r"\[data\]: one of path, sources and dataset is required, not none"),
        (lambda: job(data={"path": "x", "alpa": 1}), r"\[data\]: there is no key 'alpa'.*did you mean 'alpha'\?"),
        (lambda: job(wire={"codec": "zip"}), r"\[wire\] codec = 'zip' is unknown: choose raw"),
        (lambda: job(test={"path": "x", "splitt": "y"}), r"\[test\]: there is no key 'splitt'"),
    ],
)
def test_what_is_wrong_is_said_with_its_key_and_the_mend(make, said):
    with pytest.raises(fq.JobError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_tables_of_a_job_are_what_their_names_say():
    assert isinstance(fq.Cohort(size=3), settings.CohortSettings)
    assert isinstance(fq.Cohort(size=3), fq.Cohort)
    assert isinstance(fq.Data("x.npz"), DataSpec)
    assert fq.Fleet(3, boards=["jetson-nano"]) == settings.FleetSettings(3, ("jetson-nano",))
    assert msgspec.structs.asdict(fq.Cohort()) == msgspec.structs.asdict(settings.CohortSettings())


def test_what_is_shown_makes_the_same_job():
    assert eval(repr(job()), {"Job": fq.Job}) == job()
    assert "attempts" not in repr(job())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fq.simulate("job.toml"), r"'job\.toml' is not a fq\.Job: .*fq\.Job\.read"),
        (lambda: fq.compare(job(), seeds=[0]), r"compare takes a list of jobs and seeds"),
        (lambda: fq.compare([job()], seeds=1), r"compare takes a list of jobs and seeds"),
        (lambda: fq.compare("job.toml"), r"compare takes a list of jobs and seeds"),
        (lambda: fq.models.mlp(64, 32, 10), r"mlp: hidden is a list of widths: write \[32\]"),
    ],
)
def test_an_argument_of_another_kind_is_no_bare_type_error(make, said):
    """An argument of the wrong type raises a JobError that says what to pass instead, not a TypeError."""
    with pytest.raises(fq.JobError, match=said):
        make()

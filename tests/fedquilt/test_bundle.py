"""Bundles of jobs on disk, and whether they are up to date."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedquilt.arrays import tensors
from fedquilt.core import JobError, StoreError
from fedquilt.formats import checksummed_json, job_bundle

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MODEL = tensors.encode_tensors({"w": np.array([1.0, 2.0])})


def test_a_bundle_is_read_back_as_it_was_written(tmp_path):
    job_bundle.write_bundle(tmp_path, {"network": {"name": "mlp"}}, {"model": MODEL, "note": b"hello"})
    loaded = job_bundle.load_bundle(tmp_path)
    assert loaded.meta == {"network": {"name": "mlp"}}
    assert loaded.files["note"].size == 5
    assert loaded.load("model")["w"].tolist() == [1.0, 2.0]
    assert sorted(path.name for path in (tmp_path / "blobs").iterdir()) == sorted(
        ref.sha256 for ref in loaded.files.values()
    )


def test_files_that_are_there_already_are_kept(tmp_path):
    ref = job_bundle.write_bundle(tmp_path, {}, {"model": MODEL}).files["model"]
    path = tmp_path / "blobs" / ref.sha256
    before = path.stat().st_ino
    job_bundle.write_bundle(tmp_path, {}, {"model": MODEL})
    assert path.stat().st_ino == before
    path.write_bytes(b"cut")
    assert job_bundle.write_bundle(tmp_path, {}, {"model": MODEL}).load("model")["w"].tolist() == [1.0, 2.0]


def test_an_absent_bundle_says_how_it_is_made(tmp_path):
    with pytest.raises(JobError, match="create one with `fedquilt prepare`"):
        job_bundle.load_bundle(tmp_path)


def test_a_missing_or_shortened_file_is_named(tmp_path):
    ref = job_bundle.write_bundle(tmp_path, {}, {"donor/a": MODEL}).files["donor/a"]
    path = tmp_path / "blobs" / ref.sha256
    path.write_bytes(MODEL[:-1])
    with pytest.raises(JobError, match=r"'donor/a'.*missing or incomplete: run `fedquilt prepare` again"):
        job_bundle.load_bundle(tmp_path)
    path.unlink()
    with pytest.raises(JobError, match=r"'donor/a'"):
        job_bundle.load_bundle(tmp_path)


def test_a_bundle_of_another_version_is_refused(tmp_path):
    other = msgspec.defstruct("Other", [("meta", dict[str, int]), ("version", int)])
    (tmp_path / "bundle.json").write_bytes(checksummed_json.encode_with_checksum(other({}, 2)))
    with pytest.raises(JobError, match="version"):
        job_bundle.load_bundle(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match=r"cannot write the bundle .*taken"):
        job_bundle.write_bundle(tmp_path / "taken", {}, {})


def loads_or_refuses(folder: Path, index: bytes) -> None:
    (folder / "bundle.json").write_bytes(index)
    with suppress(JobError):
        job_bundle.load_bundle(folder)


@FUZZ
@given(noise=st.binary(max_size=60), data=st.data())
def test_arbitrary_and_mutated_indices_give_only_the_named_error(tmp_path, noise, data):
    job_bundle.write_bundle(tmp_path, {"n": 1}, {"model": MODEL})
    valid = (tmp_path / "bundle.json").read_bytes()
    loads_or_refuses(tmp_path, noise)
    place = data.draw(st.integers(0, len(valid)))
    loads_or_refuses(tmp_path, valid[:place] + noise[:8] + valid[place + len(noise[:8]) :])


@FUZZ
@given(
    sha256=st.sampled_from(["../bundle.json", "a" * 64, "a" * 64 + "\n", "\x00" * 64]) | st.text(max_size=5),
    size=st.integers() | st.none(),
)
def test_digests_that_lead_elsewhere_give_only_the_named_error(tmp_path, sha256, size):
    Index = msgspec.defstruct("Index", [("meta", dict[str, int]), ("files", dict[str, Any])])
    index = Index({}, {"model": {"sha256": sha256, "size": size}})
    try:
        payload = checksummed_json.encode_with_checksum(index)
    except UnicodeEncodeError:  # what is no text cannot be in a file
        return
    (tmp_path / "bundle.json").write_bytes(payload)
    with pytest.raises(JobError):
        job_bundle.load_bundle(tmp_path)


# -- what a bundle was prepared from ---------------------------------------------------------------

JOB = 'name = "a"\nmethod = "fedavg"\nrounds = 3\nmodel.name = "mlp"\ndata.path = "own.csv"\n'


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that was just prepared from job.toml."""
    folder = tmp_path / "job.bundle"
    folder.mkdir()
    (tmp_path / "own.csv").write_text("a,y\n1,0\n")
    (tmp_path / "job.toml").write_text(JOB)
    (folder / "bundle.json").write_text("{}")
    table = {"data": {"path": str(tmp_path / "own.csv"), "labels": [str(tmp_path)]}}
    job_bundle.record_inputs(job_bundle.stamp_inputs(tmp_path / "job.toml", table), folder)
    return folder


def test_a_bundle_is_current_until_something_that_it_depends_on_changes(bundle):
    job, data = bundle.with_name("job.toml"), bundle.with_name("own.csv")
    assert job_bundle.is_current(job, bundle)
    job.write_text(JOB.replace("rounds = 3", "rounds = 4"))
    assert job_bundle.is_current(job, bundle)
    job.write_text(JOB.replace("mlp", "cnn"))
    assert not job_bundle.is_current(job, bundle)
    job.write_text(JOB)
    data.write_text("a,y\n1,0\n2,1\n")
    assert not job_bundle.is_current(job, bundle)


def test_a_bundle_with_a_damaged_record_is_not_current(bundle):
    (bundle / "inputs.json").write_bytes(b"{\x00")
    assert not job_bundle.is_current(bundle.with_name("job.toml"), bundle)


def test_a_file_in_a_folder_of_examples_counts(bundle):
    job, folder = bundle.with_name("job.toml"), bundle.with_name("pictures")
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "1.txt").write_text("1")
    job.write_text(JOB.replace("own.csv", "pictures"))
    job_bundle.record_inputs(job_bundle.stamp_inputs(job, {"data": {"path": str(folder)}}), bundle)
    assert job_bundle.is_current(job, bundle)
    (folder / "a" / "2.txt").write_text("2")
    assert not job_bundle.is_current(job, bundle)


def test_data_that_appear_during_preparation_count(bundle):
    job, data = bundle.with_name("job.toml"), bundle.with_name("downloaded.csv")
    given = job_bundle.stamp_inputs(job, {"data": {"path": str(data)}, "test": {"path": str(data.with_name("none"))}})
    data.write_text("a,y\n1,0\n")
    job_bundle.record_inputs(given, bundle)
    assert job_bundle.is_current(job, bundle)
    data.write_text("a,y\n1,0\n2,1\n")
    assert not job_bundle.is_current(job, bundle)


def test_only_keys_of_paths_name_files(bundle):
    """A class or a category may be "/", too."""
    job = bundle.with_name("job.toml")
    table = {"labels": ["/", str(job)], "data": {"categories": {"path": ["/"]}, "sources": [{"path": str(job)}]}}
    assert list(job_bundle.stamp_inputs(job, table).files) == [str(job)]

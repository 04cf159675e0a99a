"""A bundle is out of date when its job file, or a file that this names, has changed."""

import os
from pathlib import Path

import pytest

from fedquilt.formats import job_bundle

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


def test_a_file_with_a_new_date_does_not_change_the_content_of_a_bundle(bundle):
    job, data = bundle.with_name("job.toml"), bundle.with_name("own.csv")
    before = job_bundle.hash_content(bundle)
    os.utime(data, (1, 1))
    assert not job_bundle.is_current(job, bundle)
    job_bundle.record_inputs(job_bundle.stamp_inputs(job, {"data": {"path": str(data)}}), bundle)
    assert job_bundle.hash_content(bundle) == before


def test_a_bundle_that_was_carried_here_is_used_as_it_is(bundle):
    job = bundle.with_name("job.toml")
    bundle.with_name("own.csv").unlink()
    assert job_bundle.is_current(job, bundle)
    (bundle / "inputs.json").unlink()
    job.write_text("")
    assert job_bundle.is_current(job, bundle)
    (bundle / "bundle.json").unlink()
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

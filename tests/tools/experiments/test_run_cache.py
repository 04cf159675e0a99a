"""Finished runs in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

import fedquilt
from fedquilt.core import JobError, StoreError
from fedquilt.formats import job_bundle
from fedquilt.tools.experiments import run_cache


def test_a_run_is_found_again_and_one_of_another_shape_is_not(tmp_path: Path) -> None:
    store = run_cache.RunCache(tmp_path, list[int])
    assert store.find("a") is None
    store.store("a", [1, 2])
    assert run_cache.RunCache(tmp_path, list[int]).find("a") == [1, 2]
    assert run_cache.RunCache(tmp_path, list[str]).find("a") is None
    assert [path.name for path in store.folder.iterdir()] == ["a.json"]


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
    with pytest.raises(JobError, match=r"no bundle in .*prepare"):
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
    file = tmp_path / "data.npz"
    file.write_bytes(b"0123")
    monkeypatch.setattr(run_cache, "SETTLED_S", -1e9)
    first = run_cache.compute_content_digest(file)
    opened: list[Path] = []
    monkeypatch.setattr(Path, "open", lambda path, *mode: opened.append(path))
    assert run_cache.compute_content_digest(file) == first
    assert opened == []
    monkeypatch.undo()
    file.write_bytes(b"3210")
    assert run_cache.compute_content_digest(file) != first


def test_a_jobs_data_are_in_two_tables_and_in_each_of_several_sources() -> None:
    table = {
        "data": {"sources": [{"path": "/a", "labels_from": 0}, {"path": "/b", "labels_from": 5}]},
        "test": {"path": "/t"},
    }
    assert run_cache.list_data_paths(msgspec.json.encode(table)) == [Path("/a"), Path("/b"), Path("/t")]
    assert run_cache.list_data_paths(msgspec.json.encode({"data": {"dataset": "fedpews-32k"}})) == []


def test_a_key_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop.py").write_text("a = 1")
    monkeypatch.setattr(fedquilt, "__file__", str(tmp_path / "package" / "__init__.py"))
    code = run_cache.compute_code_digest.__wrapped__
    found = [code()]
    assert code() == found[0]
    (tmp_path / "elsewhere" / "loop.py").write_text("a = 2")
    found.append(code())
    monkeypatch.setattr(fedquilt, "__version__", "0.0.0")
    found.append(code())
    monkeypatch.setattr(run_cache, "_get_package_version", lambda name: "9")
    found.append(code())
    assert len(set(found)) == 4
    (tmp_path / "elsewhere" / "notes.txt").write_text("no code")
    assert code() == found[-1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*out/runs"):
        run_cache.RunCache(tmp_path / "out", list[int])

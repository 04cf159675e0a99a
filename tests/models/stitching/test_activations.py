"""Stacks hand out what was put in, wherever they lie; what is kept is whole or absent."""

import errno
import gc
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import StoreError
from fedquilt.models.stitching.device.activations import (
    ActivationCache,
    ActivationStack,
    FileStack,
    MappedSource,
    MemoryStack,
    SourceSlice,
)

X = np.random.default_rng(0).normal(size=(7, 2, 3, 3)).astype(np.float32)


def stack(where: str, folder: Path) -> ActivationStack:
    made = MemoryStack(X.shape) if where == "memory" else FileStack(X.shape, folder)
    for part in (X[:3], X[3:4], X[4:]):
        made.append(part)
    return made


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize(("first", "last"), [(0, 7), (0, 3), (1, 2), (2, 6), (3, 4), (6, 7)])
def test_rows_and_columns_are_those_that_were_put(where, first, last, tmp_path):
    made = stack(where, tmp_path)
    assert np.array_equal(made.read_examples(first, last), X[first:last])
    assert np.array_equal(made.read_features(first, last, 5), X.reshape(7, -1)[:5, first:last])
    assert made.nbytes == X.nbytes


@pytest.mark.parametrize(("last", "reads"), [(18, 1), (17, 5)])
def test_whole_examples_are_one_read_of_the_file(last, reads, tmp_path, monkeypatch):
    made, read, sizes = stack("file", tmp_path), os.preadv, []

    def preadv(file, into, offset):
        sizes.append(len(into[0]))
        return read(file, into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert np.array_equal(made.read_features(0, last, 5), X.reshape(7, -1)[:5, :last])
    assert len(sizes) == reads


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_saved_stack_is_found_again_and_only_in_its_shape(where, tmp_path):
    made = stack(where, tmp_path)
    made.save(tmp_path / "kept")
    del made
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    found = FileStack.open(tmp_path / "kept", X.shape)
    assert np.array_equal(found.read_examples(0, 7), X)
    assert FileStack.open(tmp_path / "kept", (8, 2, 3, 3)) is None
    assert FileStack.open(tmp_path / "absent", X.shape) is None
    os.truncate(tmp_path / "kept", 100)
    assert FileStack.open(tmp_path / "kept", X.shape) is None
    with pytest.raises(StoreError, match="truncated"):
        found.read_examples(0, 7)


def open_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open, also those that are deleted since."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that listed the others is closed again
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder.resolve()}/")]


def test_a_stack_that_is_not_saved_leaves_nothing(tmp_path):
    """Its file goes with it, and its descriptor. Descriptors of earlier tests may be closed meanwhile."""
    made = stack("file", tmp_path)
    assert len(list(tmp_path.iterdir())) == len(open_in(tmp_path)) == 1
    del made
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert not open_in(tmp_path)


def test_a_full_disk_is_told_with_a_mend(tmp_path, monkeypatch):
    """What cannot be written raises; what can be spared is just not kept."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    shelf = ActivationCache(tmp_path, 10**6, 10**6)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left on device; free disk space"):
        stack("file", tmp_path)
    with pytest.raises(StoreError, match="free disk space"):
        shelf.store("needed", stack("memory", tmp_path), spare=False)
    shelf.store("spared", stack("memory", tmp_path), spare=True)
    assert shelf.find("needed", X.shape) is shelf.find("spared", X.shape) is None


def test_stacks_are_in_memory_while_there_is_room(tmp_path):
    (tmp_path / "part-left").write_bytes(b"x")
    shelf = ActivationCache(tmp_path, 2 * X.nbytes, 0)
    assert not list(tmp_path.iterdir())
    first, second, third = (shelf.make_stack(X.shape) for _ in range(3))
    assert [type(each) for each in (first, second, third)] == [MemoryStack, MemoryStack, FileStack]
    del first
    gc.collect()
    assert isinstance(shelf.make_stack(X.shape), MemoryStack)


def test_a_kept_stack_that_is_damaged_is_not_found(tmp_path, caplog):
    shelf = ActivationCache(tmp_path, 10**6, 10**6)
    for at in (0, -1, -5):  # the first example, the checksum and the last example
        shelf.store("target", MemoryStack.from_array(X), spare=False)
        whole = bytearray((tmp_path / "target").read_bytes())
        whole[at] ^= 16
        (tmp_path / "target").write_bytes(whole)
        assert shelf.find("target", X.shape) is None
        assert not (tmp_path / "target").exists()
    assert caplog.text.count("target is damaged") == 3


def test_what_is_kept_makes_room_for_newer_and_the_longest_unused_goes_first(tmp_path):
    """Room for two: reading the older one saves it. What cannot be spared stays, whatever comes."""
    shelf = ActivationCache(tmp_path, 10**6, 2 * X.nbytes)
    shelf.store("target", MemoryStack.from_array(X), spare=False)
    for name, age in (("a", 300), ("b", 200)):
        shelf.store(name, MemoryStack.from_array(X), spare=True)
        path = tmp_path / f"{name}.spare"
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    assert shelf.find("a", X.shape) is not None
    shelf.store("c", MemoryStack.from_array(X), spare=True)
    assert [shelf.find(name, X.shape) is not None for name in ("a", "b", "c", "target")] == [True, False, True, True]
    shelf.store(
        "wide", MemoryStack.from_array(np.concatenate([X, X, X])), spare=True
    )  # would never fit: nothing goes for it
    assert [shelf.find(name, X.shape) is not None for name in ("a", "c", "target")] == [True, True, True]


def test_views_change_values_or_places_and_nothing_else(tmp_path):
    doubled = MappedSource(stack("file", tmp_path), lambda x: 2 * x[:, :1], (1, 3, 3), 5)
    assert doubled.shape == (7, 1, 3, 3)
    part = SourceSlice(doubled, 2, 6)
    assert part.shape == (4, 1, 3, 3)
    assert part.example_bytes == 5
    assert np.array_equal(part.read_examples(1, 3), 2 * X[3:5, :1])

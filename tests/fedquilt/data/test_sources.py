"""Several sources as one set: labels, shapes and types brought together, each source read only if needed."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedquilt.core import DataError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec, ExampleSource

REAL = Path(os.environ.get("FEDQUILT_TEST_DATA") or Path(__file__).parents[3] / "../shared/data")


def saved(path: Path, value: float, shape: tuple[int, ...], kinds: int = 2, count: int = 6, dtype=np.uint8) -> str:
    """`count` examples that hold this value, of so many classes in turn, in both splits."""
    x, y = np.full((count, *shape), value, dtype), np.arange(count) % kinds
    np.savez(path, x_train=x, y_train=y, x_test=x[:kinds], y_test=y[:kinds])
    return str(path)


def mixed(*sources: tuple[str, int], **options) -> DataSpec:
    return DataSpec(sources=tuple(ExampleSource(path, first) for path, first in sources), **options)


def test_two_sources_are_one_set_of_classes_side_by_side(tmp_path):
    spec = mixed(
        (saved(tmp_path / "colour.npz", 200, (4, 4, 3)), 0),
        (saved(tmp_path / "grey.npz", 7, (2, 2), kinds=3), 2),
        size=4,
    )
    every = examples.load_split(spec)
    assert (every.x.shape, every.x.dtype) == ((12, 4, 4, 3), np.uint8)
    assert every.y.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 4, 2, 3, 4]
    assert [set(np.unique(every.x[every.y == kind])) for kind in range(5)] == [{200}, {200}, {7}, {7}, {7}]
    test = examples.load_split(msgspec.structs.replace(spec, split="test"))
    assert test.y.tolist() == [0, 1, 2, 3, 4]


def test_by_source_each_device_has_one_kind_of_image(tmp_path):
    spec = mixed(
        (saved(tmp_path / "a.npz", 1, (2, 2)), 0),
        (saved(tmp_path / "b.npz", 2, (2, 2), count=10), 2),
        groups="source",
        partition="iid",
        shares=2,
    )
    parts = examples.load_all_shares(spec)
    assert [set(np.unique(train.x)) for train, _ in parts] == [{1}, {2}]
    assert [sorted({*train.y, *held.y}) for train, held in parts] == [[0, 1], [2, 3]]
    four = examples.load_all_shares(msgspec.structs.replace(spec, shares=4))
    assert [len(train) + len(held) for train, held in four] == [3, 3, 5, 5]


def test_inputs_stay_with_their_labels(tmp_path):
    for name, first in (("a", 0), ("b", 10)):
        y = np.arange(50) % 10
        np.savez(tmp_path / f"{name}.npz", x=(first + y)[:, None].astype(np.uint8), y=y)
    spec = mixed(
        (str(tmp_path / "a.npz"), 0), (str(tmp_path / "b.npz"), 10), partition="dirichlet", shares=3, limit=60, seed=4
    )
    parts = [part for pair in examples.load_all_shares(spec) for part in pair]
    assert all(np.array_equal(part.x[:, 0], part.y) for part in parts)
    assert sum(map(len, parts)) == 60
    alone = examples.load_share(msgspec.structs.replace(spec, share=1))
    assert all(np.array_equal(one.x, other.x) for one, other in zip(alone, parts[2:4], strict=True))


def test_by_source_counts_rows_that_a_limit_leaves(tmp_path):
    spec = mixed(
        (saved(tmp_path / "a.npz", 1, (2,), count=40), 0),
        (saved(tmp_path / "b.npz", 2, (2,), count=40), 2),
        groups="source",
        shares=2,
        per_class=5,
    )
    for share, (train, held) in enumerate(examples.load_all_shares(spec)):
        assert set(np.unique(np.concatenate([train.x, held.x]))) == {share + 1}
        assert len(train) + len(held) == 10


def test_a_device_of_one_source_reads_no_inputs_of_the_other(tmp_path):
    a, b = saved(tmp_path / "a.npz", 1, (99, 99)), saved(tmp_path / "b.npz", 2, (99, 99))
    payload = bytearray(Path(b).read_bytes())
    payload[payload.index(b"\x02" * 64) + 50_000] ^= 1
    Path(b).write_bytes(payload)
    spec = mixed((a, 0), (b, 2), groups="source", shares=2)
    train, _ = examples.load_share(spec)
    assert np.all(train.x == 1)
    with pytest.raises(DataError, match=r"cannot read .*b\.npz"):
        examples.load_share(msgspec.structs.replace(spec, share=1))


def test_sources_may_share_their_classes(tmp_path):
    spec = mixed((saved(tmp_path / "a.npz", 1, (2,)), 3), (saved(tmp_path / "b.npz", 2, (2,)), 3))
    assert examples.load_split(spec).y.tolist() == [3, 4] * 6


def test_a_board_with_one_source_of_a_mixture_numbers_its_classes_alike(tmp_path):
    path = saved(tmp_path / "b.npz", 2, (2, 2))
    alone = examples.load_split(mixed((path, 10)))
    assert alone.y.tolist() == [10, 11] * 3


def test_floats_and_bytes_become_floats_from_0_to_1(tmp_path):
    bytes_, floats = saved(tmp_path / "a.npz", 255, (2, 2)), saved(tmp_path / "b.npz", 0.5, (2, 2), dtype=np.float64)
    x = examples.load_split(mixed((bytes_, 0), (floats, 2))).x
    assert x.dtype == np.float32
    assert set(np.unique(x)) == {0.5, 1.0}


def test_images_are_scaled_by_the_table(tmp_path):
    x = np.array([[[1, 2], [3, 4]]] * 300, np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.zeros(300, int))
    halved = examples.load_split(DataSpec(str(tmp_path / "a.npz"), size=1))
    assert halved.x.shape == (300, 1, 1)
    assert set(np.unique(halved.x)) == {2}
    np.savez(tmp_path / "b.npz", x=np.array([[[0, 100], [0, 100]]], np.uint8), y=[0])
    doubled = examples.load_split(DataSpec(str(tmp_path / "b.npz"), size=4))
    assert doubled.x.tolist() == [[[0, 25, 75, 100]] * 4]


def test_sources_that_do_not_go_together_are_refused(tmp_path):
    small, large = saved(tmp_path / "small.npz", 1, (2, 2)), saved(tmp_path / "large.npz", 1, (4, 4, 3))
    with pytest.raises(DataError, match=r"small\.npz \(2, 2\), .*large\.npz \(4, 4, 3\)\): set \[data\] size"):
        examples.load_split(mixed((small, 0), (large, 2)))
    points = saved(tmp_path / "points.npz", 1, (5,))
    with pytest.raises(DataError, match=r"points\.npz \(5,\)\): leave out all but one shape"):
        examples.load_split(mixed((small, 0), (points, 2)))
    with pytest.raises(DataError, match=r"points\.npz: inputs of shape \(5,\) are no images: leave \[data\] size out"):
        examples.load_split(mixed((small, 0), (points, 2), size=4))
    whole = saved(tmp_path / "whole.npz", 1, (2, 2), dtype=np.int32)
    with pytest.raises(DataError, match=r"different types .*int32\): save all as uint8"):
        examples.load_split(mixed((small, 0), (whole, 2)))
    with pytest.raises(DataError, match=r"both have class 1, .* set equal labels_from"):
        examples.load_split(mixed((small, 0), (large, 1), size=2))
    with pytest.raises(DataError, match=r"no data at .*nowhere"):
        examples.load_split(mixed((small, 0), (str(tmp_path / "nowhere"), 2)))

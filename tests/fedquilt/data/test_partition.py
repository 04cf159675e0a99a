"""Shards, groups, balanced draws, and FedPeWS' synthetic sets: who has what, and what is refused."""

import hashlib

import msgspec
import numpy as np
import pytest

from fedquilt.core import DataError, JobError
from fedquilt.data import examples, partition, synthetic
from fedquilt.data.spec import DataSpec

TEN = np.repeat(np.arange(10), 30)  # 30 examples of each of ten classes
KNOWN = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def rows_of_share(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    return partition.rows_of_shares(y, spec, selected=[spec.share])[0]


def kinds(y: np.ndarray, owned: np.ndarray) -> set[int]:
    return set(y[owned].tolist())


def test_a_tiny_alpha_leaves_each_class_to_one_device():
    spec = DataSpec("-", partition="dirichlet", alpha=1e-300, shares=4)
    owned = partition.rows_of_shares(TEN, spec)
    assert [sum(int(k in kinds(TEN, own)) for own in owned) for k in range(10)] == [1] * 10
    assert sorted(np.concatenate(owned)) == list(range(300))


def test_shards_are_equal_and_of_few_classes():
    owned = partition.rows_of_shares(TEN, DataSpec("-", partition="shards", shares=10))
    assert [len(own) for own in owned] == [30] * 10
    assert {len(kinds(TEN, own)) for own in owned} <= {1, 2}
    assert any(len(kinds(TEN, own)) == 2 for own in owned)


def test_more_shards_than_examples_are_refused():
    spec = DataSpec("few.npz", partition="shards", shares=175)
    with pytest.raises(
        DataError, match=r"few\.npz: 175 devices need 350 shards .*, but there are 300 .* at most 150 devices"
    ):
        rows_of_share(TEN, spec)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes", "shards"])
def test_devices_of_different_groups_have_no_class_in_common(kind):
    spec = DataSpec("-", partition=kind, shares=8, groups=KNOWN, classes=4, min_size=1)
    owned = partition.rows_of_shares(TEN, spec)
    assert all(kinds(TEN, own) <= set(KNOWN[share // 4]) for share, own in enumerate(owned))
    assert sorted(np.concatenate(owned).tolist()) == list(range(300))


def test_each_group_is_a_partition_of_its_own():
    spec = DataSpec("-", partition="iid", shares=8, groups=KNOWN, seed=3)
    owned = partition.rows_of_shares(TEN, spec)
    assert not np.array_equal(owned[0] + 150, owned[4])
    for share in (0, 3, 4, 7):
        assert np.array_equal(rows_of_share(TEN, msgspec.structs.replace(spec, share=share)), owned[share])


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match=r"d\.npz: class 9 is in no group of \[data\] groups: add it"):
        rows_of_share(TEN, DataSpec("d.npz", shares=2, groups=((0, 1, 2, 3, 4), (5, 6, 7, 8))))
    with pytest.raises(DataError, match="2 groups are more than 1 shares: simulate at least 2 devices"):
        rows_of_share(TEN, DataSpec("d.npz", groups=KNOWN))


def test_a_split_has_its_own_number_of_each_class(tmp_path):
    x = np.zeros((300, 2), np.float32)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=TEN, x_test=x, y_test=TEN, x_more=x, y_more=TEN)
    spec = DataSpec.parse({"path": str(tmp_path / "a.npz"), "per_class": {"train": 3, "test": 1}})
    sizes = [
        len(examples.load_split(msgspec.structs.replace(spec, split=split))) for split in ("train", "test", "more")
    ]
    assert sizes == [30, 10, 300]
    assert len(examples.load_split(msgspec.structs.replace(spec, per_class=2))) == 20


MIXED = [{"path": "a.npz", "labels_from": 0}, {"path": "b.npz", "labels_from": 10}]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "one of path, sources and dataset is required, not none"),
        ({"sources": [{"path": "a", "labels_from": 0}], "dataset": "MNIST"}, "dataset requires path"),
        ({"dataset": "fedpews-32k", "size": 32}, "size is for images"),
        ({"sources": MIXED, "column": "x"}, "column requires path, or set it in each source"),
        (
            {"sources": [{"path": "a.npz"}]},
            r"write labels_from = \.\.\. in \[data\] sources\[0\]",
        ),
        ({"path": "a.npz", "limit": 5, "per_class": 2}, "limit and per_class"),
        ({"path": "a.npz", "groups": "source"}, "requires at least two sources"),
        ({"path": "a.npz", "groups": [[0, 1], [1, 2]]}, "a repeated class"),
        ({"path": "a.npz", "groups": [[0, 1], []]}, "groups has an empty group"),
        ({"path": "a.npz", "groups": [[-1]]}, r"groups"),
        ({"path": "a.npz", "per_class": {"train": -1}}, "per_class"),
        (
            {"path": "a.npz", "partition": "shard"},
            r"did you mean 'shards'\? There are: all, classes, column, dirichlet, iid, quantity, shards",
        ),
    ],
)
def test_a_wrong_table_says_what_is_wrong(table, message):
    with pytest.raises(JobError, match=message):
        DataSpec.parse(table)


LARGE = DataSpec(dataset="fedpews-32k")


@pytest.mark.parametrize(("name", "count"), [("fedpews-32k", 32000), ("fedpews-3.2k", 3200)])
def test_the_sets_are_as_large_as_they_are_called(name, count):
    spec = DataSpec(dataset=name)
    train, test = examples.load_split(spec), examples.load_split(msgspec.structs.replace(spec, split="test"))
    assert (train.x.shape, train.x.dtype) == ((count, 5), np.float32)
    assert np.bincount(train.y).tolist() == [count // 4] * 4
    assert np.bincount(test.y).tolist() == [1600] * 4


def test_clusters_lie_where_they_should_and_are_as_wide():
    """Means within five standard errors of centre + offset; covariances within a tenth of A'A."""
    plane = synthetic.draw_points("fedpews-32k", "train", 0).reshape(4, 4, 2000, 2)  # centre, offset, point
    round_ = [[0.085, 0.075], [0.075, 0.085]]  # .25^2 + .15^2; 2 x .25 x .15
    wanted = [[[0.0025, 0], [0, 0.2025]], round_, round_, [[0.0625, 0], [0, 0.0025]]]
    for centre, (right, up) in enumerate([(-4, 4), (4, 4), (-4, -4), (4, -4)]):
        for offset in range(4):
            found, covariance = plane[centre, offset], np.array(wanted[centre])
            errors = np.abs(found.mean(axis=0) - [right + offset, up - offset])
            assert np.all(errors < 5 * np.sqrt(np.diag(covariance) / 2000))
            scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
            assert np.all(np.abs(np.cov(found.T) - covariance) < 0.1 * scale)


def test_classes_interleave_within_a_side():
    y = examples.open_split(LARGE).y.reshape(4, 4, 2000)
    assert np.array_equal(y[:, :, 0], [[0, 1, 0, 1]] * 2 + [[2, 3, 2, 3]] * 2)
    assert np.array_equal(y.min(axis=2), y.max(axis=2))


def test_features_are_standardised_by_the_training_set():
    train = examples.load_split(LARGE).x.astype(np.float64)
    assert np.allclose(train.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(train.std(axis=0), 1, atol=1e-5)
    test = examples.load_split(msgspec.structs.replace(LARGE, split="test")).x.astype(np.float64)
    assert np.allclose(test.mean(axis=0), 0, atol=0.05)
    assert not np.allclose(test.mean(axis=0), 0, atol=1e-6)
    x, y = synthetic.draw_points("fedpews-32k", "train", 0).T
    for column, raw in enumerate([x, y, x * x, y * y, x * y]):
        assert np.allclose(train[:, column], (raw - raw.mean()) / raw.std(), atol=1e-5)


def test_every_machine_draws_the_same():
    drawn = synthetic.draw_points("fedpews-3.2k", "train", 0)
    digits = np.rint(drawn * 1e5).astype("<i8").tobytes()
    assert hashlib.sha256(digits).hexdigest()[:16] == "0e0bf965124502ff"
    assert not np.array_equal(drawn, synthetic.draw_points("fedpews-3.2k", "train", 1))
    assert not np.array_equal(drawn[:200], synthetic.draw_points("fedpews-3.2k", "test", 0)[:200])
    assert not np.array_equal(drawn[:200], synthetic.draw_points("fedpews-32k", "train", 0)[:200])


def test_each_device_makes_its_own_share():
    """Two devices with a pair of classes each, as in the paper: what each makes is its part of the whole."""
    spec = msgspec.structs.replace(LARGE, groups=((0, 1), (2, 3)), shares=2, held=0.0)
    every = examples.load_split(LARGE)
    for share in (0, 1):
        train, held = examples.load_share(msgspec.structs.replace(spec, share=share))
        assert len(held) == 0
        assert np.array_equal(train.x, every.x[every.y // 2 == share])
        assert np.array_equal(train.y, every.y[every.y // 2 == share])


def test_there_are_two_splits():
    with pytest.raises(DataError, match="fedpews-32k has no split 'validation'"):
        examples.load_split(msgspec.structs.replace(LARGE, split="validation"))

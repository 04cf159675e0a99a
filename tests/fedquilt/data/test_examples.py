"""A board's examples: exact partitions, every reader on small files, and on real data where it is at hand."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from example_files import needs_torchvision, rows_of

from fedquilt.core import DataError, JobError
from fedquilt.data import examples as data
from fedquilt.data import partition, readers
from fedquilt.data.spec import DataSpec

REAL = Path(os.environ.get("FEDQUILT_TEST_DATA") or Path(__file__).parents[3] / "../shared/data")
needs_real = pytest.mark.skipif(
    not (REAL / "MNIST/raw").is_dir(),
    reason=f"no real data in {REAL}: set FEDQUILT_TEST_DATA to a folder with MNIST/raw and cifar10-10k.npz",
)

LABELS = np.repeat(np.arange(5), [40, 30, 20, 8, 2])  # 100 examples of 5 classes, unequal
PARTITIONS = {
    "iid": DataSpec("-", partition="iid", shares=7),
    "dirichlet": DataSpec("-", partition="dirichlet", shares=7, alpha=0.3),
    "classes": DataSpec("-", partition="classes", shares=7, classes=2),
    "shards": DataSpec("-", partition="shards", shares=7),
    "quantity": DataSpec("-", partition="quantity", shares=7, alpha=0.7),
    "groups": DataSpec("-", partition="dirichlet", shares=7, groups=((0, 3), (1, 2, 4))),
}
every_partition = pytest.mark.parametrize("kind", PARTITIONS)


def rows_of_share(y: np.ndarray, spec: DataSpec) -> np.ndarray:
    return partition.rows_of_shares(y, spec, selected=[spec.share])[0]


def shares(y: np.ndarray, spec: DataSpec) -> list[np.ndarray]:
    return [rows_of_share(y, msgspec.structs.replace(spec, share=share)) for share in range(spec.shares)]


def with_options(spec: DataSpec, **options) -> DataSpec:
    return msgspec.structs.replace(spec, **options)


# -- partitions -----------------------------------------------------------------------------------


@every_partition
def test_shares_are_disjoint_and_cover_everything(kind):
    together = np.concatenate(shares(LABELS, PARTITIONS[kind]))
    assert sorted(together.tolist()) == list(range(100))


@every_partition
def test_the_seed_decides_the_partition(kind):
    first, again, other = (shares(LABELS, with_options(PARTITIONS[kind], seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("iid", "c31d85cffbca49ec"),
        ("dirichlet", "8b4e030b3c067170"),
        ("classes", "cf5c3de1cb002293"),
        ("shards", "b077bd4aef7bf98f"),
        ("quantity", "113d23762156724c"),
        ("groups", "742f144c649bde77"),
    ],
)
def test_every_python_and_numpy_draws_the_same_partition(kind, digest):
    """Devices of one fleet may run different ones: the shares are pinned by their hash."""
    rows = b"|".join(share.astype("<i8").tobytes() for share in shares(LABELS, PARTITIONS[kind]))
    assert hashlib.sha256(rows).hexdigest()[:16] == digest


def test_iid_shares_differ_by_one_at_most():
    assert sorted(map(len, shares(LABELS, PARTITIONS["iid"]))) == [14] * 5 + [15] * 2


def test_no_dirichlet_share_is_below_the_minimum():
    """Drawn again until it holds; and called out of reach where it cannot."""
    spec = DataSpec("digits.npz", partition="dirichlet", shares=7, alpha=0.3, min_size=6)
    assert min(map(len, shares(LABELS, spec))) >= 6
    with pytest.raises(DataError, match=r"digits\.npz: none of 1000 .* raise alpha, or lower shares"):
        rows_of_share(LABELS, with_options(spec, min_size=14, alpha=0.01))
    with pytest.raises(DataError, match=r"each of 7 devices 14 examples: set min_size = \d+, raise") as raised:
        rows_of_share(LABELS, with_options(spec, min_size=14))
    min_size = int(re.findall(r"min_size = (\d+)", str(raised.value))[0])
    assert min(map(len, shares(LABELS, with_options(spec, min_size=min_size)))) == min_size
    with pytest.raises(DataError, match="100 examples are too few for 7 shares of at least 15"):
        rows_of_share(LABELS, with_options(spec, min_size=15))


def test_sizes_follow_a_power_law_above_the_minimum():
    """Of sizes s above it, P(size > s) falls as s ** -alpha: in logarithms, deciles lie log(10) / alpha apart."""
    spec = DataSpec("-", partition="quantity", shares=1000, alpha=2.0, min_size=5, seed=1)
    sizes = np.sort([len(own) for own in partition.rows_of_shares(np.zeros(10**6, int), spec)])[::-1] - 5
    assert sizes.sum() == 10**6 - 5000
    assert np.log(sizes[9] / sizes[99]) == pytest.approx(np.log(10) / 2, rel=0.2)
    assert np.log(sizes[99] / sizes[999]) == pytest.approx(np.log(10) / 2, rel=0.1)
    even = shares(LABELS, with_options(PARTITIONS["quantity"], alpha=1e6))
    assert sorted(map(len, even)) == [14] * 5 + [15] * 2
    one = shares(LABELS, with_options(PARTITIONS["quantity"], alpha=1e-6))
    assert sorted(map(len, one)) == [2] * 6 + [88]
    with pytest.raises(DataError, match="100 examples are too few for 7 shares of at least 15: simulate fewer devices"):
        rows_of_share(LABELS, with_options(PARTITIONS["quantity"], min_size=15))


def test_each_device_has_so_many_classes_and_each_class_a_device():
    owned = shares(LABELS, PARTITIONS["classes"])
    having = {kind: [share for share in owned if kind in LABELS[share]] for kind in range(5)}
    assert all(len(np.unique(LABELS[share])) <= 2 for share in owned)
    assert {len(those) for those in having.values()} <= {2, 3}
    for kind in range(4):
        counts = [int((LABELS[share] == kind).sum()) for share in having[kind]]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("classes", [1, 6])
def test_classes_that_cannot_be_given_out_are_refused(classes):
    """3 devices of one class leave two classes to nobody; 6 of 5 classes cannot be had."""
    spec = DataSpec("d", partition="classes", shares=3, classes=classes)
    with pytest.raises(DataError, match="set classes from 2 to 5"):
        rows_of_share(LABELS, spec)


def test_a_fifth_of_each_class_is_held_out():
    """round(0.2 * 100) = 20 as 8 + 6 + 4 + 1.6 + 0.4: the fractions go to the class with the larger one."""
    train, held = partition.split_held_out(LABELS, DataSpec("-"))
    assert np.bincount(LABELS[held], minlength=5).tolist() == [8, 6, 4, 2, 0]
    assert sorted([*train, *held]) == list(range(100))
    other = partition.split_held_out(LABELS, DataSpec("-", seed=1))[1]
    assert not np.array_equal(held, other)


@pytest.mark.parametrize(("count", "share", "wanted"), [(1, 0.2, 0), (2, 0.2, 1), (3, 0.9, 2), (10, 0.0, 0)])
def test_both_parts_have_something_where_they_can(count, share, wanted):
    train, held = partition.split_held_out(np.zeros(count, int), DataSpec("-", held=share))
    assert (len(train), len(held)) == (count - wanted, wanted)


# -- npz ------------------------------------------------------------------------------------------


def small(path: Path, save=np.savez_compressed, **arrays) -> Path:
    """20 images of 3x3, whose every pixel is their row number; the test split holds the same from 100 on."""
    x = np.arange(20, dtype=np.uint8)[:, None, None] * np.ones((1, 3, 3), np.uint8)
    y = np.arange(20) % 4
    held = {"x_train": x, "y_train": y, "x_test": x[:5] + 100, "y_test": y[:5], **arrays}
    save(path, **held)
    return path


def test_all_shares_at_once_are_those_of_each_device(tmp_path):
    x, y = np.arange(200, dtype=np.uint8).reshape(100, 2), LABELS
    np.savez(tmp_path / "data.npz", x=x, y=y)
    spec = DataSpec(str(tmp_path / "data.npz"), partition="dirichlet", shares=4, limit=60, seed=5)
    together = data.load_all_shares(spec)
    assert len(together) == 4
    for share, parts in enumerate(together):
        for part, own in zip(parts, data.load_share(with_options(spec, share=share)), strict=True):
            assert np.array_equal(part.x, own.x)
            assert np.array_equal(part.y, own.y)


def test_one_empty_share_does_not_make_every_device_read_the_data_by_itself(tmp_path, monkeypatch):
    spec = DataSpec(str(small(tmp_path / "a.npz", np.savez)), partition="iid", shares=25)
    opened, open_ = [], data.open_split
    monkeypatch.setattr(data, "open_split", lambda spec: opened.append(spec) or open_(spec))
    together, empty = data.SharedLoader(), []
    for share in range(25):
        try:
            train, held = together.load_share(with_options(spec, share=share))
            assert len(train) + len(held) == 1
        except DataError as error:
            empty.append(str(error))
    assert len(empty) == 5
    assert all("of 25 (partition 'iid') has none of the 20 examples" in told for told in empty)
    assert len(opened) == 1


def test_large_arrays_are_read_in_blocks(tmp_path):
    wide = np.arange(40, dtype=np.float32)[:, None] * np.ones((1, 30_000), np.float32)  # 120 kB a row, 8 a block
    path = small(tmp_path / "wide.npz", np.savez, x_train=wide, y_train=np.arange(40))
    rows = np.array([23, 24, 39, 7, 8, 0, 9, 8])
    taken = readers.open_reader(DataSpec(str(path))).take(rows)
    assert taken.dtype == np.float32
    assert np.array_equal(taken, wide[rows])


def test_a_share_is_read_without_the_rest(tmp_path):
    path = tmp_path / "large.npz"
    np.savez_compressed(path, x=np.zeros((1000, 50_000), np.uint8), y=np.arange(1000) % 10)
    check = """
import sys
from fedquilt.arrays import tensors
from fedquilt.data import examples as data
from fedquilt.data import partition, readers
from fedquilt.data.spec import DataSpec

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

before = peak()
train, held = data.load_share(DataSpec(sys.argv[1], partition="iid", shares=50, share=5))
assert train.x.nbytes + held.x.nbytes == 1_000_000
assert peak() - before < 20_000_000, peak() - before
"""
    done = subprocess.run([sys.executable, "-c", check, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_test_split_is_read_whole(tmp_path):
    spec = DataSpec(str(small(tmp_path / "a.npz")), split="test", partition="iid", shares=4)
    examples = data.load_split(spec)
    assert rows_of(examples) == [100, 101, 102, 103, 104]
    assert examples.y.dtype == np.int64


def test_a_limit_is_drawn_over_the_whole_set(tmp_path):
    spec = DataSpec(str(small(tmp_path / "a.npz")), limit=8, partition="iid", shares=2)
    halves = [data.load_share(with_options(spec, share=share, held=0)) for share in (0, 1)]
    drawn = sorted(rows_of(halves[0][0]) + rows_of(halves[1][0]))
    assert len(set(drawn)) == 8
    assert drawn == rows_of(data.load_split(spec)) != list(range(8))
    assert len(data.load_split(with_options(spec, limit=50))) == 20


def test_arrays_may_be_called_otherwise(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((2, 3)), y=[0, 1], pixels=np.zeros((2, 3)))
    assert data.load_split(DataSpec(str(path))).x.sum() == 6
    assert data.load_split(DataSpec(str(path), x="pixels")).x.sum() == 0
    with pytest.raises(DataError, match=r"a\.npz has no array x_test: set \[data\] x to one of x, y, pixels"):
        data.load_split(DataSpec(str(path), split="test"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y_train": np.arange(19)}, r"x_train has 20 examples and y_train 19 labels: give one label for each"),
        ({"y_train": np.linspace(0, 1, 20)}, "labels of type float64"),
        ({"y_train": np.zeros((20, 2), int)}, r"labels of type int64, shape \(20, 2\)"),
        ({"y_train": -np.ones(20, int)}, "one whole number from 0"),
        ({"x_train": np.array([{}] * 20)}, r"x_train has Python objects .*np\.stack"),
        ({"y_train": np.array([{}] * 20)}, "y_train has Python objects"),
        ({"y_train": np.array(["a"] * 20)}, r'labels of type <U1, .*set \[data\] labels = \["a"\]'),
        ({"y_train": np.array(3)}, "y_train is a single number"),
        ({"x_train": np.asfortranarray(np.ones((20, 3)))}, r"save np\.ascontiguousarray\(x_train\)"),
    ],
)
def test_arrays_that_are_no_examples_are_refused(tmp_path, arrays, message):
    path = small(tmp_path / "odd.npz", **arrays)
    with pytest.raises(DataError, match=rf"odd\.npz.*({message})"):
        data.load_share(DataSpec(str(path)))


def test_a_damaged_npz_is_refused(tmp_path):
    whole = small(tmp_path / "a.npz", np.savez).read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"\x05" * 9) + 3] ^= 1
    for name, payload in {"cut": whole[:-300], "text": b"x,y\n1,2\n", "empty": b"", "flipped": bytes(flipped)}.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(payload)
        with pytest.raises(DataError, match=rf"{name}\.npz"):
            data.load_share(DataSpec(str(path)))


# -- the table, and what is not there -------------------------------------------------------------


def test_a_device_without_data_is_told_what_to_set(tmp_path):
    with pytest.raises(DataError, match=r"no data at .*nowhere: set \[data\] path"):
        data.load_share(DataSpec(str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="/dev/zero is a device or a pipe: set"):
        data.load_share(DataSpec("/dev/zero"))
    path = str(small(tmp_path / "a.npz"))
    with pytest.raises(
        DataError, match=r"a\.npz: share 20 of 21 \(partition 'iid'\) has none of the 20 examples: set fewer"
    ):
        data.load_share(DataSpec(path, partition="iid", share=20, shares=21))


def test_a_share_that_does_not_exist_is_refused_when_the_table_is_read():
    """A board whose last share is counted from 1 would decline every task."""
    with pytest.raises(JobError, match=r"\[data\]: share 4 of 4: shares are counted from 0 to 3"):
        DataSpec.parse({"path": "-", "partition": "iid", "share": 4, "shares": 4})
    assert DataSpec.parse({"path": "-", "share": 3, "shares": 4}).share == 3


@pytest.mark.parametrize("wrong", [{"held": 1.0}, {"partition": "even"}, {"shares": 0}, {"alpha": 0}, {"sead": 1}])
def test_the_table_is_strict(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"path": "-", **wrong}, DataSpec)


def test_the_table_is_checked_without_numpy():
    check = "import sys; from fedquilt.data.spec import DataSpec; DataSpec('-'); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# -- real data ------------------------------------------------------------------------------------


@needs_real
@needs_torchvision
def test_mnist_reads_the_same_through_idx_and_torchvision():
    by_idx = data.load_split(DataSpec(str(REAL / "MNIST"), split="test"))
    assert by_idx.x.shape == (10000, 28, 28)
    assert by_idx.y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    spec = DataSpec(str(REAL), dataset="MNIST", split="test", limit=100)
    by_torchvision = data.load_split(spec)
    rows = partition.sample_rows(10000, 100, 0)
    assert np.array_equal(by_torchvision.x, by_idx.x[rows])
    assert np.array_equal(by_torchvision.y, by_idx.y[rows])


def test_nothing_held_out_of_floats_is_no_error(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((10, 2, 2), np.float32), y=np.arange(10) % 2)
    train, held = data.load_share(DataSpec(str(tmp_path / "x.npz"), held=0))
    assert (len(train), held.x.shape) == (10, (0, 2, 2))


def test_examples_that_are_not_finite_are_named(tmp_path):
    x = np.zeros((10, 2, 2), np.float32)
    x[3, 1, 1], x[7, 0, 0] = np.nan, np.inf
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(10) % 2)
    with pytest.raises(DataError, match=r"x\.npz: 2 of 10 examples hold NaN or infinity, the first is example 3"):
        data.load_split(DataSpec(str(tmp_path / "x.npz")))

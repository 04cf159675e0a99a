"""Examples in IDX files, folders of images and torchvision's data sets."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from example_files import needs_torchvision, rows_of

from fedquilt.core import DataError
from fedquilt.data import examples as data
from fedquilt.data.spec import DataSpec

# -- IDX ------------------------------------------------------------------------------------------


def idx(folder: Path, prefix: str, count: int, *, packed: bool = False, labels: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    labels = count if labels is None else labels
    pixels = np.repeat(np.arange(count, dtype=np.uint8), 4).tobytes()
    files = {
        f"{prefix}-images-idx3-ubyte": struct.pack(">BBBBIII", 0, 0, 8, 3, count, 2, 2) + pixels,
        f"{prefix}-labels-idx1-ubyte": struct.pack(">BBBBI", 0, 0, 8, 1, labels) + bytes(i % 3 for i in range(labels)),
    }
    for name, payload in files.items():
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(payload) if packed else payload)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", ["", "raw"])
def test_idx_files_are_found_in_their_folder(tmp_path, packed, inside):
    idx(tmp_path / inside, "train", 6, packed=packed)
    idx(tmp_path / inside, "t10k", 3, packed=packed)
    train, held = data.load_share(DataSpec(str(tmp_path)))
    assert sorted(rows_of(train) + rows_of(held)) == list(range(6))
    assert train.x.shape[1:] == (2, 2)
    test = data.load_split(DataSpec(str(tmp_path), split="test"))
    assert (rows_of(test), test.y.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_one_idx_file_brings_its_labels(tmp_path):
    idx(tmp_path, "train", 6)
    images = tmp_path / "train-images-idx3-ubyte"
    assert len(data.load_split(DataSpec(str(images)))) == 6
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is not beside it"):
        data.load_split(DataSpec(str(images)))


def test_damaged_idx_files_are_refused(tmp_path):
    idx(tmp_path / "counts", "train", 6, labels=5)
    with pytest.raises(DataError, match="holds 6 images, train-labels-idx1-ubyte 5 labels"):
        data.load_share(DataSpec(str(tmp_path / "counts")))
    idx(tmp_path / "cut", "train", 6)
    images = tmp_path / "cut/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: cut short in row 4 of 6"):
        data.load_share(DataSpec(str(tmp_path / "cut")))
    images.write_bytes(b"no pixels")
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not an IDX file"):
        data.load_share(DataSpec(str(tmp_path / "cut")))
    with pytest.raises(DataError, match="for split 'test' is wanted; it has train-images-idx3-ubyte"):
        data.load_share(DataSpec(str(tmp_path / "cut"), split="test"))
    idx(tmp_path / "packed", "train", 6, packed=True)
    packed = tmp_path / "packed/train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        data.load_share(DataSpec(str(tmp_path / "packed")))


# -- image folders, torchvision -------------------------------------------------------------------


def picture(path: Path, value: int, size: tuple[int, int] = (4, 4), mode: str = "L") -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


def test_a_folder_of_images_is_read_by_class(tmp_path):
    for name, value, mode in (("cat/b.png", 2, "RGB"), ("cat/a.png", 1, "L"), ("dog/c.PNG", 3, "L")):
        picture(tmp_path / "train" / name, value, mode=mode)
    picture(tmp_path / "test/dog/z.png", 9)
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    train = data.load_split(DataSpec(str(tmp_path)))
    assert train.x.shape == (3, 4, 4, 3)
    assert (rows_of(train), train.y.tolist()) == ([1, 2, 3], [0, 0, 1])
    test = data.load_split(DataSpec(str(tmp_path), split="test"))
    assert (rows_of(test), test.y.tolist()) == ([9], [1])
    alone = data.load_split(DataSpec(str(tmp_path / "train")))
    assert np.array_equal(alone.x, train.x)


def test_images_of_several_sizes_need_one(tmp_path):
    picture(tmp_path / "cat/a.png", 1)
    picture(tmp_path / "dog/b.png", 2, (6, 5))
    with pytest.raises(DataError, match=r"images of \(5, 6\) and \(4, 4\) pixels: set \[data\] size"):
        data.load_split(DataSpec(str(tmp_path)))
    sized = data.load_split(DataSpec(str(tmp_path), size=3))
    assert sized.x.shape == (2, 3, 3, 3)
    assert rows_of(sized) == [1, 2]


def test_folders_that_are_no_data_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no images: put them in"):
        data.load_share(DataSpec(str(tmp_path)))
    picture(tmp_path / "train/cat/a.png", 1)
    with pytest.raises(DataError, match="has no folder 'test'"):
        data.load_share(DataSpec(str(tmp_path), split="test"))
    picture(tmp_path / "test/cow/a.png", 1)
    with pytest.raises(DataError, match="class 'cow' is not among those to train on: cat"):
        data.load_share(DataSpec(str(tmp_path), split="test"))
    for payload in (b"not a picture", (tmp_path / "train/cat/a.png").read_bytes()[:50]):
        (tmp_path / "train/cat/b.png").write_bytes(payload)
        with pytest.raises(DataError, match=r"cannot read .*cat/b\.png"):
            data.load_share(DataSpec(str(tmp_path)))


@needs_torchvision
def test_a_torchvision_data_set_that_is_not_there_says_how_to_fetch_it(tmp_path):
    with pytest.raises(DataError, match=r"CIFAR10 in .*set \[data\] download = true"):
        data.load_share(DataSpec(str(tmp_path), dataset="CIFAR10"))
    with pytest.raises(DataError, match="torchvision has no data set 'CIFAR11'"):
        data.load_share(DataSpec(str(tmp_path), dataset="CIFAR11"))

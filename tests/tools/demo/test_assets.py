"""What the demo ships: digits, donors, and the command that trains them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import DataError

DEMO = Path(__file__).resolve().parents[3] / "tools" / "lab" / "demo"


def test_the_digits_are_all_of_ucis_test_set_as_bytes_split_for_good() -> None:
    """1,797 images of 8 x 8 in seventeen levels from 0 to 255; a quarter is for testing; the source is named."""
    with np.load(DEMO / "digits.npz", allow_pickle=False) as held:
        digits = dict(held)
    assert {name: array.shape for name, array in digits.items()} == {
        "x_train": (1347, 8, 8),
        "y_train": (1347,),
        "x_test": (450, 8, 8),
        "y_test": (450,),
    }
    levels = np.unique(np.concatenate([digits["x_train"], digits["x_test"]]))
    assert levels.tolist() == np.round(np.arange(17) * 255 / 16).tolist()
    counts = np.bincount(np.concatenate([digits["y_train"], digits["y_test"]]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI lists them
    told = (DEMO / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "10.24432/C50P49" in told
    assert "CC BY 4.0" in told


@pytest.fixture
def little_mnist(tmp_path: Path) -> Path:
    """512 images to train on and 16 to test on, in MNIST's own files: bars whose height is the digit."""
    for part, count in (("train", 512), ("t10k", 16)):
        y = np.arange(count, dtype=np.uint8) % 10
        x = np.zeros((count, 28, 28), np.uint8)
        for image, digit in zip(x, y, strict=True):
            image[2 : 4 + 2 * digit, 8:20] = 255
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            header = np.array([0x800 + array.ndim, *array.shape], ">u4").tobytes()
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return tmp_path


def test_training_the_donors_twice_gives_the_same_bytes(
    little_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="training donors takes torch")
    from tests import demo_donors as command
    from tests.demo_donors import train_donors

    monkeypatch.setattr(command, "EPOCHS", 1)
    for out in ("one", "two"):
        said: list[str] = []
        accuracies = train_donors(little_mnist, tmp_path / out, said.append)
        assert set(accuracies) == {"upright", "turned", "negative"}
    one, two = (
        {str(path.relative_to(tmp_path / out)): path.read_bytes() for path in (tmp_path / out).rglob("*.*")}
        for out in ("one", "two")
    )
    assert one == two
    assert {"weights/upright.safetensors", "views.npz", "bundle/bundle.json"} <= set(one)
    assert said[-1].startswith("donor negative: 6 blocks")


def test_a_third_of_the_views_each_is_upright_turned_and_negative() -> None:
    with np.load(DEMO / "digits.npz") as digits, np.load(DEMO / "views.npz") as views:
        for split in ("train", "test"):
            x, seen = digits[f"x_{split}"], views[f"x_{split}"]
            assert np.array_equal(digits[f"y_{split}"], views[f"y_{split}"])
            assert np.array_equal(seen[0::3], x[0::3])
            assert np.array_equal(seen[1::3], np.rot90(x[1::3], axes=(1, 2)))
            assert np.array_equal(seen[2::3], 255 - x[2::3])


def test_training_images_keep_shape_and_range_and_change() -> None:
    torch = pytest.importorskip("torch", reason="augmentations are torch's")
    from tests.demo_donors import reduce_resolution, shift_images

    x = torch.zeros(4, 1, 28, 28)
    x[:, :, 6:22, 10:18] = 1.0
    for augment in (shift_images, reduce_resolution):
        images = augment(x, torch.Generator().manual_seed(0))
        assert images.shape == x.shape
        assert 0 <= float(images.min()) <= float(images.max()) <= 1 + 1e-6
        assert not torch.equal(images, x)
    assert torch.equal(images[1::2], x[1::2])  # every second one as it is


def test_a_folder_without_mnist_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training donors takes torch")
    from tests.demo_donors import train_donors

    with pytest.raises(DataError, match=str(tmp_path)):
        train_donors(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Where the tables look for data, and what they say when it is elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import DataError
from fedquilt.tools.reproduce import common


def test_mnist_is_found_where_its_files_or_torchvision_put_it(tmp_path: Path) -> None:
    """Packed or not."""
    with pytest.raises(DataError, match="t1 needs --data"):
        common.mnist("t1", None)
    with pytest.raises(DataError, match=r"there is no MNIST in .*train-images-idx3-ubyte, .*MNIST/raw below it"):
        common.mnist("t1", tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    assert common.mnist("t1", tmp_path) == str(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    with pytest.raises(DataError, match=r"no MNIST in .*raw"):
        common.mnist("t1", tmp_path)
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"")
    assert common.mnist("t1", tmp_path) == str(raw)


def test_cifar_is_found_as_a_file_or_as_torchvision_puts_it(tmp_path: Path) -> None:
    """A folder with neither is told with what is wanted."""
    with pytest.raises(DataError, match=r"there is no CIFAR-10 in .*: cifar10\.npz, or torchvision's folder"):
        common.cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert common.cifar(tmp_path) == {"path": str(tmp_path), "dataset": "CIFAR10"}
    (tmp_path / "cifar10.npz").write_bytes(b"")
    assert common.cifar(tmp_path) == {"path": str(tmp_path / "cifar10.npz")}

"""Where the tables look for data, and what they say when it is elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import DataError
from fedquilt.tools.experiments import intervals
from fedquilt.tools.experiments.papers import common


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


def test_a_claim_holds_if_the_whole_interval_is_on_its_side() -> None:
    """Of 1, 2 and 3 the mean is 2 and the interval, with 4.303 at 2 degrees of freedom, 2 -+ 2.48."""
    low, high = common.interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5))
    shown = common.claim([1.0, 2.0, 3.0], "points", at_least=0.0)
    assert (shown["verdict"], shown["reached"]) == ("not shown", False)  # though every seed is ahead
    assert (shown["value"], shown["low"], shown["high"]) == (2.0, -0.484, 4.484)
    assert common.claim([1.9, 2.0, 2.1], "points", at_least=0.0)["verdict"] == "holds"
    assert common.claim([1.9, 2.0, 2.1], "points", at_least=1.9)["verdict"] == "not shown"
    assert common.claim([1.9, 2.0, 2.1], "points", at_least=2.5)["verdict"] == "against"
    assert common.claim([1.9, 2.0, 2.1], "%", at_most=2.5)["verdict"] == "holds"
    assert common.claim([1.9, 2.0, 2.1], "%", at_most=1.5)["verdict"] == "against"
    assert common.claim([0.0, 0.0], "", at_least=0.0)["verdict"] == "not shown"


def test_one_seed_has_no_interval_and_shows_nothing() -> None:
    """However far ahead it is."""
    alone = common.claim([50.0], "points", at_least=0.0)
    assert (alone["verdict"], alone["reached"], alone["low"]) == ("one seed: no interval", False, None)
    (line,) = common.claim_lines({"figures": {"ahead": alone}})
    assert line.startswith("NOT ahead")
    assert "+50.00 points, one seed: no interval" in line


def test_claims_are_told_with_their_intervals_and_other_figures_as_a_benchs() -> None:
    """Mean, interval, verdict, and what is claimed."""
    figures = {
        "ahead": common.claim([1.9, 2.0, 2.1], "points", at_least=0.0),
        "bytes": {"value": 20.0, "at_most": 25.0, "unit": "%", "reached": True},
    }
    ahead, size = common.claim_lines({"figures": figures})
    assert " ".join(ahead.split()) == "ok ahead +2.00 [+1.75, +2.25] points: holds (claimed: above 0)"
    assert " ".join(size.split()) == "ok bytes 20.00 % (at most 25)"


def test_quantiles_are_students() -> None:
    """As tables of the distribution have them, where they are reckoned too."""
    for freedom, right in ((1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)):
        assert intervals.quantile(freedom) == pytest.approx(right, abs=1e-3)

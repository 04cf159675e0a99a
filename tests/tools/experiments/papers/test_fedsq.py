"""FedSQ beside its baselines: one small run, and what is told of runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedquilt.core import DataError, JobError

pytest.importorskip("torch", reason="networks are pre-trained and federated")

from fedquilt.tools.experiments.papers import fedsq

REAL = Path(os.environ.get("FEDQUILT_TEST_DATA") or Path(__file__).parents[4] / "../shared/data")


def test_one_round_of_all_three_from_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin with the same network, and go apart; the same run again gives the same."""
    if not (REAL / "MNIST" / "raw").is_dir():
        pytest.skip(f"no MNIST in {REAL}: set FEDQUILT_TEST_DATA to a folder with MNIST/raw")
    monkeypatch.setattr(fedsq, "DIGIT_SETTINGS", {"cnn": fedsq.DIGIT_SETTINGS["cnn"]})
    monkeypatch.setattr(fedsq, "SPLITS", {"iid": {"partition": "iid"}})
    monkeypatch.setattr(fedsq, "PRETRAINED_ON", 1000)
    results = [fedsq.run("fedsq", [1], 2, REAL, lambda line: None) for _ in range(2)]
    assert results[0] == results[1]
    curves = results[0]["settings"]["cnn"]["iid"]
    assert curves.keys() == {"fedavg", "fedprox", "fedsq"}
    assert len({curve[0][0] for curve in curves.values()}) == 1
    assert all(len(curve[0]) == 3 for curve in curves.values())
    assert curves["fedsq"] != curves["fedavg"]


def test_means_by_round_and_the_lead_at_the_end_are_told() -> None:
    """Two seeds: 10 and 30 percent are 20; FedSQ is 10 points ahead in one and 10 behind in the other."""
    curves = {
        "fedavg": [[0.1, 0.5], [0.1, 0.6]],
        "fedprox": [[0.1, 0.1], [0.1, 0.3]],
        "fedsq": [[0.1, 0.6], [0.1, 0.5]],
    }
    told = fedsq.lines({"table": "fedsq", "seeds": [0, 1], "settings": {"net": {"iid": curves}}})
    assert told[2:] == [
        "net, iid",
        "round          0      1",
        "fedavg      10.0   55.0",
        "fedprox     10.0   20.0",
        "fedsq       10.0   55.0",
        "fedsq - fedavg, at the end: +0.00 [-127.06, +127.06] points: not shown",
        "fedsq - fedprox, at the end: +35.00 [-155.59, +225.59] points: not shown",
    ]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A table, the data, the weights."""
    with pytest.raises(JobError, match=r"fedsq-9.*fedsq-imagenet"):
        fedsq.run("fedsq-9", [0])
    with pytest.raises(DataError, match="needs --data"):
        fedsq.run("fedsq", [0])
    (tmp_path / "cifar10.npz").write_bytes(b"")
    with pytest.raises(DataError):
        fedsq.run("fedsq-imagenet", [0], 1, tmp_path)

"""FedSDG beside FedLoRA and local training: one small run on drawn pictures, and what is claimed of runs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedquilt.core import DataError, Fit, JobError

pytest.importorskip("torch", reason="a transformer is pre-trained and federated")

from fedquilt.testing.toys import pictures
from fedquilt.tools.experiments.papers import fedsdg


def test_a_small_run_of_all_methods_tells_accuracy_bytes_and_gates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two devices, one round: only the shared part goes up, four gates of each device are told, and it repeats."""
    monkeypatch.setattr(fedsdg, "DEVICES", 2)
    monkeypatch.setattr(fedsdg, "ALPHAS", (0.3,))
    monkeypatch.setattr(fedsdg, "BEFORE", Fit(epochs=1, batch=16, lr=1e-3, optimizer="adam"))
    monkeypatch.setattr(fedsdg, "BEFORE_EXAMPLES", 40)
    monkeypatch.setattr(fedsdg, "SPEC", {**fedsdg.SPEC, "limit": 60})
    data = str(pictures(tmp_path / "drawn.npz", 28))
    one = fedsdg.play(data, 0, 1)
    told = one["0.3"]
    assert told.keys() == {"fedsdg", "fedlora", "fedprox", "local"}
    assert all(0 <= each["accuracy"] <= 1 for each in told.values())
    assert told["fedsdg"]["shared_bytes"] == told["fedlora"]["shared_bytes"] == 4 * (4 * 8 * (128 + 192) + 650)
    assert 1 < told["fedsdg"]["up_bytes"] / (2 * told["fedsdg"]["shared_bytes"]) < 1.1
    assert {device: len(gates) for device, gates in told["fedsdg"]["gates"].items()} == {"dev-00": 4, "dev-01": 4}
    assert fedsdg.play(data, 0, 1) == one
    assert "seed 0, Dirichlet 0.3: fedsdg" in fedsdg._seed_lines(one)[0]


def one_run(sdg: float, lora: float, local: float, up_bytes: int) -> dict[str, object]:
    told = {
        "fedsdg": {
            "accuracy": sdg,
            "up_bytes": up_bytes,
            "tasks": 2,
            "shared_bytes": 100,
            "gates": {"a": [0.25, 0.75]},
        },
        **{name: {"accuracy": value} for name, value in (("fedlora", lora), ("fedprox", lora), ("local", local))},
    }
    return {"seed": 0, "model_bytes": 1000, "0.1": told, "0.3": told}


def test_claims_are_judged_by_their_intervals() -> None:
    """Ahead of FedLoRA by 10 points or so in each of three seeds; of local by 5, 0 and -5; some 110 % of bytes."""
    runs = [one_run(0.90, 0.80, 0.85, 210), one_run(0.80, 0.71, 0.80, 220), one_run(0.85, 0.74, 0.90, 230)]
    figures = fedsdg._figures(runs)
    assert [each["value"] for each in figures.values()] == [10.0, 10.0, 0.0, 0.0, 110.0]
    assert [each["verdict"] for each in figures.values()] == ["holds"] * 2 + ["not shown"] * 3
    text = fedsdg.lines({"runs": runs, "settings": {"rounds": 1}, "figures": figures})
    assert "fedsdg 90.0 %, fedlora 80.0 %" in text[1]
    assert "gates 0.25 to 0.75" in text[1]
    assert sum(line.startswith("NOT") for line in text) == 3


def test_gates_are_drawn_by_block() -> None:
    """Two runs of one device with two gates, at two concentrations: a row for each block, with four dots."""
    drawn = fedsdg.picture({"runs": [one_run(0.9, 0.7, 0.95, 210)] * 2})
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "block 0" in words
    assert "block 1" in words
    assert drawn.count("block 0: 0.25") == 4


def test_what_is_not_there_is_said() -> None:
    """A table of another name, and no folder of data."""
    with pytest.raises(JobError, match="table 'fedsdg-9' is unknown; there are: fedsdg"):
        fedsdg.run("fedsdg-9")
    with pytest.raises(DataError, match="needs --data"):
        fedsdg.run("fedsdg")

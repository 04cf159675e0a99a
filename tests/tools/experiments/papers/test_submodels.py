"""Sub-models on a fleet of mixed memory: one small run on drawn pictures, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.core import DataError, Fit

pytest.importorskip("torch", reason="networks are trained")

from fedquilt.testing.toys import pictures
from fedquilt.tools.experiments.papers import submodels


def test_a_small_run_tells_the_whole_network_and_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four devices, one round, a narrow network: every row has its accuracies, and parts are other networks."""
    monkeypatch.setattr(submodels, "DEVICES", 4)
    monkeypatch.setattr(submodels, "BEFORE", Fit(epochs=1, batch=16, lr=0.05))
    monkeypatch.setattr(submodels, "BEFORE_EXAMPLES", 40)
    monkeypatch.setattr(submodels, "SPEC", {**submodels.SPEC, "limit": 60})
    monkeypatch.setattr(submodels, "NETWORK", {**submodels.NETWORK, "width": 4})
    monkeypatch.setattr(submodels, "TESTED", 40)
    told = submodels.play(str(pictures(tmp_path / "drawn.npz", 14)), 0, 1)
    for name, arm in submodels.ARMS.items():
        assert told[name].keys() == {"whole", *(submodels.PARTS if arm.parts else ())}
        assert all(0 <= value <= 1 for value in told[name].values())
    assert any(len(set(told[name].values())) > 1 for name, arm in submodels.ARMS.items() if arm.parts)
    assert "FjORD" in submodels._seed_lines(told)[0]


def test_the_table_has_means_spreads_and_nothing_where_all_train_the_whole() -> None:
    """60 and 70 % are 65.0 with a deviation of 7.1; one seed alone has none."""
    runs = [
        {"seed": seed, **{name: {"whole": value, "1GB": 0.5} for name in submodels.ARMS}}
        for seed, value in ((0, 0.6), (1, 0.7))
    ]
    for run in runs:
        run["FeDepth"] = {"whole": run["FeDepth"]["whole"]}  # type: ignore[index]
    text = submodels.lines({"seeds": [0, 1], "rounds": 15, "runs": runs})
    assert next(line for line in text if "FjORD" in line).split() == ["FjORD", "65.0", "±", "7.1", "50.0", "±", "0.0"]
    assert next(line for line in text if "FeDepth" in line).split() == ["FeDepth", "65.0", "±", "7.1"]
    assert any("FjORD" in line and "+0.00 [+0.00, +0.00] points: not shown" in line for line in text)
    alone = submodels.lines({"seeds": [0], "rounds": 15, "runs": runs[:1]})
    assert next(line for line in alone if "DepthFL" in line).split() == ["DepthFL", "60.0", "50.0"]


def test_data_is_wanted() -> None:
    """And said before anything is run."""
    with pytest.raises(DataError, match="submodels needs --data"):
        submodels.run("submodels")

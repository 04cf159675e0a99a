"""FedStitch beside training: small runs of both, and what is made of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedquilt.core import DataError, JobError
from fedquilt.tools.experiments.papers import common, fedstitch, fedstitch_runs
from fedquilt.tools.experiments.papers.fedstitch_runs import Arm

DEMO = Path(__file__).parents[4] / "tools" / "demo"
SEARCH = {"expansions": 2, "subrounds": 1, "depth": 3, "samples": 32, "finalists": 1, "k": 1}
STITCHED = Arm("fedstitch", "donors", 0, 40, SEARCH)
TRAINED = Arm("ft_full", "scratch", 1, 2, {"batch": 8})
CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 10, "width": 2, "input": {"channels": 1, "size": 8}}


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's digits in CIFAR-10's place, for two devices."""
    monkeypatch.setattr(common, "cifar", lambda data: {"path": str(DEMO / "digits.npz")})
    for name, value in {"DEVICES": 2, "ASKED": 2, "IMAGES": 200, "TESTED": 50, "SCRATCH": CNN}.items():
        monkeypatch.setattr(fedstitch_runs, name, value)


def test_training_tells_each_evaluation_and_what_the_papers_schedule_would_take(digits: None, tmp_path: Path) -> None:
    """Ten epochs in one round take about five times the time of one epoch in each of two; and the budget is kept to."""
    pytest.importorskip("torch", reason="a network is trained")
    starts = fedstitch_runs.prepared({"x": TRAINED}, tmp_path, [7], tmp_path)
    given = fedstitch_runs.job(TRAINED, tmp_path, {"partition": "iid"}, 7, 2)
    planned = fedstitch_runs.job(TRAINED, tmp_path, {"partition": "iid"}, 7, 1, epochs=10)
    found = fedstitch_runs.play(starts["scratch", 7], given, "", planned)
    first, last = found["marks"]
    assert (first["rounds"], last["rounds"]) == (1, 2)
    assert 0 < first["seconds"] < last["seconds"]
    assert 3 < found["planned"]["seconds"] / last["seconds"] < 5.5  # weights are read once in a round
    assert found["planned"]["energy_j"] == pytest.approx(2 * 8.55 * found["planned"]["seconds"])  # two boards, alike
    peak = fedstitch_runs.peak_bytes(TRAINED, starts["scratch", 7], given, "1GB")
    assert peak is not None
    assert 10**8 < peak < 10**9
    assert fedstitch_runs.peak_bytes(TRAINED, starts["scratch", 7], given, "200MB") is None


def test_a_search_is_played_alone_and_its_memory_is_the_most_of_all_its_tasks(digits: None, tmp_path: Path) -> None:
    """The demo's donors; nothing is trained, so that one evaluation is all."""
    pytest.importorskip("onnxruntime", reason="blocks are run")
    given = fedstitch_runs.job(replace(STITCHED, alone=1), tmp_path, {"partition": "iid"}, 0, 40)
    names = [f"{fedstitch_runs.BOARD}-{index:02d}" for index in range(2)]
    found = fedstitch_runs.play(DEMO / "bundle", given, names[1], None)
    assert found.keys() == {"marks"}
    (mark,) = found["marks"]
    assert mark["rounds"] > 3
    assert mark["seconds"] > 0
    assert 0 <= mark["test"] <= 1
    peak = fedstitch_runs.peak_bytes(STITCHED, DEMO / "bundle", given, "1GB")
    assert peak is not None
    assert 3 * 10**7 < peak < 10**9


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedepth"])
def test_a_schedule_takes_what_training_takes(
    digits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Two of three devices in each of three rounds: seconds and joules are those of the run that really trains.

    One device has no room for the whole network: methods that want that ask another one in its place.
    """
    pytest.importorskip("torch", reason="a network is trained")
    network = {"name": "residual", "channels": 1, "classes": 10, "input": {"channels": 1, "size": 8}}
    for name, value in {"DEVICES": 3, "SCRATCH": network, "BUDGETS": ("150MB", "1GB", "8GB")}.items():
        monkeypatch.setattr(fedstitch_runs, name, value)
    arm = Arm(method, "scratch", 1, 3, {"batch": 8, "epochs": 2}, every=3)  # before each evaluation HeteroFL asks all
    folder = fedstitch_runs.prepared({"x": arm}, tmp_path, [7], tmp_path)["scratch", 7]
    given = fedstitch_runs.job(arm, tmp_path, {"partition": "dirichlet", "alpha": 1.0}, 7, 3)
    last = fedstitch_runs.play(folder, given, "", None)["marks"][-1]
    found = fedstitch_runs.schedule(given, folder)
    assert (found["rounds"], last["rounds"]) == (3, 3)
    assert found["seconds"] == pytest.approx(last["seconds"], rel=1e-9)
    assert found["energy_j"] == pytest.approx(last["energy_j"], rel=1e-9)


# -- what is made of runs -------------------------------------------------------------------------


def one(seed: int, *marks: tuple[float, float], planned: tuple[float, float] | None = None) -> dict[str, Any]:
    """A run that evaluated at these (seconds, accuracy); 10 J in a second."""
    found: dict[str, Any] = {
        "seed": seed,
        "marks": [
            {
                "rounds": index,
                "test": accuracy,
                "seconds": seconds,
                "energy_j": 10 * seconds,
                "real_s": 60.0,
                "down_bytes": 4_000_000,
                "up_bytes": 1_000_000,
            }
            for index, (seconds, accuracy) in enumerate(marks, 1)
        ],
    }
    return found if planned is None else {**found, "planned": {"seconds": planned[0], "energy_j": planned[1]}}


def told(monkeypatch: pytest.MonkeyPatch, slow: float, peak: int) -> dict[str, Any]:
    """FedStitch (60 and 70 %, in 2.9 and 3.1 s, with 200 MB) beside one method that trains."""
    train = "MobileNetV2 FT-Full"
    arms: Mapping[str, Arm] = {name: fedstitch.ARMS[name] for name in (fedstitch.OURS, train)}
    monkeypatch.setattr(fedstitch, "ARMS", arms)
    ours = [one(0, (2.9, 0.6)), one(1, (3.1, 0.7))]
    theirs = [one(seed, (1.0, 0.5), (3.0, 0.7), planned=(slow, 400.0)) for seed in (0, 1)]
    small = dict.fromkeys(("1GB", "2GB", "4GB", "8GB"), 200_000_000)
    large: dict[str, int | None] = {"1GB": None, "2GB": peak, "4GB": peak, "8GB": 2 * peak}
    rows = {
        fedstitch.OURS: fedstitch._row(fedstitch.OURS, ours, small, ours),
        train: fedstitch._row(train, theirs, large, ours),
    }
    runs = {fedstitch.OURS: ours, train: theirs}
    return {
        "table": "fedstitch",
        "seeds": [0, 1],
        "rows": rows,
        "runs": runs,
        "figures": fedstitch._figures(rows, runs),
    }


def test_ratios_are_those_of_the_papers_schedule_and_of_the_devices_that_can_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 s beside 3 s are 8 times; 30 of 400 J save 92.5 %; 3 of 10 have no room, 6 hold 700 MB, one 1400: 800."""
    result = told(monkeypatch, 24.0, 700_000_000)
    row = result["rows"]["MobileNetV2 FT-Full"]
    assert (row["takes_part"], row["peak_bytes"], row["most_bytes"]) == (pytest.approx(0.7), 8e8, 14 * 10**8)
    assert row["to_equal"] == 3.0
    found = fedstitch.ratios(result["rows"])["MobileNetV2 FT-Full"]
    assert {key: round(value, 2) for key, value in found.items()} == {
        "speed-up": 8.0,
        "memory": 75.0,
        "most": 85.71,
        "energy": 92.5,
    }
    assert all(claim["reached"] for claim in result["figures"].values())
    slower = told(monkeypatch, 2.0, 100_000_000)
    assert [claim["reached"] for claim in slower["figures"].values()] == [False, True, False, False, True]
    rows = {name: {**row, "to_equal": 1.5} for name, row in slower["rows"].items()}
    quicker = fedstitch._figures(rows, slower["runs"])["speed-up to equal accuracy, least"]
    assert (quicker["value"], quicker["reached"]) == (0.5, False)  # as good after half the time
    never = fedstitch._figures({name: {**row, "to_equal": None} for name, row in rows.items()}, slower["runs"])
    assert not any("equal" in name for name in never)


def test_the_table_has_the_papers_numbers_and_says_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy with its spread, who takes part, and when it was as good as FedStitch."""
    result = told(monkeypatch, 24.0, 700_000_000)
    text = fedstitch.lines(result)
    ours, theirs = (next(line for line in text if line.startswith(name)) for name in result["rows"])
    assert ours.split()[:6] == ["FedStitch", "100", "65.0", "±", "7.1", "90.5"]
    assert theirs.split()[2:10] == ["70", "70.0", "±", "0.0", "76.9", "3.00", "3.00", "30.0"]
    assert any("MobileNetV2 FT-Full" in line and "-5.00 [-68.53, +58.53] points: not shown" in line for line in text)
    assert any("the paper, at most" in line and "8.12" in line and "89.41" in line for line in text)
    result["rows"]["MobileNetV2 FT-Full"]["to_equal"] = None
    assert any(" never " in line for line in fedstitch.lines({**result, "table": "fedstitch-noniid"}))
    noniid = fedstitch.lines({**result, "table": "fedstitch-noniid"})
    assert any("73.0" in line and line.startswith("MobileNetV2 FT-Full") for line in noniid)


def test_the_picture_has_time_memory_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three plots in one file, each row in each."""
    drawn = fedstitch.picture(told(monkeypatch, 24.0, 700_000_000))
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("FedStitch") == 3
    assert any("Joules" in word for word in words if word)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A table of another name, no folder, and a folder without the donors' weights."""
    with pytest.raises(JobError, match="'fedstitch-9' is unknown; there are: fedstitch, fedstitch-noniid"):
        fedstitch.run("fedstitch-9")
    with pytest.raises(DataError, match="needs --data"):
        fedstitch.run("fedstitch")
    with pytest.raises(DataError, match=r"no mobilenet_v2\*\.pt in .*weights"):
        fedstitch.run("fedstitch", [0], 1, tmp_path)

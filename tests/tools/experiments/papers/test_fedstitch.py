"""FedStitch beside training: small runs of both, and what is made of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from fedquilt import profiles
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import JobError
from fedquilt.tools.lab import papers
from fedquilt.tools.lab.papers import cells, fedstitch
from fedquilt.tools.lab.papers.cells import ExecutionOptions
from fedquilt.tools.lab.papers.grid import GridRow
from fedquilt.tools.simulation import agents

DEMO = Path(agents.__file__).parents[1] / "lab" / "demo"
BOARD = "jetson-tx2"
SEARCH = {"expansions": 2, "subrounds": 1, "depth": 3, "samples": 32, "finalists": 1, "k": 1}
CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 10, "width": 2, "input": {"channels": 1, "size": 8}}
TRAINED = GridRow(play="run_training", paper={"rounds": (1.0,)})


def job(method: str, rounds: int, seed: int = 7, **changes: Any) -> JobSettings:
    """A job as the table's are, on the demo's digits, for two devices."""
    table: dict[str, Any] = {
        "name": "reproduce",
        "method": method,
        "rounds": rounds,
        "seed": seed,
        "cohort": {"size": 2, "deadline_s": 1e6},
        "fleet": {"devices": 2, "boards": [BOARD], "budgets": ["1GB", "2GB"]},
        "data": {"path": str(DEMO / "digits.npz"), "limit": 200, "partition": "iid", "seed": seed},
        "test": {"limit": 50},
    }
    return settings.parse_job({**table, **changes})


def how(row: GridRow) -> ExecutionOptions:
    """What of a run of the table its job does not say."""
    return ExecutionOptions("fedstitch", row, together=True, first=False, tested=True, device="")


def bundle(given: JobSettings, place: Path) -> Path:
    """A bundle with random weights."""
    cells.make_bundle("", msgspec.to_builtins(given), None, place)
    return place / "bundle"


def test_training_tells_each_evaluation_and_what_the_papers_schedule_would_take(tmp_path: Path) -> None:
    """Ten epochs in one round take about five times the time of one epoch in each of two; and the budget is kept to."""
    pytest.importorskip("torch", reason="a network is trained")
    given = job("ft_full", 2, model=CNN, params={"batch": 8}, check={"every": 1})
    folder = bundle(given, tmp_path)
    run = fedstitch.run_training(given, folder, how(TRAINED))
    first, last = run.marks
    planned = run.figures["planned"]
    assert (first.rounds, last.rounds) == (1, 2)
    assert first.seconds is not None
    assert last.seconds is not None
    assert 0 < first.seconds < last.seconds
    assert 3 < planned["seconds"] / last.seconds < 5.5  # weights are read once in a round
    watts = planned["energy_j"] / planned["seconds"] / 2  # two boards, alike, at one of their points
    assert any(point.busy_w == pytest.approx(watts) for point in profiles.load_board_profile(BOARD).operating_points())
    given = msgspec.structs.replace(given, params={"batch": 8, "epochs": 1})
    peak = fedstitch.measure_peak_bytes(folder, given, "1GB")
    assert peak is not None
    assert 10**8 < peak < 10**9
    assert fedstitch.measure_peak_bytes(folder, given, "200MB") is None


def test_a_search_is_played_alone_and_its_memory_is_the_most_of_all_its_tasks(tmp_path: Path) -> None:
    """The demo's donors; nothing is trained, so that one evaluation is all; each of two devices has a run."""
    pytest.importorskip("onnxruntime", reason="blocks are run")
    given = job("fedstitch", 40, 0, params=SEARCH, cohort={"size": 1, "deadline_s": 1e6})
    run = fedstitch.run_single_devices(given, DEMO / "bundle", how(GridRow(play="run_single_devices")))
    assert run.figures.keys() == {"alone"}  # a search has no schedule of the paper's
    assert [(each["devices"], len(each["marks"])) for each in run.figures["alone"]] == [(1, 1), (1, 1)]
    (mark,) = run.marks
    assert mark.rounds > 3
    assert mark.seconds is not None
    assert mark.test is not None
    assert mark.seconds > 0
    assert 0 <= mark.test <= 1
    peak = fedstitch.measure_peak_bytes(DEMO / "bundle", given, "1GB")
    assert peak is not None
    assert 3 * 10**7 < peak < 10**9


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedepth"])
def test_a_schedule_takes_what_training_takes(tmp_path: Path, method: str) -> None:
    """Two of three devices in each of three rounds: seconds and joules are those of the run that really trains.

    One device has no room for the whole network: methods that want that ask another one in its place.
    """
    pytest.importorskip("torch", reason="a network is trained")
    given = job(
        method,
        3,
        model={"name": "residual", "channels": 1, "classes": 10, "input": {"channels": 1, "size": 8}},
        params={"batch": 8, "epochs": 2},
        check={"every": 3},  # before each evaluation HeteroFL asks all
        fleet={"devices": 3, "boards": [BOARD], "budgets": ["150MB", "1GB", "8GB"]},
    )
    folder = bundle(given, tmp_path)
    last = cells.run_with_options(given, folder, how(TRAINED), workers=1).marks[-1]
    found = fedstitch.measure_schedule(given, folder)
    assert (found["rounds"], last.rounds) == (3, 3)
    assert found["seconds"] == pytest.approx(last.seconds, rel=1e-9)
    assert found["energy_j"] == pytest.approx(last.energy_j, rel=1e-9)


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


def told(slow: float, peak: int) -> dict[str, Any]:
    """FedStitch (60 and 70 %, in 2.9 and 3.1 s, with 200 MB) beside one method that trains."""
    train = "MobileNetV2 FT-Full"
    ours = [one(0, (2.9, 0.6)), one(1, (3.1, 0.7))]
    theirs = [one(seed, (1.0, 0.5), (3.0, 0.7), planned=(slow, 400.0)) for seed in (0, 1)]
    counts = {"1GB": 3, "2GB": 3, "4GB": 3, "8GB": 1}
    small: dict[str, list[int | None]] = {budget: [200_000_000] * count for budget, count in counts.items()}
    large: dict[str, list[int | None]] = {**{b: [peak] * 3 for b in counts}, "1GB": [None] * 3, "8GB": [2 * peak]}
    rows = {
        fedstitch.OURS: fedstitch._summarise_row(ours, small, ours, (90.49,)),
        train: fedstitch._summarise_row(theirs, large, ours, (76.87,)),
    }
    runs = {fedstitch.OURS: ours, train: theirs}
    return {
        "table": "fedstitch",
        "seeds": [0, 1],
        "devices": 20,
        "asked": 4,
        "rows": rows,
        "runs": runs,
        "figures": fedstitch._judge_claims(rows, runs),
    }


def test_ratios_are_those_of_the_papers_schedule_and_of_the_devices_that_can_take_part() -> None:
    """24 s beside 3 s are 8 times; 30 of 400 J save 92.5 %; 3 of 10 have no room, 6 hold 700 MB, one 1400: 800."""
    result = told(24.0, 700_000_000)
    row = result["rows"]["MobileNetV2 FT-Full"]
    assert (row["takes_part"], row["peak_bytes"], row["most_bytes"]) == (pytest.approx(0.7), 8e8, 14 * 10**8)
    assert row["to_equal"] == 3.0
    found = fedstitch.compute_savings(result["rows"])["MobileNetV2 FT-Full"]
    assert {key: round(value, 2) for key, value in found.items()} == {
        "speed-up": 8.0,
        "memory": 75.0,
        "most": 85.71,
        "energy": 92.5,
    }
    assert all(claim["reached"] for claim in result["figures"].values())
    slower = told(2.0, 100_000_000)
    assert [claim["reached"] for claim in slower["figures"].values()] == [False, True, False, False, True]
    rows = {name: {**row, "to_equal": 1.5} for name, row in slower["rows"].items()}
    quicker = fedstitch._judge_claims(rows, slower["runs"])["speed-up to equal accuracy, least"]
    assert (quicker["value"], quicker["reached"]) == (0.5, False)  # as good after half the time
    never = fedstitch._judge_claims({name: {**row, "to_equal": None} for name, row in rows.items()}, slower["runs"])
    assert not any("equal" in name for name in never)


def test_rows_without_fedstitch_or_without_training_are_not_compared(tmp_path: Path) -> None:
    """Every row is compared with FedStitch, which the error names; a table of searches alone claims nothing."""
    chosen = papers.load_tables()["fedstitch"].grid.select_rows(["Local"])
    with pytest.raises(JobError, match="name FedStitch in --rows too"):
        fedstitch.run_table("fedstitch", chosen, [0], None, tmp_path, print)
    result = told(24.0, 700_000_000)
    ours = {name: result["rows"][name] for name in [fedstitch.OURS]}
    assert fedstitch._judge_claims(ours, result["runs"]) == {}


def test_the_table_has_the_papers_numbers_and_says_never() -> None:
    """Accuracy with its spread, who takes part, and when it was as good as FedStitch."""
    result = told(24.0, 700_000_000)
    text = fedstitch.lines(result)
    ours, theirs = (next(line for line in text if line.startswith(name)) for name in result["rows"])
    assert ours.split()[:6] == ["FedStitch", "100", "65.0", "±", "7.1", "90.5"]
    assert theirs.split()[2:10] == ["70", "70.0", "±", "0.0", "76.9", "3.00", "3.00", "30.0"]
    assert any("MobileNetV2 FT-Full" in line and "-5.00 [-68.53, +58.53] points: not shown" in line for line in text)
    assert any("the paper, at most" in line and "8.12" in line and "89.41" in line for line in text)
    result["rows"]["MobileNetV2 FT-Full"]["to_equal"] = None
    assert any(" never " in line for line in fedstitch.lines(result))


def test_each_table_has_the_papers_numbers_of_its_own_shares() -> None:
    """FT-Full of MobileNetV2 on IID shares, and on Dirichlet ones."""
    known = papers.load_tables()
    row = "MobileNetV2 FT-Full"
    told = {name: known[name].grid.rows[row].paper["test"] for name in ("fedstitch", "fedstitch-noniid")}
    assert told == {"fedstitch": (76.87,), "fedstitch-noniid": (73.0,)}


def test_the_picture_has_time_memory_and_energy() -> None:
    """Three plots in one file, each row in each."""
    drawn = fedstitch.picture(told(24.0, 700_000_000))
    root = ElementTree.fromstring(drawn)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("FedStitch") == 3
    assert any("Joules" in word for word in words if word)

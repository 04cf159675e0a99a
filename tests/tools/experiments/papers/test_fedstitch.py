"""FedStitch beside training: small runs of both, and what is made of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedquilt import profiles
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.tools.experiments.comparison import ComparisonCase
from fedquilt.tools.lab.papers import cells, custom
from fedquilt.tools.lab.papers.cells import ExecutionOptions
from fedquilt.tools.lab.papers.grid import GridRow
from fedquilt.tools.simulation import agents

DEMO = Path(agents.__file__).parents[1] / "lab" / "demo"
BOARD = "jetson-tx2"
SEARCH = {"expansions": 2, "subrounds": 1, "depth": 3, "samples": 32, "finalists": 1, "k": 1}
CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 10, "width": 2, "input": {"channels": 1, "size": 8}}
TRAINED = GridRow(play="run_with_costs", paper={"rounds": (1.0,)})


def job(method: str, rounds: int, seed: int = 7, **changes: Any) -> JobSettings:
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
    return ExecutionOptions("", row, together=True, first=False, needs_test_set=True, device="")


def bundle(given: JobSettings, place: Path) -> Path:
    cells.make_pretrained_bundle(msgspec.to_builtins(given), None, place)
    return place / "bundle"


def test_training_tells_each_evaluation_and_what_the_papers_schedule_would_take(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a network is trained")
    given = job("ft_full", 2, model=CNN, params={"batch": 8}, check={"every": 1})
    folder = bundle(given, tmp_path)
    run = custom.run_with_costs(given, folder, how(TRAINED))
    first, last = run.marks
    planned = run.figures
    assert (first.rounds, last.rounds) == (1, 2)
    assert first.seconds is not None
    assert last.seconds is not None
    assert 0 < first.seconds < last.seconds
    assert 3 < planned["planned_s"] / last.seconds < 5.5  # weights are read once in a round
    watts = planned["planned_j"] / planned["planned_s"] / 2  # two boards, alike, at one of their points
    assert any(point.busy_w == pytest.approx(watts) for point in profiles.load_board_profile(BOARD).operating_points())
    given = msgspec.structs.replace(given, params={"batch": 8, "epochs": 1})
    peak = custom.measure_peak_bytes(folder, given, "1GB")
    assert peak is not None
    assert 10**8 < peak < 10**9
    assert custom.measure_peak_bytes(folder, given, "200MB") is None


def test_a_search_is_played_alone_and_its_memory_is_the_most_of_all_its_tasks(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="blocks are run")
    given = job("fedstitch", 40, 0, params=SEARCH, cohort={"size": 1, "deadline_s": 1e6})
    case = ComparisonCase(
        msgspec.json.encode(given), str(DEMO / "bundle"), msgspec.json.encode(how(GridRow(alone=2))), "Local"
    )
    run = cells.run_case(case, lambda done: None)
    assert (run.devices, run.marks, run.figures["up_bytes"]) == (2, (), 0)
    assert run.figures["rounds"] > 3
    assert run.figures["seconds"] > 0
    assert 0 <= run.figures["test"] <= 1
    peak = custom.measure_peak_bytes(DEMO / "bundle", given, "1GB")
    assert peak is not None
    assert 3 * 10**7 < peak < 10**9


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedepth"])
def test_a_schedule_takes_what_training_takes(tmp_path: Path, method: str) -> None:
    pytest.importorskip("torch", reason="a network is trained")
    given = job(
        method,
        3,
        model={"name": "residual", "channels": 1, "classes": 10, "input": {"channels": 1, "size": 8}},
        params={"batch": 8, "epochs": 2},
        check={"every": 3},  # before each evaluation HeteroFL asks all
        fleet={"devices": 3, "boards": [BOARD], "budgets": ["150MB", "1GB", "8GB"]},
        data={"path": str(DEMO / "digits.npz"), "limit": 80, "partition": "iid", "seed": 7},
    )
    folder = bundle(given, tmp_path)
    last = cells.run_with_options(given, folder, how(TRAINED), workers=0).marks[-1]
    found = custom.measure_schedule(given, folder)
    assert last.rounds == 3
    assert found["planned_s"] == pytest.approx(last.seconds, rel=1e-9)
    assert found["planned_j"] == pytest.approx(last.energy_j, rel=1e-9)

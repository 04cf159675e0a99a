"""What benches print of measurements, and what they make of a machine that others use."""

from __future__ import annotations

import struct
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from mosquittos import MOSQUITTO

from fedquilt.core import DataError, LinkError
from fedquilt.tools.boards.gpu_check import load_meter
from fedquilt.tools.boards.gpu_check.load_meter import LoadMeter
from tests.benches import __main__ as benches
from tests.benches import coordinator, sim, stitch
from tests.benches.figures import compare_at_least

Times = namedtuple("Times", "user system idle iowait guest guest_nice")


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.others_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(load_meter.psutil, "cpu_count", lambda: 2)
        monkeypatch.setattr(load_meter.psutil, "cpu_times", self.cpu_times)
        monkeypatch.setattr(load_meter.os, "times", lambda: (0.1 * self.now_s, 0.0, 0.4 * self.now_s, 0.0, self.now_s))

    def cpu_times(self) -> Times:
        busy_s = 0.5 * self.now_s + self.others_s
        return Times(
            busy_s - 1.0, 1.0 + 7.0, 2 * self.now_s - busy_s, 3.0, 7.0, 0.0
        )  # a guest's time is also the user's

    def run(self, seconds: float, others_s: float) -> None:
        self.now_s, self.others_s = self.now_s + seconds, self.others_s + others_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_the_share_of_others_is_what_this_process_and_its_children_have_not_used(clocks: Clocks) -> None:
    meter = LoadMeter()
    clocks.run(10.0, others_s=4.0)
    assert meter.measure_share() == pytest.approx(0.2)
    clocks.run(10.0, others_s=0.0)
    assert meter.measure_share() == pytest.approx(0.0)


def run_bench(clocks: Clocks, others_s: tuple[float, ...], ratio: float) -> int:
    def measure(report: Callable[[str], None]) -> dict[str, Any]:
        for number, seconds in enumerate(others_s):
            clocks.run(10.0, seconds)
            report(f"measurement {number}")
            if seconds == 13.0:
                raise KeyboardInterrupt
        return {"figures": {"ratio": compare_at_least(ratio, 1.0, "x")}}

    return benches.run_bench("sim", measure, {})


@pytest.mark.parametrize(("ratio", "code", "verdict"), [(1.5, 0, "ok "), (0.5, 1, "NOT")])
def test_a_bench_on_an_idle_machine_is_judged(
    clocks: Clocks, capsys: Any, ratio: float, code: int, verdict: str
) -> None:
    assert run_bench(clocks, (1.0, 2.0), ratio) == code
    rows = capsys.readouterr().out.splitlines()
    assert rows[:2] == [
        "measurement 0 (other processes: 5% of the processors)",
        "measurement 1 (other processes: 10% of the processors)",
    ]
    assert rows[2].startswith(f"{verdict} ratio")


@pytest.mark.parametrize("ratio", [1.5, 0.5])
def test_one_disturbed_measurement_leaves_no_verdict(clocks: Clocks, capsys: Any, ratio: float) -> None:
    assert run_bench(clocks, (0.0, 4.0, 0.0), ratio) == benches.BUSY == 12
    out, err = capsys.readouterr()
    assert out.splitlines()[3].startswith("?   ratio")
    assert "benchmark is invalid: other processes used up to 20% of the processors" in err


def test_an_interrupted_bench_has_printed_its_measurements(clocks: Clocks, capsys: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_bench(clocks, (0.0, 13.0, 0.0), 1.0)
    assert [row[:13] for row in capsys.readouterr().out.splitlines()] == ["measurement 0", "measurement 1"]


@pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not installed")
def test_a_broker_that_does_not_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"accepts no connections on port \d+ \(.*nonsense"):
        coordinator.start_mosquitto(tmp_path, coordinator.find_free_port(), "nonsense 1\n")


TINY = replace(sim.OVERHEAD, clients=6, examples_per_client=40, cohort_size=4, rounds=8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """IDX files of 28x28 images: a bright row tells the class."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for split, count in (("train", 300), ("t10k", 100)):
        draws = np.random.default_rng(count)
        y = draws.integers(10, size=count).astype(np.uint8)
        x = draws.integers(60, size=(count, 28, 28)).astype(np.uint8)
        x[np.arange(count), 2 * y + 4] = 255
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder


@pytest.mark.nightly
def test_ours_and_the_bare_loop_take_the_same_steps(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    rows: list[str] = []
    monkeypatch.setattr(sim, "WORKLOADS", {"W2": TINY})
    result = sim.measure(images, repeats=1, processes=2, report=rows.append)
    names = ("fedquilt", "fedquilt, torch engine", "bare loop, 2 processes", "bare loop, 1 process")
    assert [row.partition(": ")[0] + row.partition(": ")[2].partition(": ")[0] for row in rows] == [
        f"overhead, turn 1 of 1{name}" for name in names
    ]
    told = result["workloads"]["overhead"]
    assert set(told) == {"ours", "ours_torch", "bare_n", "bare_1"}
    for name, each in told.items():
        assert each["accuracy"] > 0.5
        assert each["accuracy"] == pytest.approx(told["bare_1"]["accuracy"], abs=0.1)
        assert each["rate"] > 0
        assert 0 < each["start_s"] < each["wall_s"]
        assert (
            each["rss_mb"] >= each["pss_mb"] > (30 if name == "ours" else 100)
        )  # ours needs no torch for this network
    figures = result["figures"]
    ratio = told["ours"]["rate"] / told["bare_n"]["rate"]
    assert figures["overhead_of_bare_loop_by_wall"]["value"] == pytest.approx(ratio, abs=0.001)
    by_cpu = told["ours"]["cpu_rates"][0] / told["bare_n"]["cpu_rates"][0]
    assert figures["overhead_of_bare_loop_by_cpu"]["value"] == pytest.approx(by_cpu, abs=0.001)
    assert "overhead_of_flower" not in figures


def test_images_that_do_not_do_are_refused(images: Path) -> None:
    with pytest.raises(DataError, match=r"has 300 examples .*, but 600 images"):
        sim.write_workload(replace(TINY, clients=15), images, images / "out")
    with pytest.raises(DataError):
        sim.write_workload(TINY, images / "nowhere", images / "out")


def test_a_simulator_that_cannot_be_installed_is_told_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")  # what the contestants' environments take it from
    (tmp_path / "index").mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path / "index"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, absent = sim._prepare_contestants(["pfl"], 2)
    assert [each.name for each in found] == ["ours", "ours_torch", "bare_n", "bare_1"]
    assert absent["pfl"].startswith("pfl-research cannot be installed: ")
    assert not (tmp_path / "fedquilt" / "bench" / "pfl" / "ready").exists()


class ScoredRound(msgspec.Struct):
    path: tuple[str, ...]
    pool: tuple[str, ...]
    samples: int


def compare_round(length: int, naive_s: float, own_s: float, difference: float = 0.0) -> stitch.ScoringComparison:
    request: Any = ScoredRound(tuple(f"a.{i}" for i in range(length)), ("b.1", "b.2"), 64)
    scores = np.array([0.25, 0.5])
    own, naive = np.array([own_s, 2 * own_s]), np.array([naive_s, 3 * naive_s])
    seconds = {"output": own, "hybrid": own, "input": own, "naive": naive}
    return stitch.ScoringComparison(request, seconds, {"output": scores + difference, "naive": scores})


@pytest.mark.parametrize(
    ("size", "rounds", "reached"),
    [
        (64, [compare_round(1, 90.0, 2.0), compare_round(9, 10.0, 3.0)], {"output", "hybrid", "scores"}),  # 20 x
        (224, [compare_round(5, 100.0, 4.0)], {"output", "scores"}),  # 25 x
        (
            64,
            [compare_round(1, 90.0, 2.0), compare_round(5, 90.0, 2.0, difference=0.01)],
            {"output", "hybrid", "input"},
        ),
    ],
)
def test_speedups_count_all_rounds_and_large_images_have_higher_limits(
    size: int, rounds: list[stitch.ScoringComparison], reached: set[str]
) -> None:
    figures = stitch._build_result(size, np.array([4.0, 8.0]), np.array([5.0, 16.0]), rounds)["figures"]
    names = {mode: f"{mode}_score_to_naive_by_cpu" for mode in ("output", "hybrid", "input")}
    assert {
        name for name, key in {**names, "scores": "difference_of_scores"}.items() if figures[key]["reached"]
    } == reached
    assert figures["references_to_plain_forward_by_cpu"]["value"] == 1.25

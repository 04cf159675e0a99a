"""What `lab bench` prints of measurements, and what it makes of a machine that others use."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from mosquittos import MOSQUITTO

from fedquilt.core import DataError, JobError, LinkError
from fedquilt.tools.lab import bench
from fedquilt.tools.lab.bench import sim, stitch
from fedquilt.tools.lab.bench.stitch import ScoringComparison
from fedquilt.tools.report import thresholds
from fedquilt.tools.report.thresholds import LoadMeter, compare_at_least, format_figures

Times = namedtuple("Times", "user system idle iowait guest guest_nice")


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.others_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(thresholds.psutil, "cpu_count", lambda: 2)
        monkeypatch.setattr(thresholds.psutil, "cpu_times", self.cpu_times)
        monkeypatch.setattr(thresholds.os, "times", lambda: (0.1 * self.now_s, 0.0, 0.4 * self.now_s, 0.0, self.now_s))

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


def run_bench(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, others_s: tuple[float, ...], ratio: float, format: str = "text"
) -> int:
    def measure(report: Callable[[str], None]) -> dict[str, Any]:
        for number, seconds in enumerate(others_s):
            clocks.run(10.0, seconds)
            report(f"measurement {number}")
            if seconds == 13.0:
                raise KeyboardInterrupt
        return {"figures": {"ratio": compare_at_least(ratio, 1.0, "x")}}

    fake = SimpleNamespace(measure=measure, lines=format_figures)
    monkeypatch.setitem(sys.modules, "fedquilt.tools.lab.bench.fake", fake)
    return bench.run_and_print("fake", format, {})


@pytest.mark.parametrize(("ratio", "code", "verdict"), [(1.5, 0, "ok "), (0.5, 1, "NOT")])
def test_a_bench_on_an_idle_machine_is_judged(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, capsys: Any, ratio: float, code: int, verdict: str
) -> None:
    assert run_bench(monkeypatch, clocks, (1.0, 2.0), ratio) == code
    rows = capsys.readouterr().out.splitlines()
    assert rows[:2] == [
        "measurement 0 (other processes: 5% of the processors)",
        "measurement 1 (other processes: 10% of the processors)",
    ]
    assert rows[2].startswith(f"{verdict} ratio")


@pytest.mark.parametrize("ratio", [1.5, 0.5])
def test_one_disturbed_measurement_leaves_no_verdict(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, capsys: Any, ratio: float
) -> None:
    assert run_bench(monkeypatch, clocks, (0.0, 4.0, 0.0), ratio) == bench.BUSY == 12
    out, err = capsys.readouterr()
    assert out.splitlines()[3].startswith("?   ratio")
    assert "benchmark is invalid: other processes used up to 20% of the processors" in err


def test_the_json_of_a_disturbed_bench_has_no_verdict(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, capsys: Any
) -> None:
    assert run_bench(monkeypatch, clocks, (4.0,), 1.5, "json") == bench.BUSY
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["others_share"], found["figures"]["ratio"]["reached"]) == (0.2, None)
    assert err.startswith("measurement 0 (other")


def test_an_interrupted_bench_has_printed_its_measurements(
    monkeypatch: pytest.MonkeyPatch, clocks: Clocks, capsys: Any
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_bench(monkeypatch, clocks, (0.0, 13.0, 0.0), 1.0)
    assert [row[:13] for row in capsys.readouterr().out.splitlines()] == ["measurement 0", "measurement 1"]


@pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not installed")
def test_a_broker_that_does_not_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"accepts no connections on port \d+ \(.*nonsense"):
        bench.start_mosquitto(tmp_path, bench.find_free_port(), "nonsense 1\n")


WHOLE, OWN = np.array([4.0, 8.0]), np.array([5.0, 16.0])


def round_of(length: int, naive_s: float, own_s: float, stray: float = 0.0) -> ScoringComparison:
    ask: Any = Asked(tuple(f"a.{i}" for i in range(length)), ("b.1", "b.2"), 64)
    scores = np.array([0.25, 0.5])
    own, naive = np.array([own_s, 2 * own_s]), np.array([naive_s, 3 * naive_s])
    seconds = {"output": own, "hybrid": own, "input": own, "naive": naive}
    return ScoringComparison(ask, seconds, {"output": scores + stray, "naive": scores})


class Asked(msgspec.Struct):
    path: tuple[str, ...]
    pool: tuple[str, ...]
    samples: int


def test_the_rounds_compared_are_taken_together() -> None:
    found = stitch._build_result(64, WHOLE, OWN, [round_of(1, 90.0, 2.0), round_of(9, 10.0, 3.0)])
    assert found["figures"]["output_score_to_naive_by_cpu"]["value"] == 20.0
    assert found["figures"]["references_to_plain_forward_by_cpu"]["value"] == 1.25
    assert found["figures"]["output_score_to_naive_by_wall"]["value"] == 30.0
    assert found["figures"]["references_to_plain_forward_by_wall"]["value"] == 2.0
    assert [row["candidates"] for row in found["rounds"]] == [2, 2]
    assert {"path", "blocks", "naive", "output", "hybrid", "input"} <= set(
        " ".join(stitch.format_result(found)).split()
    )
    assert msgspec.json.decode(msgspec.json.encode(found)) == found  # the command's other form


def test_large_images_are_held_to_more() -> None:
    """25 times faster is enough for output scores at both sizes, and for hybrid ones at the small size only."""
    compared = [round_of(5, 100.0, 4.0)]
    reached = {
        size: [way for way in stitch.MIN_SPEEDUPS if found["figures"][f"{way}_score_to_naive_by_cpu"]["reached"]]
        for size in (64, 224)
        for found in [stitch._build_result(size, WHOLE, OWN, compared)]
    }
    assert reached == {64: ["output", "hybrid"], 224: ["output"]}
    assert not stitch._build_result(224, WHOLE, OWN, compared)["figures"]["references_to_plain_forward_by_cpu"][
        "reached"
    ]


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
    said: dict[tuple[str, float, float], None] = {}
    rows: list[str] = []
    monkeypatch.setattr(sim, "WORKLOADS", {"W2": TINY})
    result = sim.measure(images, repeats=1, processes=2, show=lambda *told: said.setdefault(told), report=rows.append)
    names = ("fedquilt", "fedquilt, torch engine", "bare loop, 2 processes", "bare loop, 1 process")
    assert list(said) == [(f"overhead, turn 1 of 1: {name}", done, 4) for done, name in enumerate(names)]
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
    assert sim.format_result(result)[-len(figures) :] == format_figures(result)


def test_images_that_do_not_do_are_refused(images: Path) -> None:
    with pytest.raises(DataError, match=r"has 300 examples .*, but 600 images"):
        sim.write_workload(replace(TINY, clients=15), images, images / "out")
    with pytest.raises(DataError):
        sim.write_workload(TINY, images / "nowhere", images / "out")


def test_one_workload_can_be_run_by_itself() -> None:
    assert [work.name for work in sim.select_workloads(())] == ["compute", "overhead"]
    assert [work.name for work in sim.select_workloads(("W2",))] == ["overhead"]
    with pytest.raises(JobError, match="--only w3 is not a workload: choose from W1, W2"):
        sim.select_workloads(("w3",))


def test_a_simulator_that_nobody_knows_is_refused_before_anything_runs(images: Path) -> None:
    with pytest.raises(JobError, match="--with abacus is not a simulator: choose from flower, pfl"):
        sim.measure(images, beside=("abacus",))


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

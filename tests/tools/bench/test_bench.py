"""What `lab bench` prints of measurements, and what it makes of a machine that others use."""

from __future__ import annotations

import json
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fedquilt.tools.lab import bench
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
    assert "not measured: other processes used up to 20% of the processors" in err


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

"""What `fedquilt bench costs` makes of times: of a machine that keeps to its rates, by clocks of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fedquilt.core import OperatingPoint, Rates, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.methods import fedavg
from fedquilt.tools.boards.record.probes import TaskProbe
from fedquilt.tools.lab.bench import costs

RATES = Rates(flops_per_s=2e9, bytes_per_s=1e9, launch_s=1e-4, task_s=0.5)
MACHINE = OperatingPoint(name="m", rates={"numpy-dense": RATES})


def work(flops: float, read_bytes: float, launches: float) -> WorkEstimate:
    return WorkEstimate(flops=flops, read_bytes=read_bytes, launches=launches, workload="numpy-dense")


PROBES = [work(4e9, 1e9, 10.0), work(1e9, 4e9, 20.0), work(2e9, 1e9, 9000.0), work(8e9, 2e9, 500.0)]
TASK = work(6e9, 3e9, 1000.0)  # 3 + 3 + 0.1 + 0.5 s


class Machine:
    """Work that takes the seconds of `RATES`, by a clock of its own; the wall's goes at half the speed."""

    def __init__(self) -> None:
        self.now_s, self.runs = 0.0, 0

    def takes(self, done: WorkEstimate, times: float = 1.0) -> Callable[[], None]:
        """Work that takes so many times as long; whatever runs in the first turn takes ten times that."""

        def run() -> None:
            self.now_s += (
                (10 if self.runs < len(PROBES) + 2 else 1) * times * (cost_model.work_seconds(done, MACHINE) or 0)
            )
            self.runs += 1

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with four probes, a task that takes what its work says, and one that takes half as long again."""
    pytest.importorskip("torch")
    made = Machine()
    clocks = {"processor": lambda: made.now_s, "wall": lambda: 2 * made.now_s}
    tried = {"honest": costs.CostCase(TASK, made.takes(TASK)), "slower": costs.CostCase(TASK, made.takes(TASK, 1.5))}
    monkeypatch.setattr(costs, "CLOCKS", clocks)
    monkeypatch.setattr(costs, "cases", lambda folder: tried)
    monkeypatch.setattr(
        costs.probes, "build_probes", lambda: {"numpy-dense": [TaskProbe(each, made.takes(each)) for each in PROBES]}
    )
    return made


def test_rates_are_found_and_a_task_is_held_against_them_by_each_clock(machine: Machine) -> None:
    """The least of the turns counts, so that a slow first one does not; both clocks predict by rates of their own."""
    found = costs.measure(turns=3)
    assert machine.runs == 3 * (len(PROBES) + 2)
    assert found["rates"]["numpy-dense"] == pytest.approx(
        {"flops_per_s": 2e9, "bytes_per_s": 1e9, "launch_s": 1e-4, "task_s": 0.5}, rel=1e-6
    )
    honest, slower = found["seconds"]["honest"], found["seconds"]["slower"]
    assert honest["processor"] == pytest.approx({"predicted_s": 6.6, "measured_s": 6.6}, rel=1e-6)
    assert honest["wall"] == pytest.approx({"predicted_s": 13.2, "measured_s": 13.2}, rel=1e-6)
    assert slower["processor"] == pytest.approx({"predicted_s": 6.6, "measured_s": 9.9}, rel=1e-6)
    assert msgspec.json.decode(msgspec.json.encode(found)) == found  # the command's other form


def test_a_prediction_that_is_a_quarter_off_either_way_misses(machine: Machine) -> None:
    """1 is exact; what takes half as long again is 1.5 off, which is more than 1.25."""
    found = costs.measure(turns=2)
    told = {name: (each["value"], each["reached"]) for name, each in found["figures"].items()}
    assert told == {"honest": (1.0, True), "slower": (1.5, False)}
    assert costs._off({"predicted_s": 3.0, "measured_s": 2.0}) == costs._off({"predicted_s": 2.0, "measured_s": 3.0})
    (line,) = (line for line in costs.lines(found) if "slower" in line and "ms" in line)
    assert "6600.0 /" in line
    assert line.split().count("0.67") == 2


def test_a_case_is_the_task_that_its_method_orders_and_what_carries_it_out(tmp_path: Path) -> None:
    """Eight examples of an epoch in two batches: counts are of all of them, and the work is the engine's own."""
    pytest.importorskip("torch")
    network = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 10}
    case = costs._second_round_case(fedavg.METHOD, fedavg.Params(batch=4, lr=0.1), network, 8, "numpy", tmp_path)
    assert case.work.workload == "numpy-dense"
    assert case.work.tasks == 1
    assert case.work.flops == 8 * 2 * (2 * 6 * 5 + 3 * 5 * 10)  # no gradient of what comes in
    twice = costs._second_round_case(fedavg.METHOD, fedavg.Params(batch=4, lr=0.1), network, 16, "numpy", tmp_path)
    assert twice.work.launches > case.work.launches
    assert case.run().weight == 8

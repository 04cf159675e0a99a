"""`fedquilt board check-gpu`: tasks and loops on the processor, a fake of NVIDIA's library, and reports."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.cli import main
from fedquilt.core import Examples, FedquiltError, Fit, JobError, Power, Reading, StoreError
from fedquilt.tools.boards.gpu_check import check, nvml, rates, report, tasks
from fedquilt.tools.boards.gpu_check.nvml import NvmlGpu
from fedquilt.tools.boards.gpu_check.report import Environment, GpuReport, MemoryRun, PartResult

REPORT = GpuReport(
    fedquilt="0.1.0",
    began="2026-11-27 17:00:00",
    took_s=200.0,
    busy_cpu_share=0.01,
    busy_gpu_share=0.0,
    environment=Environment(
        board="A workstation with a long name of its maker, and a longer one of its model, for tables",
        memory_bytes=64 << 30,
        python="3.12.3",
        kernel="6.8",
        unknown={"gpu": "torch is not installed"},
    ),
    parts={"providers": PartResult(verdict="ok", sentence="torch on cuda; outputs as the CPU's within 0.001")},
    memory=(
        MemoryRun(
            work="training",
            batch=32,
            runs_on="CUDA",
            predicted_bytes=100_000_000,
            measured_bytes=110_000_000,
            ratio=1.1,
        ),
    ),
)


class FakeNvml:
    """Answers as libnvidia-ml.so.1 does: 0 or an error code, and the value through a pointer."""

    def __init__(self, **values: int) -> None:
        self.values = values
        self.asked: list[tuple[Any, ...]] = []

        class Text:
            restype: Any = None

            def __call__(self, code: int) -> bytes:
                return f"Not Supported ({code})".encode()

        self.nvmlErrorString = Text()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*given: Any) -> int:
            self.asked.append((name, *given))
            if name in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex_v2"):
                return 0
            if name == "nvmlSystemGetDriverVersion":
                given[0].value = b"580.65"
                return 0
            key = name.removeprefix("nvmlDeviceGet")
            if key == "MissingCall":
                raise AttributeError(name)
            if key not in self.values:
                return 3
            target = given[-1]._obj
            if isinstance(target, ctypes.Structure):
                setattr(target, "gpu" if key == "UtilizationRates" else "used", self.values[key])
            else:
                target.value = self.values[key]
            return 0

        return call


def test_a_gpu_tells_power_energy_limits_load_memory_and_clocks_in_units_of_si() -> None:
    """NVML counts in mW, mJ, MHz and per cent. Energy begins at 0 when the meter is made."""
    fake = FakeNvml(
        PowerUsage=71_500,
        TotalEnergyConsumption=1_000,
        EnforcedPowerLimit=700_000,
        PowerManagementDefaultLimit=650_000,
        UtilizationRates=7,
        MemoryInfo=5 << 30,
        ClockInfo=1980,
        MaxClockInfo=2000,
    )
    gpu = NvmlGpu("1234", fake)
    assert next(each for each in fake.asked if "UUID" in each[0])[1] == b"GPU-1234"
    fake.values["TotalEnergyConsumption"] = 4_000
    assert gpu.read(0.0) == Power(71.5, "NVML", energy_j=3.0)
    assert (gpu.driver(), gpu.power_limit_w(), gpu.power_limit_w(default=True)) == ("580.65", 700.0, 650.0)
    assert (gpu.busy_share(), gpu.used_bytes()) == (0.07, 5 << 30)
    assert (gpu.clock_hz(nvml.GRAPHICS), gpu.clock_hz(nvml.MEMORY, highest=True)) == (1.98e9, 2e9)
    assert gpu.faults == {}


def test_what_a_gpu_does_not_tell_is_none_with_the_librarys_reason() -> None:
    """As in a slice of a GPU (MIG), which has no meter of its own."""
    gpu = NvmlGpu(None, FakeNvml())
    assert gpu.read(0.0) == Power(None, "NVML")
    assert (gpu.power_limit_w(), gpu.busy_share(), gpu.used_bytes(), gpu.clock_hz(nvml.GRAPHICS)) == (None,) * 4
    assert gpu.faults["PowerUsage"] == "Not Supported (3)"


def test_a_machine_without_the_library_says_so() -> None:
    """Or has it, and this environment can use it."""
    found, why = check._find_nvml(None)
    assert (found is None) == bool(why)


# -- reports --------------------------------------------------------------------------------------


def test_a_report_reads_back_and_its_tables_fit_80_columns(tmp_path: Path) -> None:
    """What is unknown is said to be."""
    report.write_report(REPORT, tmp_path / "report.json")
    assert report.read_report(tmp_path / "report.json") == REPORT
    lines = report.format_report(REPORT)
    assert max(map(len, lines)) <= 80
    assert "gpu                 unknown" in lines
    assert "training, batch 32  CUDA         100.0        110.0   1.1" in lines
    assert report.format_markdown(REPORT)[-1] == "| training, batch 32 | CUDA | 100.0 | 110.0 | 1.1 |"


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("skipped", 10), ("refused", 10), ("error", 11)])
def test_the_exit_code_is_that_of_the_worst_part_as_doctors_is(verdict: Any, code: int) -> None:
    """A part that could not run or has no verdict is a warning."""
    parts = {**REPORT.parts, "memory": PartResult(verdict=verdict, sentence="x")}
    assert report.exit_code(msgspec.structs.replace(REPORT, parts=parts)) == code


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-20], "truncated"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "Invalid enum value 2"),
        (lambda text: text.replace('"took_s"', '"tok_s"'), "unknown field `tok_s`"),
        (lambda text: text.replace('"ok"', '"fine"'), "Invalid enum value 'fine'"),
        (lambda text: "[" * 100_000, "no report of check-gpu"),
        (lambda text: "\x00\udcff", "no report of check-gpu"),
        (lambda text: " " * (1 << 20) + text, "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    """Reports are sent by people, and may be damaged, edited or of another version."""
    path = tmp_path / "sent.json"
    report.write_report(REPORT, path)
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(JobError, match=r"sent\.json") as refused:
        report.read_report(path)
    assert said in str(refused.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the reader, and by the command."""
    with pytest.raises(StoreError, match=r"none.json cannot be read"):
        report.read_report(tmp_path / "none.json")
    assert main(["board", "check-gpu", "--show", str(tmp_path / "none.json")]) == 6
    assert "none.json cannot be read" in capsys.readouterr().err


def test_a_report_is_shown_again_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, or as JSON."""
    report.write_report(REPORT, tmp_path / "report.json")
    assert main(["board", "check-gpu", "--show", str(tmp_path / "report.json")]) == 0
    assert "providers  ok  torch on cuda" in capsys.readouterr().out
    assert main(["board", "check-gpu", "--show", str(tmp_path / "report.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


# -- parts ----------------------------------------------------------------------------------------


def test_the_difference_of_updates_is_relative_to_the_largest_change() -> None:
    """The largest change is 4, the largest difference 1; counters do not count."""
    start = {"w": np.zeros(3), "n": np.array(0)}
    one = {"w": np.array([1.0, 2.0, 5.0]), "n": np.array(9)}
    other = {"w": np.array([1.0, 2.0, 4.0]), "n": np.array(7)}
    assert tasks.largest_difference(one, other, start) == 0.25
    assert tasks.largest_difference(other, other, start) == 0.0


def test_rates_are_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take turns to be first. The engine takes 2 s, the bare loop 1 s, and a slow pair changes no median."""
    now_s, order = [0.0], []
    monkeypatch.setattr(rates.time, "perf_counter", lambda: now_s[0])

    def take(name: str, seconds: float) -> None:
        slow = 10 if len(order) in (3, 4) else 1
        now_s[0] += seconds * slow
        order.append(name)

    found = rates._compare("x", "cpu", "steps/s", 4, lambda: take("ours", 2.0), lambda: take("bare", 1.0), 3)
    assert order == ["ours", "bare", "ours", "ours", "bare", "bare", "ours"]
    assert found.ratio == 0.5
    assert (found.engine_rates, found.bare_rates) == ((2.0, 0.2, 2.0), (4.0, 0.4, 4.0))


def test_energy_is_the_meters_while_the_load_runs() -> None:
    """A counter that gains 50 J each second, read in a thread."""
    began_s = time.monotonic()
    found = check._measure_power(
        {"m": lambda now_s: Reading(energy_j=50 * (now_s - began_s), energy_source="m")}, lambda: time.sleep(0.5)
    )
    cost = found["m"].cost_until(found["m"].at_s or 0.0, None)
    assert cost.energy_j == pytest.approx(50 * cost.duration_s, rel=1e-3)


def test_a_part_that_breaks_or_is_skipped_has_a_verdict_with_its_reason() -> None:
    """The others run all the same."""

    def fail() -> check.Outcome:
        raise RuntimeError("CUDA error: no kernel image is available")

    def skip() -> check.Outcome:
        raise check.SkippedPartError("torch is not installed")

    def refuse() -> check.Outcome:
        raise FedquiltError("a task failed")

    assert check._judge_part(fail).verdict == "error"
    assert "no kernel image" in check._judge_part(fail).sentence
    assert check._judge_part(skip) == PartResult(verdict="skipped", sentence="torch is not installed")
    assert check._judge_part(refuse) == PartResult(verdict="error", sentence="a task failed")


@pytest.fixture
def bench(tmp_path: Path) -> tasks.TaskBench:
    pytest.importorskip("torch")
    return tasks.TaskBench(tmp_path, tasks.WITHOUT_GPU)


def test_tasks_are_the_agents_and_the_one_above_the_memory_is_refused(bench: tasks.TaskBench) -> None:
    """In its own process. Two runs are bit-identical, and the task after the refused one works."""
    with bench.worker() as worker:
        found = tasks.check_results(bench, worker, None)
    assert (found.steps, found.repeat_difference) == (4, 0.0)
    assert (found.refusal_code, found.next_task) == ("memory", "ok")
    assert "budget" in found.refusal or "memory" in found.refusal


def test_peaks_are_measured_beside_the_engines_own_prediction(bench: tasks.TaskBench) -> None:
    """Training and inference at two batch sizes; a processor runs each once."""
    found = [one for one in tasks.measure_memory(bench) if not one.work.endswith("again")]
    assert [(one.work, one.batch) for one in found] == [
        (work, batch) for work in ("training", "inference") for batch in (16, 64)
    ]
    for one in found:
        assert one.predicted_bytes is not None
        assert one.measured_bytes is not None
        assert one.ratio == one.measured_bytes / one.predicted_bytes > 0


def test_the_bare_loop_does_the_same_work_as_the_engine() -> None:
    """One mini-batch of all examples, twice: the same model to float tolerance."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    work, device = tasks.WITHOUT_GPU, "cuda" if torch.cuda.is_available() else "cpu"
    examples, start, fit = Examples(*work.draw(16)), work.start(), Fit(epochs=2, batch=16, lr=0.01)
    ours, _ = TorchEngine(1 << 40).train(work.network, start, examples, fit, np.random.default_rng(0))
    bare = rates._bare_training(work.network, start, examples, fit, device)
    assert tasks.largest_difference(ours, bare, start) < 1e-2


def test_providers_are_counted_by_the_nodes_that_they_ran(tmp_path: Path) -> None:
    """The processor takes all of the graph. Of the engine's own plan, two batch sizes are measured."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    graph = check.write_graph(tmp_path)
    found = list(check._run_onnx_providers(graph, tmp_path))
    assert found[0].device == "CPUExecutionProvider"
    assert found[0].runs
    assert set(found[0].nodes) == {"CPUExecutionProvider"}
    assert found[0].largest_difference == 0.0
    assert rates.measure_onnx_rates(graph, (check.CHANNELS, check.PIXELS, check.PIXELS), 1, 0.01).ratio > 0

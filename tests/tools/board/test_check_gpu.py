"""`fedquilt board check-gpu`: tasks and loops on the processor, a fake of NVIDIA's library, and reports."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.cli import main
from fedquilt.core import Examples, FedquiltError, Fit, JobError, Power, Reading, StoreError
from fedquilt.tools.boards.gpu_check import check, nvml, rates, report, tasks
from fedquilt.tools.boards.gpu_check.nvml import NvmlGpu
from fedquilt.tools.boards.gpu_check.report import (
    Correctness,
    Environment,
    GpuReport,
    MemoryRun,
    PartResult,
    ThroughputRun,
)

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
    assert "training, batch 32  CUDA         100.0        110.0    1.1" in lines
    assert report.format_markdown(REPORT)[-1] == "| training, batch 32 | CUDA | 100.0 | 110.0 | 1.1 |"


def test_the_table_of_the_page_on_boards_is_generated_from_the_stored_report() -> None:
    """A report as an owner sends it."""
    docs = Path(__file__).parents[3] / "docs"
    found = report.read_report(docs / "gpu-report.json")
    page = (docs / "boards.md").read_text()
    told = page.partition("<!-- gpu-report.json -->")[2].partition("<!-- end -->")[0]
    assert told.strip() == "\n".join(report.format_markdown(found))
    assert max(map(len, report.format_report(found))) <= 80


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


class FakeCuda:
    """As `torch.cuda` describes a GPU with memory of its own."""

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(
            name="NVIDIA H100", total_memory=80 << 30, is_integrated=0, major=9, minor=0, uuid="12-34"
        )

    def mem_get_info(self, number: int) -> tuple[int, int]:
        return 70 << 30, 80 << 30


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> check.GpuCheck:
    """A check of a machine whose torch and NVML see a GPU that is idle."""
    pytest.importorskip("torch")
    fake = FakeNvml(UtilizationRates=0, PowerUsage=70_000, EnforcedPowerLimit=700_000, ClockInfo=1980)
    monkeypatch.setattr(check, "_find_cuda", lambda: (FakeCuda(), ""))
    monkeypatch.setattr(check, "_find_nvml", lambda cuda: (NvmlGpu("12-34", fake), ""))
    monkeypatch.setattr(check, "IDLE_S", 0.3)
    return check.GpuCheck(Path("/"), False, lambda name, done, total: None)


def test_what_is_unknown_of_a_gpu_has_its_reason(fake_gpu: check.GpuCheck) -> None:
    """The name and the limit are known, the default limit and the maker's mode are not."""
    found = fake_gpu._read_environment()
    assert (found.gpu, found.compute_capability, found.shared_memory) == ("NVIDIA H100", "9.0", False)
    assert (found.driver, found.power_limit_w, found.power_limit_default_w) == ("580.65", 700.0, None)
    assert "PowerManagementDefaultLimit: Not Supported (3)" in found.unknown["power_limit_default_w"]
    assert all(name in found.unknown for name, value in msgspec.structs.asdict(found).items() if value is None)


def test_the_meter_and_the_clocks_of_a_gpu_are_reported(fake_gpu: check.GpuCheck) -> None:
    """70 W from NVML without a counter; its clocks are read, and none is set."""
    verdict, said = fake_gpu._measure_idle()
    assert (verdict, "70 W" in said) == ("ok", True)
    assert fake_gpu._check_clocks()[0] == "ok"
    assert [row.now_hz for row in fake_gpu._clocks if row.name == "NVML gpu"] == [1.98e9]


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "ok", "differs from the CPU's by 0.01"),
        ({"cpu_difference": 0.2}, "warning", "0.2"),
        ({"repeat_difference": 1e-6}, "warning", "two runs differ by 1e-06"),
        ({"refusal_code": "exception"}, "error", "ended as exception"),
        ({"next_task": "failed"}, "error", "the next as failed"),
    ],
)
def test_results_on_a_gpu_are_judged(
    fake_gpu: check.GpuCheck,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: dict[str, Any],
    verdict: str,
    said: str,
) -> None:
    """The task above the memory is sized by what is free of the GPU's own."""
    free: list[int | None] = []
    found = Correctness(
        steps=4, runs_on="CUDA", cpu_difference=0.01, repeat_difference=0.0, refusal_code="memory", next_task="ok"
    )

    def check_results(bench: Any, worker: Any, free_bytes: int | None) -> Correctness:
        free.append(free_bytes)
        return msgspec.structs.replace(found, **changes)

    monkeypatch.setattr(tasks, "check_results", check_results)
    judged = fake_gpu._check_results(tmp_path)
    assert (judged[0], said in judged[1], free) == (verdict, True, [70 << 30])


@pytest.mark.parametrize(
    ("others_s", "share", "verdict"), [(0.0, 0.0, "ok"), (1e6, 0.0, "refused"), (0.0, 0.5, "refused")]
)
def test_rates_on_a_busy_machine_get_no_verdict(
    fake_gpu: check.GpuCheck,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    others_s: float,
    share: float,
    verdict: str,
) -> None:
    """Whether others use the processors or the GPU. The rates are reported all the same."""
    busy = iter([0.0, others_s])
    monkeypatch.setattr(check, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(check, "_has_onnx", lambda: False)
    run = ThroughputRun(work="x", runs_on="CUDA", unit="steps/s", engine_rates=(9.5,), bare_rates=(10.0,), ratio=0.95)
    monkeypatch.setattr(rates, "measure_torch_rates", lambda work: iter([run]))
    assert fake_gpu._check_rates(tmp_path, share)[0] == verdict
    assert fake_gpu._throughput == [run]


def test_a_check_without_time_skips_every_part_and_writes_its_report(fake_gpu: check.GpuCheck, tmp_path: Path) -> None:
    """Each says why, and the file reads back."""
    found = check.check_gpu(tmp_path / "report.json", 1e-9, say=lambda name, done, total: None)
    assert {part.verdict for part in found.parts.values()} == {"skipped"}
    assert all("--minutes" in part.sentence for part in found.parts.values())
    assert report.read_report(tmp_path / "report.json") == found
    assert report.exit_code(found) == 10

"""`fedquilt board check-gpu`: tasks and loops on the processor, a stand-in for nvidia-smi, and reports."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.cli import main
from fedquilt.core import FedquiltError, Fit, Reading
from fedquilt.tools.boards import gpu_check
from fedquilt.tools.boards.gpu_check import GpuReport, PartResult, tasks

ROW = {"work": "training, 32", "on": "CUDA", "budget": "plan", "ended": "ok", "plan_mb": 100.0, "ratio": 1.05}
REPORT = GpuReport(
    fedquilt="0.1.0",
    began="2026-11-27 17:00:00",
    took_s=200.0,
    environment={"board": "A workstation with a long name of its maker, and a longer one of its model", "gpu": None},
    unknown={"gpu": "torch is not installed"},
    parts={"memory": PartResult(verdict="ok", sentence="at most 1.05 times the prediction", rows=(ROW,))},
)


# -- reports --------------------------------------------------------------------------------------


def test_the_tables_of_the_page_on_boards_are_those_of_the_stored_report() -> None:
    docs = Path(__file__).parents[3] / "docs"
    found = msgspec.json.decode((docs / "gpu-report.json").read_bytes(), type=GpuReport)
    told = (docs / "boards.md").read_text().partition("<!-- gpu-report.json -->\n\n```\n")[2].partition("\n```\n")[0]
    assert told.splitlines() == gpu_check.format_report(found)
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("skipped", 10), ("refused", 10), ("error", 11)])
def test_the_exit_code_is_that_of_the_worst_part_as_doctors_is(verdict: Any, code: int) -> None:
    parts = {**REPORT.parts, "memory": PartResult(verdict=verdict, sentence="x")}
    assert gpu_check.exit_code(msgspec.structs.replace(REPORT, parts=parts)) == code


# -- parts ----------------------------------------------------------------------------------------


def test_the_difference_of_updates_is_relative_to_the_largest_change() -> None:
    start = {"w": np.zeros(3), "n": np.array(0)}
    one = {"w": np.array([1.0, 2.0, 5.0]), "n": np.array(9)}
    other = {"w": np.array([1.0, 2.0, 4.0]), "n": np.array(7)}
    assert tasks.largest_difference(one, other, start) == 0.25
    assert tasks.largest_difference(other, other, start) == 0.0


def test_rates_are_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, order = [0.0], []
    monkeypatch.setattr(tasks.time, "perf_counter", lambda: now_s[0])

    def take(name: str, seconds: float) -> None:
        slow = 10 if len(order) in (3, 4) else 1
        now_s[0] += seconds * slow
        order.append(name)

    found = tasks.compare_rates(("x", "", "steps/s"), 4, lambda: take("ours", 2.0), lambda: take("bare", 1.0), 3)
    assert order == ["ours", "bare", "ours", "ours", "bare", "bare", "ours"]
    assert (found["ratio"], found["engine"], found["bare_loop"], found["on"]) == (0.5, 2.0, 4.0, "processor")


def test_energy_is_the_meters_while_the_load_runs() -> None:
    began_s = time.monotonic()
    meters = {
        "m": lambda now_s: Reading(energy_j=50 * (now_s - began_s), energy_source="counter"),
        "none": lambda now_s: Reading(),
    }
    found = gpu_check.measure_energy(meters, lambda: time.sleep(0.5))
    assert list(found) == ["m"]
    assert found["m"].energy_source == "counter, counter"
    assert found["m"].energy_j / found["m"].duration_s == pytest.approx(50, rel=1e-2)


def test_a_part_that_breaks_or_is_skipped_has_a_verdict_with_its_reason() -> None:
    def stop(error: Exception) -> gpu_check.Outcome:
        raise error

    broken = gpu_check.judge_part(lambda: stop(RuntimeError("CUDA error: no kernel image is available")))
    assert (broken.verdict, "no kernel image" in broken.sentence) == ("error", True)
    skipped = gpu_check.judge_part(lambda: stop(gpu_check.SkippedPartError("torch is not installed")))
    assert skipped == PartResult(verdict="skipped", sentence="torch is not installed")
    assert gpu_check.judge_part(lambda: stop(FedquiltError("a task failed"))).verdict == "error"


@pytest.fixture
def bench(tmp_path: Path) -> tasks.TaskBench:
    pytest.importorskip("torch")
    return tasks.TaskBench(tmp_path, tasks.WITHOUT_GPU._replace(batches=(16,)))


def test_tasks_are_the_agents_and_the_one_above_the_memory_is_refused(bench: tasks.TaskBench) -> None:
    with bench.worker() as worker:
        found = tasks.check_results(bench, worker, None)
    assert (found["steps"], found["to_repetition"]) == (4, 0.0)
    assert (found["too_large"], found["next_task"]) == ("memory", "ok")


def test_peaks_are_measured_beside_the_engines_own_prediction(bench: tasks.TaskBench) -> None:
    found = [row for row in tasks.measure_memory(bench) if row["budget"] == "ample"]
    assert [row["work"] for row in found] == ["training, 16", "inference, 16"]
    for row in found:
        assert row["ended"] == "ok"
        assert row["ratio"] == pytest.approx(row["peak_mb"] / row["plan_mb"])
        assert row["ratio"] > 0


def test_a_board_without_torch_measures_the_memory_of_onnx_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    found = gpu_check.importlib.util.find_spec
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    rows = gpu_check.GpuCheck()._check_memory(tmp_path)[2]
    assert [row["work"] for row in rows] == ["ONNX inference, 4", "ONNX inference, 64"]
    with pytest.raises(gpu_check.SkippedPartError, match="neither torch nor onnxruntime"):
        gpu_check.judge_memory([])


def test_the_bare_loop_does_the_same_work_as_the_engine() -> None:
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    work, device = tasks.WITHOUT_GPU, "cuda" if torch.cuda.is_available() else "cpu"
    examples, start, fit = work.draw_examples(16), work.initial_weights(), Fit(epochs=2, batch=16, lr=0.01)
    ours, _ = TorchEngine(1 << 40).train(work.network, start, examples, fit, np.random.default_rng(0))
    bare = tasks.train_bare(work.network, start, examples, fit, device)
    assert tasks.largest_difference(ours, bare, start) < 1e-2


def test_onnx_runtime_counts_nodes_and_has_as_many_threads_in_the_bare_loop_as_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    graph, sessions, create = gpu_check.write_graph(tmp_path), [], ort.InferenceSession
    found = next(gpu_check.compare_devices(gpu_check.list_onnx_runs(graph, tmp_path)))
    assert (found["device"], found["nodes"], found["difference"]) == ("CPUExecutionProvider", "6 of 6", 0.0)

    def record(*given: Any, **more: Any) -> Any:
        sessions.append(create(*given, **more))
        return sessions[-1]

    monkeypatch.setattr(ort, "InferenceSession", record)
    shape = (gpu_check.CHANNELS, gpu_check.PIXELS, gpu_check.PIXELS)
    assert tasks.measure_onnx_rates(graph, shape, 1, 0.0)["ratio"] > 0
    assert [each.get_session_options().intra_op_num_threads for each in sessions] == [0, 0]


# -- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "ok", "at most 1.05 times"),
        ({"ratio": 1.3}, "warning", "at most 1.30 times"),
        (
            {"ended": "memory", "reason": "the task held 2 GB"},
            "warning",
            "training, 32 ended with 'memory', budget plan: the task held 2 GB",
        ),
    ],
)
def test_peaks_on_a_gpu_are_judged_within_the_plan(changes: dict[str, Any], verdict: str, said: str) -> None:
    judged = gpu_check.judge_memory([{**ROW, "budget": "ample", "ratio": 2.7}, {**ROW, **changes}])
    assert (judged[0], said in judged[1]) == (verdict, True)


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "ok", "differs from the CPU's by 0.01"),
        ({"to_cpu": 0.2}, "warning", "0.2"),
        ({"to_cpu": None}, "skipped", "not compared: no GPU"),
        ({"to_repetition": 1e-6}, "warning", "two runs differ by 1e-06"),
        ({"too_large": "exception"}, "error", "ended with 'exception'"),
        ({"next_task": "failed"}, "error", "the next one with 'failed'"),
    ],
)
def test_results_on_a_gpu_are_judged(changes: dict[str, Any], verdict: str, said: str) -> None:
    row = {"on": "CUDA", "too_large": "memory", "next_task": "ok", "steps": 4, "to_cpu": 0.01, "to_repetition": 0.0}
    judged = gpu_check.judge_results({**row, **changes}, "no GPU")
    assert (judged[0], said in judged[1]) == (verdict, True)


@pytest.mark.parametrize(
    ("cpu", "gpu", "ratio", "verdict"),
    [(0.0, 0.0, 0.95, "ok"), (0.0, 0.0, 0.8, "warning"), (0.5, 0.0, 0.95, "refused"), (0.0, 0.5, 0.95, "refused")],
)
def test_rates_on_a_busy_machine_get_no_verdict(cpu: float, gpu: float, ratio: float, verdict: str) -> None:
    rows = [{"work": "training, 32", "ratio": ratio}]
    judged = gpu_check.judge_rates(rows, cpu, gpu)
    assert (judged[0], judged[2]) == (verdict, rows)


# -- a stand-in for a GPU -------------------------------------------------------------------------


class FakeCuda:
    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(
            name="NVIDIA H100", total_memory=80 << 30, is_integrated=0, major=9, minor=0, uuid="12-34"
        )


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> gpu_check.GpuCheck:
    pytest.importorskip("torch")

    def run(command: tuple[str, ...], **more: Any) -> Any:
        assert command[:2] == ("nvidia-smi", "--id=GPU-12-34")
        told = "580.65, 70.5, 700.00, [N/A], 7, 512, 1980, 2000, 2619, [Not Supported]\n"
        return SimpleNamespace(stdout="70.5\n" if command[2] == "--query-gpu=power.draw" else told)

    monkeypatch.setattr(gpu_check, "_find_cuda_or_reason", lambda: (FakeCuda(), ""))
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    return gpu_check.GpuCheck()


def test_what_a_gpu_tells_is_in_units_of_si_and_the_rest_is_left_out(fake_gpu: gpu_check.GpuCheck) -> None:
    found = gpu_check.query_nvidia_smi(FakeCuda())
    assert found == {
        "driver": "580.65",
        "power_w": 70.5,
        "power_limit_w": 700.0,
        "busy_share": pytest.approx(0.07),
        "used_bytes": 512 << 20,
        "graphics_hz": 1.98e9,
        "graphics_high_hz": 2e9,
        "memory_hz": 2.619e9,
    }
    environment, unknown = fake_gpu._read_environment()
    assert (environment["gpu"], environment["gpu_memory_is"], environment["driver"]) == (
        "NVIDIA H100",
        "its own",
        "580.65",
    )
    assert unknown["power_limit_default_w"] == "not reported by nvidia-smi"
    assert all(name in unknown for name, value in environment.items() if value is None)
    rows = fake_gpu._check_clocks(Path())[2]
    assert {"clock": "GPU memory", "now_mhz": 2619.0, "high_mhz": None, "settings": 0} in rows


def test_energy_of_a_gpu_is_known_whatever_the_rate_of_its_readings(
    fake_gpu: gpu_check.GpuCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "IDLE_S", 0.35)
    monkeypatch.setattr(gpu_check, "LOAD_S", 0.1)
    monkeypatch.setattr(fake_gpu, "_device", SimpleNamespace(read_sensors=lambda now_s: Reading()))

    def load(*given: Any) -> None:
        time.sleep(0.7)

    monkeypatch.setattr(gpu_check.engines, "create_engine", lambda name, budget: SimpleNamespace(train=load))
    verdict, sentence, rows = fake_gpu._measure_energy(Path())
    assert (verdict, "70.5 to 70.5 W" in sentence) == ("ok", True)
    assert [row["meter"].split(", ")[:2] for row in rows] == [["GPU", "nvidia-smi"]]


@pytest.mark.parametrize("odd", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", ""])
def test_a_field_without_a_value_is_left_out(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    told = f"{odd}, {odd}, 700.00 W, {odd}, 0, 4, {odd}, 1980, 2619, 2619\n"
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, **more: SimpleNamespace(stdout=told))
    found = gpu_check.query_nvidia_smi(None)
    assert found["power_limit_w"] == 700.0
    assert not {"driver", "power_w", "power_limit_default_w", "graphics_hz"} & found.keys()


def test_a_field_that_a_driver_lacks_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"power.draw": "70.13", "memory.used": "1"}

    def run(command: tuple[str, ...], **more: Any) -> Any:
        names = command[2].removeprefix("--query-gpu=").split(",")
        if unknown := [name for name in names if name not in told]:
            raise subprocess.CalledProcessError(2, command, f'Field "{unknown[0]}" is not a valid field to query.')
        return SimpleNamespace(stdout=", ".join(told[name] for name in names) + "\n")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check.query_nvidia_smi(None) == {"power_w": 70.13, "used_bytes": 1 << 20}


def test_a_machine_without_nvidia_smi_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: tuple[str, ...], **more: Any) -> Any:
        raise faults.pop()

    faults: list[Exception] = [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10)]
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert (gpu_check.query_nvidia_smi(None), gpu_check.query_nvidia_smi(None)) == ({}, {})


def test_a_check_without_time_skips_every_part_and_writes_its_report(tmp_path: Path) -> None:
    assert main(["board", "check-gpu", "--minutes", "1e-9", "--out", str(tmp_path / "report.json")]) == 10
    found = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=GpuReport)
    assert {part.verdict for part in found.parts.values()} == {"skipped"}
    assert all("--minutes" in part.sentence for part in found.parts.values())

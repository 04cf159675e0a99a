"""Check of a GPU through the agent's own code, within 10 minutes (`fedquilt board check-gpu`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

import fedquilt
from fedquilt.console import progress, table
from fedquilt.core import Cost, Device, FedquiltError, Fit, Reading, shorten_error
from fedquilt.costs import peak_memory
from fedquilt.edge_agent import devices, engines
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.power.task_power import SAMPLE_S, EnergyAccount
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.host import process_resources
from fedquilt.tools.boards import clocks
from fedquilt.tools.boards.gpu_check import tasks
from fedquilt.tools.boards.gpu_check.load_meter import MAX_OTHER_LOAD, LoadMeter
from fedquilt.tools.boards.gpu_check.tasks import Row
from fedquilt.tools.boards.record import measurement, probes

Verdict: TypeAlias = Literal["ok", "skipped", "refused", "warning", "error"]
EXIT_CODES: Final[dict[Verdict, int]] = {"ok": 0, "skipped": 10, "refused": 10, "warning": 10, "error": 11}
COLOURS: Final = {"ok": "green", "error": "red", "warning": "yellow", "refused": "yellow"}


class PartResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    verdict: Verdict
    sentence: str
    rows: tuple[Row, ...] = ()


class GpuReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Report of one check. Unknown values of `environment` are None, with the reasons in `unknown`."""

    version: Literal[1] = 1
    fedquilt: str
    began: str  # UTC
    took_s: float
    environment: Row
    unknown: dict[str, str]
    parts: dict[str, PartResult]


def exit_code(report: GpuReport) -> int:
    return max(EXIT_CODES[part.verdict] for part in report.parts.values())


def format_report(report: GpuReport) -> list[str]:
    """Return the report as lines of tables of at most 80 columns, or of a terminal's width."""
    environment_rows = [(key.replace("_", " "), _text(value)) for key, value in report.environment.items()]
    verdicts = [(name, part.verdict, part.sentence) for name, part in report.parts.items()]
    lines = [*table.format_table(environment_rows, "<~"), "", *table.format_table(verdicts, "<<~", None, COLOURS)]
    for name, part in report.parts.items():
        if part.rows:
            head = [key.replace("_", " ") for key in part.rows[0]]
            rows = [head, *([_text(row[key]) for key in part.rows[0]] for row in part.rows)]
            align = "".join("<" if isinstance(value, str) else ">" for value in part.rows[0].values())
            lines += ["", f"{name}:", *table.format_table(rows, align)]
    return lines


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


TOLERANCE: Final = 5e-3  # largest relative difference of one network's outputs from the CPU's: TF32 has 10 bits
UPDATE_TOLERANCE: Final = 0.05  # largest relative difference of an update
NO_TF32: Final = "NVIDIA_TF32_OVERRIDE"
MIN_RATIO: Final = 0.9  # rate of the engine, relative to the bare loop
IDLE_S, LOAD_S = 5.0, 5.0
NO_ENGINE: Final = "neither torch nor onnxruntime with onnx is installed"
LATE_SHARE: Final = 0.8  # share of the time after which no part begins
LATE_PART: Final = PartResult(verdict="skipped", sentence="no time was left: increase --minutes")
CHANNELS, PIXELS = 32, 32  # size of the ONNX graph
QUERY_FIELDS: Final[dict[str, tuple[str, float | None]]] = {  # name in nvidia-smi, and factor to the unit
    "driver": ("driver_version", None),
    "power_w": ("power.draw", 1.0),
    "power_limit_w": ("power.limit", 1.0),
    "power_limit_default_w": ("power.default_limit", 1.0),
    "busy_share": ("utilization.gpu", 0.01),
    "used_bytes": ("memory.used", 2.0**20),
    "graphics_hz": ("clocks.gr", 1e6),
    "graphics_high_hz": ("clocks.max.gr", 1e6),
    "memory_hz": ("clocks.mem", 1e6),
    "memory_high_hz": ("clocks.max.mem", 1e6),
}

Outcome = tuple[Verdict, str, list[Row]]
DeviceRun = tuple[np.ndarray, str, str]  # output, share of the nodes, and reason if the device ran none


class SkippedPartError(FedquiltError):
    """Error in a part of the GPU check that cannot run on this machine. The part is reported as skipped."""


class GpuCheck:
    def __init__(self) -> None:
        self._device: Device = devices.create_device("auto", devices.ROOT)
        self._cuda, self._no_cuda_reason = _find_cuda_or_reason()
        self._smi_values = query_nvidia_smi(self._cuda)
        self._workload = tasks.WITHOUT_GPU if self._cuda is None else tasks.ON_GPU

    def run(self, limit_s: float) -> GpuReport:
        began_s, began, tf32 = time.monotonic(), datetime.now(timezone.utc), os.environ.get(NO_TF32)
        environment, unknown = self._read_environment()
        results: dict[str, PartResult] = {}
        with tempfile.TemporaryDirectory(prefix="fedquilt-gpu-") as scratch:
            parts = {
                "energy": self._measure_energy,
                "providers": self._check_providers,
                "memory": self._check_memory,
                "correctness": self._check_results,
                "throughput": self._check_rates,
                "clocks": self._check_clocks,
            }
            for index, (name, part) in enumerate(parts.items()):
                progress.LINE.set_part(name, index, len(parts))
                results[name] = LATE_PART
                if time.monotonic() - began_s <= LATE_SHARE * limit_s:
                    results[name] = judge_part(partial(part, Path(scratch)))
                if tf32 is None:  # the ONNX engine switches TF32 off for its process, and tasks have their own
                    os.environ.pop(NO_TF32, None)
        return GpuReport(
            fedquilt=fedquilt.__version__,
            began=f"{began:%Y-%m-%d %H:%M:%S}",
            took_s=round(time.monotonic() - began_s, 1),
            environment=environment,
            unknown=unknown,
            parts=results,
        )

    def _read_environment(self) -> tuple[Row, dict[str, str]]:
        limits = {name: self._smi_values.get(name) for name in ("driver", "power_limit_w", "power_limit_default_w")}
        groups: tuple[tuple[Row, str], ...] = (
            ({"board": self._device.board, "memory_mb": self._device.memory_bytes / 1e6}, ""),
            (_describe_gpu(self._cuda), self._no_cuda_reason),
            (limits, "not reported by nvidia-smi"),
            ({name: _read_version(name) for name in ("torch", "onnxruntime")}, "not installed, or damaged"),
            ({"power_mode": self._device.read_sensors(time.monotonic()).mode}, "no nvpmodel"),
            ({"python": platform.python_version(), "kernel": platform.release()}, ""),
        )
        environment = {name: value for values, _ in groups for name, value in values.items()}
        return environment, {
            name: reason for values, reason in groups for name, value in values.items() if value is None
        }

    def _measure_energy(self, folder: Path) -> Outcome:
        _require_torch()
        idle = measure_energy(self._meters(), lambda: time.sleep(IDLE_S))
        engine: Any = engines.create_engine("torch", tasks.AMPLE_BYTES)
        size = self._workload.batches[1]
        fit, examples = Fit(epochs=8, batch=size), self._workload.draw_examples(size)
        training_arguments = self._workload.network, self._workload.initial_weights(), examples, fit

        def load() -> None:
            end_s = time.monotonic() + LOAD_S
            while time.monotonic() < end_s:
                engine.train(*training_arguments, np.random.default_rng(0))

        loaded = measure_energy(self._meters(), load)
        rows = [
            {
                "meter": f"{name}, {cost.energy_source}",
                "idle_w": measurement.mean_power_w(idle[name]),
                "load_w": measurement.mean_power_w(cost),
                "load_j": cost.energy_j,
                "error_j": cost.energy_error_j,
            }
            for name, cost in loaded.items()
            if name in idle
        ]
        if not rows:
            raise SkippedPartError(
                "no meter is readable, of the board (INA3221, hwmon, battery, RAPL) or by nvidia-smi"
            )
        return "ok", "; ".join(f"{row['meter']}: {row['idle_w']:.3g} to {row['load_w']:.3g} W" for row in rows), rows

    def _meters(self) -> dict[str, Callable[[float], Reading]]:
        meters: dict[str, Callable[[float], Reading]] = {"board": self._device.read_sensors}
        if self._smi_values.get("power_w") is not None:
            meters["GPU"] = lambda now_s: Reading(
                power_w=query_nvidia_smi(self._cuda, ("power_w",)).get("power_w"), energy_source="nvidia-smi"
            )
        return meters

    def _check_providers(self, folder: Path) -> Outcome:
        rows: list[Row] = []
        reasons = [] if self._cuda is not None else [self._no_cuda_reason]
        if importlib.util.find_spec("torch"):
            rows += compare_devices(_list_torch_runs(("cpu",) if self._cuda is None else ("cpu", "cuda")))
        if has_onnx():
            rows += compare_devices(list_onnx_runs(write_graph(folder), folder))
        else:
            reasons.append("onnxruntime and onnx are not both installed")
        ran = [row for row in rows if row["difference"] is not None]
        reasons += [f"{row['device']}: {row['reason']}" for row in rows if row["reason"]]
        differing = [row for row in ran if row["difference"] > TOLERANCE]
        if differing:
            worst = differing[0]
            return "error", f"{worst['device']} differs from the CPU by {worst['difference']:.2g} of the output", rows
        gpus = [str(row["device"]) for row in ran if "cpu" not in str(row["device"]).lower() and not row["reason"]]
        if not gpus:
            return "error", f"nothing runs on a GPU: {'; '.join(reasons)}", rows
        sentence = f"{', '.join(gpus)}; outputs as the CPU's within {TOLERANCE:g}"
        return ("warning" if reasons else "ok"), "; ".join([sentence, *reasons]), rows

    def _bench(self, folder: Path) -> tasks.TaskBench:
        _require_torch()
        return tasks.TaskBench(Path(tempfile.mkdtemp(dir=folder)), self._workload)

    def _check_memory(self, folder: Path) -> Outcome:
        rows: list[Row] = []
        if importlib.util.find_spec("torch"):
            rows += tasks.measure_memory(self._bench(folder))
        if has_onnx():
            rows += [self._measure_graph(write_graph(folder), batch) for batch in (4, 64)]
        return judge_memory(rows)

    def _measure_graph(self, graph: Path, batch: int) -> Row:
        from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine

        process_id = os.getpid()
        engine = OnnxEngine(tasks.AMPLE_BYTES, micro_batch=batch)
        x = np.random.default_rng(0).standard_normal((batch, CHANNELS, PIXELS, PIXELS), np.float32)
        used_before = query_nvidia_smi(self._cuda).get("used_bytes")
        base = memory_budget.resident_bytes(process_id) if memory_budget.reset_peak(process_id) else None
        engine.run(graph, x)
        peak, plan = memory_budget.read_peak_bytes(process_id), engine.memory_plan(graph)
        if engine.runs_on not in ("", "processor") and peak is not None:
            used_after = query_nvidia_smi(self._cuda).get("used_bytes")
            peak = None if used_before is None or used_after is None else peak + max(int(used_after - used_before), 0)
        result = WorkResult(code="ok", base_bytes=base, peak_bytes=peak, runs_on=engine.runs_on)
        engine.close()
        predicted = plan.session_bytes + batch * (plan.example_bytes or 0) + peak_memory.FIRST_USE_BYTES["onnx"]
        return tasks.memory_row("ONNX inference", batch, "ample", result, predicted)

    def _check_results(self, folder: Path) -> Outcome:
        bench, free = self._bench(folder), None
        if self._cuda is not None and not self._cuda.get_device_properties(0).is_integrated:
            free = self._cuda.mem_get_info(0)[0]
        with bench.worker() as worker:
            return judge_results(tasks.check_results(bench, worker, free), self._no_cuda_reason)

    def _check_rates(self, folder: Path) -> Outcome:
        rows: list[Row] = []
        load = LoadMeter()
        if importlib.util.find_spec("torch"):
            rows += tasks.measure_torch_rates(self._workload)
        if has_onnx():
            rows.append(tasks.measure_onnx_rates(write_graph(folder), (CHANNELS, PIXELS, PIXELS)))
        return judge_rates(rows, load.measure_share(), self._smi_values.get("busy_share") or 0.0)

    def _check_clocks(self, folder: Path) -> Outcome:
        status, has_helper = clocks.read_status(devices.ROOT)
        rows: list[Row] = [
            {
                "clock": clock.name,
                "now_mhz": _to_mhz(clock.now_hz),
                "high_mhz": _to_mhz(clock.high_hz),
                "settings": len(clock.listed_hz) if has_helper else 0,
            }
            for clock in status.clocks
        ]
        for name in ("graphics", "memory"):
            now_hz, high_hz = self._smi_values.get(f"{name}_hz"), self._smi_values.get(f"{name}_high_hz")
            if now_hz is not None:
                mhz = {"now_mhz": _to_mhz(now_hz), "high_mhz": _to_mhz(high_hz)}
                rows.append({"clock": f"GPU {name}", **mhz, "settings": 0})
        if not rows:
            raise SkippedPartError("this machine has no readable clocks, which is usual in containers")
        settable = sum(1 for row in rows if row["settings"])
        points = f"{len(self._device.points)} operating points in the board's profile"
        return "ok", f"{len(rows)} clocks can be read, the clock helper can set {settable}; {points}", rows


# -- verdicts -------------------------------------------------------------------------------------


def judge_part(part: Callable[[], Outcome]) -> PartResult:
    """Return the result of a part, with the verdict "skipped" or "error" if it raises an exception."""
    try:
        verdict, sentence, rows = part()
    except SkippedPartError as reason:
        return PartResult(verdict="skipped", sentence=str(reason))
    except Exception as error:  # parts may fail in any way on unusual machines
        return PartResult(verdict="error", sentence=failures.describe_error(error))
    return PartResult(verdict=verdict, sentence=sentence, rows=tuple(rows))


def judge_memory(rows: list[Row]) -> Outcome:
    if not rows:
        raise SkippedPartError(NO_ENGINE)
    if failed := [row for row in rows if row["ended"] != "ok"]:
        row = failed[0]
        return "warning", f"{row['work']} ended with {row['ended']!r}, budget {row['budget']}: {row['reason']}", rows
    measured = [row for row in rows if row["ratio"] is not None and (row["on"] != "CUDA" or row["budget"] == "plan")]
    if not measured:
        raise SkippedPartError("this kernel reports no peak")
    worst = max(measured, key=lambda row: row["ratio"])
    sentence = f"at most {worst['ratio']:.2f} times the prediction ({worst['work']}, budget {worst['budget']})"
    return ("ok" if worst["ratio"] <= peak_memory.PREDICTION_MARGIN else "warning"), sentence, rows


def judge_results(row: Row, why_no_cuda: str) -> Outcome:
    if (row["too_large"], row["next_task"]) != ("memory", "ok"):
        codes = f"{row['too_large']!r}, the next one with {row['next_task']!r}"
        return "error", f"a task that exceeds the memory ended with {codes}; expected 'memory' and 'ok'", [row]
    repeat_difference, cpu_difference = row["to_repetition"], row["to_cpu"]
    sentence = f"two runs differ by {repeat_difference:.2g}" if repeat_difference else "two runs are bit-identical"
    sentence += "; a task above the memory is refused, and the next one works"
    if cpu_difference is None:
        return "skipped", f"{sentence}; GPU and CPU are not compared: {why_no_cuda}", [row]
    sentence = f"after {row['steps']} steps the update differs from the CPU's by {cpu_difference:.2g}; {sentence}"
    return ("ok" if cpu_difference <= UPDATE_TOLERANCE and not repeat_difference else "warning"), sentence, [row]


def judge_rates(rows: list[Row], cpu_share: float, gpu_share: float) -> Outcome:
    if not rows:
        raise SkippedPartError(NO_ENGINE)
    worst = min(rows, key=lambda row: row["ratio"])
    sentence = f"at least {worst['ratio']:.2f} of a bare loop's rate ({worst['work']})"
    if max(cpu_share, gpu_share) > MAX_OTHER_LOAD:
        load_text = f"other processes use {cpu_share:.0%} of the CPUs and {gpu_share:.0%} of the GPU"
        return "refused", f"{load_text}: stop them and repeat (measured: {sentence})", rows
    return ("ok" if worst["ratio"] >= MIN_RATIO else "warning"), sentence, rows


# -- measurements ---------------------------------------------------------------------------------


def write_graph(folder: Path) -> Path:
    """Write the ONNX graph of an inverted residual block, with fedquilt's metadata, and return its path."""
    import onnx

    block = probes.write_probe_block(CHANNELS, PIXELS, folder)
    path = folder / block.stages[0][0]
    model = onnx.load(path)
    properties = {"weight_bytes": str(block.weight_bytes), "activation_bytes": str(block.activation_bytes)}
    onnx.helper.set_model_props(model, properties)
    path.write_bytes(model.SerializeToString())
    return path


def compare_devices(runs: Mapping[str, Callable[[], DeviceRun]]) -> Iterator[Row]:
    """Yield how much each device's output differs from the first device's, or None if a run fails.

    The difference is the largest of any value, relative to the first output's largest value.
    """
    reference: np.ndarray | None = None  # output of the first device
    for device, run in runs.items():
        try:
            output, nodes, reason = run()
        except Exception as error:  # errors of ONNX Runtime have no common base
            yield {"device": device, "nodes": "", "difference": None, "reason": shorten_error(str(error))}
            continue
        reference = output if reference is None else reference
        difference = float(np.max(np.abs(output - reference)) / np.max(np.abs(reference)))
        yield {"device": device, "nodes": nodes, "difference": difference, "reason": reason}


def _list_torch_runs(names: Collection[str]) -> dict[str, Callable[[], DeviceRun]]:
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network(tasks.WITHOUT_GPU.network)
    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def run(device: str) -> DeviceRun:
        return model.to(device)(x.to(device)).detach().cpu().numpy(), "", ""

    return {f"torch on {name}": partial(run, name) for name in names}


def list_onnx_runs(graph: Path, folder: Path) -> dict[str, Callable[[], DeviceRun]]:
    import onnxruntime as ort

    from fedquilt.edge_agent.engines import execution_providers as onnx_session
    from fedquilt.edge_agent.engines.execution_providers import CUDA, ExecutionProviders

    x = np.random.default_rng(0).standard_normal((4, CHANNELS, PIXELS, PIXELS), np.float32)

    def run(name: str) -> DeviceRun:
        providers = ExecutionProviders([name], 1 << 30)
        options = ort.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(folder / name)
        options.log_severity_level = 4
        session = providers.create_session(partial(onnx_session.create_session, graph, options))
        output = session.run(None, {"x": x})[0]
        events = json.loads(Path(session.end_profiling()).read_text())
        node_providers = [event.get("args", {}).get("provider") for event in events if event.get("cat") == "Node"]
        reason = "" if name in node_providers else providers.note or "it ran none of the graph's nodes"
        return output, f"{node_providers.count(name)} of {len(node_providers)}", reason

    names = (*onnx_session.CPU, CUDA)
    return {name: partial(run, name) for name in names if name in ort.get_available_providers()}


def measure_energy(meters: dict[str, Callable[[float], Reading]], load: Callable[[], object]) -> dict[str, Cost]:
    """Return each meter's cost while `load` runs. Meters that report no energy are missing."""
    accounts = dict.fromkeys(meters, EnergyAccount(time.monotonic()))

    def read_meters() -> None:
        for name, read in meters.items():
            reading = read(time.monotonic())
            accounts[name] = accounts[name].with_reading(time.monotonic(), reading)

    with process_resources.call_in_background(read_meters, SAMPLE_S, "meters"):
        load()
    read_meters()
    costs = {
        name: account.cost_until(account.last_reading_s or time.monotonic(), None) for name, account in accounts.items()
    }
    return {name: cost for name, cost in costs.items() if cost.energy_j}


def query_nvidia_smi(cuda: Any, names: Collection[str] = tuple(QUERY_FIELDS)) -> dict[str, Any]:
    """Return the values of QUERY_FIELDS in `names` that nvidia-smi reports for torch's GPU.

    Without torch's `cuda` module the GPU is number 0. Values that the driver does not report are missing.
    """
    uuid = None if cuda is None else getattr(cuda.get_device_properties(0), "uuid", None)
    gpu_id = "0" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    fields = ",".join(QUERY_FIELDS[name][0] for name in names)
    command = ("nvidia-smi", f"--id={gpu_id}", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except subprocess.CalledProcessError:  # a driver that lacks one field returns none
        single_queries = [query_nvidia_smi(cuda, (name,)) for name in names if len(names) > 1]
        return {name: value for single in single_queries for name, value in single.items()}
    except (OSError, subprocess.SubprocessError):
        return {}
    values: dict[str, Any] = {}
    for name, text in zip(names, map(str.strip, output.split(",")), strict=False):
        factor = QUERY_FIELDS[name][1]
        with contextlib.suppress(ValueError):  # Jetsons and MIG slices return "[N/A]"
            if text not in ("", "N/A") and not text.startswith("["):
                values[name] = text if factor is None else float(text.split(" ")[0]) * factor
    return values


def _find_cuda_or_reason() -> tuple[Any, str]:
    if not importlib.util.find_spec("torch"):
        return None, "torch is not installed"
    importlib.import_module("fedquilt.edge_agent.engines.torch.engine")  # before torch, for the threads of tasks
    import torch

    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a build for the CPU only"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__}, a build for CUDA {torch.version.cuda}, finds no GPU"
    return torch.cuda, ""


def _describe_gpu(cuda: Any) -> Row:
    names = ("gpu", "gpu_memory_mb", "gpu_memory_is", "compute_capability", "cuda", "cudnn")
    if cuda is None:
        return dict.fromkeys(names)
    import torch

    properties = cuda.get_device_properties(0)
    memory = properties.total_memory / 1e6, "the board's" if properties.is_integrated else "its own"
    version = f"{properties.major}.{properties.minor}", torch.version.cuda, str(torch.backends.cudnn.version())
    return dict(zip(names, (properties.name, *memory, *version), strict=True))


def _require_torch() -> None:
    if not importlib.util.find_spec("torch"):
        raise SkippedPartError("torch is not installed")


def has_onnx() -> bool:
    return bool(importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"))


def _read_version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, OSError):  # a damaged package fails the checks that use it
        return None


def _to_mhz(hz: float | None) -> float | None:
    return None if hz is None else hz / 1e6

"""Verdicts on the parts of a GPU check."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import psutil

import fedquilt
from fedquilt.core import Device, Examples, FedquiltError, Fit, Reading, shorten_error
from fedquilt.edge_agent import devices, engines
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import SOCKET, ClockClient
from fedquilt.edge_agent.power.energy import SAMPLE_S, EnergyAccount
from fedquilt.edge_agent.task import failures, memory_budget
from fedquilt.host import sysfs
from fedquilt.tools.boards.gpu_check import report as reports
from fedquilt.tools.boards.gpu_check.nvml import GRAPHICS, MEMORY, NvmlGpu
from fedquilt.tools.boards.gpu_check.report import (
    Clock,
    Correctness,
    Environment,
    GpuReport,
    MemoryRun,
    MeterRun,
    PartResult,
    ProviderRun,
    ThroughputRun,
    Verdict,
)

TOLERANCE: Final = 5e-3  # largest relative difference of one network's outputs from the CPU's: TF32 has 10 bits
UPDATE_TOLERANCE: Final = 0.05  # largest relative difference of an update
MEMORY_RATIO: Final = 1.1  # measured over predicted, the margin of plans (`fedquilt.costs.peak_memory.MARGIN`)
NO_TF32: Final = "NVIDIA_TF32_OVERRIDE"
LEAST_RATIO: Final = 0.9  # of the engine's rate to the bare loop's
BUSY_CPU, BUSY_GPU = 0.2, 0.1  # shares of other processes at most, for a verdict on rates
IDLE_S, LOAD_S = 5.0, 5.0
LATE: Final = 0.8  # of the time, after which no part begins
CHANNELS, PIXELS, WIDER = 32, 32, 6  # of the graph that ONNX Runtime runs
NOT_INSTALLED: Final = "{} is not installed"
JETSON_LOADS: Final = ("sys/devices/gpu.0/load", "sys/devices/platform/gpu.0/load")  # in per mille


class SkippedPartError(FedquiltError):
    """Reason why a part cannot run here."""


Outcome = tuple[Verdict, str]


class GpuCheck:
    """Check of the GPU.

    Args:
        root: Folder of `proc` and `sys`.
        set_clocks: Whether to pin the lowest and highest operating point.
        say: Function that shows a part, how many are done, and how many there are.
    """

    def __init__(self, root: Path, set_clocks: bool, say: Callable[[str, float, float], None]) -> None:
        self._root, self._set_clocks, self._say = root, set_clocks, say
        self._helper = ClockClient.connect(root / SOCKET)
        self._device: Device = devices.create_device("auto", root, connect=lambda: self._helper)
        self._cuda, self._why_no_cuda = _find_cuda()
        self._nvml, self._why_no_nvml = _find_nvml(self._cuda)
        self._parts: dict[str, PartResult] = {}
        self._providers: list[ProviderRun] = []
        self._memory: list[MemoryRun] = []
        self._throughput: list[ThroughputRun] = []
        self._correctness: Correctness | None = None
        self._clocks: list[Clock] = []
        self._meters: list[MeterRun] = []
        self._busy_cpu_share: float | None = None

    def run(self, limit_s: float) -> GpuReport:
        """Run all parts. Those that have not begun after most of `limit_s` are skipped."""
        began_s, began = time.monotonic(), datetime.now(timezone.utc)
        gpu_share, tf32 = self._gpu_busy_share(), os.environ.get(NO_TF32)
        environment = self._read_environment()
        with tempfile.TemporaryDirectory(prefix="fedquilt-gpu-") as scratch:
            folder = Path(scratch)
            parts: dict[str, Callable[[], Outcome]] = {
                "idle power": self._measure_idle,
                "providers": lambda: self._check_providers(folder),
                "memory": lambda: self._check_memory(folder),
                "correctness": lambda: self._check_results(folder),
                "throughput": lambda: self._check_rates(folder, gpu_share),
                "energy": self._measure_load,
                "clocks": self._check_clocks,
            }
            for place, (name, part) in enumerate(parts.items()):
                self._say(name, place, len(parts))
                late = time.monotonic() - began_s > LATE * limit_s
                self._parts[name] = _judge_part(_skip_late_part if late else part)
                if tf32 is None:  # the ONNX engine switches TF32 off for its process, and tasks have their own
                    os.environ.pop(NO_TF32, None)
        return GpuReport(
            fedquilt=fedquilt.__version__,
            began=f"{began:%Y-%m-%d %H:%M:%S}",
            took_s=round(time.monotonic() - began_s, 1),
            busy_cpu_share=self._busy_cpu_share,
            busy_gpu_share=gpu_share,
            environment=environment,
            parts=self._parts,
            providers=tuple(self._providers),
            memory=tuple(self._memory),
            throughput=tuple(self._throughput),
            correctness=self._correctness,
            clocks=tuple(self._clocks),
            meters=tuple(self._meters),
        )

    # -- environment ------------------------------------------------------------------------------

    def _read_environment(self) -> Environment:
        known: dict[str, Any] = {"power_mode": self._device.read_sensors(time.monotonic()).mode}
        unknown = {} if known["power_mode"] else {"power_mode": "no nvpmodel"}
        for library in ("torch", "onnxruntime"):
            known[library] = _version(library)
            if known[library] is None:
                unknown[library] = NOT_INSTALLED.format(library)
        names = ("gpu", "gpu_memory_bytes", "shared_memory", "compute_capability", "cuda", "cudnn")
        if self._cuda is None:
            unknown |= dict.fromkeys(names, self._why_no_cuda)
        else:
            import torch

            of = self._cuda.get_device_properties(0)
            known |= {"gpu": of.name, "gpu_memory_bytes": of.total_memory, "shared_memory": bool(of.is_integrated)}
            known |= {"compute_capability": f"{of.major}.{of.minor}", "cuda": torch.version.cuda}
            known["cudnn"] = torch.backends.cudnn.version()
        if self._nvml is None:
            unknown |= dict.fromkeys(("driver", "power_limit_w", "power_limit_default_w"), self._why_no_nvml)
        else:
            known |= {"driver": self._nvml.driver(), "power_limit_w": self._nvml.power_limit_w()}
            known["power_limit_default_w"] = self._nvml.power_limit_w(default=True)
            told = "; ".join(f"{call}: {fault}" for call, fault in self._nvml.faults.items()) or "NVML does not tell it"
            unknown |= dict.fromkeys(
                (name for name, value in known.items() if value is None and name not in unknown), told
            )
        return Environment(
            board=self._device.board,
            memory_bytes=self._device.memory_bytes,
            python=platform.python_version(),
            kernel=platform.release(),
            unknown=unknown,
            **known,
        )

    def _gpu_busy_share(self) -> float | None:
        """Return the largest load of the GPU within a second, before this process uses it."""
        shares: list[float] = []
        for _ in range(5):
            share = None if self._nvml is None else self._nvml.busy_share()
            for name in JETSON_LOADS if share is None else ():
                text = sysfs.read_line(self._root / name)
                share = int(text) / 1000 if text and text.isdigit() else share
            shares += [] if share is None else [share]
            time.sleep(0.2)
        return max(shares, default=None)

    # -- providers --------------------------------------------------------------------------------

    def _check_providers(self, folder: Path) -> Outcome:
        found = self._providers
        reasons = [] if self._cuda is not None else [self._why_no_cuda]
        if importlib.util.find_spec("torch"):
            found += _run_torch_devices(self._cuda is not None)
        if _has_onnx():
            found += _run_onnx_providers(write_graph(folder), folder)
        else:
            reasons.append("onnxruntime and onnx are not both installed")
        odd = [one for one in found if one.runs and (one.largest_difference or 0.0) > TOLERANCE]
        if odd:
            return "error", f"{odd[0].device} differs from the CPU by {odd[0].largest_difference:.2g} of the output"
        reasons += [f"{one.library} on {one.device}: {one.reason}" for one in found if not one.runs]
        gpus = [
            f"{one.library} on {one.device}" for one in found if one.runs and not one.device.lower().startswith("cpu")
        ]
        if not gpus:
            return "error", f"nothing runs on a GPU: {'; '.join(reasons)}"
        told = f"{', '.join(gpus)}; outputs as the CPU's within {TOLERANCE:g}"
        return ("warning" if reasons else "ok"), "; ".join([told, *reasons])

    # -- tasks ------------------------------------------------------------------------------------

    def _bench(self, folder: Path) -> Any:
        if not importlib.util.find_spec("torch"):
            raise SkippedPartError(NOT_INSTALLED.format("torch"))
        from fedquilt.tools.boards.gpu_check import tasks

        own = Path(tempfile.mkdtemp(dir=folder))
        return tasks.TaskBench(own, tasks.ON_GPU if self._cuda is not None else tasks.WITHOUT_GPU)

    def _check_memory(self, folder: Path) -> Outcome:
        from fedquilt.tools.boards.gpu_check import tasks

        found = self._memory
        if importlib.util.find_spec("torch"):
            found += tasks.measure_memory(self._bench(folder))
        if _has_onnx():
            found += [self._measure_graph(write_graph(folder), batch) for batch in (4, 64)]
        ratios = [(one.ratio, one) for one in found if one.ratio is not None]
        if not ratios:
            raise SkippedPartError("no engine is installed, or this kernel reports no peak")
        worst, one = max(ratios, key=lambda each: each[0])
        told = f"at most {worst:.2f} times the prediction ({one.work}, batch {one.batch})"
        return ("ok" if worst <= MEMORY_RATIO else "warning"), told

    def _measure_graph(self, graph: Path, batch: int) -> MemoryRun:
        """Measure the peak of a graph in this process, with the increase of the GPU's used memory."""
        from fedquilt.costs import peak_memory
        from fedquilt.edge_agent.engines.onnx.engine import OnnxEngine

        me = os.getpid()
        engine = OnnxEngine(1 << 40, micro_batch=batch)
        x = np.random.default_rng(0).standard_normal((batch, CHANNELS, PIXELS, PIXELS), np.float32)
        before, used = None, None if self._nvml is None else self._nvml.used_bytes()
        if memory_budget.reset_peak(me):
            before = memory_budget.resident_bytes(me)
        engine.run(graph, x)
        peak = memory_budget.read_peak_bytes(me)
        plan = engine.memory_plan(graph)
        predicted = plan.held_bytes + batch * (plan.example_bytes or 0) + peak_memory.FIRST_USE_BYTES["onnx"]
        measured = None if before is None or peak is None else peak - before
        on_gpu = engine.runs_on not in ("", "processor")
        now = self._nvml.used_bytes() if on_gpu and self._nvml is not None else None
        if on_gpu and measured is not None:
            measured = None if used is None or now is None else measured + max(now - used, 0)
        engine.close()
        return MemoryRun(
            work="ONNX inference",
            batch=batch,
            runs_on=engine.runs_on or "processor",
            predicted_bytes=predicted,
            measured_bytes=measured,
            ratio=measured / predicted if measured is not None else None,
        )

    def _check_results(self, folder: Path) -> Outcome:
        from fedquilt.tools.boards.gpu_check import tasks

        bench, free = self._bench(folder), None
        if self._cuda is not None and not self._cuda.get_device_properties(0).is_integrated:
            free = self._cuda.mem_get_info(0)[0]
        with bench.worker() as worker:
            found = tasks.check_results(bench, worker, free)
        self._correctness = found
        if found.refusal_code != "memory" or found.next_task != "ok":
            told = f"a task above the memory ended as {found.refusal_code} ({found.refusal}), the next as"
            return "error", f"{told} {found.next_task}"
        repeated = found.repeat_difference
        told = "two runs are bit-identical" if not repeated else f"two runs differ by {repeated:.2g}"
        told += "; a task above the memory is refused, and the next one works"
        if found.cpu_difference is None:
            return "skipped", f"{told}; GPU and CPU are not compared: {self._why_no_cuda}"
        told = f"after {found.steps} steps the update differs from the CPU's by {found.cpu_difference:.2g}; {told}"
        return ("ok" if found.cpu_difference <= UPDATE_TOLERANCE and not repeated else "warning"), told

    # -- rates ------------------------------------------------------------------------------------

    def _check_rates(self, folder: Path, gpu_share: float | None) -> Outcome:
        from fedquilt.tools.boards.gpu_check import rates, tasks

        if not importlib.util.find_spec("torch") and not _has_onnx():
            raise SkippedPartError("neither torch nor onnxruntime with onnx is installed")
        found = self._throughput
        busy, own, began_s = _busy_s(), _own_s(), time.monotonic()
        if importlib.util.find_spec("torch"):
            found += rates.measure_torch_rates(tasks.ON_GPU if self._cuda is not None else tasks.WITHOUT_GPU)
        if _has_onnx():
            found.append(rates.measure_onnx_rates(write_graph(folder), (CHANNELS, PIXELS, PIXELS)))
        others_s = max(_busy_s() - busy - (_own_s() - own), 0.0)
        cpu_share = others_s / (time.monotonic() - began_s) / (psutil.cpu_count() or 1)
        self._busy_cpu_share = cpu_share
        worst = min(found, key=lambda one: one.ratio)
        told = f"at least {worst.ratio:.2f} of a bare loop's rate ({worst.work})"
        if cpu_share > BUSY_CPU or (gpu_share or 0.0) > BUSY_GPU:
            others = f"other processes use {cpu_share:.0%} of the CPUs and {gpu_share or 0.0:.0%} of the GPU"
            return "refused", f"{others}: stop them and repeat; measured nevertheless: {told}"
        return ("ok" if worst.ratio >= LEAST_RATIO else "warning"), told

    # -- power and clocks -------------------------------------------------------------------------

    def _meter_readers(self) -> dict[str, Callable[[float], Reading]]:
        found: dict[str, Callable[[float], Reading]] = {"board": self._device.read_sensors}
        if self._nvml is not None:
            nvml = self._nvml

            def read(now_s: float) -> Reading:
                power = nvml.read(now_s)
                return Reading(energy_j=power.energy_j, energy_source=power.source, power_w=power.total_w)

            found["GPU"] = read
        return found

    def _measure_idle(self) -> Outcome:
        accounts = _measure_power(self._meter_readers(), lambda: time.sleep(IDLE_S))
        runs = []
        for name, account in accounts.items():
            cost = account.cost_until(time.monotonic(), None)
            watts = None if cost.energy_j is None else cost.energy_j / cost.duration_s
            reason = "" if watts is not None else "no meter of the board (INA3221, hwmon, battery, RAPL) is readable"
            meter = f"{name}, {cost.energy_source}" if cost.energy_source else name
            runs.append(MeterRun(meter=meter, idle_w=watts, reason=reason))
        if self._nvml is None:
            runs.append(MeterRun(meter="GPU", reason=self._why_no_nvml))
        self._meters = runs
        return _describe_meters(runs, "idle_w")

    def _measure_load(self) -> Outcome:
        if not importlib.util.find_spec("torch"):
            raise SkippedPartError(NOT_INSTALLED.format("torch"))
        from fedquilt.tools.boards.gpu_check import tasks

        work = tasks.ON_GPU if self._cuda is not None else tasks.WITHOUT_GPU
        engine: Any = engines.create_engine("torch", tasks.AMPLE_BYTES)
        examples, start = Examples(*work.draw(work.batches[1])), work.start()

        def load() -> None:
            end_s = time.monotonic() + LOAD_S
            while time.monotonic() < end_s:
                engine.train(
                    work.network, start, examples, Fit(epochs=8, batch=work.batches[1]), np.random.default_rng(0)
                )

        accounts = list(_measure_power(self._meter_readers(), load).values())
        runs = []
        for place, run in enumerate(self._meters):
            if place < len(accounts) and run.idle_w is not None:
                now_s = accounts[place].at_s or 0.0
                cost = accounts[place].cost_until(now_s, None)
                watts = None if cost.energy_j is None else cost.energy_j / cost.duration_s
                run = msgspec.structs.replace(
                    run,
                    load_w=watts,
                    load_j=cost.energy_j,
                    load_error_j=cost.energy_error_j,
                    load_s=cost.duration_s,
                )
            runs.append(run)
        self._meters = runs
        return _describe_meters(runs, "load_w")

    def _check_clocks(self) -> Outcome:
        told = () if self._helper is None else self._helper.request_status().clocks
        settable = {one.name: len(one.listed_hz) for one in told}
        rows = [
            Clock(
                name=one.name,
                kind=one.kind,
                now_hz=_hz(one, one.now),
                high_hz=_hz(one, one.high),
                settings=settable.get(one.name, 0),
            )
            for one in controls.discover_controls(self._root).found
        ]
        if self._nvml is not None:
            for name, kind in (("gpu", GRAPHICS), ("emc", MEMORY)):
                now_hz, high_hz = self._nvml.clock_hz(kind), self._nvml.clock_hz(kind, highest=True)
                rows.append(Clock(name=f"NVML {name}", kind=name, now_hz=now_hz, high_hz=high_hz, settings=0))
        can = [row for row in rows if row.settings]
        sentence = f"{len(rows)} clocks can be read, {len(can)} can be set through the clock helper"
        if self._set_clocks and can and self._device.points:
            rows = self._pin_both_ends(rows)
            sentence += "; set to the lowest and the highest point, and restored"
        elif self._set_clocks:
            sentence += "; none was set, as no clock helper runs or the board has no profile with points"
        self._clocks = rows
        if not rows:
            raise SkippedPartError("this machine shows no clocks, as a container or a virtual machine")
        return "ok", sentence

    def _pin_both_ends(self, rows: list[Clock]) -> list[Clock]:
        found = {one.name: one for one in controls.discover_controls(self._root).found}
        points = self._device.points
        seen: dict[str, list[float]] = {row.name: [] for row in rows}
        try:
            for point in (points[0], points[-1]):
                self._device.pin_clocks(point)
                time.sleep(0.5)
                for name, one in found.items():
                    hz = _hz(one, one.now)
                    seen[name] += [] if hz is None else [hz]
        finally:
            self._device.unpin_clocks()
        return [msgspec.structs.replace(row, measured_hz=tuple(seen[row.name])) for row in rows]


def _skip_late_part() -> Outcome:
    raise SkippedPartError("no time was left: give the check more --minutes")


def _judge_part(part: Callable[[], Outcome]) -> PartResult:
    try:
        verdict, sentence = part()
    except SkippedPartError as reason:
        verdict, sentence = "skipped", str(reason)
    except Exception as error:  # whatever a strange machine makes of a part
        verdict, sentence = "error", failures.describe_error(error)
    return PartResult(verdict=verdict, sentence=sentence)


def _hz(clock: controls.ClockControl, file: Path | None) -> float | None:
    value = controls.read_number(file)
    return None if value is None else float(value * clock.unit_hz)


def check_gpu(
    out: Path | None,
    minutes: float,
    *,
    root: Path = devices.ROOT,
    set_clocks: bool = False,
    say: Callable[[str, float, float], None],
) -> GpuReport:
    """Check the GPU, and write the report to `out`.

    Raises:
        StoreError: If the file cannot be written.
    """
    found = GpuCheck(root, set_clocks, say).run(60 * minutes)
    if out is not None:
        reports.write_report(found, out)
    return found


def write_graph(folder: Path) -> Path:
    """Write the graph of an inverted residual block, with the metadata that fedquilt's graphs have."""
    import onnx

    from fedquilt.tools.boards.record import probes

    block = probes.write_probe_block(CHANNELS, PIXELS, folder)
    path = folder / block.stages[0][0]
    model = onnx.load(path)
    facts = {"weight_bytes": str(block.weight_bytes), "activation_bytes": str(block.activation_bytes)}
    onnx.helper.set_model_props(model, facts)
    path.write_bytes(model.SerializeToString())
    return path


def _run_torch_devices(cuda: bool) -> Iterator[ProviderRun]:
    import torch

    from fedquilt.models.networks import registry
    from fedquilt.tools.boards.gpu_check import tasks

    model = registry.load_network(tasks.WITHOUT_GPU.network)
    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    wanted = model(x).detach().numpy()
    for device in ("cpu", *(("cuda",) if cuda else ())):
        try:
            found = model.to(device)(x.to(device)).detach().cpu().numpy()
        except RuntimeError as error:
            yield ProviderRun(library="torch", device=device, runs=False, reason=shorten_error(str(error)))
            continue
        apart = _relative_difference(found, wanted)
        yield ProviderRun(library="torch", device=device, runs=True, largest_difference=apart)


def _run_onnx_providers(graph: Path, folder: Path) -> Iterator[ProviderRun]:
    import onnxruntime as ort

    from fedquilt.edge_agent.engines.onnx import session as onnx_session
    from fedquilt.edge_agent.engines.onnx.providers import NAMES, TENSORRT, ExecutionProviders

    x = np.random.default_rng(0).standard_normal((4, CHANNELS, PIXELS, PIXELS), np.float32)
    wanted: np.ndarray | None = None
    own = [name for name in (*onnx_session.CPU, *NAMES) if name in ort.get_available_providers()]
    for name in own:
        places = ExecutionProviders([name], 1 << 30)
        if name == TENSORRT:
            places.use_tensorrt(folder, 1 << 30)
        options = ort.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(folder / name)
        options.log_severity_level = 4
        try:
            session = places.create_session(partial(onnx_session.create_session, graph, options))
            found = session.run(None, {"x": x})[0]
        except Exception as error:  # errors of ONNX Runtime have no common base
            yield ProviderRun(library="onnxruntime", device=name, runs=False, reason=shorten_error(str(error)))
            continue
        wanted = found if wanted is None else wanted
        nodes = _count_nodes(Path(session.end_profiling()))
        runs = name in nodes
        reason = "" if runs else places.note or "it took none of the graph's nodes"
        apart = _relative_difference(found, wanted)
        yield ProviderRun(
            library="onnxruntime", device=name, runs=runs, nodes=nodes, largest_difference=apart, reason=reason
        )


def _count_nodes(profile: Path) -> dict[str, int]:
    """Return the number of nodes by provider from a profile of ONNX Runtime."""
    found: dict[str, int] = {}
    for event in json.loads(profile.read_text()):
        if event.get("cat") == "Node" and (name := event.get("args", {}).get("provider")):
            found[name] = found.get(name, 0) + 1
    return found


def _relative_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


def _measure_power(
    meters: dict[str, Callable[[float], Reading]], load: Callable[[], object]
) -> dict[str, EnergyAccount]:
    """Read the meters in a thread while `load` runs."""
    began_s = time.monotonic()
    accounts = {name: EnergyAccount(began_s) for name in meters}
    ended = threading.Event()

    def watch() -> None:
        last = False
        while not last:
            last = ended.wait(SAMPLE_S)
            for name, read in meters.items():
                now_s = time.monotonic()
                accounts[name] = accounts[name].with_reading(now_s, read(now_s))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        load()
    finally:
        ended.set()
        thread.join()
    return accounts


def _describe_meters(runs: list[MeterRun], field: str) -> Outcome:
    known = [f"{one.meter} {getattr(one, field):.3g} W" for one in runs if getattr(one, field) is not None]
    if not known:
        raise SkippedPartError("; ".join(dict.fromkeys(one.reason for one in runs if one.reason)) or "no meter")
    return "ok", "; ".join(known)


def _find_cuda() -> tuple[Any, str]:
    """Return the module `torch.cuda`, or None and the reason."""
    if not importlib.util.find_spec("torch"):
        return None, NOT_INSTALLED.format("torch")
    import torch

    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is made for the CPU alone"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} is made for CUDA {torch.version.cuda} and finds no GPU"
    return torch.cuda, ""


def _find_nvml(cuda: Any) -> tuple[NvmlGpu | None, str]:
    uuid = None if cuda is None else getattr(cuda.get_device_properties(0), "uuid", None)
    try:
        return NvmlGpu(None if uuid is None else str(uuid)), ""
    except (OSError, AttributeError) as error:
        return None, f"NVML cannot be used: {error}"


def _version(package: str) -> str | None:
    for name in (package, f"{package}-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _has_onnx() -> bool:
    return bool(importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_s() -> float:
    return float(sum(os.times()[:4]))

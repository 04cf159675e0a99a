"""Benchmark of simulated fleets against a plain PyTorch loop and other simulators.

Two FedAvg workloads on 28x28 images, SGD 0.05, batches of 32: `compute` (100 clients with 600 images, 10 per round, 30
rounds, a CNN) and `overhead` (1,000 clients with 60 images, 50 per round, 20 rounds, logistic regression). All
contestants start with the same weights and take turns on the same cores, with one process per core except for the
single-process loop. A rate is client-rounds per second over all rounds except the first, by wall time or by processor
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds import selection
from fedquilt.core import DataError, FedquiltError, JobError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.formats import job_bundle
from tests.benches.figures import compare_at_least, compare_at_most

HERE = Path(__file__).parent / "contestants"
ORPHAN_TIMEOUT_S = 10.0  # limit for the processes that a contestant leaves
SAMPLE_S = 0.3  # interval of memory samples, which slow the contestant a little
NAME = "client-{:04d}"
SEED = 1
SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans of contestants become children of this process
INPUT = {"channels": 1, "size": 28, "mean": [0.0], "std": [1.0]}
OURS = ("ours", "ours_torch")
BARE = ("bare_1", "bare_n")


class OtherSimulator(NamedTuple):
    package: str
    requirement: str
    script: str
    title: str


OTHERS = {
    "flower": OtherSimulator("flwr", "flwr[simulation]", "flower_app.py", "Flower"),
    "pfl": OtherSimulator("pfl", "pfl[pytorch]", "pfl_app.py", "pfl-research"),
}


def prepare_environment(name: str) -> tuple[Path, str]:
    """Return a simulator's Python and version, installed on first use with this Python's torch.

    Raise JobError if it cannot be installed.
    """
    simulator = OTHERS[name]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "bench" / name
    python = home / "bin" / "python"

    def run_install_command(*command: str) -> str:
        try:
            completed = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise JobError(f"{simulator.title}: {error}") from None
        if completed.returncode:
            error_lines = [
                line for line in (completed.stderr or completed.stdout).strip().splitlines() if "WARNING" not in line
            ]
            reason = error_lines[-1] if error_lines else f"exit code {completed.returncode}"
            raise JobError(f"{simulator.title} cannot be installed: {reason}")
        return completed.stdout

    if not (home / "ready").exists():
        torch = metadata.version("torch").partition("+")[0]
        run_install_command(sys.executable, "-m", "venv", "--clear", "--without-pip", str(home))
        pip = (sys.executable, "-m", "pip", "--python", str(python))
        run_install_command(*pip, "install", "--quiet", f"torch=={torch}", simulator.requirement)
        (home / "ready").touch()
    version_code = f"from importlib import metadata; print(metadata.version({simulator.package!r}))"
    return python, run_install_command(str(python), "-c", version_code).strip()


@dataclass(frozen=True)
class FederationWorkload:
    """A federation that every contestant trains: sizes, rounds and network."""

    name: str
    clients: int
    examples_per_client: int
    cohort_size: int  # clients per round
    rounds: int
    network: dict[str, Any]
    engine: str  # of fedquilt's devices


COMPUTE = FederationWorkload(
    "compute", 100, 600, 10, 30, {"name": "cnn", "channels": 1, "size": 28, "classes": 10, "input": INPUT}, "torch"
)
OVERHEAD = FederationWorkload(
    "overhead", 1000, 60, 50, 20, {"name": "mlp", "inputs": 784, "hidden": [], "classes": 10}, "numpy"
)


@dataclass(frozen=True)
class Contestant:
    """Program that runs a workload. Its command lacks the arguments for folder and processes."""

    name: str
    title: str
    command: tuple[str, ...]
    processes: int
    engine: str = ""  # of fedquilt's devices, or "" for the workload's engine


WORKLOADS = {"W1": COMPUTE, "W2": OVERHEAD}


def measure(
    data: Path,
    beside: Sequence[str] = (),
    only: Sequence[str] = (),
    repeats: int = 3,
    processes: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run all contestants on all workloads, in turn, and return rates, times, memory and judged figures.

    `beside` names other simulators to install and run. Only fedquilt and the bare loops are run `repeats` times. Raise
    FedquiltError if a contestant fails or the images (28x28) do not suffice.
    """
    workloads = [work for name, work in WORKLOADS.items() if name in only or not only]
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    processes = processes or len(os.sched_getaffinity(0))
    contestants, missing_simulators = _prepare_contestants(beside, processes)
    result: dict[str, Any] = {"processes": processes, "repeats": repeats, "absent": missing_simulators}
    result["workloads"] = {}
    with tempfile.TemporaryDirectory() as scratch:
        schedule = [
            (work, repeat, contestant)
            for work in workloads
            for repeat in range(repeats)
            for contestant in contestants
            if contestant.engine != work.engine and (repeat == 0 or contestant.name in (*OURS, *BARE))
        ]
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {work.name: {} for work in workloads}
        for work in workloads:
            write_workload(work, data, Path(scratch) / work.name)
        for work, repeat, contestant in schedule:
            name = f"{work.name}, turn {repeat + 1} of {repeats}: {contestant.title}"
            measurements = _run_and_measure_contestant(contestant, Path(scratch) / work.name, work)
            runs[work.name].setdefault(contestant.name, []).append(measurements)
            cpu_rate = measurements.get("cpu_rate", math.nan)
            rates = f"{measurements['rate']:.1f} client-rounds/s, {cpu_rate:.1f} by processor time"
            report(
                f"{name}: {rates}, whole run {measurements['wall_s']:.1f} s, "
                f"{measurements['cpu_s']:.1f} s of processors"
            )
        for work in workloads:
            result["workloads"][work.name] = _summarise_runs(runs[work.name], contestants)
    return {**result, "figures": _build_figures(result), "lines": format_contestants(result)}


def _prepare_contestants(other_simulators: Sequence[str], processes: int) -> tuple[list[Contestant], dict[str, str]]:
    loop_command = (sys.executable, str(HERE / "torch_loop.py"))
    fedquilt_command = (sys.executable, str(HERE / "fedquilt_app.py"))
    contestants = [
        Contestant("ours", "fedquilt", fedquilt_command, processes),
        Contestant("ours_torch", "fedquilt, torch engine", fedquilt_command, processes, "torch"),
        Contestant("bare_n", f"bare loop, {processes} processes", loop_command, processes),
        Contestant("bare_1", "bare loop, 1 process", loop_command, 1),
    ]
    missing_simulators = {}
    for name in other_simulators:
        try:
            python, version = prepare_environment(name)
        except JobError as error:
            missing_simulators[name] = str(error)
            continue
        simulator = OTHERS[name]
        contestants.append(
            Contestant(name, f"{simulator.title} {version}", (str(python), str(HERE / simulator.script)), processes)
        )
    return contestants, missing_simulators


def write_workload(work: FederationWorkload, path: Path | str, folder: Path) -> None:
    """Write data, cohorts and initial weights for all contestants, and fedquilt's bundle and job."""
    table = {"path": str(path), "held": 0.0, "seed": SEED}
    splits = [msgspec.convert({**table, "split": split}, DataSpec) for split in ("train", "test")]
    train, test = map(examples.load_split, splits)
    needed_examples = work.clients * work.examples_per_client
    if train.x.shape[1:] != (28, 28) or len(train) < needed_examples:
        problem = f"has {len(train)} examples {train.x.shape[1:]}, but {needed_examples} images (28, 28) are needed"
        raise DataError(f"{path} {problem}: use MNIST or Fashion-MNIST")
    rows = np.random.default_rng(SEED).permutation(len(train))[:needed_examples]
    folder.mkdir(parents=True)
    for name, array in (("x", train.x[rows]), ("y", train.y[rows]), ("test_x", test.x), ("test_y", test.y)):
        np.save(folder / f"{name}.npy", array)
    names = {NAME.format(index): index for index in range(work.clients)}
    cohorts = [
        [names[name] for name in selection.select_cohort(selection.CohortDraw(SEED, number), names, work.cohort_size)]
        for number in range(work.rounds)
    ]
    np.save(folder / "cohorts.npy", np.array(cohorts))
    start = _draw_weights(work.network)
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    job = {
        "name": "bench",
        "method": "fedavg",
        "engine": work.engine,
        "rounds": work.rounds,
        "seed": SEED,
        "cohort": {"size": work.cohort_size, "turns": 1e9},  # selected uniformly, as by the other simulators
        "params": {"lr": 0.05, "batch": 32},
    }
    table = {"clients": work.clients, "each": work.examples_per_client, "network": work.network}
    table |= {"lr": 0.05, "batch": 32, "seed": SEED, "name": NAME, "job": job}
    (folder / "spec.json").write_text(json.dumps(table))
    meta: dict[str, Any] = {"network": work.network}
    if work.network["name"] != "mlp":  # the table of an MLP implies its register
        from fedquilt.models.networks import traces

        meta["register"] = traces.register_from_table(work.network)
    job_bundle.write_bundle(folder / "bundle", meta, {"model": tensors.encode_tensors(start)})


def _draw_weights(network: dict[str, Any]) -> dict[str, np.ndarray]:
    # in a separate process, so that this one does not load torch
    code = (
        "import json, sys\n"
        "from fedquilt.arrays import tensors\n"
        "from fedquilt.models.networks import registry\n"
        f"model = registry.load_network(json.loads(sys.argv[1]), seed={SEED})\n"
        "state = {name: value.numpy() for name, value in model.state_dict().items()}\n"
        "sys.stdout.buffer.write(tensors.encode_tensors(state))"
    )
    completed = subprocess.run([sys.executable, "-c", code, json.dumps(network)], capture_output=True, check=True)
    return tensors.decode_tensors(completed.stdout)


def _run_and_measure_contestant(contestant: Contestant, folder: Path, work: FederationWorkload) -> dict[str, Any]:
    env = {**os.environ, "BENCH_BEGAN": repr(time.time()), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile() as error_output, tempfile.TemporaryFile() as output:
        began_s = time.perf_counter()
        command = [*contestant.command, str(folder), str(contestant.processes), *filter(None, [contestant.engine])]
        process = subprocess.Popen(command, stdout=output, stderr=error_output, env=env, cwd=folder)
        max_rss, max_pss, cpu_before_s = 0, 0, _child_processor_s()
        while process.poll() is None:
            now_rss, now_pss = _rss_and_pss_bytes(process.pid)
            max_rss, max_pss = max(max_rss, now_rss), max(max_pss, now_pss)
            time.sleep(SAMPLE_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            # Ray's daemons outlive their parents, and their processor time counts only after a wait for them
            psutil.wait_procs(psutil.Process().children(), timeout=ORPHAN_TIMEOUT_S)
        wall_s, cpu_s = time.perf_counter() - began_s, _child_processor_s() - cpu_before_s
        error_output.seek(0), output.seek(0)
        result_lines = [
            line for line in output.read().decode(errors="replace").splitlines() if line.startswith('{"start_s"')
        ]
        if process.returncode or not result_lines:
            error_lines = error_output.read().decode(errors="replace").strip().splitlines()
            raise FedquiltError(
                f"{contestant.title} failed on {work.name}: {error_lines[-1] if error_lines else 'no output'}"
            )
    result = json.loads(result_lines[-1])
    steady = result["rounds_s"][1:]
    if steady_cpu_s := result.get("steady_cpu_s"):
        result["cpu_rate"] = work.cohort_size * len(steady) / steady_cpu_s
    return {
        **result,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rate": work.cohort_size * len(steady) / sum(steady),
        "rss_mb": max_rss / 1e6,
        "pss_mb": max_pss / 1e6,
    }


def _child_processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _rss_and_pss_bytes(pid: int) -> tuple[int, int]:
    rss = pss = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                memory = process.memory_full_info()
                rss, pss = rss + memory.rss, pss + memory.pss
    except psutil.Error:
        pass
    return rss, pss


def _summarise_runs(runs: dict[str, list[dict[str, Any]]], contestants: Sequence[Contestant]) -> dict[str, Any]:
    columns = ("rate", "start_s", "wall_s", "cpu_s", "accuracy", "rss_mb", "pss_mb")
    return {
        contestant.name: {
            "title": contestant.title,
            **{key: statistics.median(run[key] for run in runs[contestant.name]) for key in columns},
            "rates": [run["rate"] for run in runs[contestant.name]],
            "cpu_rates": [run["cpu_rate"] for run in runs[contestant.name] if "cpu_rate" in run],
        }
        for contestant in contestants
        if contestant.name in runs
    }


def _build_figures(result: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, limit in (("compute", 1.1), ("overhead", 1.0)):
        if name not in result["workloads"]:
            continue
        contestants = result["workloads"][name]
        for clock, rates in (("wall", "rates"), ("cpu", "cpu_rates")):
            ratio = statistics.median(
                a / b for a, b in zip(contestants["ours"][rates], contestants["bare_n"][rates], strict=True)
            )
            figures[f"{name}_of_bare_loop_by_{clock}"] = compare_at_least(ratio, limit, "x")
        figures[f"{name}_memory"] = compare_at_most(
            contestants["ours"]["rss_mb"], 400 if name == "overhead" else 600, "MB"
        )
        best = max(contestant["accuracy"] for contestant in contestants.values())
        figures[f"{name}_accuracy_behind_best"] = compare_at_most(
            100 * (best - contestants["ours"]["accuracy"]), 1.0, "points"
        )
        if name == "overhead":
            figures["overhead_whole_run"] = compare_at_most(contestants["ours"]["wall_s"], 2.0, "s")
            if "flower" in contestants:
                figures["overhead_of_flower"] = compare_at_least(
                    contestants["ours"]["rate"] / contestants["flower"]["rate"], 15, "x"
                )
                cpu_ratio = contestants["flower"]["cpu_s"] / contestants["ours"]["cpu_s"]
                figures["overhead_whole_run_of_flower_by_cpu"] = compare_at_least(cpu_ratio, 15, "x")
    return figures


def format_contestants(result: dict[str, Any]) -> list[str]:
    text = [f"{result['processes']} processes each"]
    for name, contestants in result["workloads"].items():
        text.append(
            f"{name:24} client-rounds/s   of bare    by CPU   start s   whole s   CPU s   RSS MB   PSS MB   accuracy"
        )
        floor, cpu_floor = contestants["bare_n"]["rate"], statistics.median(contestants["bare_n"]["cpu_rates"])
        for contestant in contestants.values():
            by_cpu = statistics.median(contestant["cpu_rates"]) / cpu_floor if contestant["cpu_rates"] else math.nan
            rate = contestant["rate"]
            speed = f"{rate:15.1f} {rate / floor:9.2f} {by_cpu:9.2f} {contestant['start_s']:9.1f}"
            times = f"{contestant['wall_s']:9.1f} {contestant['cpu_s']:7.1f}"
            memory = f"{contestant['rss_mb']:8.0f} {contestant['pss_mb']:8.0f}"
            text.append(f"  {contestant['title']:22} {speed} {times} {memory} {100 * contestant['accuracy']:9.2f}%")
    return text + [f"  not measured: {reason}" for reason in result["absent"].values()]

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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from fedquilt.arrays import tensors
from fedquilt.console import progress
from fedquilt.coordinator.rounds import selection
from fedquilt.core import DataError, FedquiltError, JobError
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.formats import job_bundle
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures

HERE = Path(__file__).parent
ORPHANS_S = 10.0  # longest wait for the processes that a contestant leaves
SAMPLE_S = 0.3  # between two looks at a contestant's memory, which cost it some time
NAME = "client-{:04d}"
SEED = 1
SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans of contestants become children of this process
INPUT = {"channels": 1, "size": 28, "mean": [0.0], "std": [1.0]}
OURS = ("ours", "ours_torch")
BARE = ("bare_1", "bare_n")


class OtherSimulator(NamedTuple):
    """Package and script of another simulator."""

    package: str
    requirement: str
    script: str
    title: str


OTHERS = {
    "flower": OtherSimulator("flwr", "flwr[simulation]", "flower_app.py", "Flower"),
    "pfl": OtherSimulator("pfl", "pfl[pytorch]", "pfl_app.py", "pfl-research"),
}


def prepare_environment(name: str) -> tuple[Path, str]:
    """Return a simulator's Python and version, and install the environment with the torch of this Python if missing."""
    other = OTHERS[name]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedquilt" / "bench" / name
    python = home / "bin" / "python"

    def run(*command: str) -> str:
        try:
            found = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise JobError(f"{other.title}: {error}") from None
        if found.returncode:
            said = [line for line in (found.stderr or found.stdout).strip().splitlines() if "WARNING" not in line]
            raise JobError(f"{other.title} cannot be installed here: {said[-1] if said else 'pip said nothing'}")
        return found.stdout

    if not (home / "ready").exists():
        torch = metadata.version("torch").partition("+")[0]
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(home))
        pip = (sys.executable, "-m", "pip", "--python", str(python))
        run(*pip, "install", "--quiet", f"torch=={torch}", other.requirement)
        (home / "ready").touch()
    shown = f"from importlib import metadata; print(metadata.version({other.package!r}))"
    return python, run(str(python), "-c", shown).strip()


@dataclass(frozen=True)
class FederationWorkload:
    """A federation that every contestant trains: sizes, rounds and network."""

    name: str
    clients: int
    each: int  # examples of a client
    asked: int  # clients in a round
    rounds: int
    network: dict[str, Any]
    engine: str  # of our devices


COMPUTE = FederationWorkload(
    "compute", 100, 600, 10, 30, {"name": "cnn", "channels": 1, "size": 28, "classes": 10, "input": INPUT}, "torch"
)
OVERHEAD = FederationWorkload(
    "overhead", 1000, 60, 50, 20, {"name": "mlp", "inputs": 784, "hidden": [], "classes": 10}, "numpy"
)


@dataclass(frozen=True)
class Contestant:
    """A program that runs a workload, without the arguments for folder and processes."""

    name: str
    title: str
    command: tuple[str, ...]
    processes: int
    engine: str = ""  # of our devices, instead of the workload's


NAMES = {"W1": COMPUTE, "W2": OVERHEAD}


def select_workloads(only: Sequence[str]) -> Sequence[FederationWorkload]:
    """Return the workloads with these names (W1 is `compute`, W2 is `overhead`), or all of them."""
    for name in only:
        if name not in NAMES:
            raise JobError(f"bench sim has no workload {name!r} for --only: there are {', '.join(NAMES)}")
    return [work for name, work in NAMES.items() if name in only or not only]


def measure(
    data: Path,
    beside: Sequence[str] = (),
    only: Sequence[str] = (),
    repeats: int = 3,
    processes: int | None = None,
    show: Callable[[str, float, float], None] = progress.LINE.show_status,
    report: Callable[[str], None] = progress.LINE.print_to_stdout,
) -> dict[str, Any]:
    """Run all contestants on all workloads, in turn."""
    for name in beside:
        if name not in OTHERS:
            raise JobError(f"--with {name}: there are {', '.join(OTHERS)}")
    workloads = select_workloads(only)
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    processes = processes or len(os.sched_getaffinity(0))
    contestants, absent = _prepare_contestants(beside, processes)
    found: dict[str, Any] = {
        "processes": processes,
        "repeats": repeats,
        "absent": absent,
        "workloads": {},
        "figures": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        turns = [
            (work, turn, each)
            for work in workloads
            for turn in range(repeats)
            for each in contestants
            if each.engine != work.engine and (turn == 0 or each.name in (*OURS, *BARE))
        ]
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {work.name: {} for work in workloads}
        for work in workloads:
            write_workload(work, data, Path(scratch) / work.name)
        for done, (work, turn, each) in enumerate(turns):
            name = f"{work.name}, turn {turn + 1} of {repeats}: {each.title}"
            ran = _run_and_measure_contestant(
                each, Path(scratch) / work.name, work, partial(show, name, done, len(turns))
            )
            runs[work.name].setdefault(each.name, []).append(ran)
            rates = f"{ran['rate']:.1f} client-rounds/s, {ran.get('cpu_rate', math.nan):.1f} by processor time"
            report(f"{name}: {rates}, whole run {ran['wall_s']:.1f} s, {ran['cpu_s']:.1f} s of processors")
        for work in workloads:
            found["workloads"][work.name] = _summarise_runs(runs[work.name], contestants)
    found["figures"] = _build_figures(found)
    return found


def _prepare_contestants(beside: Sequence[str], processes: int) -> tuple[list[Contestant], dict[str, str]]:
    bare = (sys.executable, str(HERE / "torch_loop.py"))
    ours = (sys.executable, str(HERE / "fedquilt_app.py"))
    found = [
        Contestant("ours", "fedquilt", ours, processes),
        Contestant("ours_torch", "fedquilt, torch engine", ours, processes, "torch"),
        Contestant("bare_n", f"bare loop, {processes} processes", bare, processes),
        Contestant("bare_1", "bare loop, 1 process", bare, 1),
    ]
    absent = {}
    for name in beside:
        try:
            python, version = prepare_environment(name)
        except JobError as error:
            absent[name] = str(error)
            continue
        other = OTHERS[name]
        found.append(Contestant(name, f"{other.title} {version}", (str(python), str(HERE / other.script)), processes))
    return found, absent


def write_workload(work: FederationWorkload, path: Path | str, folder: Path) -> None:
    """Write the data, cohorts and first weights that contestants are given, and our bundle and job."""
    table = {"path": str(path), "held": 0.0, "seed": SEED}
    train, test = (
        examples.load_split(msgspec.convert({**table, "split": split}, DataSpec)) for split in ("train", "test")
    )
    wanted = work.clients * work.each
    if train.x.shape[1:] != (28, 28) or len(train) < wanted:
        raise DataError(f"{path}: {wanted} images of 28x28 are needed, not {len(train)} of {train.x.shape[1:]}")
    rows = np.random.default_rng(SEED).permutation(len(train))[:wanted]
    folder.mkdir(parents=True)
    for name, array in (("x", train.x[rows]), ("y", train.y[rows]), ("test_x", test.x), ("test_y", test.y)):
        np.save(folder / f"{name}.npy", array)
    names = {NAME.format(index): index for index in range(work.clients)}
    asked = [
        [names[name] for name in selection.select_cohort(SEED, number, names, work.asked)]
        for number in range(work.rounds)
    ]
    np.save(folder / "cohorts.npy", np.array(asked))
    start = _draw_weights(work.network)
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    job = {
        "name": "bench",
        "method": "fedavg",
        "engine": work.engine,
        "rounds": work.rounds,
        "seed": SEED,
        "cohort": {"size": work.asked, "turns": 1e9},  # selected uniformly, as by the other simulators
        "params": {"lr": 0.05, "batch": 32},
    }
    table = {"clients": work.clients, "each": work.each, "network": work.network, "lr": 0.05, "batch": 32, "seed": SEED}
    (folder / "spec.json").write_text(json.dumps({**table, "name": NAME, "job": job}))
    facts: dict[str, Any] = {"network": work.network}
    if work.network["name"] != "mlp":  # whose table implies its register
        from fedquilt.models.networks import traces

        facts["register"] = traces.register_from_table(work.network)
    job_bundle.write_bundle(folder / "bundle", facts, {"model": tensors.encode_tensors(start)})


def _draw_weights(network: dict[str, Any]) -> dict[str, np.ndarray]:
    # in a separate process, so that this one does not load torch
    code = (
        "import json, sys\n"
        "from fedquilt.arrays import tensors\n"
        "from fedquilt.models.networks import registry\n"
        f"model = registry.load_network(json.loads(sys.argv[1]), seed={SEED})\n"
        "held = {name: value.numpy() for name, value in model.state_dict().items()}\n"
        "sys.stdout.buffer.write(tensors.encode_tensors(held))"
    )
    shown = subprocess.run([sys.executable, "-c", code, json.dumps(network)], capture_output=True, check=True)
    return tensors.decode_tensors(shown.stdout)


def _run_and_measure_contestant(
    each: Contestant, folder: Path, work: FederationWorkload, tell: Callable[[], None]
) -> dict[str, Any]:
    env = {**os.environ, "BENCH_BEGAN": repr(time.time()), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        began_s = time.perf_counter()
        command = [*each.command, str(folder), str(each.processes), *filter(None, [each.engine])]
        process = subprocess.Popen(command, stdout=told, stderr=said, env=env, cwd=folder)
        rss, pss, spent_s = 0, 0, _child_processor_s()
        while process.poll() is None:
            tell()
            now_rss, now_pss = _memory_bytes(process.pid)
            rss, pss = max(rss, now_rss), max(pss, now_pss)
            time.sleep(SAMPLE_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            # Ray's daemons outlive their parents, and only who waits for them learns their processor time
            psutil.wait_procs(psutil.Process().children(), timeout=ORPHANS_S)
        wall_s, cpu_s = time.perf_counter() - began_s, _child_processor_s() - spent_s
        said.seek(0), told.seek(0)
        last = [line for line in told.read().decode(errors="replace").splitlines() if line.startswith('{"start_s"')]
        if process.returncode or not last:
            words = said.read().decode(errors="replace").strip().splitlines()
            raise FedquiltError(f"{each.title} failed on {work.name}: {words[-1] if words else 'no output'}")
    found = json.loads(last[-1])
    steady = found["rounds_s"][1:]
    if steady_cpu_s := found.get("steady_cpu_s"):
        found["cpu_rate"] = work.asked * len(steady) / steady_cpu_s
    return {
        **found,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rate": work.asked * len(steady) / sum(steady),
        "rss_mb": rss / 1e6,
        "pss_mb": pss / 1e6,
    }


def _child_processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _memory_bytes(pid: int) -> tuple[int, int]:
    rss = pss = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                held = process.memory_full_info()
                rss, pss = rss + held.rss, pss + held.pss
    except psutil.Error:
        pass
    return rss, pss


def _summarise_runs(runs: dict[str, list[dict[str, Any]]], contestants: Sequence[Contestant]) -> dict[str, Any]:
    columns = ("rate", "start_s", "wall_s", "cpu_s", "accuracy", "rss_mb", "pss_mb")
    return {
        each.name: {
            "title": each.title,
            **{key: statistics.median(run[key] for run in runs[each.name]) for key in columns},
            "rates": [run["rate"] for run in runs[each.name]],
            "cpu_rates": [run["cpu_rate"] for run in runs[each.name] if "cpu_rate" in run],
        }
        for each in contestants
        if each.name in runs
    }


def _build_figures(found: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, limit in (("compute", 1.1), ("overhead", 1.0)):
        if name not in found["workloads"]:
            continue
        told = found["workloads"][name]
        for clock, rates in (("wall", "rates"), ("cpu", "cpu_rates")):
            ratio = statistics.median(a / b for a, b in zip(told["ours"][rates], told["bare_n"][rates], strict=True))
            figures[f"{name}_of_bare_loop_by_{clock}"] = compare_at_least(ratio, limit, "x")
        figures[f"{name}_memory"] = compare_at_most(told["ours"]["rss_mb"], 400 if name == "overhead" else 600, "MB")
        best = max(each["accuracy"] for each in told.values())
        figures[f"{name}_accuracy_behind_best"] = compare_at_most(
            100 * (best - told["ours"]["accuracy"]), 1.0, "points"
        )
        if name == "overhead":
            figures["overhead_whole_run"] = compare_at_most(told["ours"]["wall_s"], 2.0, "s")
            if "flower" in told:
                figures["overhead_of_flower"] = compare_at_least(told["ours"]["rate"] / told["flower"]["rate"], 15, "x")
                spent = told["flower"]["cpu_s"] / told["ours"]["cpu_s"]
                figures["overhead_whole_run_of_flower_by_cpu"] = compare_at_least(spent, 15, "x")
    return figures


def lines(result: dict[str, Any]) -> list[str]:
    shown = [f"{result['processes']} processes each"]
    for name, told in result["workloads"].items():
        shown.append(
            f"{name:24} client-rounds/s   of bare    by CPU   start s   whole s   CPU s   RSS MB   PSS MB   accuracy"
        )
        floor, cpu_floor = told["bare_n"]["rate"], statistics.median(told["bare_n"]["cpu_rates"])
        for each in told.values():
            by_cpu = statistics.median(each["cpu_rates"]) / cpu_floor if each["cpu_rates"] else math.nan
            speed = f"{each['rate']:15.1f} {each['rate'] / floor:9.2f} {by_cpu:9.2f} {each['start_s']:9.1f}"
            held = f"{each['wall_s']:9.1f} {each['cpu_s']:7.1f} {each['rss_mb']:8.0f} {each['pss_mb']:8.0f}"
            shown.append(f"  {each['title']:22} {speed} {held} {100 * each['accuracy']:9.2f}%")
    shown += [f"  not here: {why}" for why in result["absent"].values()]
    return [*shown, *format_figures(result)]

"""Benchmark of a simulated fleet on half of the cores and on all of them.

One federation is run on half of the cores and on all of them, in turn: FedAvg, the CNN of `bench sim`, eight devices
for each core in every round. The command and all that it starts (workers; with Ray its daemons too) may use these cores
alone, with one worker for each: the coordinator has no core of its own. The bare loop of `bench sim` takes the same
turns, which is what twice the cores give on this machine. Workers of a Ray cluster that is there already can only be
counted: half of them, then all, and no bare loop beside them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.console import progress
from fedquilt.core import JobError
from fedquilt.tools.lab.bench import sim
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures
from fedquilt.tools.simulation.workers.ray import cluster as ray_cluster

EACH: Final = 8  # devices for each core in a round
IMAGES: Final = 400  # of a device
ROUNDS: Final = 6
TURNS: Final = 3
WANTED: Final = 1.8
TESTED: Final = 500  # drawn images that the model is tested on


def measure(
    engine: str = "pool",
    cores: int | None = None,
    data: Path | None = None,
    images: int = IMAGES,
    rounds: int = ROUNDS,
    turns: int = TURNS,
    show: Callable[[str, float, float], None] = progress.LINE.show_status,
) -> dict[str, Any]:
    carrier = ray_cluster.choose_engine(engine, os.environ)
    cluster = carrier.startswith(ray_cluster.SCHEME) or (
        carrier == "ray" and bool(ray_cluster.find_ray_address(os.environ))
    )
    here = sorted(os.sched_getaffinity(0))
    if cluster and cores is None:
        raise JobError(f"--engine {engine} names a cluster: say by --cores how many of its processors are to be used")
    most = len(here) // 2 * 2 if cores is None else cores
    if most < 2 or most % 2 or (most > len(here) and not cluster):
        raise JobError(f"{most} cores: an even number is wanted, from 2 to the {len(here)} that there are")
    cohort = EACH * most
    work = sim.FederationWorkload("cores", cohort, images, cohort, rounds, sim.COMPUTE.network, sim.COMPUTE.engine)
    contestants = _make_contestants(carrier, [most // 2, most], [] if cluster else here)
    runs: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contestants}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / work.name
        sim.write_workload(work, data or _draw_images(Path(scratch) / "drawn.npz", cohort * images), folder)
        taken = [(turn, each) for turn in range(turns) for each in contestants]
        for done, (turn, each) in enumerate(taken):
            tell = partial(show, f"turn {turn + 1} of {turns}: {each.title}", done, len(taken))
            runs[each.name].append(sim.run_contestant(each, folder, work, tell))
    ours = [run for name in ("half", "whole") for run in runs[name]]
    ratios = _ratios(runs, "half", "whole")
    return {
        "engine": carrier,
        "cores": most,
        "load": load,
        "runs": sim.summarise_runs(runs, contestants),
        "coordinator_ms": {
            name: 1e3 * statistics.median(run["coordinator_s"] for run in runs[name]) / (cohort * (rounds - 1))
            for name in ("half", "whole")
        },
        "ratios": ratios,
        "bare_ratios": [] if cluster else _ratios(runs, "bare_half", "bare_whole"),
        "figures": {
            "on_twice_the_cores": compare_at_least(statistics.median(ratios), WANTED, "x"),
            "runs_with_other_bits": compare_at_most(sum(run["sha256"] != ours[0]["sha256"] for run in ours), 0, ""),
        },
    }


def _make_contestants(carrier: str, counts: list[int], here: list[int]) -> list[sim.Contestant]:
    ours, bare = ((sys.executable, str(sim.HERE / script)) for script in ("fedquilt_app.py", "torch_loop.py"))
    found = []
    for name, count in zip(("half", "whole"), counts, strict=True):
        pinned = frozenset(here[:count])
        what = f"{count} {'cores' if here else 'workers'}".removesuffix("s" if count == 1 else "")
        title = f"{carrier}, {what}"
        found.append(sim.Contestant(name, title, ours, count, sim.COMPUTE.engine, carrier, pinned))
        if here:
            found.append(sim.Contestant(f"bare_{name}", f"bare loop, {what}", bare, count, cores=pinned))
    return found


def _draw_images(path: Path, count: int) -> Path:
    draws = np.random.default_rng(sim.SEED)
    held: dict[str, np.ndarray] = {}
    for suffix, size in (("", count), ("_test", TESTED)):
        y = draws.integers(10, size=size)
        x = draws.integers(60, size=(size, 28, 28), dtype=np.uint8)
        x[np.arange(size), 2 * y + 4] = 255
        held |= {f"x{suffix}": x, f"y{suffix}": y}
    np.savez(path, **held)  # type: ignore[arg-type]
    return path


def _ratios(runs: dict[str, list[dict[str, Any]]], half: str, whole: str) -> list[float]:
    return [b["rate"] / a["rate"] for a, b in zip(runs[half], runs[whole], strict=True)]


def lines(result: dict[str, Any]) -> list[str]:
    shown = [f"engine {result['engine']}, load {result['load']:.1f} when it began"]
    shown.append(f"{'':24} client-rounds/s   start s   whole s   accuracy   coordinator's CPU ms a client-round")
    for name, each in result["runs"].items():
        spent = f"{result['coordinator_ms'][name]:10.2f}" if name in result["coordinator_ms"] else ""
        times = f"{each['rate']:15.1f} {each['start_s']:9.1f} {each['wall_s']:9.1f}"
        shown.append(f"  {each['title']:22} {times} {100 * each['accuracy']:9.2f}% {spent}")
    for title, ratios in (("ours", result["ratios"]), ("the bare loop", result["bare_ratios"])):
        if ratios:
            shown.append(f"  {title}, turn by turn: {', '.join(f'{each:.2f}' for each in ratios)} times")
    return [*shown, *format_figures(result)]

"""FedStitch beside training on one fleet: accuracy, time, memory and joules (arXiv 2409.07202, Table III, Fig. 4 to 6).

`fedquilt reproduce fedstitch --data FOLDER --picture fedstitch.svg`

"fedstitch" has IID shares, "fedstitch-noniid" Dirichlet ones with alpha = 1. 30, 30, 30 and 10 % of the devices have
1, 2, 4 and 8 GB for a task. Group 1 trains one network from random weights: FedAvg (a row the paper has not) all of it,
on every device whose memory allows, the others on each device what its memory tier holds; "Local" is one device's own
search, mean of two. Group 2 fine-tunes the donors' weights: FT-Full on devices that hold a batch of 128 at once,
FT-Part the last layer. Who cannot declines, and another device is asked in its place. All goes through the
coordinator's rounds, with devices on virtual time; the paper has no deadline: rounds may take as long as they do.

Seconds and joules are those of simulated boards (Jetson TX2, MAXN), by one prediction from FLOPs and bytes for
stitching and training: the slowest board of each round, and the work of all, without transfers and waiting. Memory is
the true peak of the agent's task process on this machine, without a GPU, under the device's budget and with batches of
128, for stitching over a whole search: the mean of the devices that can take part, and the largest; of one seed.
Costs are told twice: of the rounds that were run here, beside the accuracy they came to, and of the paper's own
schedule, 10 epochs in each of 500 rounds (group 1) or 100 (group 2). All of its rounds are played, with who is asked
and who declines, but no weight is moved in them: what a task takes on a simulated board never depends on values. Most
claims are about it, as the paper compares whole jobs with one search. Of HeteroFL's rounds here those that gather
statistics before each evaluation count as well; its schedule has one, at the end. "to equal" is the boards' time
after which a method was as good as FedStitch here, in the mean over seeds; where there is one, the last claim is
about that. How far FedStitch's accuracy is ahead is told with its interval over the seeds, not claimed.

Other differences: 20 devices, 4 in a round, for 100 and 10; 5,000 images for 50,000; 64 pixels; ResNet-20 at 32
pixels for group 1's ResNet50; MobileNetV2 and SqueezeNet 1.1 with ImageNet weights for the paper's five donors;
FedStitch solves a closed-form head, and a vote is one round and not five; few rounds of 2 epochs with batches of 32,
at rates of our own; FT-Part wants a linear last layer, which SqueezeNet has not, and holds 0.2 of an example's bytes,
as measured; no local energy coordinator; of MobileNetV2's file batch normalisation is folded away, and is put back
with the statistics of 256 images without labels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt.coordinator import cohort
from fedquilt.core import DataError
from fedquilt.tools.experiments import parallel
from fedquilt.tools.experiments.papers import common, fedstitch_runs
from fedquilt.tools.experiments.papers.fedstitch_runs import ASKED, BUDGETS, DEVICES, Arm
from fedquilt.tools.report import plots
from fedquilt.tools.report.figures import at_least
from fedquilt.tools.simulation.scratch import Scratch

TABLES: Final = ("fedstitch", "fedstitch-noniid")
SEEDS: Final = (0, 1, 2)
PARTITIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fedstitch": {"partition": "iid"},
    "fedstitch-noniid": {"partition": "dirichlet", "alpha": 1.0, "min_size": 100},
}
PAPER_EPOCHS: Final = 10
PAPER: Final = {"speed-up": 8.12, "memory": 79.5, "energy": 89.41}  # at most: times, %, %
PAPER_BATCH: Final = 128  # that memory is measured with, and that decides who can take part
SEARCH: Final = {"expansions": 24, "subrounds": 1, "depth": 20, "samples": 64, "head_samples": 200}
SGD: Final = {"epochs": 2, "batch": 32, "momentum": 0.9, "weight_decay": 5e-4}
SCRATCH: Final = {**SGD, "lr": 0.05}
TUNED: Final = {**SGD, "lr": 0.01, "at_once": PAPER_BATCH}
WIDTHS: Final = (7, 13, 7, 8, 9, 9, 6, 13, 11, 9, 10)  # of columns, in letters
OURS: Final = "FedStitch"
ARMS: Final[Mapping[str, Arm]] = {
    OURS: Arm("fedstitch", "donors", 0, 200, SEARCH, paper=(90.49, 88.17)),
    "Local": Arm("fedstitch", "donors", 1, 200, SEARCH, alone=2, paper=(81.45, 77.55)),
    "FedAvg": Arm("fedavg", "scratch", 1, 10, SCRATCH, 2, paper_rounds=500),
    "HeteroFL": Arm("heterofl", "scratch", 1, 10, SCRATCH, 2, paper=(74.15, 64.36), paper_rounds=500),
    "DepthFL": Arm("depthfl", "scratch", 1, 10, SCRATCH, 2, paper=(76.23, 65.68), paper_rounds=500),
    "FeDepth": Arm("fedepth", "scratch", 1, 10, SCRATCH, 2, paper=(79.88, 67.24), paper_rounds=500),
    "MobileNetV2 FT-Part": Arm(
        "ft_part", "mobilenet_v2", 2, 5, {**TUNED, "kept": 0.2}, paper=(73.11, 72.10), paper_rounds=100
    ),
    "MobileNetV2 FT-Full": Arm("ft_full", "mobilenet_v2", 2, 5, TUNED, paper=(76.87, 73.00), paper_rounds=100),
    "SqueezeNet FT-Full": Arm("ft_full", "squeezenet1_1", 2, 5, {**TUNED, "lr": 0.001}, paper_rounds=100),
}
PAGE: Final = "stitching.md#beside-training-on-one-fleet"
COVERS: Final = dict.fromkeys(TABLES, tuple(dict.fromkeys(arm.method for arm in ARMS.values())))


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """A table; its claims are checked with the default number of rounds.

    Args:
        rounds: of every arm that trains.
        data: a folder with CIFAR-10 and the donors' weights in weights/.

    Raises:
        JobError: there is no such table.
        DataError: images or weights are not there.
    """
    common.require(table, TABLES)
    if data is None:
        raise DataError(f"{table} needs --data: a folder with CIFAR-10, and weights/ with the donors' files")
    with Scratch() as scratch:
        starts = fedstitch_runs.prepared(ARMS, data, seeds, scratch)
        todo = [
            (name, seed, given)
            for seed in seeds
            for name in ARMS
            for given in _runs(name, starts, table, data, seed, rounds)
        ]
        say(f"{len(todo)} runs")
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
        for index, found in parallel.spread(fedstitch_runs.play, [given for *_, given in todo]):
            name, seed, _ = todo[index]
            runs[name].append({"seed": seed, **found})
            last = found["marks"][-1]
            say(f"seed {seed}, {name}: {100 * last['test']:.1f} % in {last['seconds']:.2f} s of the boards")
        peaks = _peaks(starts, table, data, seeds[0], say)
    rows = {name: _row(name, runs[name], peaks[name], runs[OURS]) for name in ARMS}
    return {
        "table": table,
        "seeds": list(seeds),
        "rows": rows,
        "runs": runs,
        "figures": _figures(rows, runs) if rounds is None else {},
    }


def _runs(
    name: str, starts: Mapping[tuple[str, int], Path], table: str, data: Path, seed: int, rounds: int | None
) -> list[tuple[Any, ...]]:
    """Arguments of `play` of one arm with one seed."""
    arm, partition = ARMS[name], PARTITIONS[table]
    given = fedstitch_runs.job(arm, data, partition, seed, (arm.trains and rounds) or arm.rounds)
    planned = None
    if arm.paper_rounds is not None:
        planned = fedstitch_runs.job(arm, data, partition, seed, arm.paper_rounds, epochs=PAPER_EPOCHS)
    names = [f"{fedstitch_runs.BOARD}-{index:02d}" for index in range(DEVICES)]
    who = cohort.sample(seed, 0, names, arm.alone) if arm.alone else ("",)
    return [(starts[arm.start, seed], given, device, planned) for device in who]


def _peaks(
    starts: Mapping[tuple[str, int], Path], table: str, data: Path, seed: int, say: Callable[[str], None]
) -> dict[str, dict[str, int | None]]:
    """Arm -> budget -> the peak of a task there, None where it does not fit. One after the other: nothing beside it."""
    found: dict[str, dict[str, int | None]] = {}
    for name, arm in ARMS.items():
        changes = {"epochs": 1, "batch": PAPER_BATCH} if arm.trains else {}
        given = fedstitch_runs.job(arm, data, PARTITIONS[table], seed, arm.rounds, **changes)
        if arm.alone:
            found[name] = found[OURS]
            continue
        found[name] = {
            budget: fedstitch_runs.peak_bytes(arm, starts[arm.start, seed], given, budget)
            for budget in dict.fromkeys(BUDGETS)
        }
        told = ", ".join(f"{'-' if peak is None else f'{peak / 1e6:.0f}'} MB of {b}" for b, peak in found[name].items())
        say(f"memory, {name}: {told}")
    return found


# -- what it came to ------------------------------------------------------------------------------


def _row(
    name: str, runs: Sequence[Mapping[str, Any]], peaks: Mapping[str, int | None], ours: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Means over the runs; "sd" of the accuracy. "to_equal" is None if their mean never came to that of FedStitch."""
    last = [run["marks"][-1] for run in runs]
    known = [peak for budget in BUDGETS if (peak := peaks[budget]) is not None]
    goal = statistics.fmean(each["marks"][-1]["test"] for each in ours)
    planned = [run["planned"] for run in runs if "planned" in run]
    accuracies = [mark["test"] for mark in last]
    return {
        "group": ARMS[name].group,
        "accuracy": statistics.fmean(accuracies),
        "sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "takes_part": len(known) / len(BUDGETS),
        "rounds": statistics.fmean(mark["rounds"] for mark in last),
        "seconds": statistics.fmean(mark["seconds"] for mark in last),
        "energy_j": statistics.fmean(mark["energy_j"] for mark in last),
        "real_s": statistics.fmean(mark["real_s"] for mark in last),
        "down_bytes": statistics.fmean(mark["down_bytes"] for mark in last),
        "up_bytes": statistics.fmean(mark["up_bytes"] for mark in last),
        "peak_bytes": statistics.fmean(known) if known else None,
        "most_bytes": max(known, default=None),
        "peaks": dict(peaks),
        "to_equal": next((seconds for seconds, accuracy in _curve(runs) if accuracy >= goal), None),
        "planned": {key: statistics.fmean(each[key] for each in planned) for key in ("seconds", "energy_j")}
        if planned
        else None,
        "paper": ARMS[name].paper,
    }


def _curve(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Seconds of the boards and accuracy, means over seeds, at each evaluation that all have."""
    count = min(len(run["marks"]) for run in runs)
    marks = [[run["marks"][index] for run in runs] for index in range(count)]
    return [
        (statistics.fmean(mark["seconds"] for mark in each), statistics.fmean(mark["test"] for mark in each))
        for each in marks
    ]


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Training method -> how many times FedStitch's time it takes, and % of memory and energy that FedStitch saves."""
    ours = rows[OURS]
    return {
        name: {
            "speed-up": row["planned"]["seconds"] / ours["seconds"],
            "memory": 100 * (1 - ours["peak_bytes"] / row["peak_bytes"]),
            "most": 100 * (1 - ours["most_bytes"] / row["most_bytes"]),
            "energy": 100 * (1 - ours["energy_j"] / row["planned"]["energy_j"]),
        }
        for name, row in rows.items()
        if row["planned"] is not None and row["peak_bytes"] is not None
    }


def _figures(rows: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What is claimed, beside the method that FedStitch gains least on: costs by their intervals over the seeds.

    Memory was measured with one seed. Where nobody is as good nothing is said of that.
    """
    found, ours = ratios(rows), rows[OURS]["seconds"]
    equal = [rows[name]["to_equal"] / ours for name in found if rows[name]["to_equal"] is not None]

    def least(what: str) -> float:
        return min(each[what] for each in found.values())

    def over_seeds(what: str, ratio: Callable[[float, float], float]) -> list[float]:
        """`ratio(planned, ours)` of each seed, of the method for which it is least in the mean."""
        mine = by_seed(runs[OURS], lambda run: run["marks"][-1][what])
        plans = [by_seed(runs[name], lambda run: run["planned"][what]) for name in found]
        each = [[ratio(plan[seed], mine[seed]) for seed in mine] for plan in plans]
        return min(each, key=statistics.fmean)

    faster = over_seeds("seconds", lambda planned, mine: planned / mine)
    saved = over_seeds("energy_j", lambda planned, mine: 100 * (1 - mine / planned))
    return {
        "speed-up over the paper's schedule, least": common.claim(faster, "times", at_least=1.0),
        "energy saved of the paper's schedule, least": common.claim(saved, "%", at_least=1.0),
        "memory saved, mean of devices, least": at_least(least("memory"), 1.0, "%"),
        "memory saved, largest of devices, least": at_least(least("most"), 1.0, "%"),
        **({"speed-up to equal accuracy, least": at_least(min(equal), 1.0, "times")} if equal else {}),
    }


def by_seed(runs: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
    """Seed -> the mean of its runs' values: more than one where devices are alone."""
    seeds = dict.fromkeys(run["seed"] for run in runs)
    return {seed: statistics.fmean(value(run) for run in runs if run["seed"] == seed) for seed in seeds}


def ahead(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """FedStitch's points of accuracy over another row, as a claim."""
    mine, theirs = (by_seed(runs[each], lambda run: 100 * run["marks"][-1]["test"]) for each in (OURS, name))
    return common.claim([mine[seed] - theirs[seed] for seed in mine], "points", at_least=0.0)


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    rows, noniid = result["rows"], result["table"] != TABLES[0]
    seeds = ", ".join(map(str, result["seeds"]))
    found = [
        f"{result['table']}: CIFAR-10, {DEVICES} devices, {ASKED} in a round; seeds {seeds}",
        _cells("", "takes", "accuracy", "paper", "board", "to", "", "real", "peak MB", "MB down", "paper", "schedule"),
        _cells("", "part %", "%", "%", "s", "equal s", "J", "s", "mean / most", "/ up", "s", "J"),
    ]
    for name, row in rows.items():
        spread = f"{100 * row['accuracy']:.1f}" + (f" ± {100 * row['sd']:.1f}" if row["sd"] is not None else "")
        paper = "-" if row["paper"] is None else f"{row['paper'][noniid]:.1f}"
        held = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} / {row['most_bytes'] / 1e6:.0f}"
        equal = "" if name == OURS else "never" if row["to_equal"] is None else f"{row['to_equal']:.2f}"
        sent = f"{row['down_bytes'] / 1e6:.0f} / {row['up_bytes'] / 1e6:.0f}"
        planned = (
            ["", ""] if row["planned"] is None else [f"{row['planned'][key]:.0f}" for key in ("seconds", "energy_j")]
        )
        run = [f"{row['seconds']:.2f}", equal, f"{row['energy_j']:.1f}", f"{row['real_s']:.0f}"]
        found.append(_cells(name, f"{100 * row['takes_part']:.0f}", spread, paper, *run, held, sent, *planned))
    found.append("FedStitch beside the paper's schedule of each: times as fast, % of memory (mean), % of joules saved")
    for name, each in ratios(rows).items():
        found.append(f"  {name:20} {each['speed-up']:8.1f} {each['memory']:8.1f} {each['energy']:8.1f}")
    found.append(f"  {'the paper, at most':20} {PAPER['speed-up']:8.2f} {PAPER['memory']:8.1f} {PAPER['energy']:8.2f}")
    found.append("FedStitch's accuracy over that of others, by seed")
    found += [f"  {name:20} {common.told(ahead(result['runs'], name))}" for name in rows if name != OURS]
    return [*found, *common.claim_lines(result)]


def _cells(name: str, *cells: str) -> str:
    return f"{name:20}" + "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def picture(result: Mapping[str, Any]) -> str:
    """Fig. 4 to 6 in small: accuracy by the boards' time, memory and joules."""
    rows = result["rows"]
    curves = [
        plots.Line(name, *zip(*((s, 100 * accuracy) for s, accuracy in _curve(result["runs"][name])), strict=True))
        for name in rows
    ]
    memory = [
        plots.Bar(name, [None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6]) for name, row in rows.items()
    ]
    energy = [
        plots.Bar(name, [row["energy_j"] if row["planned"] is None else row["planned"]["energy_j"]])
        for name, row in rows.items()
    ]
    return plots.alone(
        plots.lines(curves, "Accuracy by the boards' time, as run here", "s of the slowest board", "test accuracy, %"),
        plots.bars(memory, "Memory of a task's process, mean of devices", "MB"),
        plots.bars(energy, "Joules of whole jobs, training by the paper's schedule", "J"),
    )

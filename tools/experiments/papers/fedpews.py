"""FedPeWS's tables on Synthetic-32K and 3.2K (arXiv 2410.03042, Table 2 and 6) beside the paper's numbers.

`fedquilt reproduce fedpews-table2 --columns 32k-1.0`

Two devices, each with the two interleaved classes of one side. With and without warm-up start from the
same weights on the same points, drawn by the seed, and go through the coordinator's rounds, each seed as a job of its
own with devices on virtual time: all seeds abreast, so that outside the warm-up their devices train in one graph, and
a seed's last bits may depend on which others are beside it. The paper has no deadline: rounds may take as long as they
do. Accuracy is the global model's on the test points, measured beside the rounds. The baseline is FedPeWS with
warmup = 0, which is FedAvg, or FedProx with mu = 0.01. The local steps K, the points and the network's first weights
are ours, since the paper does not tell them: K is one epoch, the weights are torch's default.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import JobError
from fedquilt.data.examples import load_all
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments import parallel
from fedquilt.tools.experiments.papers import common
from fedquilt.tools.simulation.carriers import abreast, bench
from fedquilt.tools.simulation.hands import Bench
from fedquilt.tools.simulation.run import play as play_all
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation

NETWORK: Final = {"name": "mlp", "inputs": 5, "hidden": [32, 64, 128, 32], "classes": 4}  # the paper's Table 4
SEEDS: Final = (0, 1, 2)


@dataclass(frozen=True)
class Paper:
    """What the paper tells of one method: mean and deviation over three seeds; None: not reached."""

    rounds: float | None  # to the target
    final: float  # percent, after all rounds
    rounds_sd: float | None = None  # None: one seed alone got there
    final_sd: float = 0.0


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    data: str
    batch: int
    lr: float  # eta_l
    server_lr: float  # eta_g
    diversity: float  # lambda
    tau: float  # share of the rounds that is warm-up
    rounds: int  # T
    target: float  # percent
    base: Paper
    pews: Paper


@dataclass(frozen=True)
class Table:
    """Columns, and what they are over."""

    base: str
    mu: float
    columns: Mapping[str, Column]


def _columns(diversities: Sequence[float], told: Sequence[tuple[Paper, Paper]]) -> dict[str, Column]:
    rows = (
        ("fedpews-32k", 32, 0.001, 1.0, 0.125, 200, 99.0),
        ("fedpews-32k", 32, 0.001, 0.5, 0.2, 250, 90.0),
        ("fedpews-32k", 32, 0.001, 0.25, 0.1875, 400, 75.0),
        ("fedpews-3.2k", 8, 0.01, 0.1, 0.1, 500, 99.0),
    )
    return {
        f"{data.removeprefix('fedpews-')}-{eta}": Column(data, batch, lr, eta, diversity, tau, rounds, target, *papers)
        for (data, batch, lr, eta, tau, rounds, target), diversity, papers in zip(rows, diversities, told, strict=True)
    }


TABLES: Final = {
    "fedpews-table2": Table(
        "FedAvg",
        0.0,
        _columns(
            (5.0, 2.0, 1.0, 2.0),
            (
                (Paper(148, 99.94, 3.79, 0.05), Paper(115, 99.96, 7.21, 0.01)),
                (Paper(199, 91.40, None, 7.25), Paper(182, 99.49, 6.81, 0.60)),
                (Paper(None, 67.64, None, 0.90), Paper(286, 83.50, 7.93, 3.52)),
                (Paper(371, 97.33, None, 3.89), Paper(301, 99.66, 10.59, 0.19)),
            ),
        ),
    ),
    "fedpews-table6": Table(
        "FedProx",
        0.01,
        _columns(
            (0.1, 0.1, 1.0, 1.0),
            (
                (Paper(138, 99.95, 13.22, 0.02), Paper(115, 99.96, 5.29, 0.01)),
                (Paper(None, 82.43, None, 7.98), Paper(211, 98.40, 16.52, 1.84)),
                (Paper(None, 69.26, None, 6.03), Paper(314, 90.40, 27.83, 3.91)),
                (Paper(362, 99.92, 20.00, 0.06), Paper(344, 99.92, 27.30, 0.07)),
            ),
        ),
    ),
}


COVERS: Final = dict.fromkeys(TABLES, ("fedpews",))
PAGE: Final = "training.md#fedpews"


def play(column: Column, mu: float, seeds: Sequence[int], warmup: int, rounds: int) -> list[dict[str, Any]]:
    """A run of each seed: accuracy (0..1) on the test set after each round, and bytes both ways."""
    from fedquilt.edge_agent.engines.torch_batched import BatchedTorchEngine  # before torch: how threads wait

    # isort: split
    import torch

    torch.set_num_threads(1)  # of so small a network no thread has a share
    engine = BatchedTorchEngine(ROOM_BYTES)
    curves: list[list[float]] = [[] for _ in seeds]
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(Scratch())
        benches: dict[Simulation, Bench] = {}
        tests = []
        for seed in seeds:
            spec = points(column, seed)
            tests.append(load_all(msgspec.structs.replace(spec, split="test")))
            made, held = bench(common.members(spec, 2), engine=engine)
            folder = common.bundle(NETWORK, scratch / f"bundle-{seed}", seed=seed)
            given = job(column, mu, seed, warmup, rounds)
            home = scratch / f"home-{seed}"
            benches[stack.enter_context(Simulation(given, folder, held, home, engine=engine.name))] = made
        simulations = list(benches)
        for each in play_all(simulations, abreast(benches)):
            index = simulations.index(each)
            if len(each.rounds) > len(curves[index]):
                curves[index].append(engine.evaluate(NETWORK, each.state.model, tests[index])["accuracy"])
        runs = [(common.ended(each), each.state.reached) for each in simulations]
    return [
        {
            "accuracy": [round(value, 5) for value in curve],
            "covered": round(reached, 4),
            "up_bytes": run.up_bytes,
            "down_bytes": run.down_bytes,
        }
        for curve, (run, reached) in zip(curves, runs, strict=True)
    ]


def points(column: Column, seed: int) -> DataSpec:
    """What the two devices hold together."""
    return DataSpec(
        synthetic=column.data,  # type: ignore[arg-type]
        groups=((0, 1), (2, 3)),
        partition="iid",
        held=0.0,
        seed=seed,
    )


def job(column: Column, mu: float, seed: int, warmup: int, rounds: int) -> Job:
    params = {
        "batch": column.batch,
        "lr": column.lr,
        "warmup": warmup,
        "server_lr": column.server_lr,
        "mu": mu,
        "diversity": column.diversity,
    }
    return settings.parse(
        {
            "name": "reproduce",
            "method": "fedpews",
            "rounds": rounds,
            "seed": seed,
            "params": params,
            "cohort": common.UNHURRIED,
        }
    )


def first_reached(accuracy: Sequence[float], target: float) -> int | None:
    """The first round, counted from 1, after which the accuracy (0..1) is `target` percent or more."""
    return next((number for number, value in enumerate(accuracy, 1) if 100 * value >= target), None)


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    columns: Sequence[str] = (),
    workers: int | None = None,
) -> dict[str, Any]:
    """A table, as far as wanted.

    Args:
        rounds: of every run; None: as many as the paper's. The warm-up is the same share of them.
        columns: names of `TABLES[table].columns`; none: all.
        workers: processes; None: one for each core. Results do not depend on it.

    Raises:
        JobError: there is no such table or column.
    """
    common.require(table, TABLES)
    chosen = TABLES[table]
    if odd := sorted(set(columns) - chosen.columns.keys()):
        raise JobError(f"{table} has no column {odd[0]!r}; it has: {', '.join(chosen.columns)}")
    wanted = {name: column for name, column in chosen.columns.items() if name in columns or not columns}
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    todo = [(name, pews) for name in wanted for pews in (True, False)]
    given = []
    for name, pews in todo:
        column, last = wanted[name], rounds or wanted[name].rounds
        given.append((column, chosen.mu, seeds, round(column.tau * last) if pews else 0, last))
    began_s = time.monotonic()
    for index, found_runs in parallel.spread(play, given, workers):
        name, pews = key = todo[index]
        runs[key], target = found_runs, wanted[name].target
        method, taken_s = f"{chosen.base}{'+PeWS' if pews else ''}", time.monotonic() - began_s
        say(f"[{len(runs)}/{len(todo)}] {name} {method}, {taken_s:.0f} s from the start:")
        for seed, one in zip(seeds, found_runs, strict=True):
            at = first_reached(one["accuracy"], target)
            when = f"{target:g} % after {at} rounds" if at else f"{target:g} % not reached"
            say(f"  seed {seed}: {when}, ends at {100 * one['accuracy'][-1]:.2f} %")
    found: dict[str, Any] = {}
    for name, column in wanted.items():
        by_method = {
            label: _account(column, paper, runs[name, pews])
            for label, paper, pews in (
                (chosen.base, column.base, False),
                (f"{chosen.base}+PeWS", column.pews, True),
            )
        }
        settings = {key: value for key, value in msgspec.to_builtins(column).items() if key not in ("base", "pews")}
        found[name] = {"settings": {**settings, "rounds": rounds or column.rounds}, "methods": by_method}
    return {
        "reproduce": table,
        "seeds": list(seeds),
        "mu": chosen.mu,
        "columns": found,
        "figures": _figures(chosen, found) if rounds is None else {},
    }


def _account(column: Column, paper: Paper, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rounds_to_target": [first_reached(each["accuracy"], column.target) for each in runs],
        "final_percent": [round(100 * each["accuracy"][-1], 2) for each in runs],
        "paper": msgspec.to_builtins(paper),
        "runs": list(runs),
    }


def _figures(table: Table, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is claimed, by intervals over the seeds: the warm-up saves rounds; a mean of all alike ends high."""
    figures = {}
    for name, column in found.items():
        base, pews = column["methods"].values()
        never = column["settings"]["rounds"] + 1  # of what was not reached
        ours, theirs = ([at or never for at in each["rounds_to_target"]] for each in (pews, base))
        saved = [float(their - our) for our, their in zip(ours, theirs, strict=True)]
        figures[f"{name}: rounds saved by PeWS"] = common.claim(saved, "rounds", at_least=0.0)
        if column["settings"]["server_lr"] == 1.0:
            figures[f"{name}: {table.base} ends at"] = common.claim(base["final_percent"], "%", at_least=99.7)
    return figures


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    found = [f"{result['reproduce']}: seeds {', '.join(map(str, result['seeds']))}; the paper's in brackets"]
    for name, column in result["columns"].items():
        settings = column["settings"]
        found.append(
            f"{name}: eta_g {settings['server_lr']:g}, lambda {settings['diversity']:g}, tau {settings['tau']:g}, "
            f"{settings['rounds']} rounds, target {settings['target']:g} %"
        )
        for method, told in column["methods"].items():
            paper, final = told["paper"], told["final_percent"]
            rounds = ", ".join("-" if at is None else str(at) for at in told["rounds_to_target"])
            theirs = "never" if paper["rounds"] is None else f"{paper['rounds']:g} ± {paper['rounds_sd'] or 'NA'}"
            found.append(
                f"  {method:13} rounds to target {rounds:15} ({theirs:12})   final {_spread(final):15} "
                f"({paper['final']:.2f} ± {paper['final_sd']:.2f})"
            )
    return [*found, *common.claim_lines(result)]


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation} %"

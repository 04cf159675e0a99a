"""What the tables share: data and weights in a folder, runs of the coordinator's rounds, and claims over seeds.

A claim over seeds is judged by its interval: the mean of what each seed shows, a difference of two runs that differ in
nothing else, say, with the range that holds it with 95 % (Student's t). It holds if the whole range is on the claimed
side, and is not shown if the range reaches across.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt import tensors
from fedquilt.coordinator.settings import Job
from fedquilt.core import DataError, Examples, Fit, JobError, Tensors
from fedquilt.data import examples as shares
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import parallel
from fedquilt.tools.experiments.intervals import interval
from fedquilt.tools.report import figures
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.carriers import Hands, in_process
from fedquilt.tools.simulation.run import play
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import Round, Simulation

UNHURRIED: Final = {"deadline_s": 1e6}  # [cohort] of a table whose paper knows no deadline: nobody is cut off


def require(table: str, tables: Iterable[str]) -> None:
    """Raises JobError: there is no such table."""
    if table not in tables:
        raise JobError(f"table {table!r} is unknown; there are: {', '.join(tables)}")


def mnist(table: str, data: Path | None) -> str:
    """The folder of MNIST's files: `data` itself, or where torchvision puts them below it.

    Raises:
        DataError: no folder is given, or one without these files.
    """
    if data is None:
        raise DataError(f"{table} needs --data: a folder with MNIST's files")
    nested = data / "MNIST" / "raw"
    place = nested if nested.is_dir() else data
    if not any(place.glob("*images?idx3-ubyte*")):
        raise DataError(
            f"{table}: there is no MNIST in {place}: train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, "
            "or the same with .gz, are wanted there or in MNIST/raw below it"
        )
    return str(place)


def cifar(data: Path) -> dict[str, Any]:
    """Where CIFAR-10 lies, as keys of a [data] table: a cifar10*.npz, or as torchvision puts it.

    Raises:
        DataError: it is not there.
    """
    files = sorted(data.glob("cifar10*.npz"))
    if not files and not (data / "cifar-10-batches-py").is_dir():
        raise DataError(f"there is no CIFAR-10 in {data}: cifar10.npz, or torchvision's folder cifar-10-batches-py")
    return {"path": str(files[0])} if files else {"path": str(data), "dataset": "CIFAR10"}


def weights(data: Path, architecture: str) -> Path:
    """The file of one of torchvision's networks' ImageNet weights.

    Raises:
        DataError: it is not there.
    """
    files = sorted((data / "weights").glob(f"{architecture}*.pt*"))
    if not files:
        raise DataError(f"no {architecture}*.pt in {data / 'weights'}: put torchvision's weights there")
    return files[0]


def on_first_digits(network: Mapping[str, Any], data: str, seed: int, engine: Any, fit: Fit, examples: int) -> Tensors:
    """A network's weights after training on the digits 0 to 4.

    Args:
        examples: of all digits, of which about half are used.
    """
    from fedquilt.models.networks import registry  # torch

    every = shares.load_all(DataSpec(path=data, limit=examples, seed=seed))
    rows = every.y < 5
    drawn = {key: value for key, value in network.items() if key != "input"}
    start = {name: value.numpy() for name, value in registry.load(drawn, seed=seed).state_dict().items()}
    some = Examples(every.x[rows], every.y[rows])
    model: Tensors = engine.train(network, start, some, fit, tensors.rng(seed))[0]
    return model


def by_seed(
    play: Callable[..., dict[str, Any]],
    data: str,
    seeds: Sequence[int],
    rounds: int,
    told: Callable[[dict[str, Any]], Sequence[str]],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """`play(data, seed, rounds)` of every seed, in their order; what is `told` of each is said as it is finished."""
    found: dict[int, dict[str, Any]] = {}
    for index, run in parallel.spread(play, [(data, seed, rounds) for seed in seeds]):
        found[index] = run
        for line in told(run):
            say(line)
    return [found[index] for index in range(len(seeds))]


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run came to: the method's last state, and its rounds."""

    state: Any
    rounds: tuple[Round, ...]

    @property
    def up_bytes(self) -> int:
        return sum(round.up_bytes for round in self.rounds)

    @property
    def down_bytes(self) -> int:
        return sum(round.down_bytes for round in self.rounds)


def bundle(network: Mapping[str, Any], folder: Path, *, seed: int = 0, weights: Tensors | None = None) -> Path:
    """A new folder with the bundle of a network.

    Args:
        weights: what it begins with; None: random weights, drawn from the seed.
    """
    model = {**network, "seed": seed}
    if weights is not None:
        file = folder.with_suffix(".safetensors")
        file.write_bytes(tensors.encode(weights))
        model["weights"] = str(file)
    prepare.prepare({"model": model}, folder)
    return folder


def members(spec: DataSpec, count: int) -> list[Member]:
    """The shares of so many devices, "dev-00" and so on."""
    split = shares.load_shares(msgspec.structs.replace(spec, shares=count))
    return [Member(f"dev-{index:02}", *share) for index, share in enumerate(split)]


def federated(
    job: Job,
    folder: Path,
    members: Sequence[Member],
    engine: Any,
    *,
    test: Examples | None = None,
    away: Collection[str] = (),
    observe: Callable[[Simulation, Hands], None] = lambda simulation, hands: None,
) -> Run:
    """A run of the coordinator's rounds with devices on virtual time, whose work is done in this process.

    Args:
        test: what `Hands.test` evaluates on.
        away: members that are not online at first.
        observe: told before the first round, after each, and at the end.

    Raises:
        JobError: the run has failed; says why.
    """
    carry, held = in_process(members, engine=engine, test=test)
    with (
        Scratch() as home,
        Simulation(job, folder, held, home, engine=engine.name, away=away) as simulation,
    ):
        for each in play([simulation], carry):
            observe(each, carry)
        return ended(simulation)


def ended(simulation: Simulation) -> Run:
    """What a run came to.

    Raises:
        JobError: it has failed, or nobody is there to go on with it.
    """
    if simulation.status != "done":
        raise JobError(f"{simulation.run} is {simulation.status}: {simulation.reason}")
    return Run(simulation.state, tuple(simulation.rounds))


# -- claims over seeds ----------------------------------------------------------------------------


def claim(
    values: Sequence[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """What seeds show of a claim, each by its own value: a paired difference, or a ratio.

    Args:
        values: one for each seed.
        at_least, at_most: what is claimed of their mean; one of the two.

    Returns:
        "value", the mean; "low" and "high", its 95 % interval, None with one seed; "verdict": "holds", "not shown",
        "against", or "one seed: no interval"; and "reached", whether it holds.
    """
    limit, side = (at_most, -1) if at_least is None else (at_least, 1)
    assert limit is not None
    assert values
    found: dict[str, Any] = {"value": round(statistics.fmean(values), 3), "low": None, "high": None, "unit": unit}
    found["at_least" if side > 0 else "at_most"] = limit
    verdict = "one seed: no interval"
    if len(values) > 1:
        low, high = interval(values)
        found |= {"low": round(low, 3), "high": round(high, 3)}
        ends = sorted((side * (low - limit), side * (high - limit)))
        verdict = "holds" if ends[0] > 0 else "against" if ends[1] < 0 else "not shown"
    return {**found, "seeds": len(values), "verdict": verdict, "reached": verdict == "holds"}


def told(found: Mapping[str, Any]) -> str:
    """A claim's mean, interval and verdict in a few words; of a difference with its sign."""
    sign = "+" if found.get("at_least") == 0 else ""
    mean, unit = f"{found['value']:{sign}.2f}", f" {found['unit']}" if found["unit"] else ""
    if found["low"] is None:
        return f"{mean}{unit}, {found['verdict']}"
    return f"{mean} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]{unit}: {found['verdict']}"


def claim_lines(result: Mapping[str, Any]) -> list[str]:
    """The figures of a result, one a line: claims over seeds with their intervals, others as a bench's."""
    lines = []
    for name, each in result["figures"].items():
        if "verdict" not in each:
            lines += figures.figure_lines({"figures": {name: each}})
            continue
        limit = f"at most {each['at_most']:g}" if "at_most" in each else f"above {each['at_least']:g}"
        lines.append(f"{'ok ' if each['reached'] else 'NOT'} {name:44} {told(each)} (claimed: {limit})")
    return lines

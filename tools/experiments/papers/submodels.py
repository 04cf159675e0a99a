"""Sub-models on one fleet of mixed memory: how good the whole network gets, and the parts that small boards train.

`fedquilt reproduce submodels --data FOLDER`

30, 30, 30 and 10 % of 20 devices have 1, 2, 4 and 8 GB for a task, as in the FedStitch paper (arXiv 2409.07202, section
5.1). They share 2,000 MNIST images of 14 pixels by Dirichlet 0.5, all take part in each of 15 rounds of 2 epochs, and
each trains what its memory holds of one small residual network. FedAvg has all of them train the whole, as if they
could. FedLPS holds pre-trained layers still and refuses random ones: it begins with weights trained on 3,000 images of
the digits 0 to 4, which the others do not have. HeteroFL has its authors' momentum of 0.9 and weight decay of 0.0005,
all else plain steps. HeteroFL, FjORD and FedLPS gather statistics of batch normalisation from all devices before each
evaluation. Accuracy is on 1,000 test images; that of a part is what a device with so much memory would be sent; how far
the whole network is ahead of FedAvg's is told with its interval over the seeds. No paper has this table, and none a
deadline: rounds may take as long as they do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import Fit
from fedquilt.edge_agent.settings import size_bytes
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import single_run
from fedquilt.tools.experiments.evaluate import Evaluator
from fedquilt.tools.experiments.papers import common
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.run import simulate
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation

TABLES: Final = ("submodels",)
SEEDS: Final = (0, 1, 2)
ROUNDS: Final = 15
DEVICES: Final = 20
BUDGETS: Final = ("1GB", "2GB", "4GB") * 3 + ("8GB",)
PARTS: Final = ("1GB", "2GB", "4GB")
INPUT: Final = {"channels": 1, "size": 14}
NETWORK: Final = {"name": "residual", "channels": 1, "classes": 10, "width": 16}
TRAINING: Final = {"epochs": 2, "batch": 20, "lr": 0.05}
HETEROFL: Final = {"momentum": 0.9, "weight_decay": 5e-4}  # as in its authors' code
SPEC: Final = {"limit": 2000, "held": 0.0, "partition": "dirichlet", "alpha": 0.5}
TESTED: Final = 1000
BEFORE: Final = Fit(epochs=4, batch=32, lr=0.05)
BEFORE_EXAMPLES: Final = 6000  # of all digits, of which about half are used


@dataclass(frozen=True)
class Arm:
    """One row. `parts`: whether devices with less memory are sent less than the whole."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    parts: bool = True
    pretrained: bool = False


ARMS: Final[Mapping[str, Arm]] = {
    "FedAvg, whole on all": Arm("fedavg", parts=False),
    "HeteroFL": Arm("heterofl", HETEROFL),
    "HeteroFL, clip = 0": Arm("heterofl", {**HETEROFL, "clip": 0.0}),
    "FjORD": Arm("fjord"),
    "DepthFL": Arm("depthfl"),
    "FeDepth": Arm("fedepth", parts=False),
    "FedLPS, pre-trained": Arm("fedlps", pretrained=True),
}
COVERS: Final = dict.fromkeys(TABLES, tuple(dict.fromkeys(arm.method for arm in ARMS.values())))
PAGE: Final = "training.md#sub-models-on-boards-of-1-to-8-gb"


def play(data: str, seed: int, rounds: int) -> dict[str, Any]:
    """All rows with one seed: accuracy (0..1) of the whole network, and of parts by budget."""
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine  # before torch: it says how threads wait

    # isort: split
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    found: dict[str, Any] = {"seed": seed}
    with Scratch() as scratch:
        table = {"model": {**NETWORK, "seed": seed}, "input": INPUT}
        prepare.prepare(table, scratch / "random")
        network, engine = {**NETWORK, "input": INPUT}, TorchEngine(ROOM_BYTES)
        weights = common.on_first_digits(network, data, seed, engine, BEFORE, BEFORE_EXAMPLES)
        file = scratch / "weights.safetensors"
        save_file({name: torch.from_numpy(array.copy()) for name, array in weights.items()}, file)
        prepare.prepare({**table, "model": {**NETWORK, "weights": str(file)}}, scratch / "pretrained")
        for name, arm in ARMS.items():
            folder = scratch / ("pretrained" if arm.pretrained else "random")
            found[name] = federated(arm, job(arm, data, seed, rounds), folder)
    return found


def job(arm: Arm, data: str, seed: int, rounds: int) -> Job:
    return settings.parse(
        {
            "name": "reproduce",
            "method": arm.method,
            "rounds": rounds,
            "seed": seed,
            "params": {**TRAINING, **arm.params},
            "cohort": common.UNHURRIED,
            "fleet": {"devices": DEVICES, "budgets": list(BUDGETS)},
            "data": {"path": data, "seed": seed, **SPEC},
            "test": {"limit": TESTED},
        }
    )


def federated(arm: Arm, given: Job, folder: Path) -> dict[str, float]:
    """One run: "whole", and accuracy by the budget of a device where `Arm.parts`."""
    members, test = single_run.shares(given, folder)
    last: Any = None

    def observe(simulation: Simulation, hands: Hands) -> None:
        nonlocal last
        last = simulation.state

    simulate(given, folder, members, observe=observe)
    with Evaluator(given, folder, test=test) as judge:
        sizes = {"whole": ROOM_BYTES, **{part: size_bytes(part) for part in PARTS if arm.parts}}
        scores = {name: judge.score(last, given.rounds, budget_bytes=size) for name, size in sizes.items()}
    return {name: score.value for name, score in scores.items() if score is not None}


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The table. It claims nothing.

    Args:
        data: a folder with MNIST's files.

    Raises:
        JobError: there is no such table.
        DataError: MNIST is not there.
    """
    common.require(table, TABLES)
    runs = common.by_seed(play, common.mnist(table, data), seeds, rounds or ROUNDS, _seed_lines, say)
    return {"table": table, "seeds": list(seeds), "rounds": rounds or ROUNDS, "runs": runs, "figures": {}}


def _seed_lines(each: Mapping[str, Any]) -> list[str]:
    told = ", ".join(f"{name} {100 * each[name]['whole']:.1f} %" for name in ARMS)
    return [f"  seed {each['seed']}: {told}"]


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    seeds = ", ".join(map(str, result["seeds"]))
    found = [
        f"submodels: MNIST, {DEVICES} devices, {result['rounds']} rounds; accuracy in %, seeds {seeds}",
        f"  {'':22}{'whole':>14}" + "".join(f"{part:>14}" for part in PARTS),
    ]
    first = next(iter(ARMS))
    for name in ARMS:
        cells = []
        for what in ("whole", *PARTS):
            values = [100 * run[name][what] for run in result["runs"] if what in run[name]]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.1f}{spread}" if values else "")
        found.append(f"  {name:22}" + "".join(f"{cell:>14}" for cell in cells))
    found.append(f"the whole network's accuracy over that of {first}, by seed")
    return found + [f"  {name:22} {common.told(_ahead(result['runs'], name, first))}" for name in ARMS if name != first]


def _ahead(runs: Sequence[Mapping[str, Any]], name: str, other: str) -> dict[str, Any]:
    """One row's points over another's, as a claim."""
    values = [100 * (each[name]["whole"] - each[other]["whole"]) for each in runs]
    return common.claim(values, "points", at_least=0.0)

"""FedSDG: what a gated branch of a device's own adds to shared adapters, and what travels.

`fedquilt reproduce fedsdg --data FOLDER --seeds 0 1 2`

The paper has no table to compare with: these are its claims on MNIST in small. A small vision transformer is first
trained on the digits 0 to 4 of the training files; then ten devices federate on all ten digits of the test files, that
it has never seen, split by Dirichlet 0.1 and 0.3. FedSDG, FedLoRA and FedLoRA with FedProx's pull start from the same
adapters and head on the same examples; "local" is FedLoRA in a job of each device's own for as many rounds of as many
epochs. Accuracy is over all examples that devices hold out, each device with what it would use itself: its own branch
in FedSDG, the one shared model in FedLoRA. All goes through the coordinator's rounds, with devices on virtual time;
bytes are those of contents, headers included, and the backbone goes down once. The paper has no deadline: rounds may
take as long as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import Fit
from fedquilt.data.spec import DataSpec
from fedquilt.tools.experiments.papers import common
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation

TABLES: Final = ("fedsdg",)
SEEDS: Final = (0, 1, 2)
ALPHAS: Final = (0.1, 0.3)
ROUNDS: Final = 10
DEVICES: Final = 10
INPUT: Final = {"channels": 1, "size": 28}
NETWORK: Final = {
    "name": "vit",
    **INPUT,
    "patch": 7,
    "width": 64,
    "depth": 4,
    "heads": 4,
    "classes": 10,
    "input": INPUT,
}
BEFORE: Final = Fit(epochs=4, batch=32, lr=1e-3, optimizer="adam", clip=1.0)  # on digits 0 to 4
BEFORE_EXAMPLES: Final = 6000  # of all digits, of which about half are used
TRAINING: Final = {"epochs": 2, "batch": 16}
SPEC: Final = {"split": "test", "limit": 2000, "held": 0.4, "partition": "dirichlet", "min_size": 10}
METHODS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "fedsdg": ("fedsdg", {"tell_gates": True}),
    "fedlora": ("fedlora", {}),
    "fedprox": ("fedlora", {"mu": 0.01}),
}
COVERS: Final = dict.fromkeys(TABLES, tuple(dict.fromkeys(name for name, _ in METHODS.values())))
PAGE: Final = "training.md#fedsdg"


def play(data: str, seed: int, rounds: int) -> dict[str, Any]:
    """All methods at every concentration with one seed."""
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine  # before torch: it says how threads wait

    # isort: split
    import torch

    torch.set_num_threads(1)
    engine = TorchEngine(ROOM_BYTES)
    weights = common.on_first_digits(NETWORK, data, seed, engine, BEFORE, BEFORE_EXAMPLES)
    found: dict[str, Any] = {"seed": seed, "model_bytes": tensors.total_bytes([weights])}
    with Scratch() as scratch:
        folder = common.bundle(NETWORK, scratch / "start", seed=seed, weights=weights)
        for alpha in ALPHAS:
            spec = DataSpec(path=data, alpha=alpha, seed=seed, **SPEC)  # type: ignore[arg-type]
            members = common.members(spec, DEVICES)
            told = {
                name: federated(job(method, params, seed, rounds), folder, members, engine)
                for name, (method, params) in METHODS.items()
            }
            alone = [federated(job("fedlora", {}, seed, rounds), folder, [member], engine) for member in members]
            right = sum(each["right"] for each in alone)
            told["local"] = {"accuracy": right / sum(each["examples"] for each in alone), "up_bytes": 0}
            found[f"{alpha:g}"] = told
    return found


def job(method: str, params: Mapping[str, Any], seed: int, rounds: int) -> Job:
    return settings.parse(
        {
            "name": "reproduce",
            "method": method,
            "rounds": rounds,
            "seed": seed,
            "params": {**TRAINING, **params},
            "cohort": common.UNHURRIED,
            "fleet": {"budgets": ["8GB"]},
        }
    )


def federated(given: Job, folder: Path, members: Sequence[Member], engine: Any) -> dict[str, Any]:
    """One run: accuracy over all that is held out, bytes, and the last gates of every device that tells them."""
    own: list[dict[str, float]] = []

    def observe(simulation: Simulation, hands: Hands) -> None:
        if simulation.finished:
            own[:] = hands.evaluate(simulation).values()

    run = common.federated(given, folder, members, engine, observe=observe)
    right = sum(each["accuracy"] * each["examples"] for each in own)
    examples = sum(each["examples"] for each in own)
    gates = {
        device: [value for key, value in sorted(metrics.items()) if key.startswith("gate.")]
        for device, metrics in run.rounds[-1].devices_metrics.items()
    }
    return {
        "accuracy": right / examples if examples else None,
        "right": right,
        "examples": examples,
        "up_bytes": run.up_bytes,
        "down_bytes": run.down_bytes,
        "shared_bytes": tensors.total_bytes([run.state.model]),
        "tasks": sum(len(each.devices) for each in run.rounds),
        "gates": {device: values for device, values in gates.items() if values},
    }


# -- the table ------------------------------------------------------------------------------------


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The table; its claims are checked with the default number of rounds.

    Args:
        data: a folder with MNIST's files.

    Raises:
        JobError: there is no such table.
        DataError: MNIST is not there.
    """
    common.require(table, TABLES)
    runs = common.by_seed(play, common.mnist(table, data), seeds, rounds or ROUNDS, _seed_lines, say)
    return {
        "table": table,
        "seeds": list(seeds),
        "settings": {"rounds": rounds or ROUNDS, "network": NETWORK, **TRAINING, **SPEC},
        "runs": runs,
        "figures": _figures(runs) if rounds is None else {},
    }


def _figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is claimed, each by its interval over the seeds."""

    def ahead(alpha: str, other: str) -> list[float]:
        return [100 * (each[alpha]["fedsdg"]["accuracy"] - each[alpha][other]["accuracy"]) for each in runs]

    def sent(each: Mapping[str, Any]) -> float:
        return float(100 * each["up_bytes"] / (each["tasks"] * each["shared_bytes"]))

    more = [max(sent(each[f"{alpha:g}"]["fedsdg"]) for alpha in ALPHAS) for each in runs]
    return {
        **{
            f"over {name} at {alpha}": common.claim(ahead(alpha, other), "points", at_least=0.0)
            for name, other in (("FedLoRA", "fedlora"), ("local", "local"))
            for alpha in ("0.1", "0.3")
        },
        "sent, of the shared part and a header of names": common.claim(more, "%", at_most=110.0),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    found = [f"fedsdg: MNIST, {DEVICES} devices, {result['settings']['rounds']} rounds"]
    for each in result["runs"]:
        found += _seed_lines(each)
    return [*found, *common.claim_lines(result)]


def _seed_lines(each: Mapping[str, Any]) -> list[str]:
    found = []
    for alpha in (f"{value:g}" for value in ALPHAS):
        told = each[alpha]
        gates = [m for values in told["fedsdg"]["gates"].values() for m in values]
        scores = ", ".join(f"{name} {100 * told[name]['accuracy']:.1f} %" for name in (*METHODS, "local"))
        found.append(
            f"  seed {each['seed']}, Dirichlet {alpha}: {scores}; {told['fedsdg']['up_bytes'] / 1e6:.2f} MB up "
            f"(model {each['model_bytes'] / 1e6:.2f} MB), gates {min(gates):.2f} to {max(gates):.2f}"
        )
    return found


def picture(result: Mapping[str, Any]) -> str:
    """Every device's gate in each block after the last round, all seeds and concentrations, as SVG."""
    told = [run[f"{alpha:g}"]["fedsdg"]["gates"] for run in result["runs"] for alpha in ALPHAS]
    gates = [values for each in told for values in each.values()]
    rows = [plots.Dots(f"block {index}", values) for index, values in enumerate(zip(*gates, strict=True))]
    return plots.alone(plots.dots(rows, "How far each device's gates are open", "m"))

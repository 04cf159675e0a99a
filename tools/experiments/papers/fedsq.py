"""FedSQ beside FedAvg and FedProx on small pre-trained networks (after arXiv 2604.02990, Table I and Fig. 2).

`fedquilt reproduce fedsq --data FOLDER --seeds 0 1 2`

The paper's ResNet-18 on CIFAR-100 and AlexNet on CINIC-10 take GPUs and data that are not everywhere, so
no figure here is one of the paper's: what is compared is what it claims. Ten clients, all in every
round, one epoch, plain SGD; all three train the same modules from the same weights with the same new head, and see
the same examples in the same order. FedAvg and FedProx are `fedsq` with gates = "own" (a test holds it against
`fedavg`). The clients' rate and batch are ours: the shares are some thirtieth of the paper's. Rates were
tried on one seed, and the best for FedAvg taken, but for SqueezeNet: at 0.01 FedSQ's loss explodes there. All goes
through the coordinator's rounds, with clients on virtual time; the paper has no deadline, so that rounds may take as
long as they do. Nothing is claimed; how far FedSQ is ahead in the end is told with its interval over the seeds.

fedsq            networks pre-trained on MNIST, federated on the UCI digits
fedsq-weak       pre-trained on the UCI digits (1,347 images of 8 x 8), federated on a part of MNIST
fedsq-imagenet   SqueezeNet 1.1 with ImageNet weights on CIFAR-10, head and last block trained
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import DataError, Examples, Fit
from fedquilt.data import examples as shares
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import frozen_part
from fedquilt.tools.experiments.papers import common
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.scratch import Scratch
from fedquilt.tools.simulation.simulated_job import ROOM_BYTES, Simulation

TABLES: Final = ("fedsq", "fedsq-weak", "fedsq-imagenet")
SEEDS: Final = (0, 1, 2)
DIGITS: Final = Path(__file__).parents[2] / "demo" / "digits.npz"
CLIENTS: Final = 10
ROUNDS: Final = 8
PRETRAINED_ON: Final = 6000  # of MNIST's images
SPLITS: Final[Mapping[str, dict[str, Any]]] = {
    "iid": {"partition": "iid"},
    "dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
}
ARMS: Final[Mapping[str, dict[str, Any]]] = {
    "fedavg": {"gates": "own"},
    "fedprox": {"gates": "own", "mu": 0.1},
    "fedsq": {},
}
COVERS: Final = dict.fromkeys(TABLES, ("fedsq",))
PAGE: Final = "training.md#fedsq"
SMALL: Final = {"channels": 1, "size": 16}
IMAGENET: Final = {"channels": 3, "size": 64, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@dataclass(frozen=True)
class Setting:
    """One network, and what of it is trained how."""

    network: Mapping[str, Any]
    trained: tuple[str, ...]
    bn: str
    lr: float = 0.1
    batch: int = 16


RESIDUAL: Final = {"name": "residual", "channels": 1, "classes": 10, "input": SMALL}
CNN: Final = {"name": "cnn", "channels": 1, "size": 16, "classes": 10, "input": SMALL}
SQUEEZE: Final = {"name": "torchvision/squeezenet1_1", "classes": 10, "input": IMAGENET}
DIGIT_SETTINGS: Final = {
    "residual, bn frozen": Setting(RESIDUAL, ("3", "6"), "frozen_stats"),
    "residual, bn trained": Setting(RESIDUAL, ("3", "6"), "train"),
    "cnn": Setting(CNN, ("7", "9"), "frozen_stats"),
}


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The table's figures, ready for JSON: by setting, split and arm, "accuracy" by seed and round (0: the start).

    Raises:
        JobError: no such table.
        DataError: what it needs is not in the folder `data`.
    """
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    common.require(table, TABLES)
    engine = TorchEngine(ROOM_BYTES)
    if data is None:
        raise DataError(f"{table} needs --data: a folder with MNIST (for fedsq-imagenet: CIFAR-10 and weights/)")
    found: dict[str, Any] = {"table": table, "seeds": list(seeds), "settings": {}}
    squeeze = {"squeezenet1_1": Setting(SQUEEZE, ("features.12", "classifier"), "frozen_stats", 0.003, 32)}
    chosen = squeeze if table == "fedsq-imagenet" else DIGIT_SETTINGS
    with Scratch() as place:
        for name, setting in chosen.items():
            by_split = _by_split(table, name, setting, data, seeds, rounds or ROUNDS, engine, place, say)
            found["settings"][name] = by_split
    return found


def _by_split(
    table: str,
    name: str,
    setting: Setting,
    data: Path,
    seeds: Sequence[int],
    rounds: int,
    engine: Any,
    place: Path,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[list[float]]]]:
    """Split -> arm -> accuracy by seed and round, of one network."""
    starts = {}
    for seed in seeds:
        weights = _pretrained(table, setting, data, seed, engine)
        starts[seed] = common.bundle(setting.network, place / f"{name}-{seed}", seed=seed, weights=weights)
    found = {}
    for split, table_of in SPLITS.items():
        spec, test = _task(table, data)
        curves: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        for seed in seeds:
            members = common.members(msgspec.structs.replace(spec, **table_of, seed=seed), CLIENTS)
            for arm, changes in ARMS.items():
                given = _job(setting, changes, seed, rounds)
                curves[arm].append(_curve(given, starts[seed], members, engine, test))
        found[split] = curves
        say(f"{name}, {split}: " + ", ".join(f"{arm} {_mean(curve, -1):.1%}" for arm, curve in curves.items()))
    return found


def lines(result: Mapping[str, Any]) -> list[str]:
    """The figures as text: mean accuracy over the seeds by round, percent, and FedSQ's lead at the end."""
    told = [f"{result['table']}: accuracy in percent, mean of {len(result['seeds'])} seeds, by round"]
    for name, by_split in result["settings"].items():
        for split, curves in by_split.items():
            count = len(curves["fedsq"][0])
            shown = [0, *(n for n in (1, 2, 3, 5, 10, 20, 30) if n < count - 1), count - 1]
            told += ["", f"{name}, {split}", "round    " + "".join(f"{n:>7}" for n in shown)]
            told += [
                f"{arm:<9}" + "".join(f"{100 * _mean(curve, n):7.1f}" for n in shown) for arm, curve in curves.items()
            ]
            told += [f"fedsq - {arm}, at the end: {common.told(_ahead(curves, arm))}" for arm in ARMS if arm != "fedsq"]
    return told


def _ahead(curves: Mapping[str, Sequence[Sequence[float]]], arm: str) -> dict[str, Any]:
    """FedSQ's points over another arm after the last round, as a claim."""
    pairs = zip(curves["fedsq"], curves[arm], strict=True)
    return common.claim([100 * (ours[-1] - theirs[-1]) for ours, theirs in pairs], "points", at_least=0.0)


def _mean(curves: Sequence[Sequence[float]], number: int) -> float:
    return statistics.fmean(curve[number] for curve in curves)


# -- what is run ----------------------------------------------------------------------------------


def _job(setting: Setting, changes: Mapping[str, Any], seed: int, rounds: int) -> Job:
    params = {"lr": setting.lr, "batch": setting.batch, "trained": list(setting.trained), "bn": setting.bn}
    return settings.parse(
        {
            "name": "reproduce",
            "method": "fedsq",
            "rounds": rounds,
            "seed": seed,
            "params": {**params, **changes},
            "cohort": common.UNHURRIED,
            "fleet": {"budgets": ["8GB"]},
        }
    )


def _curve(given: Job, folder: Path, members: Sequence[Member], engine: Any, test: Examples) -> list[float]:
    """Accuracy on the test set before the first round and after each, by the method's own evaluation."""
    found: list[float] = []

    def observe(simulation: Simulation, hands: Hands) -> None:
        if len(found) == len(simulation.rounds):
            told = hands.test(simulation)
            assert told is not None
            found.append(told["accuracy"])

    common.federated(given, folder, members, engine, test=test, observe=observe)
    return found


def _pretrained(table: str, setting: Setting, data: Path, seed: int, engine: Any) -> dict[str, np.ndarray]:
    """The pre-trained network with a new last layer, drawn from the seed."""
    if table == "fedsq-imagenet":
        architecture = setting.network["name"].removeprefix("torchvision/")
        model = frozen_part.warm(setting.network, str(common.weights(data, architecture)), 1000, seed)
        return {name: value.numpy() for name, value in model.state_dict().items()}
    from fedquilt.models.networks import registry

    network = setting.network
    before = (
        _all(DataSpec(path=common.mnist(table, data), limit=PRETRAINED_ON))
        if table == "fedsq"
        else _all(DataSpec(path=str(DIGITS)))
    )
    first = {name: value.numpy() for name, value in registry.load(network, seed=seed).state_dict().items()}
    fit = Fit(epochs=3 if table == "fedsq" else 12, batch=32, lr=0.05, momentum=0.9, weight_decay=1e-4)
    given, _ = engine.train(network, first, before, fit, tensors.rng("pre-trained", seed))
    last = max((name for name in first if name.endswith(".weight") and first[name].ndim == 2), key=_place)
    fresh = {name: value.numpy() for name, value in registry.load(network, seed=seed + 1000).state_dict().items()}
    return {name: fresh[name] if name.startswith(last.rpartition(".")[0] + ".") else given[name] for name in first}


def _place(name: str) -> int:
    return int(name.split(".")[0])


def _task(table: str, data: Path) -> tuple[DataSpec, Examples]:
    """What is federated, and the test set."""
    if table == "fedsq":
        spec, test = DataSpec(path=str(DIGITS)), _all(DataSpec(path=str(DIGITS), split="test"))
    elif table == "fedsq-weak":
        spec = DataSpec(path=common.mnist(table, data), limit=3000)
        test = _all(DataSpec(path=common.mnist(table, data), split="test", limit=1000))
    else:
        where = DataSpec(**common.cifar(data))
        spec = msgspec.structs.replace(where, limit=1000)
        test = _all(msgspec.structs.replace(where, split="test", limit=500))
    return msgspec.structs.replace(spec, held=0.0), test


def _all(spec: DataSpec) -> Examples:
    return shares.load_all(spec)

"""FedSDG: what a gated branch of a device's own adds to shared adapters, and what travels.

`fedquilt reproduce fedsdg --data FOLDER --seeds 0 1 2`

The paper has no table to compare with: these are its claims on MNIST in small. A small vision transformer is first
trained on the digits 0 to 4 of the training files; then ten devices federate on all ten digits of the test files, that
it has never seen, split by Dirichlet 0.1 and 0.3. FedSDG, FedLoRA and FedLoRA with FedProx's pull start from the same
adapters and head on the same examples; "local" is FedLoRA on each device alone for as many rounds. Accuracy is over all
examples that devices hold out, each device with what it would use itself: its own branch in FedSDG, the one shared
model in FedLoRA. Bytes are counted as they would be sent, headers included; the backbone goes down once.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedquilt import methods, tensors
from fedquilt.core import Answer, BlobRef, Bundle, DeviceView, Fit, Site, Task
from fedquilt.edge_agent import data as shares
from fedquilt.tools import plots
from fedquilt.tools.bench import at_least, figure, figure_lines
from fedquilt.tools.local_run import BUDGET_BYTES, Member, Spent, delivered, states
from fedquilt.tools.reproduce import common

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
    engine = TorchEngine(BUDGET_BYTES)
    weights = common.on_first_digits(NETWORK, data, seed, engine, BEFORE, BEFORE_EXAMPLES)
    bundle = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: weights)
    found: dict[str, Any] = {"seed": seed, "model_bytes": tensors.total_bytes([weights])}
    for alpha in ALPHAS:
        spec = shares.DataSpec(path=data, alpha=alpha, shares=DEVICES, seed=seed, **SPEC)  # type: ignore[arg-type]
        members = [Member(f"dev-{index:02}", *share) for index, share in enumerate(shares.load_shares(spec))]
        told = {name: federated(*each, bundle, members, engine, seed, rounds) for name, each in METHODS.items()}
        alone = [federated("fedlora", {}, bundle, [member], engine, seed, rounds) for member in members]
        right = sum(each["right"] for each in alone)
        told["local"] = {"accuracy": right / sum(each["examples"] for each in alone), "up_bytes": 0}
        found[f"{alpha:g}"] = told
    return found


def federated(
    name: str,
    params: Mapping[str, Any],
    bundle: Bundle,
    members: Sequence[Member],
    engine: Any,
    seed: int,
    rounds: int,
) -> dict[str, Any]:
    """One run: accuracy over all that is held out, bytes, and the last gates of every device that tells them."""
    method, spent, last = methods.load(name), Spent(), dict[str, Answer]()

    def work(task: Task, site: Site) -> Answer:
        last[site.device] = method.work(task, site)
        return last[site.device]

    *_, state = states(
        replace(method, work=work),
        bundle,
        Path,
        engine,
        members,
        method.params(**TRAINING, **params),
        seed=seed,
        rounds=rounds,
        spent=spent,
    )
    assert method.check is not None
    right = examples = 0.0
    with tempfile.TemporaryDirectory() as cache:
        for member in members:
            order = method.send(state, DeviceView(member.device, None))
            assert order is not None
            local = last[member.device].local
            told = method.check(*delivered(method, order, rounds, seed, member, engine, Path, local, Path(cache)))
            right += told["accuracy"] * told["examples"] if told["examples"] else 0.0
            examples += told["examples"]
    gates = {
        device: [value for key, value in sorted(answer.metrics.items()) if key.startswith("gate.")]
        for device, answer in last.items()
    }
    return {
        "accuracy": right / examples if examples else None,
        "right": right,
        "examples": examples,
        "up_bytes": spent.up_bytes,
        "down_bytes": spent.down_bytes,
        "shared_bytes": tensors.total_bytes([state.model]),
        "tasks": spent.tasks,
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
    """What is claimed: accuracy by the mean over seeds, bytes in the worst."""

    def ahead(alpha: str, other: str) -> float:
        return 100 * statistics.fmean(
            each[alpha]["fedsdg"]["accuracy"] - each[alpha][other]["accuracy"] for each in runs
        )

    more = max(
        each[f"{alpha:g}"]["fedsdg"]["up_bytes"]
        / (each[f"{alpha:g}"]["fedsdg"]["tasks"] * each[f"{alpha:g}"]["fedsdg"]["shared_bytes"])
        for each in runs
        for alpha in ALPHAS
    )
    return {
        "over FedLoRA at 0.1": at_least(ahead("0.1", "fedlora"), 2.0, "points"),
        "over FedLoRA at 0.3": at_least(ahead("0.3", "fedlora"), 2.0, "points"),
        "over local at 0.3": at_least(ahead("0.3", "local"), 0.1, "points"),
        "sent, of the shared part and a header of names": figure(100 * more, 110.0, "%"),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    found = [f"fedsdg: MNIST, {DEVICES} devices, {result['settings']['rounds']} rounds"]
    for each in result["runs"]:
        found += _seed_lines(each)
    return [*found, *figure_lines({"figures": result["figures"]})]


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

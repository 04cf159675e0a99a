"""GENE-FL (arXiv 2504.14628): bytes, personal accuracy, and what a newcomer with unknown classes inherits.

`fedquilt reproduce genefl --data FOLDER --seeds 0 1 2`

"genefl" is the paper's experiment in small, on MNIST: ten devices with classes 0 to 4 federate, by FedAvg and
by GENE-FL, from the same weights on the same examples; then ten devices with classes 5 to 9 turn up in the
running GENE-FL job, over the same halves and bytes as everybody. "Inherited" starts from their cluster's
learnGene, "scratch" from the job's first weights, both with the same examples in the same order; "whole" starts
from FedAvg's global model, which is many times the bytes. Bytes are counted as they would be sent, fingerprints
and headers included. Differences: a small CNN for ResNet18, MNIST for CIFAR-10, ten devices for fifty, one
FedAvg model for all clusters; five local epochs; two of the three layers are sent from the first round on, by the
order of the paper's mask sentence (highest scores, by the root of size). Seen besides: with the lowest scores times
size, the defaults, some devices send the one large layer: uploads were 42 and 43 % of FedAvg's with seeds 0 and 1,
personal accuracy as high. A schedule that drops a layer after its first round holds devices to what that layer was
then, at full strength: personal accuracy came out 0.6 to 2.1 points below FedAvg's.

"genefl-bytes" are the columns of Tables II and III that follow from ResNet18 alone: nothing is trained. The
paper's 41.66 is rounded up from 41.655; all agree to the last digit that it prints.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedquilt import methods, tensors
from fedquilt.core import Answer, BlobRef, Bundle, Contribution, DeviceView, Site, Task, Tensors
from fedquilt.edge_agent import data as shares
from fedquilt.models import zoo
from fedquilt.models.layers import layers
from fedquilt.tools.bench import at_least, figure, figure_lines
from fedquilt.tools.local_run import BUDGET_BYTES, Member, Spent, delivered, states
from fedquilt.tools.reproduce import common

TABLES: Final = ("genefl", "genefl-bytes")
WITHOUT_DATA: Final = ("genefl-bytes",)
SEEDS: Final = (0, 1, 2)
ROUNDS: Final = 15  # of training; GENE-FL's round of fingerprints comes on top
INPUT: Final = {"channels": 1, "size": 28}
NETWORK: Final = {"name": "cnn", **INPUT, "classes": 10, "width": 8, "input": INPUT}
KNOWN, NEW = 10, 10  # devices
TRAINING: Final = {"epochs": 5, "batch": 16, "lr": 0.02, "momentum": 0.9}
GENE: Final = {"first_layers": 2, "min_layers": 2, "gene_order": "highest", "gene_norm": "div_sqrt"}
SPEC: Final = {"limit": 4000, "held": 0.4, "partition": "classes", "classes": 2}
METHODS: Final = {"fedavg": ({}, 0), "genefl": (GENE, 1)}  # parameters, and rounds on top
COVERS: Final = {"genefl": tuple(METHODS), "genefl-bytes": ("fedavg", "fedfina", "fedlg")}
PAGE: Final = "training.md#gene-fl"
GROUPS: Final = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def play(data: str, seed: int, rounds: int) -> dict[str, Any]:
    """Both methods with one seed, and the newcomers."""
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine  # before torch: it says how threads wait

    # isort: split
    import torch

    torch.set_num_threads(1)
    engine = TorchEngine(BUDGET_BYTES)
    spec = shares.DataSpec(path=data, groups=GROUPS, shares=KNOWN + NEW, seed=seed, **SPEC)  # type: ignore[arg-type]
    members = [Member(f"dev-{index:02}", *share) for index, share in enumerate(shares.load_shares(spec))]
    known, new = members[:KNOWN], members[KNOWN:]
    weights = {name: value.numpy() for name, value in zoo.load(NETWORK, seed=seed).state_dict().items()}
    bundle = Bundle({"network": NETWORK}, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: weights)
    found: dict[str, Any] = {"seed": seed}
    last: dict[str, Any] = {}
    for name, (params, more) in METHODS.items():
        method, spent = methods.load(name), Spent()
        personal: dict[str, float] = {}

        def work(task: Task, site: Site, method: Any = method, personal: dict[str, float] = personal) -> Answer:
            answer: Answer = method.work(task, site)
            personal[site.device] = answer.metrics.get("personal", 0.0)
            return answer

        *_, last[name] = states(
            replace(method, work=work),
            bundle,
            Path,
            engine,
            known,
            method.params(**TRAINING, **params),
            seed=seed,
            rounds=rounds + more,
            spent=spent,
        )
        if name == "fedavg":
            for member in known:
                personal[member.device] = engine.evaluate(NETWORK, last[name].model, member.held)["accuracy"]
        found[name] = {"accuracy": statistics.fmean(personal.values()), "up_bytes": spent.up_bytes}
    state = last["genefl"]
    found["gene"] = {str(k): list(gene) for k, gene in enumerate(state.genes)}
    found["newcomers"] = newcomers(state, new, engine, last["fedavg"].model, seed)
    return found


def newcomers(state: Any, new: Sequence[Member], engine: Any, whole: Tensors, seed: int) -> dict[str, Any]:
    """Accuracy after their first task, by what they start from, and the bytes of a learnGene."""
    from fedquilt.methods import fedavg

    method = methods.load("genefl")
    accuracy: dict[str, list[float]] = {"inherited": [], "scratch": [], "whole": []}
    sizes = []
    first = {name: array for part in state.first.values() for name, array in part.items()}
    with tempfile.TemporaryDirectory() as cache:

        def ask(member: Member, past: tuple[int, ...]) -> tuple[Task, Site]:
            order = method.send(state, DeviceView(member.device, None, past))
            assert order is not None
            return delivered(method, order, 1000 + len(past), seed, member, engine, Path, {}, Path(cache))

        total = None
        for member in new:
            answer = method.work(*ask(member, ()))
            sent = {name: tensors.decode(tensors.encode(part)) for name, part in answer.bundles.items()}
            total = method.fold(state, total, Contribution(member.device, 0, answer.weight, answer.metrics, sent))
        state = method.step(state, total)
        for member in new:
            task, site = ask(member, (0,))
            accuracy["inherited"].append(method.work(task, site).metrics["personal"])
            gene = state.genes[state.assigned[member.device]]
            sizes.append(tensors.total_bytes([state.first[layer] for layer in gene]))
            for name, start in (("scratch", first), ("whole", whole)):
                rng = tensors.rng(task.seed)  # the same order of examples
                model, _ = engine.train(NETWORK, {**first, **start}, member.train, fedavg.fit_of(task), rng)
                accuracy[name].append(engine.evaluate(NETWORK, model, member.held)["accuracy"])
    told = {name: statistics.fmean(values) for name, values in accuracy.items()}
    return {**told, "gene_bytes": statistics.fmean(sizes), "model_bytes": tensors.total_bytes([first])}


# -- what follows from the architecture -----------------------------------------------------------


def sizes() -> dict[str, tuple[float, float, str]]:
    """What is told -> (ours, the paper's, unit) of torchvision's ResNet18, parameters in four bytes."""
    model = zoo.build({"name": "torchvision/resnet18", "classes": 10})
    held = {name: value.detach().numpy() for name, value in model.named_parameters()}
    wider = zoo.build({"name": "torchvision/resnet18", "classes": 100})
    whole, uploads = sum(array.nbytes for array in held.values()), 100 * 10  # rounds, devices in each
    last = sum(held[f"layer4.{i}.conv{j}.weight"].nbytes for i in (0, 1) for j in (1, 2))
    some = sum(held[f"{name}.weight"].nbytes for name in ("layer4.1.conv1", "layer4.1.conv2", "layer2.0.conv1"))
    assert len(layers(held)) == 21
    return {
        "FedAvg, 1000 uploads, 10 classes": (uploads * whole / 2**30, 41.66, "GiB"),
        "FedAvg, 1000 uploads, 100 classes": (
            uploads * sum(value.nbytes for value in (p.detach().numpy() for p in wider.parameters())) / 2**30,
            41.83,
            "GiB",
        ),
        "FedFina, the four 3x3 convolutions of layer4": (last / 2**20, 31.50, "MiB"),
        "FedLG, three convolutions": (some / 2**20, 18.28, "MiB"),
    }


# -- the tables -----------------------------------------------------------------------------------


def run(
    table: str,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    data: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """A table; its claims are checked with the default number of rounds.

    Args:
        data: a folder with MNIST's files, for "genefl".

    Raises:
        JobError: there is no such table.
        DataError: MNIST is not there.
    """
    common.require(table, TABLES)
    if table == "genefl-bytes":
        known = sizes()
        claims = {
            f"{name}, off by": figure(round(abs(ours - paper), 3), 0.01, unit)
            for name, (ours, paper, unit) in known.items()
        }
        told = {name: {"ours": ours, "paper": paper, "unit": unit} for name, (ours, paper, unit) in known.items()}
        return {"table": table, "rows": told, "figures": claims}
    where = common.mnist(table, data)
    runs = common.by_seed(play, where, seeds, rounds or ROUNDS, lambda each: [_seed_line(each)], say)
    return {
        "table": table,
        "seeds": list(seeds),
        "settings": {"rounds": rounds or ROUNDS, "network": NETWORK, **TRAINING, **GENE, **SPEC},
        "runs": runs,
        "figures": _figures(runs) if rounds is None else {},
    }


def _figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is claimed, in the worst seed."""
    share = max(each["genefl"]["up_bytes"] / each["fedavg"]["up_bytes"] for each in runs)
    ahead = min(each["genefl"]["accuracy"] - each["fedavg"]["accuracy"] for each in runs)
    better = min(each["newcomers"]["inherited"] - each["newcomers"]["scratch"] for each in runs)
    return {
        "upload of FedAvg's, worst seed": figure(100 * share, 25.0, "%"),
        "personal accuracy over FedAvg's model, worst seed": at_least(100 * ahead, 0.1, "points"),
        "inherited over scratch, worst seed": at_least(100 * better, 3.0, "points"),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table as text."""
    if result["table"] == "genefl-bytes":
        rows = [
            f"  {name:46} {each['ours']:7.3f} {each['unit']} (paper {each['paper']:.2f})"
            for name, each in result["rows"].items()
        ]
        return ["genefl-bytes: ResNet18, parameters of 4 bytes", *rows, *figure_lines({"figures": result["figures"]})]
    found = [f"genefl: MNIST, {result['settings']['rounds']} rounds"]
    return [*found, *map(_seed_line, result["runs"]), *figure_lines({"figures": result["figures"]})]


def _seed_line(each: Mapping[str, Any]) -> str:
    fedavg, genefl, new = each["fedavg"], each["genefl"], each["newcomers"]
    return (
        f"  seed {each['seed']}: FedAvg {100 * fedavg['accuracy']:.1f} %, {fedavg['up_bytes'] / 1e6:.2f} MB up; "
        f"GENE-FL {100 * genefl['accuracy']:.1f} %, {genefl['up_bytes'] / 1e6:.2f} MB up; newcomers inherit "
        f"{100 * new['inherited']:.1f} % by {new['gene_bytes'] / 1e3:.1f} kB, scratch {100 * new['scratch']:.1f} %, "
        f"whole {100 * new['whole']:.1f} % by {new['model_bytes'] / 1e3:.1f} kB"
    )

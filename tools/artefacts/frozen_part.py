"""Which part of a pre-trained network the devices should train: found at `fedquilt prepare`, on calibration data.

FedSQ (arXiv 2604.02990), section III-B and Algorithm 1, line 2: a fresh copy of the network is
fine-tuned centrally with its last block trained, then with its last two, and so on, until accuracy on a
validation share no longer improves; the best is the schedule. The ordinary network is fine-tuned, so the
schedule suits FedAvg as well. The data may be public or synthetic: it is none of the devices'.

The paper begins with the last two blocks; here the last one alone is tried before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta

from fedquilt import config, evaluation, tensors
from fedquilt.core import Examples, Fit, Hooks, JobError, ModelError, Step, Tensors
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.models.networks import registry

if TYPE_CHECKING:
    from torch import nn

OPENED = 8  # a trunk with more children with weights is opened: not AlexNet's 5
BUDGET_BYTES = 1 << 40  # the operator's own machine: nothing is refused here


class Calibration(DataSpec, frozen=True, forbid_unknown_fields=True):
    """The `[schedule]` table: examples as in `[data]`, of which `held` is the validation share."""

    epochs: Annotated[int, Meta(ge=1)] = 5
    lr: Annotated[float, Meta(gt=0)] = 0.01
    weight_decay: Annotated[float, Meta(ge=0)] = 1e-4
    batch: Annotated[int, Meta(ge=1)] = 64
    blocks: tuple[tuple[str, ...], ...] = ()  # modules of each block, first to last; (): by rule (`blocks`)


class Tried(NamedTuple):
    """A candidate, and what it came to on the validation share (0 to 1)."""

    trained: tuple[str, ...]
    accuracy: float


def at_prepare(
    table: Mapping[str, Any],
    network: Mapping[str, Any],
    model: Tensors,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The bundle's meta "schedule" of a job's `[schedule]` table: "trained", and what was "tried".

    Raises:
        JobError: a key that is wrong.
        DataError: the calibration data cannot be had.
    """
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    wanted = config.convert(table, Calibration, "[schedule]")
    train, held = examples.load(wanted)
    engine = TorchEngine(BUDGET_BYTES)
    parts = wanted.blocks or blocks(registry.build(network))
    tried = search(engine, network, model, train, held, parts, wanted, say)
    best = max(tried, key=lambda one: one.accuracy)
    say(f"schedule: {', '.join(best.trained)} trained")
    return {"trained": list(best.trained), "tried": [one._asdict() for one in tried]}


def search(
    engine: Any,
    network: Mapping[str, Any],
    model: Tensors,
    train: Examples,
    held: Examples,
    parts: Sequence[Sequence[str]],
    wanted: Calibration,
    say: Callable[[str], None] = lambda line: None,
) -> list[Tried]:
    """The candidates in the order they were tried; the last one did no better than the one before, or is all.

    Raises:
        JobError: no validation share, no blocks, or a block that is not in the network.
        UpdateError: fine-tuning leads nowhere.
    """
    if not len(held):
        raise JobError("[schedule] held = 0 leaves nothing to validate on: take 0.2")
    unknown = [part for block in parts for part in block if not any(_inside(name, (part,)) for name in model)]
    if unknown or not parts:
        raise JobError(f"[schedule] blocks: {unknown[0]!r} has no tensors" if unknown else "[schedule] blocks: none")
    fit = Fit(epochs=wanted.epochs, batch=wanted.batch, lr=wanted.lr, weight_decay=wanted.weight_decay)
    tried: list[Tried] = []
    for depth in range(1, len(parts) + 1):
        trained = tuple(part for block in parts[-depth:] for part in block)
        hooks = Hooks(steps=(Step(rate=partial(_rate, trained)),))
        given, _ = engine.train(network, model, train, fit, tensors.rng("schedule", wanted.seed), hooks=hooks)
        accuracy = evaluation.main_value(engine.evaluate(network, given, held))
        tried.append(Tried(trained, accuracy))
        say(f"schedule: last {depth} of {len(parts)} blocks trained: {accuracy:.2%} of {len(held)} validation examples")
        if depth > 1 and accuracy <= tried[-2].accuracy:
            break
    return tried


def blocks(model: nn.Module) -> list[list[str]]:
    """The network's blocks, first to last: its children, without weights aside; a trunk of one child is opened.

    A child with batch norm only belongs to the one before. So AlexNet has "features" and "classifier",
    ResNet-18 its stem, four stages and "fc", MobileNetV2 19 features and "classifier".
    """
    from torch import nn

    found: list[list[str]] = []
    children = [(name, child) for name, child in model.named_children() if _weighs(child)]
    for name, child in children:
        inner = [(f"{name}.{key}", each) for key, each in child.named_children() if _weighs(each)]
        if isinstance(child, nn.Sequential) and len(inner) > OPENED and len(children) <= 2:
            for path, each in inner:
                _join(found, path, each)
        else:
            _join(found, name, child)
    return found


def _join(found: list[list[str]], name: str, module: nn.Module) -> None:
    from torch import nn

    linear = any(isinstance(each, (nn.Linear, nn.modules.conv._ConvNd)) for each in module.modules())
    if linear or not found:
        found.append([name])
    else:
        found[-1].append(name)


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _rate(trained: Sequence[str], name: str) -> float:
    return float(_inside(name, trained))


def _inside(name: str, trained: Sequence[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in trained)


# -- a new head -----------------------------------------------------------------------------------


def warm(network: Mapping[str, Any], weights: str, classes: int, seed: int) -> nn.Module:
    """The network with weights for `classes` classes, and in place of its last layer one drawn from `seed`.

    Everything but the last layer with weights is as in the file; that one is for the network's own
    number of classes, the same for every method and device.

    Raises:
        ModelError: no such weights, or nothing or more than the last layer differs with the number of classes.
    """
    old = registry.load({**network, "classes": classes}, weights).state_dict()
    model = registry.load(network, seed=seed)
    held = model.state_dict()
    heads = {name.rpartition(".")[0] for name in held if held[name].shape != old[name].shape}
    if len(heads) != 1:
        raise ModelError(
            f"network {network.get('name')!r}: {len(heads)} layers differ between {classes} classes and its own "
            "number, where one is wanted: the last"
        )
    model.load_state_dict(
        {name: value if name.rpartition(".")[0] in heads else old[name] for name, value in held.items()}
    )
    return model

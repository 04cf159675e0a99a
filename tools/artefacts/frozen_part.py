"""Search for the part of a pre-trained network that devices should train.

FedSQ (arXiv 2604.02990), section III-B and Algorithm 1, line 2: a fresh copy of the network is fine-tuned centrally
with its last block trained, then with its last two, and so on, until the accuracy on a validation share stops
improving. The best candidate is the schedule. The ordinary network is fine-tuned, so the schedule suits FedAvg as
well. The calibration data may be public or synthetic.

The paper starts with the last two blocks. Here the last block alone is tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fedquilt.arrays import tensors
from fedquilt.core import Examples, Fit, Hooks, JobError, ModelError, Step, Tensors, evaluation
from fedquilt.data import examples
from fedquilt.data.spec import DataSpec
from fedquilt.formats import toml
from fedquilt.models.networks import registry

if TYPE_CHECKING:
    from torch import nn

MAX_TRUNK_CHILDREN = 8  # larger trunks are divided. AlexNet's has 5 children
FIT = Fit(epochs=5, batch=64, lr=0.01, weight_decay=1e-4)  # of each candidate
BUDGET_BYTES = 1 << 40  # no limit on the operator's machine


class CalibrationData(DataSpec, frozen=True, forbid_unknown_fields=True):
    """The `[schedule]` table: examples as in `[data]`, with the held-out share for validation."""

    blocks: tuple[tuple[str, ...], ...] = ()  # modules of each block, or () for `list_blocks`


class CandidateResult(NamedTuple):
    """Trained modules of a candidate, and its accuracy on the validation share (0 to 1)."""

    trained: tuple[str, ...]
    accuracy: float


def make_schedule(
    table: Mapping[str, Any], network: Mapping[str, Any], model: Tensors, print_line: Callable[[str], None]
) -> dict[str, Any]:
    """Fine-tune to find the best modules to train, and return the metadata "schedule" of a bundle."""
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    calibration = toml.convert_table(table, CalibrationData, "[schedule]")
    train, validation = examples.load_share(calibration)
    engine = TorchEngine(BUDGET_BYTES)
    blocks = calibration.blocks or list_blocks(registry.build_network(network))
    candidates = search_schedule(engine, network, model, train, validation, blocks, calibration, print_line)
    best = max(candidates, key=lambda candidate: candidate.accuracy)
    print_line(f"schedule: {', '.join(best.trained)} trained")
    return {"trained": list(best.trained), "tried": [candidate._asdict() for candidate in candidates]}


def search_schedule(
    engine: Any,
    network: Mapping[str, Any],
    model: Tensors,
    train: Examples,
    held_out: Examples,
    blocks: Sequence[Sequence[str]],
    data: CalibrationData,
    print_line: Callable[[str], None] = lambda line: None,
) -> list[CandidateResult]:
    """Fine-tune the last block, then the last two, and so on. Return all candidates in order.

    The search ends after the first candidate that is not better than the previous one.
    """
    if not len(held_out):
        raise JobError("[schedule] held = 0 leaves no examples for validation: set held = 0.2")
    unknown = [part for block in blocks for part in block if not any(_is_inside(name, (part,)) for name in model)]
    if unknown or not blocks:
        problem = f"{unknown[0]!r} has no tensors" if unknown else "the network has none"
        raise JobError(f"[schedule] blocks: {problem}: name modules of the network")
    candidates: list[CandidateResult] = []
    for depth in range(1, len(blocks) + 1):
        trained = tuple(part for block in blocks[-depth:] for part in block)
        hooks = Hooks(steps=(Step(rate=partial(_is_inside, trained=trained)),))
        tuned, _ = engine.train(network, model, train, FIT, tensors.seeded_rng("schedule", data.seed), hooks=hooks)
        accuracy = evaluation.main_metric_value(engine.evaluate(network, tuned, held_out))
        candidates.append(CandidateResult(trained, accuracy))
        print_line(
            f"schedule: last {depth} of {len(blocks)} blocks trained: {accuracy:.2%} of {len(held_out)} "
            "validation examples"
        )
        if depth > 1 and accuracy <= candidates[-2].accuracy:
            break
    return candidates


def list_blocks(model: nn.Module) -> list[list[str]]:
    """Return the modules of each block of a network, first to last.

    A block is a child module with parameters. A child without linear layers, such as batch norm, joins the previous
    block. A long sequential trunk is divided into its children. AlexNet has "features" and "classifier", ResNet-18
    its stem, four stages and "fc", MobileNetV2 19 features and "classifier".
    """
    from torch import nn

    blocks: list[list[str]] = []
    children = [(name, child) for name, child in model.named_children() if _has_parameters(child)]
    for name, child in children:
        inner = [(f"{name}.{key}", module) for key, module in child.named_children() if _has_parameters(module)]
        if isinstance(child, nn.Sequential) and len(inner) > MAX_TRUNK_CHILDREN and len(children) <= 2:
            for path, module in inner:
                _append_or_extend_block(blocks, path, module)
        else:
            _append_or_extend_block(blocks, name, child)
    return blocks


def _append_or_extend_block(blocks: list[list[str]], name: str, module: nn.Module) -> None:
    from torch import nn

    is_linear = any(isinstance(submodule, (nn.Linear, nn.modules.conv._ConvNd)) for submodule in module.modules())
    if is_linear or not blocks:
        blocks.append([name])
    else:
        blocks[-1].append(name)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_inside(name: str, trained: Sequence[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in trained)


def load_with_new_head(network: Mapping[str, Any], weights: str, classes: int, seed: int) -> nn.Module:
    """Return a network with weights pre-trained for `classes` classes, and a new last layer.

    The new layer has the number of classes in `network`. Raise ModelError unless exactly one layer depends on it.
    """
    old_state = registry.load_network({**network, "classes": classes}, weights).state_dict()
    model = registry.load_network(network, seed=seed)
    new_state = model.state_dict()
    heads = {name.rpartition(".")[0] for name in new_state if new_state[name].shape != old_state[name].shape}
    if len(heads) != 1:
        raise ModelError(
            f"network {network.get('name')!r}: the shapes of {len(heads)} layers depend on the number of classes, but "
            "only the last layer can be replaced: use another network"
        )
    model.load_state_dict(
        {name: value if name.rpartition(".")[0] in heads else old_state[name] for name, value in new_state.items()}
    )
    return model

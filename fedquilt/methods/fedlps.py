"""FedLPS: all devices share a frozen encoder, cut to its strongest channels on weak ones, and train a predictor.

Paper: Jia et al., FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter Sharing, AAAI 2024
(arXiv 2402.08578), Algorithm 1: the encoder of a pre-trained network is shared and frozen. A device keeps of every
layer of the predictor the channels with the largest L1 norm of their weights, as many as its pruning ratio leaves;
the predictor is trained, and its entries are averaged over the devices that have them.

Deviations: one task. The channels are chosen once, on the coordinator, from the job's first weights, so that only a
device's own part travels (the authors prune on the device after its first training); an addition ties its operands,
and channels tied to the encoder stay whole. The ratio follows the device's memory tier, the largest for one that has
not reported its memory. An entry's mean is weighted by examples; each ratio has its own batch normalisation
statistics, gathered from all devices before an evaluation and at the end, as in `heterofl`; the encoder's stay as they
are. The encoder is the first layers by their names. Random weights are refused, since nobody would ever train the
encoder. All ratios 0 and encoder = 0 are FedAvg, bit for bit but for those statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt.core import (
    Answer,
    Bundle,
    Contribution,
    DeviceView,
    EvaluationSums,
    Hooks,
    JobError,
    ModelError,
    Order,
    Site,
    Step,
    Task,
    adds_up,
    expects,
)
from fedquilt.methods import _by_width, fedavg, heterofl
from fedquilt.methods.heterofl import Sum
from fedquilt.models.partial import masks, width
from fedquilt.models.partial.masks import Follow
from fedquilt.models.partial.width import Places

NOWHERE = Follow(())

Ratio = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the pruning ratios by memory tier, and the encoder's share."""

    ratios: tuple[Ratio, Ratio, Ratio, Ratio, Ratio] = (0.8, 0.5, 0.2, 0.0, 0.0)  # pruned: under 1 GB, 1, 2, 4, 8 GB
    encoder: Annotated[float, Meta(ge=0, lt=1)] = 0.5  # share of the layers that is frozen


@dataclass(frozen=True)
class State(_by_width.State):
    """Global model, the encoder's layers and the channels kept at each ratio."""

    encoder: tuple[str, ...]  # layers
    kept: dict[str, dict[str, np.ndarray]]  # by share of the channels that are left: group -> their indices


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """Choose the frozen encoder and, for each rate, the units that stay in the other layers.

    Raises:
        JobError: the encoder would have random weights.
        ModelError: the network has one layer only.
    """
    if params.encoder and not bundle.meta.get("pretrained", True):
        raise JobError(
            "the encoder is held still, and this network's weights are random: give [model] weights = a file of a "
            "pre-trained network's, or train all of it with encoder = 0"
        )
    plain = fedavg.init(bundle, params, seed)
    begun = _by_width.State(**vars(plain), plan=masks.of_bundle(bundle, plain.model), widths={}, settled=0)
    last = begun.register.classifier()
    order = [name for name in begun.register.parameters_by_layer() if name != last]
    if params.encoder and not order:
        raise ModelError("this network has one layer: there is no encoder to hold still, set encoder = 0")
    encoder = tuple(order[: int(params.encoder * (len(order) + 1))])
    whole = {group for layer in encoder for group in begun.plan.follows.get(f"{layer}.weight", NOWHERE).out}
    kept = {}
    for left in rates(vars(params)):
        chosen = width.strongest(begun.plan, begun.model, left)
        kept[f"{left:g}"] = {group: units for group, units in chosen.items() if group not in whole}
    state = State(**vars(begun), encoder=encoder, kept=kept)
    return replace(state, widths=heterofl.initial_statistics(state, parts(state)))


def rates(params: Mapping[str, Any]) -> list[float]:
    """Share of the channels that is left, by tier."""
    return [round(1 - ratio, 9) for ratio in params["ratios"]]


def encoder_names(state: State) -> set[str]:
    """Return the names of the frozen encoder's tensors, statistics included."""
    return {entry.name for entry in state.register.tensors if entry.layer in state.encoder}


def parts(state: State) -> dict[float, Places]:
    """Places of each part that may be sent, by the share of the channels that is left: the strongest units' entries."""
    shares = sorted({share(state, left) for left in rates(state.params)})
    return {left: width.places(state.plan, state.model, state.kept.get(f"{left:g}", {})) for left in shares}


def share(state: State, left: float) -> float:
    """Largest of the shares that leave as many channels of the predictor as `left`."""
    pruned = next(iter(state.kept.values()))
    return heterofl.width([state.plan.widths[group] for group in pruned], rates(state.params), left)


def left_of(state: State, device: DeviceView) -> float:
    """Share of the channels in a device's part."""
    return share(state, width.by_tier(device.profile, rates(state.params)))


def send(state: State, device: DeviceView) -> Order:
    """Order training of the device's part, with the encoder frozen."""
    left = left_of(state, device)
    order = heterofl.at_rate(state, heterofl.order(state, parts(state)[left], left, state.widths.get(f"{left:g}")))
    return replace(order, params={**order.params, "still": sorted(encoder_names(state))})


def work(task: Task, site: Site) -> Answer:
    """Train the predictor's part, or gather batch normalisation statistics where the task asks for them."""
    if "asked" in task.params:
        return _by_width.measured(task, site)
    hooks, held = heterofl.hooks_of(task, site, scaled=False), set(task.params["still"])
    if held:
        hooks = Hooks(prepare=hooks.prepare, steps=(Step(rate=lambda name: float(name not in held)),))
    answer = fedavg.work(task, site, hooks)
    moved = {name: array for name, array in answer.bundles["model"].items() if name not in held}
    return replace(answer, bundles={"model": moved})


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the device's own part on its held-out share."""
    hooks = heterofl.hooks_of(task, site, scaled=False)
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held, hooks=hooks)


@adds_up(Sum)
@expects(fedavg.part)
def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Add a device's predictor entries to the sums of its ratio."""
    sent, held = heterofl.sent_by(update), encoder_names(state)
    moved = {left: {name: place for name, place in at.items() if name not in held} for left, at in parts(state).items()}
    return heterofl.add_part(state, so_far, sent, moved, update.weight)


METHOD = replace(
    heterofl.METHOD,
    paper="arXiv 2402.08578",
    params=Params,
    state=State,
    init=init,
    send=send,
    work=work,
    check=check,
    fold=fold,
    settle=_by_width.statistics_rounds(parts, left_of, scaled=False, still=encoder_names),
)

"""FedLPS: a frozen encoder that all share, cut to its strongest channels on weak devices, and a predictor to train.

Paper: Jia et al., FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter Sharing, AAAI 2024
(arXiv 2402.08578), Algorithm 1: a device keeps of every layer the channels with the largest L1 norm of their weights,
as many as its ratio of pruning leaves; the encoder is held still and shared, the predictor is trained, and its
entries are averaged over the devices that have them.

Deviations: one task. Encoder and predictor are cut alike, with one ratio. The channels are chosen on the
coordinator, anew in every round, by the global model's weights, so that only a device's own part travels (the
authors prune on the device); additions tie what they add. The ratio is the device's by its memory tier, of one that
has not said the largest. An entry's mean is weighted by examples.
The encoder is the first layers by their names; it should come from a pre-trained network. All ratios 0 and
encoder = 0 are FedAvg, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt.core import Answer, Bundle, Contribution, DeviceView, Hooks, ModelError, Order, Site, Task, Turn
from fedquilt.methods import fedavg, heterofl
from fedquilt.models import layers, submodel
from fedquilt.models.submodel import Counted, Places

Ratio = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    ratios: tuple[Ratio, Ratio, Ratio, Ratio, Ratio] = (0.8, 0.5, 0.2, 0.0, 0.0)  # pruned: under 1 GB, 1, 2, 4, 8 GB
    encoder: Annotated[float, Meta(ge=0, lt=1)] = 0.5  # share of the layers that is held still


@dataclass(frozen=True)
class State(heterofl.State):
    encoder: tuple[str, ...]  # layers


def init(bundle: Bundle, params: Params, seed: int) -> State:
    begun = heterofl.init(bundle, params, seed)
    last = layers.head(begun.model)
    order = [name for name in layers.layers(begun.model) if name != last]
    if params.encoder and not order:
        raise ModelError("this network has one layer: there is no encoder to hold still, set encoder = 0")
    return State(**vars(begun), encoder=tuple(order[: int(params.encoder * (len(order) + 1))]))


def still(state: State) -> set[str]:
    """The encoder's tensors, its normalisations' statistics too."""
    found = layers.layers(state.model)
    modules = {name.rpartition(".")[0] for layer in state.encoder for name in found[layer]}
    return {name for name in state.model if name.rpartition(".")[0] in modules}


def part(state: State, ratio: float) -> Places:
    """The strongest units' entries."""
    return submodel.places(state.plan, state.model, submodel.strongest(state.plan, state.model, 1 - ratio))


def send(state: State, device: DeviceView) -> Order:
    ratio = submodel.by_tier(device.profile, state.params["ratios"])
    order = heterofl.order(state, part(state, ratio), 1 - ratio)
    return replace(order, params={**order.params, "still": sorted(still(state))})


def work(task: Task, site: Site) -> Answer:
    hooks, held = heterofl.hooks_of(task, site, scaled=False), set(task.params["still"])
    if held:
        hooks = Hooks(prepare=hooks.prepare, turns=(Turn(rate=lambda name: float(name not in held)),))
    answer = fedavg.work(task, site, hooks)
    moved = {name: array for name, array in answer.bundles["model"].items() if name not in held}
    return replace(answer, bundles={"model": moved})


def check(task: Task, site: Site) -> Any:
    """How good the device's own part is on its held-out share."""
    hooks = heterofl.hooks_of(task, site, scaled=False)
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held, hooks=hooks)


def fold(state: State, so_far: Counted | None, update: Contribution) -> Counted:
    sent, held = heterofl.sent_by(update), still(state)
    cuts = [part(state, ratio) for ratio in sorted(set(state.params["ratios"]))]
    moved = [{name: place for name, place in at.items() if name not in held} for at in cuts]
    return submodel.add(state.model, so_far, sent, submodel.recognise(state.model, sent, moved), update.weight)


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
)

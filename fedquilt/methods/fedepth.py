"""FeDepth: every device trains the whole network, a group of blocks at a time, as large as its memory allows.

Paper: Zhang et al., Memory-adaptive Depth-wise Heterogeneous Federated Learning (FeDepth), 2023 (arXiv 2303.04887),
Algorithm 1: a device takes its groups of blocks one after another. With a group it trains the classifier; all earlier
blocks are frozen, and a link layer in place of all later ones maps the group's output to the classifier's width.

Deviations: a link is an average over pixels and a linear layer without bias, which is a 1x1 convolution and then the
average. Links are averaged over the devices that have them. Groups follow the memory tier, the most where a device has
not reported its memory; distillation among devices with room to spare is left out. A frozen normalisation keeps its
statistics. The mean is weighted by examples. One group is FedAvg, bit for bit. Groups are as even in stages as
possible, whatever memory each takes (the paper fills each up to the budget), and no device leaves a group out for want
of memory (the paper's partial training): one whose memory does not hold its largest group declines. Every group takes
`epochs` passes of its own, in an order of its own, with a new optimizer; the loss reported is the last group's. The
rate falls by `lr_decay` from round to round, not by a cosine. The whole network is evaluated, without links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import layer_costs, tensors
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    Contribution,
    DeviceView,
    EvaluationSums,
    Hooks,
    Order,
    Site,
    Step,
    Task,
    Work,
    adds_up,
    expects,
)
from fedquilt.methods import depthfl, fedavg, heterofl
from fedquilt.models.networks import stages
from fedquilt.models.partial import depth as by_depth
from fedquilt.models.partial import width as by_width
from fedquilt.models.partial.depth import Body
from fedquilt.models.partial.width import Counted, Places

Groups = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, with `epochs` for each group, and the number of groups by memory tier."""

    stages: Groups = 6  # that groups are made of; no more than the network has blocks
    groups: tuple[Groups, Groups, Groups, Groups, Groups] = (6, 6, 3, 2, 1)  # under 1 GB, from 1, 2, 4 and 8 GB


@dataclass(frozen=True)
class Group:
    """Stages trained together."""

    names: tuple[str, ...]  # of its own tensors
    end: int  # stage behind it; of the network's last group: the number of stages


def init(bundle: Bundle, params: Params, seed: int) -> fedavg.State:
    """Start from the bundle's network with a random link before each stage, uniform in +-1/sqrt(width)."""
    begun = fedavg.init(bundle, params, seed)
    found = by_depth.split_stages(begun.model, params.stages, begun.register)
    rng = tensors.rng(seed, "fedepth", "links")
    model = dict(begun.model)
    for index, stage in enumerate(found.stages[1:], start=1):
        bound = stage.width**-0.5
        model[link(index)] = rng.uniform(-bound, bound, (found.features, stage.width)).astype(np.float32)
    return replace(begun, model=model)


def link(end: int) -> str:
    """Name of the tensor of the link before stage `end`."""
    return f"link.s{end}.weight"


def network(state: fedavg.State) -> dict[str, np.ndarray]:
    """Tensors of the plain network, without links."""
    return {name: array for name, array in state.model.items() if not name.startswith("link.")}


def groups(body: Body, count: int) -> list[Group]:
    """The stages split into `count` groups, as even as possible."""
    found = []
    for part in np.array_split(np.arange(len(body.stages)), min(count, len(body.stages))):
        found.append(Group(tuple(name for i in part for name in body.stages[i].names), int(part[-1]) + 1))
    return found


def part(state: fedavg.State, body: Body, count: int) -> Places:
    """Places of the whole network and of the links that `count` groups need."""
    links = [link(group.end) for group in groups(body, count)[:-1]]
    return dict.fromkeys(sorted([*network(state), *links]), (None, None))


def send(state: fedavg.State, device: DeviceView) -> Order:
    """Return the order to train the network in as many groups of blocks as the device's memory tier needs."""
    count = by_width.by_tier(device.profile, state.params["groups"])
    body = by_depth.split_stages(network(state), state.params["stages"], state.register)
    found, at = groups(body, count), part(state, body, count)
    sub = by_width.cut(state.model, at)
    order = fedavg.training_order(state, {"model": sub})
    ends = [[group.end, body.stages[group.end].entrance, body.stages[group.end].width] for group in found[:-1]]
    table = {"groups": [list(group.names) for group in found], "ends": ends, "head": body.head}
    return replace(order, params={**order.params, **table}, work=_cost(state, order, found))


def _cost(state: fedavg.State, order: Order, found: list[Group]) -> Any:
    """Cost: for each group a forward pass up to its end and a backward pass through its own; memory: the largest's."""
    if len(found) == 1:
        return order.work
    model, peaks = network(state), []
    works: list[Work] = []
    before: dict[str, np.ndarray] = {}
    head = {name: model[name] for name in model.keys() - {name for group in found for name in group.names}}
    for group in found:
        own = {name: model[name] for name in group.names}
        _, activations = layer_costs.share(state.costs(), model, own)
        before |= own
        part = state.of({**before, **head})
        part = replace(
            part,
            flops=state.flops * layer_costs.share(state.costs(), model, before)[0],
            layers=layer_costs.cut(state.layers, state.model, part.model),
        )
        works.append(fedavg.training_order(part, {}, moved={**own, **head}).work)
        light = replace(state, example_bytes=math.ceil(activations * state.example_bytes))
        peaks.append(fedavg.training_order(light, {}, moved={**own, **head}).work.peak_bytes)
    return msgspec.structs.replace(reduce(Work.plus, works), peak_bytes=max(peaks))


# -- on the device --------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
    """Train group after group, each with its link to the classifier; earlier groups are frozen."""
    parts, ends, model = task.params["groups"], task.params["ends"], site.load("model")
    if len(parts) == 1:
        return fedavg.work(task, site)
    head, steps, told = task.params["head"], 0.0, {}
    before: set[str] = set()
    for index, names in enumerate(parts):
        before |= set(names)
        start, moved = dict(model), {*names, f"{head}.weight", f"{head}.bias"}
        prepare = None
        if index < len(ends):
            end, entrance, width = ends[index]
            start = {name: model[name] for name in model if name in before or name.rpartition(".")[0] == head}
            prepare = linked(stages.Stage(entrance, width, ()), dict(start), int(end), head)
            start[link(end)], moved = model[link(end)], moved | {link(end)}
        else:
            start = {name: array for name, array in model.items() if not name.startswith("link.")}
        hooks = Hooks(prepare=prepare, steps=(Step(rate=lambda name, moved=moved: float(name in moved)),))  # type: ignore[misc]
        done = index / len(parts)
        at = replace(site, progress=lambda share, done=done: site.progress(done + share / len(parts)))  # type: ignore[misc]
        answer = fedavg.trained(task, at, start, hooks)
        model = {**model, **answer.bundles["model"]}
        told, steps = dict(answer.metrics), steps + answer.metrics["steps"]
    return Answer({"model": model}, float(len(site.train)), {**told, "steps": steps})


def linked(behind: stages.Stage, start: Mapping[str, np.ndarray], end: int, head: str) -> Any:
    """Hook that ends the network before a stage, with a link from there to its classifier."""

    def prepare(module: Any) -> Any:
        from torch import nn

        last = module.get_submodule(head)

        def answer(told: list[Any], scores: Any) -> Any:
            return last(getattr(module.link, f"s{end}")(told[0]))

        wide = last.in_features
        module = stages.first_stages(module, start, (behind,), answer, whole=False)
        module.add_module("link", nn.ModuleDict({f"s{end}": nn.Linear(behind.width, wide, bias=False)}))
        return module

    return prepare


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the whole network on the device's held-out share."""
    model = {name: array for name, array in site.load("model").items() if not name.startswith("link.")}
    return site.engine.evaluate(task.params["network"], model, site.held)


@adds_up(Counted)
@expects(fedavg.part)
def fold(state: fedavg.State, so_far: Counted | None, update: Contribution) -> Counted:
    """Add an update to the sums, entry by entry. Its number of groups shows which links it carries."""
    sent = heterofl.sent_by(update)
    body = by_depth.split_stages(network(state), state.params["stages"], state.register)
    cuts = [part(state, body, count) for count in sorted(set(state.params["groups"]))]
    return by_width.add(state.model, so_far, sent, by_width.recognise(state.model, sent, cuts), update.weight)


def result(state: fedavg.State) -> Artefact:
    """Return the global network without its links."""
    return fedavg.weights_artefact(state.network, network(state))


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2303.04887",
    params=Params,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    check=check,
    fold=fold,
    step=depthfl.step,
    result=result,
)

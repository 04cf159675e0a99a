"""FeDepth: every device trains the whole network, so many blocks at a time as its memory allows.

Paper: Zhang et al., Memory-adaptive Depth-wise Heterogeneous Federated Learning (FeDepth), 2023 (arXiv 2303.04887),
Algorithm 1: a device takes its groups of blocks one after another. With a group it trains the classifier, all before
it is held still, and a link layer in place of all that follows takes what the group gives to the classifier's width.

Deviations: a link is an average over pixels and a linear layer without bias, which is a 1x1 convolution and then the
average. Links are averaged over the devices that have them. Groups go by the memory tier, the most where a device
has not said; without distillation among devices with room to spare. A held-still normalisation keeps its statistics.
The mean is weighted by examples. One group is FedAvg, bit for bit. Groups are as even in stages as can be, whatever
memory each takes (the paper fills each up to the budget), and no device leaves a group out for want of memory (the
paper's partial training): one whose memory does not hold its largest group declines. Every group takes `epochs` passes
of its own, in an order of its own, with an optimizer begun anew; the loss told is the last group's. The rate falls by
`lr_decay` from round to round, not by a cosine. Evaluated is the whole network, without links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import layers, tensors
from fedquilt.core import Answer, Artefact, Bundle, Contribution, DeviceView, Hooks, Order, Site, Step, Task, expects
from fedquilt.methods import depthfl, fedavg, heterofl
from fedquilt.models.networks import stages
from fedquilt.models.partial import depth as by_depth
from fedquilt.models.partial import width as by_width
from fedquilt.models.partial.depth import Body
from fedquilt.models.partial.width import Counted, Places

Groups = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """`epochs` are those of each group."""

    stages: Groups = 6  # that groups are made of; no more than the network has blocks
    groups: tuple[Groups, Groups, Groups, Groups, Groups] = (6, 6, 3, 2, 1)  # under 1 GB, from 1, 2, 4 and 8 GB


@dataclass(frozen=True)
class Group:
    """What is trained at once."""

    names: tuple[str, ...]  # of its own tensors
    end: int  # the stage behind it; the network's last group: how many stages there are


def init(bundle: Bundle, params: Params, seed: int) -> fedavg.State:
    begun = fedavg.init(bundle, params, seed)
    found = by_depth.body(begun.model, params.stages, layers.calls(begun.network))
    rng = tensors.rng(seed, "fedepth", "links")
    model = dict(begun.model)
    for index, stage in enumerate(found.stages[1:], start=1):
        bound = stage.width**-0.5
        model[link(index)] = rng.uniform(-bound, bound, (found.features, stage.width)).astype(np.float32)
    return replace(begun, model=model)


def link(end: int) -> str:
    """The tensor of the link before stage `end`."""
    return f"link.s{end}.weight"


def network(state: fedavg.State) -> dict[str, np.ndarray]:
    """The network's own tensors."""
    return {name: array for name, array in state.model.items() if not name.startswith("link.")}


def groups(body: Body, count: int) -> list[Group]:
    """The stages in so many groups, as even as can be."""
    found = []
    for part in np.array_split(np.arange(len(body.stages)), min(count, len(body.stages))):
        found.append(Group(tuple(name for i in part for name in body.stages[i].names), int(part[-1]) + 1))
    return found


def part(state: fedavg.State, body: Body, count: int) -> Places:
    """All of the network, and the links that so many groups take."""
    links = [link(group.end) for group in groups(body, count)[:-1]]
    return dict.fromkeys(sorted([*network(state), *links]), (None, None))


def send(state: fedavg.State, device: DeviceView) -> Order:
    count = by_width.by_tier(device.profile, state.params["groups"])
    body = by_depth.body(network(state), state.params["stages"], layers.calls(state.network))
    found, at = groups(body, count), part(state, body, count)
    sub = by_width.cut(state.model, at)
    order = fedavg.order(state, {"model": sub})
    ends = [[group.end, body.stages[group.end].entrance, body.stages[group.end].width] for group in found[:-1]]
    table = {"groups": [list(group.names) for group in found], "ends": ends, "head": body.head}
    return replace(order, params={**order.params, **table}, work=_cost(state, order, found))


def _cost(state: fedavg.State, order: Order, found: list[Group]) -> Any:
    """Of each group the forward pass up to its end and twice its own; in memory the largest group counts."""
    if len(found) == 1:
        return order.work
    model, before, passes, peaks = network(state), 0.0, 0.0, []
    head = {name: model[name] for name in model.keys() - {name for group in found for name in group.names}}
    for group in found:
        own = {name: model[name] for name in group.names}
        flops, activations = by_width.lighter(model, own)
        before += flops
        passes += before + 2 * flops
        light = replace(state, example_bytes=math.ceil(activations * state.example_bytes))
        peaks.append(fedavg.order(light, {}, moved={**own, **head}).work.peak_bytes)
    flops = state.flops * state.params["epochs"] * passes
    return msgspec.structs.replace(order.work, flops_per_example=flops, peak_bytes=max(peaks))


# -- on the device --------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
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
    """The hook that ends the network before a stage, with a link from there to its classifier."""

    def prepare(module: Any) -> Any:
        from torch import nn

        last = module.get_submodule(head)

        def answer(told: list[Any], scores: Any) -> Any:
            return last(getattr(module.link, f"s{end}")(told[0]))

        wide = last.in_features
        module = stages.first(module, start, (behind,), answer, whole=False)
        module.add_module("link", nn.ModuleDict({f"s{end}": nn.Linear(behind.width, wide, bias=False)}))
        return module

    return prepare


def check(task: Task, site: Site) -> Mapping[str, float]:
    """How good the whole network is on the device's held-out share."""
    model = {name: array for name, array in site.load("model").items() if not name.startswith("link.")}
    return site.engine.evaluate(task.params["network"], model, site.held)


@expects(fedavg.part)
def fold(state: fedavg.State, so_far: Counted | None, update: Contribution) -> Counted:
    sent = heterofl.sent_by(update)
    body = by_depth.body(network(state), state.params["stages"], layers.calls(state.network))
    cuts = [part(state, body, count) for count in sorted(set(state.params["groups"]))]
    return by_width.add(state.model, so_far, sent, by_width.recognise(state.model, sent, cuts), update.weight)


def result(state: fedavg.State) -> Artefact:
    return Artefact("weights", {"network": state.network}, network(state))


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

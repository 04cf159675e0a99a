"""FeDepth: each device trains the whole network, one group of blocks at a time.

Paper: Zhang et al., Memory-adaptive Depth-wise Heterogeneous Federated Learning (FeDepth), 2023 (arXiv 2303.04887),
Algorithm 1: a device trains its groups of blocks one after another, each with the classifier. All earlier blocks are
frozen, and a link layer in place of all later blocks maps the group's output to the classifier's width.

Deviations: a link is an average over pixels and a linear layer without bias, which equals a 1x1 convolution and an
average. Links are averaged over the devices that have them. The number of groups follows the memory tier, and is the
largest for a device that has not reported its memory. Distillation among devices with spare memory is left out. A
frozen normalisation keeps its statistics. The mean is weighted by examples. One group is bit-identical to FedAvg.
Groups have nearly equal numbers of stages, whatever their memory (the paper fills each group up to the budget). No
device skips a group for lack of memory (the paper's partial training): a device that cannot hold its largest group
declines. Every group is trained for `epochs` passes in its own order, with a new optimizer. The reported loss is the
last group's. The learning rate is constant by default; `schedule = "cosine"` is the paper's. Evaluation uses the whole
network, without links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.methods import depthfl, fedavg, heterofl
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.networks import stages
from fedquilt.models.networks.stages import StagedNetwork
from fedquilt.models.partial import width as by_width
from fedquilt.models.partial.width import TensorCut, WeightedEntrySums

Groups = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, with `epochs` for each group, and the number of groups by memory tier."""

    stages: Groups = 6  # stages of the network, which form the groups; no more than the network has blocks
    groups: tuple[Groups, Groups, Groups, Groups, Groups] = (6, 6, 3, 2, 1)  # under 1 GB, from 1, 2, 4 and 8 GB


@dataclass(frozen=True)
class StageGroup:
    """Stages that are trained together."""

    names: tuple[str, ...]  # of the group's tensors
    end: int  # index of the next stage, or the number of stages for the last group


def init(bundle: core.Bundle, params: Params, seed: int) -> NetworkState:
    """Return the first state, with a random link before each stage but the first."""
    initial = fedavg.init(bundle, params, seed)
    body = stages.split_stages(initial.model, params.stages, initial.register)
    rng = tensors.seeded_rng(seed, "fedepth", "links")
    model = dict(initial.model)
    for index, stage in enumerate(body.stages[1:], start=1):
        bound = stage.width**-0.5
        model[link_name(index)] = rng.uniform(-bound, bound, (body.features, stage.width)).astype(np.float32)
    return replace(initial, model=model)


def link_name(end: int) -> str:
    """Return the tensor name of the link before stage `end`."""
    return f"link.s{end}.weight"


def plain_network(state: NetworkState) -> dict[str, np.ndarray]:
    """Return the tensors of the plain network, without links."""
    return {name: array for name, array in state.model.items() if not name.startswith("link.")}


def split_into_groups(body: StagedNetwork, count: int) -> list[StageGroup]:
    """Return at most `count` groups with nearly equal numbers of consecutive stages."""
    groups = []
    for indices in np.array_split(np.arange(len(body.stages)), min(count, len(body.stages))):
        groups.append(StageGroup(tuple(name for i in indices for name in body.stages[i].names), int(indices[-1]) + 1))
    return groups


def places_for_groups(state: NetworkState, body: StagedNetwork, count: int) -> TensorCut:
    """Select the network and the links between `count` groups, with all entries of each tensor."""
    links = [link_name(group.end) for group in split_into_groups(body, count)[:-1]]
    return dict.fromkeys(sorted([*plain_network(state), *links]), (None, None))


def send(state: NetworkState, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train as many groups of blocks as the device's memory tier requires."""
    count = by_width.select_by_tier(device.profile, state.params["groups"])
    body = stages.split_stages(state.model, state.params["stages"], state.register)
    groups, places = split_into_groups(body, count), places_for_groups(state, body, count)
    subnetwork = by_width.cut_tensors(state.model, places)
    task_spec = local_training.training_task_spec(state, {"model": subnetwork})
    ends = [[group.end, body.stages[group.end].entrance, body.stages[group.end].width] for group in groups[:-1]]
    group_params = {"groups": [list(group.names) for group in groups], "ends": ends, "head": body.head}
    task_spec = replace(task_spec, params={**task_spec.params, **group_params})
    if not ends:
        return task_spec
    return replace(
        task_spec,
        work=local_training.groups_work(state, plain_network(state), [trained_group.names for trained_group in groups]),
    )


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the groups in turn, each with a link to the classifier and with earlier groups frozen."""
    groups, ends, model = task.params["groups"], task.params["ends"], site.load("model")
    if len(groups) == 1:
        return fedavg.work(task, site)
    head, steps, metrics = task.params["head"], 0.0, {}
    seen_names: set[str] = set()
    for index, names in enumerate(groups):
        seen_names |= set(names)
        start, trained_names = dict(model), {*names, f"{head}.weight", f"{head}.bias"}
        prepare = None
        if index < len(ends):
            end, entrance, width = ends[index]
            start = {name: model[name] for name in model if name in seen_names or name.rpartition(".")[0] == head}
            prepare = make_link_hook(stages.Stage(entrance, width, ()), dict(start), int(end), head)
            start[link_name(end)], trained_names = model[link_name(end)], trained_names | {link_name(end)}
        else:
            start = {name: array for name, array in model.items() if not name.startswith("link.")}
        client_result = _train_group(task, site, start, trained_names, prepare, index)
        model = {**model, **client_result.bundles["model"]}
        metrics, steps = dict(client_result.metrics), steps + client_result.metrics["steps"]
    return core.ClientResult({"model": model}, float(len(site.train)), {**metrics, "steps": steps})


def _train_group(
    task: core.Task, site: core.ClientContext, start: core.Tensors, names: set[str], prepare: Any, index: int
) -> core.ClientResult:
    """Train the tensors in `names`, as group `index` of the task's groups."""
    count = len(task.params["groups"])
    hooks = core.Hooks(prepare=prepare, steps=(core.Step(rate=lambda name: float(name in names)),))
    group_site = replace(site, progress=lambda share: site.progress(index / count + share / count))
    return local_training.train_from(task, group_site, start, hooks)


def make_link_hook(next_stage: stages.Stage, start: Mapping[str, np.ndarray], end: int, head: str) -> Any:
    """Return the hook that ends the network before stage `end` with a link to the classifier `head`."""

    def prepare(module: Any) -> Any:
        from torch import nn

        classifier = module.get_submodule(head)

        def apply_link(stage_inputs: list[Any], scores: Any) -> Any:
            return classifier(getattr(module.link, f"s{end}")(stage_inputs[0]))

        features = classifier.in_features
        module = stages.keep_first_stages(module, start, (next_stage,), apply_link, keep_later_stages=False)
        module.add_module("link", nn.ModuleDict({f"s{end}": nn.Linear(next_stage.width, features, bias=False)}))
        return module

    return prepare


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the whole network on the held-out examples."""
    model = {name: array for name, array in site.load("model").items() if not name.startswith("link.")}
    return site.engine.evaluate(task.params["network"], model, site.held_out)


def fold(state: NetworkState, accumulator: WeightedEntrySums | None, update: core.DeviceUpdate) -> WeightedEntrySums:
    """Return the sums with an update's entries added. Raise UpdateError if its links fit no group count."""
    model = heterofl.require_sent_model(update)
    body = stages.split_stages(state.model, state.params["stages"], state.register)
    cuts = [places_for_groups(state, body, count) for count in sorted(set(state.params["groups"]))]
    return by_width.add_entries(
        state.model, accumulator, model, by_width.recognise_cut(state.model, model, cuts), update.weight
    )


def result(state: NetworkState) -> core.Artefact:
    """Return the global network without its links."""
    return local_training.weights_artefact(state.network, plain_network(state))


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2303.04887",
    params=Params,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    aggregation=core.Aggregation(
        fold, accumulator=lambda state: WeightedEntrySums, schema=local_training.partial_model_schema
    ),
    step=depthfl.step,
    result=result,
)

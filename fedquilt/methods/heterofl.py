"""HeteroFL: each device trains the leading channels of each layer that fit its memory.

Paper: Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021 (arXiv 2010.01264), Algorithm 1. A device at rate r has the first ceil(r * C) of each layer's C
channels. An entry of the new global model is the mean over the devices that have the entry, or unchanged if none has
(Eq. 2-5). The outputs of a narrower layer are multiplied by 1/r (the Scaler, section 3). In training the scores of
classes without examples on the device are 0 (masked cross entropy), and the last layer's rows are averaged over the
devices that have examples of their class. This option, `masked`, reveals a device's classes to the coordinator.

Deviations: the rate follows the device's memory tier, and is the smallest for a device that has not reported its
memory. The mean is weighted by examples, as in FedAvg (the paper counts devices). With all rates 1, all classes on all
devices and clip = 0 the result is bit-identical to FedAvg, except for batch norm statistics. These are gathered as in
the paper ("static" batch normalisation, section 3) and the authors' code: before an evaluation and before the end of
the job, in a round that does not count, all devices run the global model on their examples, each mini-batch normalised
by its own statistics, and the mean and variance over all devices' examples become the model's. Here each width has its
own statistics. A device runs its own width, smaller widths, and larger widths whose forward pass fits its memory. A
width without any such device, and every width between two such rounds, has the average of the running statistics of
training at that width, or the first statistics before any training. Gradients are clipped as in the authors' code:
without normalisation the Scaler makes them 1/r as large in every layer, and narrow parts diverge. The Scaler also
applies in a device's own evaluation. Channels that `fedquilt prepare` could not follow through the network stay whole,
and an addition ties its operands. The result is the whole network, so that some device should have rate 1.

Other methods that send parts by width use the functions of this module (`initial_width_state`, `part_task_spec`,
`make_width_hooks`, `add_part`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import core, metrics
from fedquilt.arrays import tensors
from fedquilt.methods import fedavg
from fedquilt.methods._subnetworks import State, gather_statistics, make_statistics_round, make_subnetwork_state
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import masks
from fedquilt.models.partial import width as width_parts
from fedquilt.models.partial.width import TensorCut, WeightedEntrySums

Rate = Annotated[float, Meta(gt=0, le=1)]
Rates = tuple[Rate, Rate, Rate, Rate, Rate]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the rates by memory tier."""

    clip: Annotated[float, Meta(ge=0)] = 1.0  # largest gradient norm; 0: no clipping
    rates: Rates = (0.0625, 0.125, 0.25, 0.5, 1.0)  # r of devices with a budget under 1 GB, from 1, 2, 4 and 8 GB
    masked: bool = True  # leave out classes that a device lacks from its loss, and from the mean of their rows


@dataclass(frozen=True)
class HeteroFLSums:
    """Sums of a round: entries of the model, and batch norm statistics of each narrower part."""

    entries: WeightedEntrySums
    widths: Mapping[str, WeightedEntrySums]


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with the first batch norm statistics of each width.

    Raises:
        ModelError: If `masked` is set and the network has no plain last linear layer.
    """
    if metrics.task_from_network(bundle.meta["network"]) != "classes":
        params = replace(params, masked=False)  # there are no classes that a device could lack
    initial = initial_width_state(bundle, params, seed)
    if params.masked:
        head = initial.register.find_classifier()
        if head is None:
            raise core.ModelError("the network has no last linear layer with a row for each class: set masked = false")
        initial.register.require_plain_weight(head)
    return initial


def initial_width_state(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state of a method that sends parts at the rates in `params`."""
    plain = fedavg.init(bundle, params, seed)
    initial = State(**vars(plain), plan=masks.plan_from_bundle(bundle, plain.model), widths={}, settled=0)
    return replace(
        initial, widths=initial_statistics(initial, {rate: leading_places(initial, rate) for rate in params.rates})
    )


def initial_statistics(state: State, parts: Mapping[float, TensorCut]) -> dict[str, dict[str, np.ndarray]]:
    """Return the first batch norm statistics of each narrower part, by rate, from the whole network."""
    names = [entry.name for entry in state.register.tensors if entry.normalises and entry.kind != "parameter"]
    return {
        f"{rate:g}": width_parts.cut_tensors(state.model, {name: places[name] for name in names})
        for rate, places in sorted(parts.items())
        if rate < 1
    }


# -- sending parts --------------------------------------------------------------------------------


def leading_places(state: State, rate: float) -> TensorCut:
    """Return the indices of the leading units in each tensor, at a rate."""
    return width_parts.unit_indices_by_tensor(state.plan, state.model, width_parts.leading_units(state.plan, rate))


def canonical_rate(widths: Collection[int], rates: Sequence[float], rate: float) -> float:
    """Return the largest of `rates` and 1 that keeps as many units of each group as `rate` does."""

    def unit_counts(rate: float) -> list[int]:
        return [width_parts.unit_count(width, rate) for width in widths]

    return max(candidate for candidate in (*rates, 1.0) if unit_counts(candidate) == unit_counts(rate))


def part_task_spec(
    state: NetworkState, places: TensorCut, rate: float, replacements: core.Tensors | None = None
) -> core.TaskSpec:
    """Return the task spec to train a part, with the part's own FLOPs, bytes and memory.

    Args:
        state: State of the whole network.
        places: Indices of the part's units in each tensor.
        rate: Width of the part, above 0 and at most 1.
        replacements: Tensors that replace the network's, or None.
    """
    part_state = make_subnetwork_state(state, places, replacements)
    task_spec = local_training.training_task_spec(part_state, {"model": part_state.model})
    network_bytes = tensors.total_bytes([state.model])  # the network is built whole before it is cut
    work = msgspec.structs.replace(task_spec.work, peak_bytes=max(task_spec.work.peak_bytes, 2 * network_bytes))
    return replace(task_spec, params={**task_spec.params, "rate": rate}, work=work)


def device_rate(state: State, device: core.DeviceView) -> float:
    """Return the rate of a device's part by its memory tier, above 0 and at most 1."""
    rates = state.params["rates"]
    return canonical_rate(state.plan.widths.values(), rates, width_parts.select_by_tier(device.profile, rates))


def places_by_rate(state: State) -> dict[float, TensorCut]:
    """Return the indices of the leading units in each tensor for each part, by the part's rate."""
    rates, widths = state.params["rates"], state.plan.widths.values()
    return {
        rate: leading_places(state, rate) for rate in sorted({canonical_rate(widths, rates, rate) for rate in rates})
    }


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the leading channels that the device's memory tier allows."""
    rate = device_rate(state, device)
    task_spec = with_training_round(
        state, part_task_spec(state, leading_places(state, rate), rate, state.widths.get(f"{rate:g}"))
    )
    return replace(task_spec, params={**task_spec.params, "head": state.register.find_classifier()})


def with_training_round(state: State, task_spec: core.TaskSpec) -> core.TaskSpec:
    """Return the task spec with the number of statistics rounds, which the schedule must not count."""
    return replace(task_spec, params={**task_spec.params, "settled": state.settled})


def make_width_hooks(task: core.Task, site: core.ClientContext, *, scaled: bool = True) -> core.Hooks:
    """Return hooks that build the narrower network, or no hooks for the whole network."""
    if task.params["rate"] == 1:
        return core.Hooks()
    start = site.load("model")
    return core.Hooks(prepare=lambda module: width_parts.shrink_module(module, start, scaled=scaled))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's part on the classes that the device has, or gather batch norm statistics."""
    if "asked" in task.params:
        return gather_statistics(task, site)
    hooks = make_width_hooks(task, site)
    if not task.params["masked"]:
        return fedavg.work(task, site, hooks)
    classes = len(site.load("model")[f"{task.params['head']}.weight"])
    has_examples = np.isin(np.arange(classes), site.train.y)
    if not has_examples.all():
        shrink = hooks.prepare or (lambda module: module)
        hooks = core.Hooks(prepare=lambda module: width_parts.mask_classes(shrink(module), has_examples))
    client_result = fedavg.work(task, site, hooks)
    return replace(client_result, bundles={**client_result.bundles, "classes": {"held": has_examples.astype(np.uint8)}})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's part on the held-out examples."""
    return site.engine.evaluate(
        task.params["network"], site.load("model"), site.held_out, hooks=make_width_hooks(task, site)
    )


# -- aggregation ----------------------------------------------------------------------------------


def require_sent_model(update: core.DeviceUpdate) -> Mapping[str, Any]:
    """Return the model in an update.

    Raises:
        UpdateError: If the update has no bundle "model".
    """
    if "model" not in update.bundles:
        raise core.UpdateError(f"{update.device} sent no bundle 'model'")
    return update.bundles["model"]


def update_schema(state: State) -> core.UpdateSchema:
    """Return the schema of an update: a part of the model and, with `masked`, the device's classes."""
    if not state.params.get("masked"):
        return local_training.partial_model_schema(state)
    head_weight = f"{state.register.find_classifier()}.weight"
    class_spec = {"held": tensors.TensorSpec(state.model[head_weight].shape[:1], np.dtype(np.uint8))}
    return core.UpdateSchema({"model": state.model, "classes": class_spec}, exact=False)


def fold(state: State, accumulator: HeteroFLSums | None, update: core.DeviceUpdate) -> HeteroFLSums:
    """Return the sums with a device's part added, except classifier rows of classes it lacks."""
    model = require_sent_model(update)
    rows = reported_classes(state, update) if state.params.get("masked") else None
    return add_part(state, accumulator, model, places_by_rate(state), update.weight, rows)


def add_part(
    state: State,
    accumulator: HeteroFLSums | None,
    part: core.Tensors,
    parts: Mapping[float, TensorCut],
    weight: float,
    rows: np.ndarray | None = None,
) -> HeteroFLSums:
    """Return the sums of a round with a device's part added.

    Args:
        state: State of the whole network, with each part's statistics.
        accumulator: Sums of the round, or None before the first update.
        part: Tensors of the update.
        parts: Indices of each part that may have been sent, by rate.
        weight: Weight of the device in the mean.
        rows: Rows of the classifier to add, or None for all.

    Raises:
        UpdateError: If the tensors fit none of the parts, or are not finite.
    """
    part_places = width_parts.recognise_cut(state.model, part, list(parts.values()))
    key = next(f"{rate:g}" for rate, places in parts.items() if places is part_places)
    row_places = dict(part_places)
    tensors.require_finite(part)
    if rows is not None:
        head = state.register.find_classifier()
        for name in (f"{head}.weight", f"{head}.bias"):
            if name in row_places:
                row_places[name] = (rows, row_places[name][1])
                part = {**part, name: part[name][rows]}
    statistics = {name: part[name] for name in state.widths.get(key, {}) if name in part}
    entry_places = {name: axes for name, axes in row_places.items() if name not in statistics}
    widths = dict(accumulator.widths) if accumulator else {}
    if statistics:
        whole_tensors = dict.fromkeys(statistics, (None, None))
        widths[key] = width_parts.add_entries(state.widths[key], widths.get(key), statistics, whole_tensors, weight)
    entries = width_parts.add_entries(
        state.model,
        accumulator.entries if accumulator else None,
        {name: part[name] for name in entry_places},
        entry_places,
        weight,
    )
    return HeteroFLSums(entries, widths)


def reported_classes(state: State, update: core.DeviceUpdate) -> np.ndarray:
    """Return the numbers of the classes that occur in a device's examples.

    Raises:
        UpdateError: If the update does not report its classes.
    """
    head_weight = f"{state.register.find_classifier()}.weight"
    classes = update.bundles.get("classes", {})
    tensors.require_addable(classes, {"held": np.zeros(len(state.model[head_weight]), np.uint8)})
    return np.flatnonzero(classes["held"])


def step(state: State, total: HeteroFLSums | None) -> State:
    """Return the state with the mean of each entry and statistic over its senders (HeteroFL, Eq. 2 to 5)."""
    if total is None:
        return state
    widths = {key: width_parts.average_entries(state.widths[key], sums) for key, sums in total.widths.items()}
    return replace(
        state, model=width_parts.average_entries(state.model, total.entries), widths={**state.widths, **widths}
    )


METHOD = replace(
    fedavg.METHOD,
    traits=replace(
        fedavg.METHOD.traits, sent_data="the sub-network of its memory tier and, with `masked`, its classes"
    ),
    paper="arXiv 2010.01264",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    aggregation=core.Aggregation(fold, accumulator=lambda state: HeteroFLSums, schema=update_schema),
    step=step,
    evaluation_round=make_statistics_round(places_by_rate, device_rate, scaled=True),
)

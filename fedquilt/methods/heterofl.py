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
from fedquilt.models.partial.width import Places, WeightedEntrySums

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
    """Sums of a round: shared entries, and batch norm statistics of each narrower part."""

    whole: WeightedEntrySums
    widths: Mapping[str, WeightedEntrySums]


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with the first batch norm statistics of each width.

    Raises:
        ModelError: If `masked` is set and the network has no plain last linear layer.
    """
    if metrics.task_from_network(bundle.meta["network"]) != "classes":
        params = replace(params, masked=False)  # there are no classes that a device could lack
    begun = initial_width_state(bundle, params, seed)
    if params.masked:
        last = begun.register.find_classifier()
        if last is None:
            raise core.ModelError(
                "this network has no last linear layer, whose rows are the classes: set masked = false"
            )
        begun.register.require_plain_weight(last)
    return begun


def initial_width_state(bundle: core.Bundle, params: Any, seed: int) -> State:
    """Return the first state of a method that sends parts at the rates in `params`."""
    plain = fedavg.init(bundle, params, seed)
    begun = State(**vars(plain), plan=masks.plan_from_bundle(bundle, plain.model), widths={}, settled=0)
    return replace(
        begun, widths=initial_statistics(begun, {rate: leading_places(begun, rate) for rate in params.rates})
    )


def initial_statistics(state: State, parts: Mapping[float, Places]) -> dict[str, dict[str, np.ndarray]]:
    """Return the first batch norm statistics of each narrower part, cut from the network's own."""
    names = [each.name for each in state.register.tensors if each.normalises and each.kind != "parameter"]
    return {
        f"{rate:g}": width_parts.cut_tensors(state.model, {name: at[name] for name in names})
        for rate, at in sorted(parts.items())
        if rate < 1
    }


# -- sending parts --------------------------------------------------------------------------------


def leading_places(state: State, rate: float) -> Places:
    """Return the places of the leading units' entries at a rate."""
    return width_parts.unit_indices_by_tensor(state.plan, state.model, width_parts.leading_units(state.plan, rate))


def canonical_rate(widths: Collection[int], rates: Sequence[float], rate: float) -> float:
    """Return the largest rate that leaves as many units in each group as `rate`."""

    def unit_counts(rate: float) -> list[int]:
        return [width_parts.unit_count(each, rate) for each in widths]

    return max(other for other in (*rates, 1.0) if unit_counts(other) == unit_counts(rate))


def part_task_spec(state: NetworkState, at: Places, rate: float, own: core.Tensors | None = None) -> core.TaskSpec:
    """Return the task spec to train a part, with the part's own FLOPs, bytes and memory.

    Args:
        state: State of the whole network.
        at: Places of the part's entries.
        rate: Width of the part, above 0 and at most 1.
        own: Tensors that replace the network's, or None.
    """
    light = make_subnetwork_state(state, at, own)
    found = local_training.training_task_spec(light, {"model": light.model})
    built = tensors.total_bytes([state.model])  # the network is built whole before it is cut
    work = msgspec.structs.replace(found.work, peak_bytes=max(found.work.peak_bytes, 2 * built))
    return replace(found, params={**found.params, "rate": rate}, work=work)


def device_rate(state: State, device: core.DeviceView) -> float:
    """Return the rate of a device's part by its memory tier, above 0 and at most 1."""
    rates = state.params["rates"]
    return canonical_rate(state.plan.widths.values(), rates, width_parts.select_by_tier(device.profile, rates))


def places_by_rate(state: State) -> dict[float, Places]:
    """Return the places of every part that can be sent, by rate."""
    rates, widths = state.params["rates"], state.plan.widths.values()
    return {
        rate: leading_places(state, rate) for rate in sorted({canonical_rate(widths, rates, rate) for rate in rates})
    }


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the leading channels that the device's memory tier allows."""
    rate = device_rate(state, device)
    found = with_training_round(
        state, part_task_spec(state, leading_places(state, rate), rate, state.widths.get(f"{rate:g}"))
    )
    return replace(found, params={**found.params, "head": state.register.find_classifier()})


def with_training_round(state: State, given: core.TaskSpec) -> core.TaskSpec:
    """Return the task spec with the number of statistics rounds, which a schedule does not count."""
    return replace(given, params={**given.params, "settled": state.settled})


def make_width_hooks(task: core.Task, site: core.ClientContext, *, scaled: bool = True) -> core.Hooks:
    """Return hooks that build the narrower network, or no hooks for the whole network."""
    if task.params["rate"] == 1:
        return core.Hooks()
    start = site.load("model")
    return core.Hooks(prepare=lambda module: width_parts.shrink_module(module, start, scaled=scaled))


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the device's part, without the classes it lacks, or gather batch norm statistics."""
    if "asked" in task.params:
        return gather_statistics(task, site)
    hooks = make_width_hooks(task, site)
    if not task.params["masked"]:
        return fedavg.work(task, site, hooks)
    classes = len(site.load("model")[f"{task.params['head']}.weight"])
    held = np.isin(np.arange(classes), site.train.y)
    if not held.all():
        narrow = hooks.prepare or (lambda module: module)
        hooks = core.Hooks(prepare=lambda module: width_parts.mask_classes(narrow(module), held))
    answer = fedavg.work(task, site, hooks)
    return replace(answer, bundles={**answer.bundles, "classes": {"held": held.astype(np.uint8)}})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's part on the held-out examples."""
    return site.engine.evaluate(
        task.params["network"], site.load("model"), site.held_out, hooks=make_width_hooks(task, site)
    )


# -- back again -----------------------------------------------------------------------------------


def require_sent_model(update: core.DeviceUpdate) -> Mapping[str, Any]:
    """Return the model in an update.

    Raises:
        UpdateError: If there is none.
    """
    if "model" not in update.bundles:
        raise core.UpdateError(f"{update.device} sent no model")
    return update.bundles["model"]


def update_schema(state: State) -> core.UpdateSchema:
    """Return the schema of an update: a part of the model and, with `masked`, the device's classes."""
    if not state.params.get("masked"):
        return local_training.partial_model_schema(state)
    last = f"{state.register.find_classifier()}.weight"
    held = {"held": tensors.TensorSpec(state.model[last].shape[:1], np.dtype(np.uint8))}
    return core.UpdateSchema({"model": state.model, "classes": held}, exact=False)


def fold(state: State, so_far: HeteroFLSums | None, update: core.DeviceUpdate) -> HeteroFLSums:
    """Add a device's part to the sums, without classifier rows of classes that the device lacks."""
    sent = require_sent_model(update)
    rows = reported_classes(state, update) if state.params.get("masked") else None
    return add_part(state, so_far, sent, places_by_rate(state), update.weight, rows)


def add_part(
    state: State,
    so_far: HeteroFLSums | None,
    sent: core.Tensors,
    parts: Mapping[float, Places],
    weight: float,
    rows: np.ndarray | None = None,
) -> HeteroFLSums:
    """Add a device's part to the sums of a round.

    Args:
        state: State of the whole network, with each part's statistics.
        so_far: Sums of the round, or None before the first update.
        sent: Tensors of the update.
        parts: Places that may have been sent, by rate.
        weight: Weight of the device in the mean.
        rows: Rows of the classifier that count, or None for all.

    Raises:
        UpdateError: If the tensors fit none of the parts, or are not finite.
    """
    found = width_parts.recognise_cut(state.model, sent, list(parts.values()))
    key, at = next(f"{rate:g}" for rate, each in parts.items() if each is found), dict(found)
    tensors.require_finite(sent)
    if rows is not None:
        last = state.register.find_classifier()
        for name in (f"{last}.weight", f"{last}.bias"):
            if name in at:
                at[name], sent = (rows, at[name][1]), {**sent, name: sent[name][rows]}
    own = {name: sent[name] for name in state.widths.get(key, {}) if name in sent}
    rest = {name: place for name, place in at.items() if name not in own}
    widths = dict(so_far.widths) if so_far else {}
    if own:
        everywhere = dict.fromkeys(own, (None, None))
        widths[key] = width_parts.add_entries(state.widths[key], widths.get(key), own, everywhere, weight)
    whole = width_parts.add_entries(
        state.model, so_far.whole if so_far else None, {name: sent[name] for name in rest}, rest, weight
    )
    return HeteroFLSums(whole, widths)


def reported_classes(state: State, update: core.DeviceUpdate) -> np.ndarray:
    """Return the numbers of the classes of which a device reports examples.

    Raises:
        UpdateError: If the update does not report its classes.
    """
    last = f"{state.register.find_classifier()}.weight"
    told = update.bundles.get("classes", {})
    tensors.require_addable(told, {"held": np.zeros(len(state.model[last]), np.uint8)})
    return np.flatnonzero(told["held"])


def step(state: State, total: HeteroFLSums | None) -> State:
    """Average each entry over the devices that sent it (Eq. 2-5), and each width's statistics."""
    if total is None:
        return state
    widths = {key: width_parts.average_entries(state.widths[key], counted) for key, counted in total.widths.items()}
    return replace(
        state, model=width_parts.average_entries(state.model, total.whole), widths={**state.widths, **widths}
    )


METHOD = replace(
    fedavg.METHOD,
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

"""HeteroFL: each device trains as wide a part of the network as its memory allows, the leading channels of each layer.

Paper: Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR 2021 (arXiv 2010.01264), Algorithm 1. A device at rate r has the first ceil(r * C) of each layer's C
channels; an entry of the new global model is the mean over the devices that have it, and stays where none has
(Eq. 2-5); a narrower layer's outputs are multiplied by 1/r (the Scaler, section 3). In training the scores of classes
that a device has no examples of are 0 (masked cross entropy), and the last layer's rows are averaged over the devices
that have examples of their class: `masked`, which reveals to the coordinator which classes a device has.

Deviations: the rate follows the device's memory tier; one that has not reported its memory gets the smallest.
The mean is weighted by examples, as FedAvg's, where the paper counts devices: with all rates 1, all classes everywhere
and clip = 0 it is FedAvg, bit for bit, but for batch normalisation's statistics. Those are gathered as in the paper
("static" batch normalisation, section 3) and the authors' code: before an evaluation, and before the job ends, a round
that does not count asks all devices to pass their examples through the global model, each mini-batch normalised by
its own statistics, and the mean and variance over all devices' examples become the model's. Here each width has
statistics of its own, and a device is asked for its own width, those below it, and those above it whose forward pass
its memory holds. A width that nobody can be asked for, and every width between two such rounds, has the average of
the statistics of training at that width; before any such training the first ones. Gradients are
clipped as in the authors' code: without normalisation the Scaler makes them 1/r as large in every layer, and narrow
parts diverge. The Scaler applies in a device's own evaluation as well. Channels that `fedquilt prepare` could not
follow through the network stay whole; an addition ties its operands. The result is the whole network: some device
should have rate 1.

Other methods that send parts by width use the halves of this one (`by_width`, `order`, `hooks_of`, `add_part`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import metrics, tensors
from fedquilt.core import (
    Answer,
    Bundle,
    Contribution,
    DeviceView,
    EvaluationSums,
    Expected,
    Hooks,
    ModelError,
    Order,
    Site,
    Task,
    Tensors,
    UpdateError,
    adds_up,
    expects,
)
from fedquilt.methods import fedavg
from fedquilt.methods._by_width import State, measured, narrowed, statistics_rounds
from fedquilt.models.partial import masks
from fedquilt.models.partial import width as width_parts
from fedquilt.models.partial.width import Counted, Places

Rate = Annotated[float, Meta(gt=0, le=1)]
Rates = tuple[Rate, Rate, Rate, Rate, Rate]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the rates by memory tier."""

    clip: Annotated[float, Meta(ge=0)] = 1.0  # largest gradient norm; 0: no clipping
    rates: Rates = (0.0625, 0.125, 0.25, 0.5, 1.0)  # r of devices with a budget under 1 GB, from 1, 2, 4 and 8 GB
    masked: bool = True  # leave out classes that a device lacks from its loss, and from the mean of their rows


@dataclass(frozen=True)
class Sum:
    """Sums of a round: entries, and separately each narrower part's statistics."""

    whole: Counted
    widths: Mapping[str, Counted]


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """Start from the bundle's model, with first statistics for each width.

    Raises:
        ModelError: `masked`, and the network has no plain last linear layer.
    """
    if metrics.task_of(bundle.meta["network"]) != "classes":
        params = replace(params, masked=False)  # there are no classes that a device could lack
    begun = by_width(bundle, params, seed)
    if params.masked:
        last = begun.register.classifier()
        if last is None:
            raise ModelError("this network has no last linear layer, whose rows are the classes: set masked = false")
        begun.register.require_plain_weight(last)
    return begun


def by_width(bundle: Bundle, params: Any, seed: int) -> State:
    """State of a method that sends parts by width, at the bundle's model and the rates in `params`."""
    plain = fedavg.init(bundle, params, seed)
    begun = State(**vars(plain), plan=masks.of_bundle(bundle, plain.model), widths={}, settled=0)
    return replace(begun, widths=initial_statistics(begun, {rate: part(begun, rate) for rate in params.rates}))


def initial_statistics(state: State, parts: Mapping[float, Places]) -> dict[str, dict[str, np.ndarray]]:
    """Return the first statistics of each part narrower than the network: the network's own."""
    names = [each.name for each in state.register.tensors if each.normalises and each.kind != "parameter"]
    return {
        f"{rate:g}": width_parts.cut(state.model, {name: at[name] for name in names})
        for rate, at in sorted(parts.items())
        if rate < 1
    }


# -- sending parts --------------------------------------------------------------------------------


def part(state: State, rate: float) -> Places:
    """Places of the leading units' entries at a rate."""
    return width_parts.places(state.plan, state.model, width_parts.leading(state.plan, rate))


def width(widths: Collection[int], rates: Sequence[float], rate: float) -> float:
    """Largest of the rates that leave as many units in each group as `rate`: 1 where nothing is left out."""

    def units(rate: float) -> list[int]:
        return [width_parts.count(each, rate) for each in widths]

    return max(other for other in (*rates, 1.0) if units(other) == units(rate))


def order(state: fedavg.State, at: Places, rate: float, own: Tensors | None = None) -> Order:
    """Order training of a part, with its own FLOPs, bytes and memory.

    Args:
        state: with the whole network.
        at: places of the part's entries.
        rate: width of the part, 0..1.
        own: tensors that replace the network's.
    """
    light = narrowed(state, at, own)
    found = fedavg.training_order(light, {"model": light.model})
    built = tensors.total_bytes([state.model])  # the network is built whole before it is cut
    work = msgspec.structs.replace(found.work, peak_bytes=max(found.work.peak_bytes, 2 * built))
    return replace(found, params={**found.params, "rate": rate}, work=work)


def rate_of(state: State, device: DeviceView) -> float:
    """Width of a device's part, 0..1."""
    rates = state.params["rates"]
    return width(state.plan.widths.values(), rates, width_parts.by_tier(device.profile, rates))


def parts_of(state: State) -> dict[float, Places]:
    """Places of every part that may be sent, by rate."""
    rates, widths = state.params["rates"], state.plan.widths.values()
    return {rate: part(state, rate) for rate in sorted({width(widths, rates, rate) for rate in rates})}


def send(state: State, device: DeviceView) -> Order:
    """Return the order to train the leading channels that the device's memory tier allows."""
    rate = rate_of(state, device)
    found = at_rate(state, order(state, part(state, rate), rate, state.widths.get(f"{rate:g}")))
    return replace(found, params={**found.params, "head": state.register.classifier()})


def at_rate(state: State, given: Order) -> Order:
    """The order at the learning rate of its round, not counting rounds that gather statistics."""
    decay = state.params.get("lr_decay", 1.0)
    return replace(given, params={**given.params, "lr": state.params["lr"] / decay**state.settled})


def hooks_of(task: Task, site: Site, *, scaled: bool = True) -> Hooks:
    """Hooks that build the narrower network; none where it is whole."""
    if task.params["rate"] == 1:
        return Hooks()
    start = site.load("model")
    return Hooks(prepare=lambda module: width_parts.shrink_module(module, start, scaled=scaled))


def work(task: Task, site: Site) -> Answer:
    """Train the device's part, masking classes that it lacks, or gather statistics if the task asks for them."""
    if "asked" in task.params:
        return measured(task, site)
    hooks = hooks_of(task, site)
    if not task.params["masked"]:
        return fedavg.work(task, site, hooks)
    classes = len(site.load("model")[f"{task.params['head']}.weight"])
    held = np.isin(np.arange(classes), site.train.y)
    if not held.all():
        narrow = hooks.prepare or (lambda module: module)
        hooks = Hooks(prepare=lambda module: width_parts.masked(narrow(module), held))
    answer = fedavg.work(task, site, hooks)
    return replace(answer, bundles={**answer.bundles, "classes": {"held": held.astype(np.uint8)}})


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the device's own part on its held-out share."""
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held, hooks=hooks_of(task, site))


# -- back again -----------------------------------------------------------------------------------


def sent_by(update: Contribution) -> Mapping[str, Any]:
    """Tensors of an update.

    Raises:
        UpdateError: it has none.
    """
    if "model" not in update.bundles:
        raise UpdateError(f"{update.device} sent no model")
    return update.bundles["model"]


def expected_update(state: State) -> Expected:
    """Return the bundles expected of a device: a part of the model and, if masked, its classes."""
    if not state.params.get("masked"):
        return fedavg.part(state)
    last = f"{state.register.classifier()}.weight"
    held = {"held": tensors.Shaped(state.model[last].shape[:1], np.dtype(np.uint8))}
    return Expected({"model": state.model, "classes": held}, whole=False)


@adds_up(Sum)
@expects(expected_update)
def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Add a device's part to the sums; its rows of missing classes do not count."""
    sent = sent_by(update)
    rows = classes_of(state, update) if state.params.get("masked") else None
    return add_part(state, so_far, sent, parts_of(state), update.weight, rows)


def add_part(
    state: State,
    so_far: Sum | None,
    sent: Tensors,
    parts: Mapping[float, Places],
    weight: float,
    rows: np.ndarray | None = None,
) -> Sum:
    """Add a device's part to a round's sums.

    Args:
        state: with the whole network and each part's statistics.
        so_far: sums of the round; None: the first update.
        sent: tensors of the update.
        parts: places that may have been sent, by rate.
        weight: of the device in the mean.
        rows: rows of the classifier that count; None: all.

    Raises:
        UpdateError: the tensors fit none of the parts, or are not finite.
    """
    found = width_parts.recognise(state.model, sent, list(parts.values()))
    key, at = next(f"{rate:g}" for rate, each in parts.items() if each is found), dict(found)
    tensors.require_finite(sent)
    if rows is not None:
        last = state.register.classifier()
        for name in (f"{last}.weight", f"{last}.bias"):
            if name in at:
                at[name], sent = (rows, at[name][1]), {**sent, name: sent[name][rows]}
    own = {name: sent[name] for name in state.widths.get(key, {}) if name in sent}
    rest = {name: place for name, place in at.items() if name not in own}
    widths = dict(so_far.widths) if so_far else {}
    if own:
        everywhere = dict.fromkeys(own, (None, None))
        widths[key] = width_parts.add(state.widths[key], widths.get(key), own, everywhere, weight)
    whole = width_parts.add(
        state.model, so_far.whole if so_far else None, {name: sent[name] for name in rest}, rest, weight
    )
    return Sum(whole, widths)


def classes_of(state: State, update: Contribution) -> np.ndarray:
    """Return the numbers of the classes that a device has examples of.

    Raises:
        UpdateError: the update does not report them.
    """
    last = f"{state.register.classifier()}.weight"
    told = update.bundles.get("classes", {})
    tensors.require_same(told, {"held": np.zeros(len(state.model[last]), np.uint8)})
    return np.flatnonzero(told["held"])


def step(state: State, total: Sum | None) -> State:
    """Average each entry over the devices that sent it, and each width's statistics."""
    if total is None:
        return state
    widths = {key: width_parts.close(state.widths[key], counted) for key, counted in total.widths.items()}
    return replace(state, model=width_parts.close(state.model, total.whole), widths={**state.widths, **widths})


# -- statistics before an evaluation --------------------------------------------------------------


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2010.01264",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    check=check,
    fold=fold,
    step=step,
    settle=statistics_rounds(parts_of, rate_of, scaled=True),
)

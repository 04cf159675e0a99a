"""Common parts of methods that send parts of a network by width: their state, a part as a model, and sBN.

Batch normalisation's statistics are gathered for each width before an evaluation (HeteroFL, section 3: "static" batch
normalisation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from fedquilt import exact, layer_costs, tensor_register, tensors, tiers
from fedquilt.core import (
    Answer,
    Contribution,
    DeviceView,
    Examples,
    Expected,
    Hooks,
    Order,
    Settle,
    Site,
    Task,
    Tensors,
    UpdateError,
    Work,
    adds_up,
    expects,
)
from fedquilt.methods import fedavg
from fedquilt.models.partial import width
from fedquilt.models.partial.masks import Plan
from fedquilt.models.partial.width import Places


@dataclass(frozen=True)
class State(fedavg.State):
    """Global model with the whole network's statistics, the dependencies between its units, and narrower parts' own."""

    plan: Plan
    widths: dict[str, dict[str, np.ndarray]]  # by rate: batch normalisation's running statistics
    settled: int  # rounds so far that gathered statistics: counted in a task's round, not in the learning rate


def narrowed(state: fedavg.State, at: Places, own: Tensors | None = None) -> fedavg.State:
    """A part as a model of its own, with the cost of its forward pass. `own`: as of `order`."""
    sub = {**width.cut(state.model, at), **(own or {})}
    flops, activations = layer_costs.share(state.costs(), state.model, sub)
    return fedavg.State(
        state.params,
        state.network,
        sub,
        state.flops * flops,
        math.ceil(state.example_bytes * activations),
        layers=layer_costs.cut(state.layers, state.model, sub),
    )


@dataclass(frozen=True)
class Measured:
    """Sums by rate and statistic: sum_k n_k mean_k, sum_k n_k (var_k + mean_k^2) and sum_k n_k."""

    total: Mapping[str, Mapping[str, exact.Total]] = field(default_factory=dict)
    weight: Mapping[str, exact.Number] = field(default_factory=dict)


def statistics_rounds(
    parts: Callable[[Any], Mapping[float, Places]],
    rate_of: Callable[[Any, DeviceView], float],
    *,
    scaled: bool,
    still: Callable[[Any], Collection[str]] = lambda state: (),
) -> Settle:
    """Return the rounds that gather batch-normalisation statistics, for a method that sends parts by width.

    Args:
        parts: state -> places of each part by rate.
        rate_of: rate of a device's own part.
        scaled: as of `hooks_of`.
        still: state -> tensors that are never trained: their statistics stay as they are.
    """

    def names(state: State) -> list[str]:
        held, means = still(state), state.register.running_means()
        return [name for pair in means.items() for name in pair[::-1] if name not in held]

    def send(state: State, device: DeviceView) -> Order:
        own, asked, bundles, work = rate_of(state, device), [], {}, Work()
        for rate, at in parts(state).items():
            light = narrowed(state, at, state.widths.get(f"{rate:g}"))
            found = fedavg.look(light)
            peak = max(
                fedavg.training_order(light, {}, moved={}).work.peak_bytes, 2 * tensors.total_bytes([state.model])
            )  # it is built whole, as for training
            if rate > own and not _roomy(device, msgspec.structs.replace(found, peak_bytes=peak)):
                continue
            asked.append(rate)
            bundles[f"part.{rate:g}"] = light.model
            work = work.plus(msgspec.structs.replace(found, peak_bytes=peak))
        table = {
            "network": tensor_register.without_register(state.network),
            "asked": asked,
            "scaled": scaled,
            "still": sorted(still(state)),
        }
        return Order(table, bundles, work)

    def taken(state: State) -> Expected:
        found = {}
        for rate, at in parts(state).items():
            found[f"statistics.{rate:g}"] = width.shapes(state.model, {name: at[name] for name in names(state)})
        return Expected(found, whole=False)

    @adds_up(Measured)
    @expects(taken)
    def fold(state: State, so_far: Measured | None, update: Contribution) -> Measured:
        so_far = so_far or Measured()
        total, weight = dict(so_far.total), dict(so_far.weight)
        places = {f"{rate:g}": at for rate, at in parts(state).items()}
        if not update.bundles or update.bundles.keys() - {f"statistics.{key}" for key in places}:
            told = ", ".join(sorted(update.bundles)) or "nothing"
            raise UpdateError(f"{update.device} sent {told}, wanted are batch normalisation's statistics by width")
        found = {}
        for bundle, sent in update.bundles.items():
            key = bundle.removeprefix("statistics.")
            shapes = width.shapes(state.model, {name: places[key][name] for name in names(state)})
            tensors.require_same(sent, shapes)
            found[key] = _moments(sent, state.register.running_means(), update.device)
        for key, moments in found.items():
            total[key] = exact.plus(total.get(key, {}), moments, update.weight)
            weight[key] = weight.get(key, exact.Number()).plus(update.weight)
        return Measured(total, weight)

    def step(state: State, total: Measured | None) -> State:
        after = replace(state, settled=state.settled + 1)
        for key, totals in total.total.items() if total else ():
            weight = float(total.weight[key])  # type: ignore[union-attr]
            if not weight:
                continue
            found, sums, means = {}, exact.values(totals), state.register.running_means()
            for name, array in sums.items():
                value = array / weight
                if name in means:
                    value = np.maximum(value - np.square(sums[means[name]] / weight), 0.0)
                found[name] = value.astype(state.model[name].dtype)
            if key in state.widths:
                after = replace(after, widths={**after.widths, key: {**after.widths[key], **found}})
            else:
                after = replace(after, model={**after.model, **found})
        return after

    return Settle(lambda state: bool(names(state)), send, fold, step)


def _roomy(device: DeviceView, work: Work) -> bool:
    return device.profile is not None and tiers.fits(device.profile, "torch", work)


def _moments(sent: Tensors, means: Mapping[str, str], device: str) -> dict[str, np.ndarray]:
    """One device's statistics as moments, which may be added up: float64. `means`: running variance -> running mean.

    Raises:
        UpdateError: a variance is below 0.
    """
    found = {}
    for name, array in sent.items():
        value = array.astype(np.float64)
        if name in means:
            if (value < 0).any():
                raise UpdateError(f"{device} sent {name!r} with values below 0: it is a variance")
            value = value + np.square(sent[means[name]].astype(np.float64))
        found[name] = np.asarray(value)
    return found


def measured(task: Task, site: Site) -> Answer:
    """Compute the statistics of the device's examples in each part it received, weighted by examples."""
    order, bundles = site.rng.permutation(len(site.train)), {}
    shuffled = Examples(site.train.x[order], site.train.y[order])
    for index, rate in enumerate(task.params["asked"]):
        start, seen = site.load(f"part.{rate:g}"), width.Moments(set(task.params["still"]))
        cut = rate != 1

        def prepare(module: Any, start: Tensors = start, cut: bool = cut, seen: width.Moments = seen) -> Any:
            return seen.watch(width.shrink_module(module, start, scaled=task.params["scaled"]) if cut else module)

        site.engine.evaluate(task.params["network"], start, shuffled, hooks=Hooks(prepare=prepare))
        bundles[f"statistics.{rate:g}"] = seen.found()
        site.progress((index + 1) / len(task.params["asked"]))
    return Answer(bundles, weight=float(len(site.train)), local=site.local)

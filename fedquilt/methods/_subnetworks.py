"""Common code of methods that send sub-networks: state, cost, and batch norm statistics.

Batch norm statistics are gathered for each width before an evaluation (HeteroFL, section 3: "static" batch
normalisation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from fedquilt import core
from fedquilt.arrays import exact_sums, tensors
from fedquilt.costs import cost_model, peak_memory
from fedquilt.formats import tensor_register
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import width
from fedquilt.models.partial.masks import MaskPlan
from fedquilt.models.partial.width import Places


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, dependencies between its units, and batch norm statistics of each sub-network."""

    plan: MaskPlan
    widths: dict[str, dict[str, np.ndarray]]  # by rate: batch normalisation's running statistics
    settled: int  # rounds so far that gathered statistics: counted in a task's round, not in the learning rate


def make_subnetwork_state(state: NetworkState, at: Places, own: core.Tensors | None = None) -> NetworkState:
    """Return the state of a sub-network, with its cost. Tensors in `own` replace those cut out."""
    sub = {**width.cut_tensors(state.model, at), **(own or {})}
    flops, activations = cost_model.part_shares(state.costs_by_layer(), state.model, sub)
    return NetworkState(
        state.params,
        state.network,
        sub,
        state.flops * flops,
        math.ceil(state.example_bytes * activations),
        layers=cost_model.scale_layers(state.layers, state.model, sub),
    )


@dataclass(frozen=True)
class BatchNormSums:
    """Sums of batch norm statistics by rate: n_k mean_k, n_k (var_k + mean_k^2) and n_k."""

    total: Mapping[str, Mapping[str, exact_sums.ExactSum]] = field(default_factory=dict)
    weight: Mapping[str, exact_sums.ExactScalar] = field(default_factory=dict)


def make_statistics_round(
    parts: Callable[[Any], Mapping[float, Places]],
    rate_of: Callable[[Any, core.DeviceView], float],
    *,
    scaled: bool,
    still: Callable[[Any], Collection[str]] = lambda state: (),
) -> core.EvaluationRound:
    """Return the evaluation round that gathers batch norm statistics of each sub-network.

    Args:
        parts: Function from the state to the places of each sub-network, by rate.
        rate_of: Function from the state and a device to the rate of its sub-network.
        scaled: Whether training multiplies the outputs of narrower layers by 1 / rate.
        still: Function from the state to the tensors that are never trained, whose statistics stay.
    """

    def statistic_names(state: State) -> list[str]:
        held, means = still(state), state.register.running_means_by_variance()
        return [name for pair in means.items() for name in pair[::-1] if name not in held]

    def send(state: State, device: core.DeviceView) -> core.TaskSpec:
        own, asked, bundles, work = rate_of(state, device), [], {}, core.WorkEstimate()
        for rate, at in parts(state).items():
            light = make_subnetwork_state(state, at, state.widths.get(f"{rate:g}"))
            found = local_training.evaluation_work(light)
            peak = max(
                local_training.training_work(light, moved={}).peak_bytes, 2 * tensors.total_bytes([state.model])
            )  # it is built whole, as for training
            if rate > own and not _fits_device(device, msgspec.structs.replace(found, peak_bytes=peak)):
                continue
            asked.append(rate)
            bundles[f"part.{rate:g}"] = light.model
            work = work.add(msgspec.structs.replace(found, peak_bytes=peak))
        table = {
            "network": tensor_register.without_register(state.network),
            "asked": asked,
            "scaled": scaled,
            "still": sorted(still(state)),
        }
        return core.TaskSpec(table, bundles, work)

    def update_schema(state: State) -> core.UpdateSchema:
        found = {}
        for rate, at in parts(state).items():
            found[f"statistics.{rate:g}"] = width.cut_shapes(
                state.model, {name: at[name] for name in statistic_names(state)}
            )
        return core.UpdateSchema(found, exact=False)

    def fold(state: State, so_far: BatchNormSums | None, update: core.DeviceUpdate) -> BatchNormSums:
        so_far = so_far or BatchNormSums()
        total, weight = dict(so_far.total), dict(so_far.weight)
        places = {f"{rate:g}": at for rate, at in parts(state).items()}
        if not update.bundles or update.bundles.keys() - {f"statistics.{key}" for key in places}:
            told = ", ".join(sorted(update.bundles)) or "nothing"
            raise core.UpdateError(f"{update.device} sent {told}, wanted are batch normalisation's statistics by width")
        found = {}
        for bundle, sent in update.bundles.items():
            key = bundle.removeprefix("statistics.")
            shapes = width.cut_shapes(state.model, {name: places[key][name] for name in statistic_names(state)})
            tensors.require_addable(sent, shapes)
            found[key] = _convert_variances_to_moments(sent, state.register.running_means_by_variance(), update.device)
        for key, moments in found.items():
            total[key] = exact_sums.add_arrays(total.get(key, {}), moments, update.weight)
            weight[key] = weight.get(key, exact_sums.ExactScalar()).add_numbers(update.weight)
        return BatchNormSums(total, weight)

    def step(state: State, total: BatchNormSums | None) -> State:
        after = replace(state, settled=state.settled + 1)
        for key, totals in total.total.items() if total else ():
            weight = float(total.weight[key])  # type: ignore[union-attr]
            if not weight:
                continue
            found, sums, means = {}, exact_sums.rounded_values(totals), state.register.running_means_by_variance()
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

    sums = core.Aggregation(fold, accumulator=lambda state: BatchNormSums, schema=update_schema)
    return core.EvaluationRound(lambda state: bool(statistic_names(state)), send, sums, step)


def _fits_device(device: core.DeviceView, work: core.WorkEstimate) -> bool:
    return device.profile is not None and peak_memory.fits_budget(device.profile.budget_bytes, ("torch",), work)


def _convert_variances_to_moments(sent: core.Tensors, means: Mapping[str, str], device: str) -> dict[str, np.ndarray]:
    """Return statistics with raw second moments for variances, or raise UpdateError for a negative variance."""
    found = {}
    for name, array in sent.items():
        value = array.astype(np.float64)
        if name in means:
            if (value < 0).any():
                raise core.UpdateError(f"{device} sent {name!r} with values below 0: it is a variance")
            value = value + np.square(sent[means[name]].astype(np.float64))
        found[name] = np.asarray(value)
    return found


def gather_statistics(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Compute batch norm statistics of the device's examples in each received sub-network."""
    order, bundles = site.rng.permutation(len(site.train)), {}
    shuffled = core.Examples(site.train.x[order], site.train.y[order])
    for index, rate in enumerate(task.params["asked"]):
        start, seen = site.load(f"part.{rate:g}"), width.BatchNormMoments(set(task.params["still"]))

        def prepare(
            module: Any, start: core.Tensors = start, rate: float = rate, seen: width.BatchNormMoments = seen
        ) -> Any:
            narrow = module if rate == 1 else width.shrink_module(module, start, scaled=task.params["scaled"])
            return seen.add_recording_hooks(narrow)

        site.engine.evaluate(task.params["network"], start, shuffled, hooks=core.Hooks(prepare=prepare))
        bundles[f"statistics.{rate:g}"] = seen.statistics()
        site.progress((index + 1) / len(task.params["asked"]))
    return core.ClientResult(bundles, weight=float(len(site.train)), private_state=site.private_state)

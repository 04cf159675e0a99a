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
from fedquilt.models.partial.width import TensorCut


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, dependencies between its units, and batch norm statistics of each sub-network."""

    plan: MaskPlan
    widths: dict[str, dict[str, np.ndarray]]  # by rate: batch normalisation's running statistics
    settled: int  # number of evaluation rounds so far: counted in a task's round, not in the learning rate


def make_subnetwork_state(
    state: NetworkState, places: TensorCut, replacements: core.Tensors | None = None
) -> NetworkState:
    """Return a state with a sub-network's tensors and costs. `replacements` replace tensors of the model."""
    subnetwork = {**width.cut_tensors(state.model, places), **(replacements or {})}
    flops_share, activation_share = cost_model.part_shares(state.costs_by_layer(), state.model, subnetwork)
    return NetworkState(
        state.params,
        state.network,
        subnetwork,
        state.flops * flops_share,
        math.ceil(state.example_bytes * activation_share),
        layers=cost_model.scale_layers(state.layers, state.model, subnetwork),
    )


@dataclass(frozen=True)
class BatchNormSums:
    """Sums by rate over devices with n_k examples: n_k mean_k, n_k (var_k + mean_k^2), and n_k."""

    total: Mapping[str, Mapping[str, exact_sums.ExactSum]] = field(default_factory=dict)
    weight: Mapping[str, exact_sums.ExactScalar] = field(default_factory=dict)


def make_statistics_round(
    parts: Callable[[Any], Mapping[float, TensorCut]],
    rate_of: Callable[[Any, core.DeviceView], float],
    *,
    scaled: bool,
    frozen_names: Callable[[Any], Collection[str]] = lambda state: (),
) -> core.EvaluationRound:
    """Return the evaluation round that gathers batch norm statistics of each sub-network.

    Args:
        parts: Function from the state to the indices of each sub-network's entries in each tensor, by rate.
        rate_of: Function from the state and a device to the rate of the device's sub-network.
        scaled: Whether training multiplies the outputs of narrower layers by 1 / rate.
        frozen_names: Function from the state to the names of tensors that are never trained. Their statistics are kept.
    """

    def statistic_names(state: State) -> list[str]:
        frozen, mean_by_variance = frozen_names(state), state.register.running_means_by_variance()
        return [name for pair in mean_by_variance.items() for name in pair[::-1] if name not in frozen]

    def send(state: State, device: core.DeviceView) -> core.TaskSpec:
        """Return the task spec with sub-networks up to the device's rate, and wider ones that fit its memory."""
        device_rate, work = rate_of(state, device), core.WorkEstimate()
        rates: list[float] = []
        bundles: dict[str, core.Tensors] = {}
        for rate, places in parts(state).items():
            subnetwork_state = make_subnetwork_state(state, places, state.widths.get(f"{rate:g}"))
            estimate = local_training.evaluation_work(subnetwork_state)
            building_bytes = 2 * tensors.total_bytes([state.model])  # the network is built whole, as for training
            training_bytes = local_training.training_work(subnetwork_state, trained_tensors={}).peak_bytes
            estimate = msgspec.structs.replace(estimate, peak_bytes=max(training_bytes, building_bytes))
            if rate > device_rate and not _fits_device(device, estimate):
                continue
            rates.append(rate)
            bundles[f"part.{rate:g}"] = subnetwork_state.model
            work = work.add(estimate)
        table = {
            "network": tensor_register.without_register(state.network),
            "asked": rates,
            "scaled": scaled,
            "still": sorted(frozen_names(state)),
        }
        return core.TaskSpec(table, bundles, work)

    def update_schema(state: State) -> core.UpdateSchema:
        shapes = {}
        for rate, places in parts(state).items():
            shapes[f"statistics.{rate:g}"] = width.cut_shapes(
                state.model, {name: places[name] for name in statistic_names(state)}
            )
        return core.UpdateSchema(shapes, exact=False)

    def fold(state: State, accumulator: BatchNormSums | None, update: core.DeviceUpdate) -> BatchNormSums:
        accumulator = accumulator or BatchNormSums()
        total, weight = dict(accumulator.total), dict(accumulator.weight)
        places_by_key = {f"{rate:g}": part for rate, part in parts(state).items()}
        if not update.bundles or update.bundles.keys() - {f"statistics.{key}" for key in places_by_key}:
            bundle_names = ", ".join(sorted(update.bundles)) or "nothing"
            raise core.UpdateError(f"{update.device} sent {bundle_names} instead of batch norm statistics by rate")
        moments_by_key = {}
        for bundle, statistics in update.bundles.items():
            key = bundle.removeprefix("statistics.")
            shapes = width.cut_shapes(state.model, {name: places_by_key[key][name] for name in statistic_names(state)})
            tensors.require_addable(statistics, shapes)
            moments_by_key[key] = _convert_variances_to_moments(
                statistics, state.register.running_means_by_variance(), update.device
            )
        for key, moments in moments_by_key.items():
            total[key] = exact_sums.add_arrays(total.get(key, {}), moments, update.weight)
            weight[key] = weight.get(key, exact_sums.ExactScalar()).add_numbers(update.weight)
        return BatchNormSums(total, weight)

    def step(state: State, total: BatchNormSums | None) -> State:
        new_state = replace(state, settled=state.settled + 1)
        for key, totals in total.total.items() if total else ():
            weight = float(total.weight[key])  # type: ignore[union-attr]
            if not weight:
                continue
            sums, mean_by_variance = exact_sums.rounded_values(totals), state.register.running_means_by_variance()
            statistics = {}
            for name, array in sums.items():
                value = array / weight
                if name in mean_by_variance:
                    value = np.maximum(value - np.square(sums[mean_by_variance[name]] / weight), 0.0)
                statistics[name] = value.astype(state.model[name].dtype)
            if key in state.widths:
                new_state = replace(
                    new_state, widths={**new_state.widths, key: {**new_state.widths[key], **statistics}}
                )
            else:
                new_state = replace(new_state, model={**new_state.model, **statistics})
        return new_state

    sums = core.Aggregation(fold, accumulator=lambda state: BatchNormSums, schema=update_schema)
    return core.EvaluationRound(lambda state: bool(statistic_names(state)), send, sums, step)


def _fits_device(device: core.DeviceView, work: core.WorkEstimate) -> bool:
    return device.profile is not None and peak_memory.fits_budget(device.profile.budget_bytes, ("torch",), work)


def _convert_variances_to_moments(
    statistics: core.Tensors, mean_by_variance: Mapping[str, str], device: str
) -> dict[str, np.ndarray]:
    """Return the statistics with variances as E[x^2], or raise UpdateError for a negative variance."""
    moments = {}
    for name, array in statistics.items():
        value = array.astype(np.float64)
        if name in mean_by_variance:
            if (value < 0).any():
                raise core.UpdateError(f"{device} sent {name!r}, a variance, with values below 0")
            value = value + np.square(statistics[mean_by_variance[name]].astype(np.float64))
        moments[name] = np.asarray(value)
    return moments


def gather_statistics(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Return batch norm statistics of the device's examples in each received sub-network."""
    order, bundles = site.rng.permutation(len(site.train)), {}
    shuffled = core.Examples(site.train.x[order], site.train.y[order])
    for index, rate in enumerate(task.params["asked"]):
        start, recorder = site.load(f"part.{rate:g}"), width.BatchNormMoments(set(task.params["still"]))

        def prepare(
            module: Any,
            start: core.Tensors = start,
            rate: float = rate,
            own_recorder: width.BatchNormMoments = recorder,
        ) -> Any:
            narrow = module if rate == 1 else width.shrink_module(module, start, scaled=task.params["scaled"])
            return own_recorder.add_recording_hooks(narrow)

        site.engine.evaluate(task.params["network"], start, shuffled, hooks=core.Hooks(prepare=prepare))
        bundles[f"statistics.{rate:g}"] = recorder.statistics()
        site.progress((index + 1) / len(task.params["asked"]))
    return core.ClientResult(bundles, weight=float(len(site.train)), private_state=site.private_state)

"""FedLPS: devices share a frozen encoder, pruned on weak devices, and train a predictor.

Paper: Jia et al., FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter Sharing, AAAI 2024
(arXiv 2402.08578), Algorithm 1. The encoder of a pre-trained network is shared and frozen. In every layer of the
predictor a device keeps the channels with the largest L1 norm of their weights, as many as its pruning ratio leaves.
The predictor is trained, and its entries are averaged over the devices that have them.

Deviations: one task. The channels are chosen once, on the coordinator, from the job's first weights, so that only a
device's own part is sent (the authors prune on the device after its first training). An addition ties the channels of
its operands, and channels tied to the encoder stay whole. The ratio follows the device's memory tier, and is the
largest for a device that has not reported its memory. An entry's mean is weighted by examples. Each ratio has its own
batch norm statistics, gathered from all devices before an evaluation and at the end, as in `heterofl`. The encoder's
statistics do not change. The encoder is the first layers by their names. Random weights are refused, because the
encoder would never be trained. With all ratios 0 and encoder = 0 the result is bit-identical to FedAvg, except for
these statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.methods import _subnetworks, fedavg, fjord, heterofl
from fedquilt.methods.heterofl import HeteroFLSums
from fedquilt.models import local_training
from fedquilt.models.partial import masks, width
from fedquilt.models.partial.masks import TensorGroups
from fedquilt.models.partial.width import TensorCut

NOWHERE = TensorGroups(())

Ratio = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the pruning ratios by memory tier, and the encoder's share."""

    ratios: tuple[Ratio, Ratio, Ratio, Ratio, Ratio] = (0.8, 0.5, 0.2, 0.0, 0.0)  # pruned: under 1 GB, 1, 2, 4, 8 GB
    encoder: Annotated[float, Meta(ge=0, lt=1)] = 0.5  # share of the layers that is frozen


@dataclass(frozen=True)
class State(_subnetworks.State):
    """Global model, names of the encoder's layers, and channels left by each pruning ratio."""

    encoder: tuple[str, ...]  # layers
    units_by_share: dict[str, dict[str, np.ndarray]]  # by share of the channels that are left: group -> their indices


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state, with the encoder's layers and the channels left by each pruning ratio.

    Raises:
        JobError: If the encoder would have random weights.
        ModelError: If the network has only one layer.
    """
    if params.encoder and not bundle.meta.get("pretrained", True):
        raise core.JobError(
            "the frozen encoder would have random weights: set [model] weights to a file of a pre-trained network, or "
            "train the whole network with encoder = 0"
        )
    plain = fedavg.init(bundle, params, seed)
    initial = _subnetworks.State(**vars(plain), plan=masks.plan_from_bundle(bundle, plain.model), widths={}, settled=0)
    head = initial.register.find_classifier()
    layers = [name for name in initial.register.parameters_by_layer() if name != head]
    if params.encoder and not layers:
        raise core.ModelError("the network has only one layer, so no encoder can be frozen: set encoder = 0")
    encoder = tuple(layers[: int(params.encoder * (len(layers) + 1))])
    unpruned_groups = {group for layer in encoder for group in initial.plan.follows.get(f"{layer}.weight", NOWHERE).out}
    units_by_share = {}
    for share in remaining_shares(vars(params)):
        units_by_group = width.strongest_units(initial.plan, initial.model, share)
        units_by_share[f"{share:g}"] = {
            group: indices for group, indices in units_by_group.items() if group not in unpruned_groups
        }
    state = State(**vars(initial), encoder=encoder, units_by_share=units_by_share)
    return replace(state, widths=heterofl.initial_statistics(state, places_by_share(state)))


def remaining_shares(params: Mapping[str, Any]) -> list[float]:
    """Return the share of channels that pruning leaves, for each memory tier."""
    return [round(1 - ratio, 9) for ratio in params["ratios"]]


def encoder_names(state: State) -> set[str]:
    """Return the names of the frozen encoder's tensors, statistics included."""
    return {entry.name for entry in state.register.tensors if entry.layer in state.encoder}


def places_by_share(state: State) -> dict[float, TensorCut]:
    """Return the indices of the kept channels in each tensor, for each share of kept channels."""
    shares = sorted({canonical_share(state, share) for share in remaining_shares(state.params)})
    return {
        share: width.unit_indices_by_tensor(state.plan, state.model, state.units_by_share.get(f"{share:g}", {}))
        for share in shares
    }


def canonical_share(state: State, share: float) -> float:
    """Return the largest share of a tier that keeps as many predictor channels as `share` does."""
    pruned = next(iter(state.units_by_share.values()))
    return heterofl.canonical_rate(
        [state.plan.widths[group] for group in pruned], remaining_shares(state.params), share
    )


def device_share(state: State, device: core.DeviceView) -> float:
    """Return the share of channels in a device's part, by its memory tier."""
    return canonical_share(state, width.select_by_tier(device.profile, remaining_shares(state.params)))


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the device's part with the encoder frozen."""
    share = device_share(state, device)
    task_spec = heterofl.with_training_round(
        state, heterofl.part_task_spec(state, places_by_share(state)[share], share, state.widths.get(f"{share:g}"))
    )
    return replace(task_spec, params={**task_spec.params, "still": sorted(encoder_names(state))})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the predictor's part, or gather batch norm statistics if the task requests them."""
    if "asked" in task.params:
        return _subnetworks.gather_statistics(task, site)
    hooks, frozen = heterofl.make_width_hooks(task, site, scaled=False), set(task.params["still"])
    if frozen:
        hooks = core.Hooks(prepare=hooks.prepare, steps=(core.Step(rate=lambda name: float(name not in frozen)),))
    client_result = fedavg.work(task, site, hooks)
    trained = {name: array for name, array in client_result.bundles["model"].items() if name not in frozen}
    return replace(client_result, bundles={"model": trained})


def fold(state: State, accumulator: HeteroFLSums | None, update: core.DeviceUpdate) -> HeteroFLSums:
    """Return the sums with a device's predictor added in place. Raise UpdateError for invalid entries."""
    model, frozen = heterofl.require_sent_model(update), encoder_names(state)
    trained_places = {
        share: {name: axes for name, axes in places.items() if name not in frozen}
        for share, places in places_by_share(state).items()
    }
    return heterofl.add_part(state, accumulator, model, trained_places, update.weight)


METHOD = replace(
    heterofl.METHOD,
    traits=replace(heterofl.METHOD.traits, sent_data="the predictor"),
    paper="arXiv 2402.08578",
    params=Params,
    state=State,
    init=init,
    send=send,
    work=work,
    check=fjord.check,
    aggregation=replace(heterofl.METHOD.aggregation, fold=fold, schema=local_training.partial_model_schema),
    evaluation_round=_subnetworks.make_statistics_round(
        places_by_share, device_share, scaled=False, frozen_names=encoder_names
    ),
)

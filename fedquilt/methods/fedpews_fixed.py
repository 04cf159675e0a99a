"""FedPeWS-Fixed: in warm-up rounds each device trains a fixed part of the network.

Paper: Tastan et al., FedPeWS (arXiv 2410.03042), section 4, "Use of fixed subnetworks", and appendix
B.2: the neurons of every hidden layer are split into N parts without overlap, one for each device. The
rest is `fedquilt.methods.fedpews`, without mask scores.

Only the covered entries are sent, in both directions, because the coordinator knows the mask. The device trains the
network with 0 in all other places. These entries stay 0: a neuron without weights has no output and no input, so that
training needs no mask, and any engine and optimizer can be used. This requires an activation that is 0 at 0 (ReLU and
similar functions, tanh).

Deviations: a device that `devices` does not list gets a part by the hash of its name, so that two devices may share a
part. A part without a device stays unchanged until the warm-up ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import fedavg, fedpews
from fedquilt.models import local_training
from fedquilt.models.partial import masks


@dataclass(frozen=True)
class Params(fedpews.WarmupParams):
    """Parameters of the warm-up and of the fixed parts."""

    parts: Annotated[int, Meta(ge=1)] = 2  # N: parts that every hidden layer is split into
    devices: tuple[str, ...] = ()  # devices of the first, second, ... part, then again from the first part


def part_index(state: fedpews.State, device: str) -> int:
    """Return the index of a device's part: its position in `devices`, otherwise a hash of its name."""
    listed_devices, parts = list(state.params["devices"]), int(state.params["parts"])
    return (listed_devices.index(device) if device in listed_devices else core.derive_seed("part", device)) % parts


def device_mask(state: fedpews.State, device: str) -> np.ndarray:
    """Return the mask of a device's neurons, (h,)."""
    return masks.mask_of_equal_part(state.plan, part_index(state, device), int(state.params["parts"]))


def send(state: fedpews.State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the device's part, or the whole network after the warm-up."""
    if not fedpews.is_warmup(state):
        return fedpews.full_task_spec(state)
    neurons = device_mask(state, device.device)
    covered = masks.select_covered(state.model, masks.covered_entries(state.plan, neurons))
    bundles = {"model": covered, "plan": {"json": masks.plan_to_array(state.plan)}}
    task_spec = local_training.training_task_spec(state, bundles, fedpews.PLAIN)
    return replace(task_spec, params={**task_spec.params, "masked": True, "part": part_index(state, device.device)})


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the received part. All other weights are 0, and stay 0 without a mask."""
    if not task.params.get("masked"):
        return fedavg.work(task, site, fedpews.proximal_hooks(task))
    part, cover = _load_part(task, site)
    client_result = local_training.train_from(task, site, part, fedpews.proximal_hooks(task))
    return replace(client_result, bundles={"model": masks.select_covered(client_result.bundles["model"], cover)})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the device's part in the warm-up, and the whole network afterwards."""
    model = _load_part(task, site)[0] if task.params.get("masked") else site.load("model")
    return site.engine.evaluate(task.params["network"], model, site.held_out)


def _load_part(task: core.Task, site: core.ClientContext) -> tuple[core.Tensors, Mapping[str, np.ndarray]]:
    """Return the network with 0 outside the device's part, and the part's mask of each tensor."""
    plan = masks.plan_from_array(site.load("plan")["json"])
    cover = masks.covered_entries(plan, masks.mask_of_equal_part(plan, task.params["part"], task.params["parts"]))
    return masks.restore_masked_tensors(site.load("model"), cover), cover


def fold(state: fedpews.State, accumulator: fedpews.RoundSums | None, update: core.DeviceUpdate) -> fedpews.RoundSums:
    """Return the sums with an update added in place: the part in the warm-up, later the model."""
    if not fedpews.is_warmup(state):
        assert not isinstance(accumulator, fedpews.MaskedSums)
        return fedpews.fold_full_model(state, accumulator, update)
    assert not isinstance(accumulator, WeightedSums)
    return fedpews.add_covered(state, accumulator, update, device_mask(state, update.device), {})


METHOD = replace(
    fedpews.METHOD,
    params=Params,
    engines=("torch", "numpy"),
    send=send,
    work=work,
    check=check,
    aggregation=core.Aggregation(fold, schema=fedpews.update_schema),
    # devices publish no masks
    traits=replace(fedpews.PLAIN, sent_data="the trained part of the model"),
)

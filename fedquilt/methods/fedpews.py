"""FedPeWS: in warm-up rounds each device trains a subnetwork under its own learned mask.

Paper: Tastan et al., FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning (arXiv 2410.03042), Algorithm 1, Eq. 4 to 8. In each of W warm-up rounds a device alternates on
every mini-batch: a step on its mask scores s (Procedure I), then a step on the weights (Procedure II), each
under new masks m ~ Bernoulli(theta), theta = sigmoid(s), one entry per hidden neuron:

    L_s = f(x m) - lambda ||theta_i - theta_{g without i}||^2        s <- s - eta_s grad L_s
    L_x = f(x m) [+ mu/2 ||(x - x_g) m||^2, over FedProx]            x <- x - eta_l grad L_x
    x_g <- x_g - eta_g (x_g - sum_i x_i m_i / sum_i m_i)   where any mask covers the entry, else unchanged

After the warm-up the method is FedAvg (mu = 0) or FedProx with eta_g. The scores stay on the device. An update of a
warm-up round contains a mask drawn after the last step, in bits, the covered entries of the weights, and theta_i in
16 bits. With `publish` = "bits" theta_i is left out, and the other devices' masks replace their probabilities.

Deviations, and choices that the paper leaves open: s starts at `first_score` = 0. A weight is covered if the neurons at
both its ends are. An uncovered entry is kept (the paper divides by 0). Devices are weighted by their examples
(`weigh`), where the paper weighs all alike. theta_{g without i} is the mean of each device's latest publication. In the
first round all entries are 0.5, and a single device has no diversity term. Procedure I changes only scores, not the
statistics of a normalisation. W counts rounds with updates. K is `epochs` over the device's examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import exact_sums, tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import masks
from fedquilt.models.partial.masks import MaskPlan

PLAIN = replace(fedavg.METHOD.traits, model_copies="mu")
TRAITS = replace(
    PLAIN,
    sent_data="the trained subnetwork and its mask",
    private_data="scores of the mask",
    training_passes=2,
    per_device_data="what every device has published of its mask",
)


@dataclass(frozen=True)
class WarmupParams(fedavg.Params):
    """Parameters common to FedPeWS and FedPeWS-Fixed."""

    warmup: Annotated[int, Meta(ge=0)] = 25  # W: rounds with masks; the paper's tau is W over all rounds. 0: none
    server_lr: Annotated[float, Meta(gt=0, le=2)] = 1.0  # eta_g: 1 takes the devices' mean
    mu: Annotated[float, Meta(ge=0)] = 0.0  # mu of FedProx; 0: FedAvg
    weigh: Literal["examples", "devices"] = "examples"  # weight of a device; in the paper all devices weigh the same


@dataclass(frozen=True)
class Params(WarmupParams):
    """Parameters of the warm-up and of the mask scores."""

    mask_lr: Annotated[float, Meta(gt=0)] = 0.1  # eta_s: learning rate of the scores; does not decay
    diversity: Annotated[float, Meta(ge=0)] = 2.0  # lambda: reward for a mask that differs from the others'
    publish: Literal["theta", "bits"] = "theta"  # form in which a device's mask is published to others
    first_score: Annotated[float, Meta(ge=-100, le=100)] = 0.0  # s_g^0; 0: every neuron is used half of the time

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_steps("FedPeWS alternates plain steps on scores and weights")
        if self.optimizer != "sgd" or self.momentum or self.weight_decay or self.clip:
            raise ValueError(
                "FedPeWS learns mask scores by plain steps: set optimizer = 'sgd', and no momentum, weight_decay, clip"
            )


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, dependencies between its neurons, and the latest mask of each device."""

    plan: MaskPlan
    round: int  # rounds with updates so far
    reached: float  # share of the model's entries that some mask covered in the last warm-up round
    published: dict[str, np.ndarray]  # latest mask of each device, (h,) float16 or (ceil(h/8),) uint8


@dataclass(frozen=True)
class MaskedSums:
    """Sums of a warm-up round by entry: covered values times device weights, and these weights."""

    total: Mapping[str, exact_sums.ExactSum]  # sum_i n_i x_i m_i; counters: the largest
    # sum_i n_i m_i in the tensor's shape, or a single entry if the masks cover the whole tensor.
    cover: Mapping[str, exact_sums.ExactSum]
    published: Mapping[str, np.ndarray]


RoundSums: TypeAlias = MaskedSums | WeightedSums  # of a warm-up round, or of a later one


def init(bundle: core.Bundle, params: WarmupParams, seed: int) -> State:
    """Return the first state, with the mask plan that `fedquilt prepare` stored.

    Raises:
        ModelError: If `warmup` is not 0 and there is no plan or nothing to mask.
    """
    initial = fedavg.init(bundle, params, seed)
    plan = MaskPlan({}, {}, {})
    if params.warmup:
        try:
            plan = masks.plan_from_bundle(bundle, initial.model)
        except core.ModelError as error:
            raise core.ModelError(f"{error}; or set warmup = 0 to train without masks") from None
    return State(**vars(initial), plan=plan, round=0, reached=0.0, published={})


def is_warmup(state: State) -> bool:
    """Return whether the next round is a warm-up round."""
    return state.round < int(state.params["warmup"])


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train under masks, or the whole network after the warm-up."""
    if not is_warmup(state):
        return full_task_spec(state)
    others_mean = _mean_mask_of_others(state, device.device)
    bundles = {"model": state.model, "plan": {"json": masks.plan_to_array(state.plan)}}
    if others_mean is not None:
        bundles["others"] = {"theta": others_mean}
    task_spec = local_training.training_task_spec(state, bundles, TRAITS)
    return replace(task_spec, params={**task_spec.params, "masked": True, "alone": others_mean is None})


def full_task_spec(state: State) -> core.TaskSpec:
    """Return the task spec to train the whole network."""
    return local_training.training_task_spec(state, {"model": state.model}, PLAIN)


def _mean_mask_of_others(state: State, device: str) -> np.ndarray | None:
    """Return the other devices' mean mask, 0.5 if no device has published one, or None if only this one."""
    if not state.published:
        return np.full(state.plan.neurons, 0.5, np.float32)
    published_masks = [mask for name, mask in sorted(state.published.items()) if name != device]
    if not published_masks:
        return None
    total = np.zeros(state.plan.neurons)
    for mask in published_masks:
        total += mask if mask.dtype.kind == "f" else masks.unpack_mask(mask, state.plan.neurons)
    return (total / len(published_masks)).astype(np.float32)


# -- on the device --------------------------------------------------------------------------------


def proximal_hooks(task: core.Task) -> core.Hooks:
    """Return hooks that add FedProx's proximal term, or no hooks if mu is 0."""
    mu = task.params["mu"]
    return (
        core.Hooks(correct_gradient=lambda gradient, value, anchors: gradient + mu * (value - anchors["start"]))
        if mu
        else core.Hooks()
    )


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train mask scores and weights (FedPeWS, Eq. 6 and 8), and return a random mask with its weights."""
    if not task.params.get("masked"):
        return fedavg.work(task, site, proximal_hooks(task))
    import torch

    from fedquilt.models.partial.torch_masks import SCORES, MaskHooks

    plan, received = masks.plan_from_array(site.load("plan")["json"]), site.load("model")
    others_mean = None if task.params["alone"] else torch.from_numpy(site.load("others")["theta"])
    mask_hooks = MaskHooks(plan, others_mean, task.params["diversity"], task.params["mu"])
    hooks = core.Hooks(
        prepare=mask_hooks.prepare,
        steps=mask_hooks.training_steps(task.params["mask_lr"] / local_training.fit_from_task(task).lr),
    )
    initial_scores = np.full(plan.neurons, task.params["first_score"], np.float32)
    client_result = local_training.train_from(
        task, site, {**received, SCORES: site.private_state.get("scores", initial_scores)}, hooks
    )
    model = dict(client_result.bundles["model"])
    scores = model.pop(SCORES)
    theta = (1 / (1 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
    neurons = site.rng.random(plan.neurons) < theta
    published_mask = {"bits": masks.pack_mask(neurons)}
    if task.params["publish"] == "theta":
        published_mask["theta"] = theta.astype(np.float16)
    covered = masks.select_covered(model, masks.covered_entries(plan, neurons))
    return replace(
        client_result,
        bundles={"model": covered, "mask": published_mask},
        metrics={**client_result.metrics, "used": float(neurons.mean()), "theta": float(theta.mean())},
        private_state={"scores": scores},
    )


# -- on the coordinator ---------------------------------------------------------------------------


def update_weight(state: State, update: core.DeviceUpdate) -> float:
    """Return the weight of an update in the mean: its examples, or 1 if all devices weigh the same."""
    return update.weight if state.params["weigh"] == "examples" else 1.0


def update_schema(state: State) -> core.UpdateSchema:
    """Return the schema of an update: a mask and the covered entries in the warm-up, later a model."""
    if not is_warmup(state):
        return local_training.full_model_schema(state)
    count = state.plan.neurons
    mask = {"bits": tensors.TensorSpec((-(-count // 8),), np.dtype(np.uint8))}
    theta = {"theta": tensors.TensorSpec((count,), np.dtype(np.float16))}
    return core.UpdateSchema({"model": state.model, "mask": {**mask, **theta}}, exact=False)


def fold(state: State, accumulator: RoundSums | None, update: core.DeviceUpdate) -> RoundSums:
    """Return the sums with an update added in place: covered entries in the warm-up, later the model.

    Raises:
        UpdateError: If a warm-up update has no mask, or a mask of the wrong size or values.
    """
    if not is_warmup(state):
        assert not isinstance(accumulator, MaskedSums)
        return fold_full_model(state, accumulator, update)
    assert not isinstance(accumulator, WeightedSums)
    mask, expected_names = update.bundles.get("mask", {}), {"bits", "theta"}
    if state.params["publish"] == "bits":
        expected_names = {"bits"}
    if mask.keys() != expected_names:
        raise core.UpdateError(
            f"{update.device} published {sorted(mask)} of its mask instead of {sorted(expected_names)}"
        )
    count = state.plan.neurons
    neurons = masks.unpack_mask(mask["bits"], count)
    published = mask.get("theta", mask["bits"])
    if "theta" in mask and not (
        published.dtype == np.float16 and published.shape == (count,) and _are_probabilities(published)
    ):
        raise core.UpdateError(f"{update.device}: theta is not {count} float16 probabilities")
    return add_covered(state, accumulator, update, neurons, {update.device: published})


def fold_full_model(state: State, accumulator: WeightedSums | None, update: core.DeviceUpdate) -> WeightedSums:
    """Return the sums with an update's whole model added in place, weighted by `update_weight`."""
    return fedavg.fold(state, accumulator, replace(update, weight=update_weight(state, update)))


def _are_probabilities(values: np.ndarray) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())  # NaN is neither


def add_covered(
    state: State,
    accumulator: MaskedSums | None,
    update: core.DeviceUpdate,
    neurons: np.ndarray,
    published: Mapping[str, np.ndarray],
) -> MaskedSums:
    """Add the entries that a device's mask `neurons`, (h,), covers in place, and return the sums.

    Raises:
        UpdateError: If the entries are not those that the mask covers, or are not finite.
    """
    covered = update.bundles.get("model", {})
    if odd_names := sorted(covered.keys() ^ state.model.keys()):
        raise core.UpdateError(f"tensor names differ: {', '.join(odd_names[:5])}{' ...' if len(odd_names) > 5 else ''}")
    covered_masks = masks.covered_entries(state.plan, neurons)
    model, weight = masks.restore_masked_tensors(covered, covered_masks), update_weight(state, update)
    tensors.require_addable(model, state.model)
    cover = {
        k: covered_masks[k] * weight if k in covered_masks else np.full((1,) * v.ndim, weight) for k, v in model.items()
    }
    accumulator = accumulator or MaskedSums({}, {}, {})
    total = exact_sums.add_arrays(accumulator.total, model, weight)
    return MaskedSums(total, exact_sums.add_arrays(accumulator.cover, cover), {**accumulator.published, **published})


def step(state: State, total: RoundSums | None) -> State:
    """Return the state with each covered entry moved to its devices' mean (FedPeWS, Eq. 4)."""
    if total is None or (isinstance(total, WeightedSums) and total.weight == 0):
        return state
    rate = state.params["server_lr"]
    if isinstance(total, WeightedSums):
        model = {name: _step_towards(state.model[name], array, rate) for name, array in total.mean().items()}
        return replace(state, model=tensors.cast_like(model, state.model), round=state.round + 1, published={})
    model, covered_entries, entries = {}, 0, 0
    for name, old in state.model.items():
        coverage, entry_sums = total.cover[name].rounded_value(), total.total[name].rounded_value()
        if old.dtype.kind in "iu":
            model[name] = entry_sums
            continue
        is_covered = np.broadcast_to(coverage > 0, old.shape)
        mean = np.divide(entry_sums, coverage, out=old.astype(np.float64), where=is_covered)
        model[name] = np.where(is_covered, _step_towards(old, mean, rate), old)
        covered_entries, entries = covered_entries + int(is_covered.sum()), entries + old.size
    return replace(
        state,
        model=tensors.cast_like(model, state.model),
        round=state.round + 1,
        reached=covered_entries / entries,
        published={**state.published, **total.published} if total.published else {},
    )


def _step_towards(old: np.ndarray, mean: np.ndarray, rate: float) -> np.ndarray:
    # With rate = 1 this form equals the mean to the last bit.
    return mean if mean.dtype.kind in "iu" else (1 - rate) * old.astype(np.float64) + rate * mean


def explain(state: State) -> list[str]:
    """Return a sentence on the share of the network that masks covered in a warm-up round, or []."""
    if not state.round or state.round > int(state.params["warmup"]):
        return []
    round_name = f"warm-up round {state.round} of {state.params['warmup']}"
    return [f"{round_name}: the devices' masks together covered {100 * state.reached:.0f} % of the network"]


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2410.03042",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
    aggregation=core.Aggregation(fold, schema=update_schema),
    step=step,
    explain=explain,
    traits=TRAITS,
)

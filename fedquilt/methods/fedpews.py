"""FedPeWS: in the first rounds each device trains a subnetwork of its own, which it finds by itself.

Paper: Tastan et al., FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning (arXiv 2410.03042), Algorithm 1, Eq. 4 to 8. In each of W warm-up rounds a device alternates on
every mini-batch: a step on its mask scores s (Procedure I), then one on the weights (Procedure II), each
under newly drawn masks m ~ Bernoulli(theta), theta = sigmoid(s), one entry per hidden neuron:

    L_s = f(x m) - lambda ||theta_i - theta_{g without i}||^2        s <- s - eta_s grad L_s
    L_x = f(x m) [+ mu/2 ||(x - x_g) m||^2, over FedProx]            x <- x - eta_l grad L_x
    x_g <- x_g - eta_g (x_g - sum_i x_i m_i / sum_i m_i)   where any mask covers the entry, else unchanged

From then on it is FedAvg (mu = 0) or FedProx with eta_g. The scores stay on the device. An update of
a warm-up round holds the mask drawn after the last step, in bits; covered entries of the weights; and theta_i in
16 bits unless `publish` is "bits": then the others' masks replace their probabilities.

Deviations, and choices that the paper leaves open: s begins at `first_score` = 0; a weight is covered where
both its ends are; an uncovered entry is kept, where the paper divides by 0. Devices count by their examples
(`weigh`), the paper's all alike. theta_{g without i} is the mean of each device's last publication; in the
first round all are at 0.5, and a device that remains the only one has no term of diversity. Procedure I changes
scores alone, no statistics of a normalisation. W counts rounds that were answered; K is `epochs` over the device's
examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from fedquilt import exact, tensors
from fedquilt.core import (
    Answer,
    Bundle,
    Contribution,
    DeviceView,
    Expected,
    Hooks,
    ModelError,
    Order,
    Site,
    Task,
    UpdateError,
    expects,
)
from fedquilt.methods import fedavg
from fedquilt.models.partial import masks
from fedquilt.models.partial.masks import Plan


@dataclass(frozen=True)
class Warmup(fedavg.Params):
    """Parameters common to FedPeWS and FedPeWS-Fixed."""

    warmup: Annotated[int, Meta(ge=0)] = 25  # W: rounds with masks; the paper's tau is W over all rounds. 0: none
    server_lr: Annotated[float, Meta(gt=0, le=2)] = 1.0  # eta_g: 1 takes the devices' mean
    mu: Annotated[float, Meta(ge=0)] = 0.0  # mu of FedProx; 0: FedAvg
    weigh: Literal["examples", "devices"] = "examples"  # weight of a device; the paper's count alike


@dataclass(frozen=True)
class Params(Warmup):
    """Parameters of the mask scores, besides the warm-up's."""

    mask_lr: Annotated[float, Meta(gt=0)] = 0.1  # eta_s: learning rate of the scores; does not decay
    diversity: Annotated[float, Meta(ge=0)] = 2.0  # lambda: reward for a mask that differs from the others'
    publish: Literal["theta", "bits"] = "theta"  # form in which a device's mask is published to others
    first_score: Annotated[float, Meta(ge=-100, le=100)] = 0.0  # s_g^0; 0: every neuron is used half of the time

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: an optimizer other than plain SGD.
        """
        super().__post_init__()
        if self.optimizer != "sgd" or self.momentum or self.weight_decay or self.clip:
            raise ValueError(
                "mask scores are learnt by plain steps: FedPeWS wants sgd without momentum, weight_decay and clip"
            )


@dataclass(frozen=True)
class State(fedavg.State):
    """Global model, the dependencies between its neurons, and the masks that devices have published."""

    plan: Plan
    round: int  # rounds answered so far
    reached: float  # share of the model's entries that some mask covered in the last warm-up round
    published: dict[str, np.ndarray]  # by device, (h,) float16 or (ceil(h/8),) uint8: its last one


@dataclass(frozen=True)
class Covered:
    """Sums of a warm-up round over devices: weighted covered entries, and the weights that cover them."""

    total: Mapping[str, exact.Total]  # sum_i n_i x_i m_i; counters: the largest
    cover: Mapping[str, exact.Total]  # sum_i n_i m_i, in the tensor's shape; one entry where everything is covered
    published: Mapping[str, np.ndarray]


def init(bundle: Bundle, params: Warmup, seed: int) -> State:
    """Start from the bundle's model with the plan of masks that `fedquilt prepare` stored.

    Raises:
        ModelError: there is no plan, or nothing that can be masked, and `warmup` is not 0.
    """
    begun = fedavg.init(bundle, params, seed)
    plan = Plan({}, {}, {})
    if params.warmup:
        try:
            plan = masks.of_bundle(bundle, begun.model)
        except ModelError as error:
            raise ModelError(f"{error}; or set warmup = 0, which needs no masks") from None
    return State(**vars(begun), plan=plan, round=0, reached=0.0, published={})


def warm(state: State) -> bool:
    """Whether the coming round has masks."""
    return state.round < int(state.params["warmup"])


def send(state: State, device: DeviceView) -> Order:
    """Order training under masks, with the others' mean probabilities; after the warm-up of the whole network."""
    if not warm(state):
        return full(state)
    others, anchors = _others(state, device.device), int(state.params["mu"] > 0)
    bundles = {"model": state.model, "plan": {"json": masks.to_array(state.plan)}}
    if others is not None:
        bundles["others"] = {"theta": others}
    order = fedavg.training_order(state, bundles, trainings=2, anchors=anchors)
    return replace(order, params={**order.params, "masked": True, "alone": others is None})


def full(state: State) -> Order:
    """Order training of the whole network."""
    return fedavg.training_order(state, {"model": state.model}, anchors=int(state.params["mu"] > 0))


def _others(state: State, device: str) -> np.ndarray | None:
    """theta_{g without i}: mean of the masks published by all other devices, float32 (h,); None: there are none."""
    if not state.published:
        return np.full(state.plan.neurons, 0.5, np.float32)
    given = [value for name, value in sorted(state.published.items()) if name != device]
    if not given:
        return None
    total = np.zeros(state.plan.neurons)
    for value in given:
        total += value if value.dtype.kind == "f" else masks.from_bits(value, state.plan.neurons)
    return (total / len(given)).astype(np.float32)


# -- on the device --------------------------------------------------------------------------------


def proximal(task: Task) -> Hooks:
    """Hooks with FedProx's pull towards the received model; none with mu = 0."""
    mu = task.params["mu"]
    return Hooks(correct=lambda gradient, value, at: gradient + mu * (value - at["start"])) if mu else Hooks()


def work(task: Task, site: Site) -> Answer:
    """Train scores and weights in turn, then draw the mask to send; plain training after the warm-up."""
    if not task.params.get("masked"):
        return fedavg.work(task, site, proximal(task))
    import torch

    from fedquilt.models.partial.torch_masks import SCORES, Gates

    plan, received = masks.from_array(site.load("plan")["json"]), site.load("model")
    others = None if task.params["alone"] else torch.from_numpy(site.load("others")["theta"])
    gates = Gates(plan, others, task.params["diversity"], task.params["mu"])
    hooks = Hooks(prepare=gates.prepare, steps=gates.steps(task.params["mask_lr"] / fedavg.fit_of(task).lr))
    first = np.full(plan.neurons, task.params["first_score"], np.float32)
    answer = fedavg.trained(task, site, {**received, SCORES: site.local.get("scores", first)}, hooks)
    model = dict(answer.bundles["model"])
    scores = model.pop(SCORES)
    theta = (1 / (1 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
    neurons = site.rng.random(plan.neurons) < theta
    told = {"bits": masks.to_bits(neurons)}
    if task.params["publish"] == "theta":
        told["theta"] = theta.astype(np.float16)
    sent = masks.take(model, masks.covered(plan, neurons))
    return replace(
        answer,
        bundles={"model": sent, "mask": told},
        metrics={**answer.metrics, "used": float(neurons.mean()), "theta": float(theta.mean())},
        local={"scores": scores},
    )


# -- on the coordinator ---------------------------------------------------------------------------


def weight_of(state: State, update: Contribution) -> float:
    """Weight of a device in the mean."""
    return update.weight if state.params["weigh"] == "examples" else 1.0


def taken(state: State) -> Expected:
    """The whole model, or in the warm-up the part that a device's mask covers, and the mask."""
    if not warm(state):
        return fedavg.whole(state)
    count = state.plan.neurons
    mask = {"bits": tensors.Shaped((-(-count // 8),), np.dtype(np.uint8))}
    theta = {"theta": tensors.Shaped((count,), np.dtype(np.float16))}
    return Expected({"model": state.model, "mask": {**mask, **theta}}, whole=False)


@expects(taken)
def fold(state: State, so_far: Covered | fedavg.Sum | None, update: Contribution) -> Covered | fedavg.Sum:
    """Add an update: its covered entries in the warm-up, its model afterwards.

    Raises:
        UpdateError: no mask, or one of other size or values.
    """
    if not warm(state):
        assert not isinstance(so_far, Covered)
        return fold_full(state, so_far, update)
    assert not isinstance(so_far, fedavg.Sum)
    told, wanted = update.bundles.get("mask", {}), {"bits", "theta"}
    if state.params["publish"] == "bits":
        wanted = {"bits"}
    if told.keys() != wanted:
        raise UpdateError(f"{update.device} told {sorted(told)} of its mask, this warm-up wants {sorted(wanted)}")
    count = state.plan.neurons
    neurons = masks.from_bits(told["bits"], count)
    value = told.get("theta", told["bits"])
    if "theta" in told and not (value.dtype == np.float16 and value.shape == (count,) and _probable(value)):
        raise UpdateError(f"{update.device} told as theta what are not {count} float16 probabilities")
    return add(state, so_far, update, neurons, {update.device: value})


def fold_full(state: State, so_far: fedavg.Sum | None, update: Contribution) -> fedavg.Sum:
    """Add an update to the sums of a round of the whole network."""
    return fedavg.fold(state, so_far, replace(update, weight=weight_of(state, update)))


def _probable(values: np.ndarray) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())  # NaN is neither


def add(
    state: State, so_far: Covered | None, update: Contribution, neurons: np.ndarray, told: Mapping[str, np.ndarray]
) -> Covered:
    """Add one device's covered entries to the sums, in place; `neurons` is its mask (h,).

    Raises:
        UpdateError: the entries are not those that its mask covers, or not finite.
    """
    sent = update.bundles.get("model", {})
    if odd := sorted(sent.keys() ^ state.model.keys()):
        raise UpdateError(f"tensor names differ: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
    marks = masks.covered(state.plan, neurons)
    model, weight = masks.put(sent, marks), weight_of(state, update)
    tensors.require_same(model, state.model)
    cover = {k: marks[k] * weight if k in marks else np.full((1,) * v.ndim, weight) for k, v in model.items()}
    so_far = so_far or Covered({}, {}, {})
    total = exact.plus(so_far.total, model, weight)
    return Covered(total, exact.plus(so_far.cover, cover), {**so_far.published, **told})


def step(state: State, total: Covered | fedavg.Sum | None) -> State:
    """Move each covered entry towards the mean over the devices that cover it; close a later round as FedAvg."""
    if total is None or (isinstance(total, fedavg.Sum) and total.weight == 0):
        return state
    rate = state.params["server_lr"]
    if isinstance(total, fedavg.Sum):
        found = {name: _towards(state.model[name], array, rate) for name, array in fedavg.mean(total).items()}
        return replace(state, model=fedavg.cast(found, state.model), round=state.round + 1, published={})
    found, reached, entries = {}, 0, 0
    for name, before in state.model.items():
        cover, given = total.cover[name].value(), total.total[name].value()
        if before.dtype.kind in "iu":
            found[name] = given
            continue
        some = np.broadcast_to(cover > 0, before.shape)
        mean = np.divide(given, cover, out=before.astype(np.float64), where=some)
        found[name] = np.where(some, _towards(before, mean, rate), before)
        reached, entries = reached + int(some.sum()), entries + before.size
    return replace(
        state,
        model=fedavg.cast(found, state.model),
        round=state.round + 1,
        reached=reached / entries,
        published={**state.published, **total.published} if total.published else {},
    )


def _towards(before: np.ndarray, mean: np.ndarray, rate: float) -> np.ndarray:
    """Step x - eta (x - mean), written so that eta = 1 gives the mean to the last bit; counters take the mean's."""
    return mean if mean.dtype.kind in "iu" else (1 - rate) * before.astype(np.float64) + rate * mean


def explain(state: State) -> list[str]:
    """Share of the network that the masks of the last warm-up round covered together."""
    if not state.round or state.round > int(state.params["warmup"]):
        return []
    of = f"warm-up round {state.round} of {state.params['warmup']}"
    return [f"{of}: the devices' masks together covered {100 * state.reached:.0f} % of the network"]


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2410.03042",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    work=work,
    fold=fold,
    step=step,
    explain=explain,
    keeps="what every device has published of its mask",
)

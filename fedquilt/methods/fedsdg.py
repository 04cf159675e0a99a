"""FedSDG: a gate in each block weighs the device's own adapter against the shared adapter.

Paper: FedSDG: Structure Decoupled Gating for Personalized Federated Finetuning (anonymous submission), sections 3.2
to 3.4. The network is frozen. The attention's output projection and the feed-forward part's output projection of block
l each have a shared adapter and an own adapter of the device, of the same shape (Eq. 3 and 4):

    y = W x + s x A_g B_g + m_l s x A_p B_p,   m_l = sigmoid(a_l).

A device minimises its loss + lambda_1 sum_l m_l + lambda_2 ||theta_p||^2 (Eq. 5) over the shared part, its own branch
and the gates, each with its own learning rate (Eq. 6 to 8), and sends only the change of the shared part (Eq. 9). The
server weighs each change by its cosine with the mean change, if the cosine is above 0 (Eq. 10 and 11).

Deviations: Eq. 4 is applied to outputs, as a sum of products, as in the authors' code. B_p starts as small noise,
because with B_p = 0 the gates would have no gradient. If no change agrees with the mean, the plain mean is used. Shared
weight decay (`official` only) is part of the loss, hence clipped with the loss. In a network without attention every
linear layer before the head is a block. Alignment needs all changes of a round at once: the coordinator holds up to
`most` changes, of devices drawn by the job's seed. A device that has never trained is evaluated with all gates shut,
because its branch is noise. The shared model is also evaluated with all gates shut. The result is the shared model with
all gates shut and the adapters merged into its weights.

`preset = "official"` follows the authors' code where it differs from the paper: a gate for every layer, which starts
closer to shut and learns faster, other penalties, and the plain mean. With `tell_gates` a device reports its gates,
rounded. By default, as in the paper, gates stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.formats import training_choices
from fedquilt.methods import fedavg, fedlora
from fedquilt.methods.robust import CollectedUpdates, collect_update
from fedquilt.models import local_training
from fedquilt.models.partial import lora

EPS = 1e-8
MIN_ALIGNMENT = 1e-6  # sum of alignments below which no change agrees with the mean
SHUT_GATE = -100.0  # a of a shut gate: m is 0 in 32 bits
TEMPERATURE = 0.05  # of "others"

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "paper": {
        "epochs": 1,
        "batch": 32,
        "lr_gates": 1e-2,
        "gate": 0.0,
        "gates": "block",
        "sparsity": 1e-3,
        "own_decay": 1e-4,
        "shared_decay": 0.0,
        "aggregation": "aligned",
    },
    "official": {
        "epochs": 5,
        "batch": 128,
        "lr_gates": 0.1,
        "gate": -2.0,
        "gates": "layer",
        "sparsity": 0.01,
        "own_decay": 0.001,
        "shared_decay": 1e-4,
        "aggregation": "mean",
    },
}


@dataclass(frozen=True)
class Params:
    """FedSDG's parameters. The preset gives the values of parameters that are None.

    `aggregation` is "aligned" for Eq. 10, "others" for the softmax of the cosines between a device's adapters and the
    mean of all others, or "mean" for equal weights.
    """

    preset: Literal["paper", "official"] = "paper"
    epochs: Annotated[int, Meta(ge=1)] | None = None  # E: 1; official 5
    batch: fedavg.Batch | None = None  # 32; official 128
    lr: Annotated[float, Meta(gt=0)] = 1e-3  # eta_g, of adapters and head, by Adam
    lr_own: Annotated[float, Meta(gt=0)] = 1e-3  # eta_p, of the device's own branch
    lr_gates: Annotated[float, Meta(gt=0)] | None = None  # eta_m: 0.01; official 0.1
    clip: Annotated[float, Meta(ge=0)] = 1.0  # largest gradient norm, over all that is trained; 0: no clipping
    rank: Annotated[int, Meta(ge=1)] = 8  # r
    alpha: Annotated[float, Meta(gt=0)] = 16.0  # factor of the adapters: alpha / r
    gate: float | None = None  # a at first: 0, hence m = 0.5; official -2; -100 shuts them: FedLoRA
    gates: Literal["block", "layer"] | None = None  # unit that has a gate of its own: block; official layer
    sparsity: Annotated[float, Meta(ge=0)] | None = None  # lambda_1: 0.001; official 0.01
    own_decay: Annotated[float, Meta(ge=0)] | None = None  # lambda_2: 0.0001; official 0.001
    shared_decay: Annotated[float, Meta(ge=0)] | None = None  # weight decay of the shared part: 0; official 0.0001
    head: Literal["shared", "private"] = "shared"
    aggregation: Literal["aligned", "others", "mean"] | None = None
    most: Annotated[int, Meta(ge=1)] = 64  # changes of a round in memory at once
    tell_gates: bool = False  # report every gate, to two decimals
    loss: core.Choice = ""
    schedule: core.Choice = "constant"  # of all three rates
    augment: tuple[core.Choice, ...] = ()
    accumulate: Annotated[int, Meta(ge=1)] = 1
    ema: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        training_choices.require_valid_choices(self)
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class State(fedlora.State):
    """Shared part as `model`, the frozen backbone, and log sentences on the last round."""

    seed: int
    log: tuple[str, ...] = ()


# -- on the coordinator ---------------------------------------------------------------------------


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state: the bundle's network as the frozen backbone, with shared adapters and head."""
    initial = fedavg.init(bundle, params, seed)
    model = fedlora.initial_shared_part(initial.model, params.rank, seed, initial.network)
    if params.head == "private":
        model = {name: array for name, array in model.items() if name not in initial.model}
    params_with_seed = {**initial.params, "optimizer": "adam", "own_seed": core.derive_seed(seed, "own")}
    fields = vars(replace(initial, params=params_with_seed, model=model))
    return State(**fields, backbone=initial.model, seed=seed)


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return FedLoRA's task spec with the names of the head's tensors."""
    task_spec = fedlora.send(state, device)
    return replace(task_spec, params={**task_spec.params, "head_names": fedlora.head_names(state.network)})


def fold(state: State, collected: CollectedUpdates | None, update: core.DeviceUpdate) -> CollectedUpdates:
    """Return the collected updates with a device's change added, for up to `most` devices in a round."""
    return collect_update(collected, update, "delta", state.model, state.params["most"], state.seed)


def step(state: State, total: CollectedUpdates | None) -> State:
    """Return the state with the changes added, weighted by alignment (FedSDG, Eq. 10 and 11)."""
    if total is None:
        return state
    devices = sorted(total.updates)
    shares, any_agreed = aggregation_weights([total.updates[device] for device in devices], state.params["aggregation"])
    model = {
        name: array + sum(share * total.updates[device][name] for share, device in zip(shares, devices, strict=True))
        for name, array in state.model.items()
    }
    notes = total.left_out_note("changes")
    if not any_agreed:
        notes.append("no change agreed with the mean change, so the plain mean was used")
    elif excluded_devices := [device for device, share in zip(devices, shares, strict=True) if share == 0]:
        notes.append(f"excluded because their change opposes the mean change: {', '.join(excluded_devices)}")
    return replace(state, model=tensors.cast_like(model, state.model), log=tuple(notes))


def aggregation_weights(deltas: Sequence[core.Tensors], rule: str) -> tuple[np.ndarray, bool]:
    """Return the weights of the changes, (n,), and whether any change agrees with the mean.

    The weights of "aligned" (FedSDG, Eq. 10) sum to slightly less than 1, by at most EPS / MIN_ALIGNMENT.
    """
    count = len(deltas)
    equal_weights = np.full(count, 1.0 / count)
    if rule == "mean" or (rule == "others" and count == 1):
        return equal_weights, True
    rows = np.stack([_flatten(delta, adapters_only=rule == "others") for delta in deltas])  # (n, values)
    total = rows.sum(axis=0)
    if rule == "others":
        cosines = np.array([_cosine(row, (total - row) / (count - 1)) for row in rows])
        exponentials = np.exp((cosines - cosines.max()) / TEMPERATURE)
        return exponentials / exponentials.sum(), True
    aligned = np.array([max(0.0, _cosine(row, total / count)) for row in rows])
    if aligned.sum() < MIN_ALIGNMENT:
        return equal_weights, False
    return aligned / (aligned.sum() + EPS), True


def _flatten(delta: core.Tensors, adapters_only: bool) -> np.ndarray:  # (values,) float64
    names = [name for name in sorted(delta) if not adapters_only or name.rpartition(".")[2] in lora.SHARED_SUFFIXES]
    return np.concatenate([delta[name].astype(np.float64).ravel() for name in names])


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + EPS))


def result(state: State) -> core.Artefact:
    """Return the network with shared adapters merged. `meta["private"]` lists what stays on devices."""
    adapter_sites = fedlora.adapted_layers(state.network)
    # A device's own branch changes the weights of all adapted layers.
    adapted_names = {f"{layer}.weight" for site in adapter_sites for layer in site.layers}
    head = set(fedlora.head_names(state.network)) if state.params["head"] == "private" else set()
    private = {"private": sorted(adapted_names | head), "untrained": sorted(head)}
    return local_training.weights_artefact(state.network, fedlora.merged_model(state), **private)


# -- on the device --------------------------------------------------------------------------------


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train shared part, own branch and gates (FedSDG, Eq. 5 to 8), and send the change (Eq. 9)."""
    backbone, received = site.load("backbone"), site.load("model")
    branch = load_own_branch(task, site, backbone)
    client_result = local_training.train_from(
        task, site, {**backbone, **received, **branch}, make_branch_hooks(task, received, branch)
    )
    model = client_result.bundles["model"]
    delta = {name: model[name] - received[name] for name in received}
    trained = {name: model[name] for name in branch}
    return replace(
        client_result,
        bundles={"delta": delta},
        metrics={**client_result.metrics, **_gate_metrics(task, trained)},
        private_state=trained,
    )


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the network with the shared part and the device's own branch."""
    backbone, received = site.load("backbone"), site.load("model")
    branch = _load_evaluation_branch(task, site, backbone)
    hooks = make_branch_hooks(task, received, branch)
    return site.engine.evaluate(task.params["network"], {**backbone, **received, **branch}, site.held_out, hooks=hooks)


def personal(task: core.Task, site: core.ClientContext) -> core.Tensors:
    """Return the device's network, with both branches merged into its weights."""
    backbone, received = site.load("backbone"), site.load("model")
    branch = _load_evaluation_branch(task, site, backbone)
    shared_model = fedlora.merge_adapters(task.params, backbone, {**received, **branch})
    return lora.merge_own_branch(shared_model, branch, layers_by_gate(task), fedlora.adapter_scale(task.params))


def _load_evaluation_branch(task: core.Task, site: core.ClientContext, backbone: core.Tensors) -> core.Tensors:
    """Return the device's branch and gates. Before the first training, all gates are shut."""
    # The branch of a device that has never trained is noise.
    branch = load_own_branch(task, site, backbone)
    if site.private_state:
        return branch
    return {name: shut_gate(array) if name.rpartition(".")[2] == lora.GATE else array for name, array in branch.items()}


def shut_gate(gate: np.ndarray) -> np.ndarray:
    """Return the value of a shut gate, which removes the own branch."""
    return np.full_like(gate, SHUT_GATE)


def load_own_branch(task: core.Task, site: core.ClientContext, backbone: core.Tensors) -> dict[str, np.ndarray]:
    """Return the device's branch, gates and private head, as last stored or with their first values.

    Raises:
        ModelError: If the stored values have the shapes of another network, rank or choice of gates.
    """
    rng = tensors.seeded_rng(task.params["own_seed"], site.device)
    branch = lora.initial_own_branch(backbone, layers_by_gate(task), task.params["rank"], rng, task.params["gate"])
    if task.params["head"] == "private":
        branch.update({name: backbone[name] for name in task.params["head_names"]})
    if not site.private_state:
        return branch
    shapes = {name: array.shape for name, array in branch.items()}
    if {name: array.shape for name, array in site.private_state.items()} != shapes:
        raise core.ModelError(
            f"{site.device} has a stored branch of another network, rank or choice of gates: give the job a new name"
        )
    return dict(site.private_state)


def layers_by_gate(task: core.Task) -> tuple[lora.AdapterSite, ...]:
    """Return the adapted layers in groups, one for each gate."""
    adapter_sites = lora.sites_from_json(task.params["places"])
    return lora.split_by_layer(adapter_sites) if task.params["gates"] == "layer" else adapter_sites


def make_branch_hooks(task: core.Task, received: core.Tensors, branch: core.Tensors) -> core.Hooks:
    """Return hooks that insert both branches, with learning rates and penalty (FedSDG, Eq. 5)."""
    sites, params = layers_by_gate(task), task.params

    def prepare(module: Any) -> Any:
        from fedquilt.models.partial import adapter_layers

        return adapter_layers.insert_adapters(
            module, sites, params["rank"], fedlora.adapter_scale(params), with_own_branch=True
        )

    def learning_rate_factor(name: str) -> float:
        suffix = name.rpartition(".")[2]
        if suffix == lora.GATE:
            return float(params["lr_gates"] / params["lr"])
        if suffix in lora.OWN_SUFFIXES:
            return float(params["lr_own"] / params["lr"])
        return float(name in received or name in branch)  # a private head learns at the shared rate

    def penalty(forward: core.ForwardPass) -> Any:
        total = 0.0 * forward.scores.sum()
        for name, value in forward.module.named_parameters():
            suffix = name.rpartition(".")[2]
            if suffix == lora.GATE and params["sparsity"]:
                total = total + params["sparsity"] * value.sigmoid()
            elif suffix in lora.OWN_SUFFIXES and params["own_decay"]:
                total = total + params["own_decay"] * value.square().sum()
            elif name in received and params["shared_decay"]:
                total = total + params["shared_decay"] / 2 * value.square().sum()
        return total

    return core.Hooks(prepare=prepare, steps=(core.Step(rate=learning_rate_factor, penalty=penalty),))


def _gate_metrics(task: core.Task, branch: core.Tensors) -> dict[str, float]:
    """Return the openness of each gate, 0 to 1, as metrics "gate.00" and so on, or {} if not reported."""
    if not task.params["tell_gates"]:
        return {}
    openness = lora.gate_openness(branch, layers_by_gate(task))
    return {f"gate.{index:02}": round(m, 2) for index, m in enumerate(openness)}


METHOD = replace(
    fedlora.METHOD,
    paper="FedSDG (anonymous submission)",
    params=Params,
    state=State,
    init=init,
    send=send,
    work=work,
    check=check,
    aggregation=core.Aggregation(fold, schema=lambda state: core.UpdateSchema({"delta": state.model})),
    step=step,
    result=result,
    explain=lambda state: state.log,
    personal_model=personal,
    traits=replace(
        fedlora.METHOD.traits,
        sent_data="changes of adapters and head",
        private_data="its adapters and gates",
        per_device_data="changes of adapters and head, `most` of them, which are compared",
    ),
)

"""MOON: a contrastive loss pulls a device's representation towards the global model's.

Paper: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021 (arXiv 2103.16257), Eq. 3 and 4.
The local loss gains mu * l_con. With s the cosine similarity, z the representation of the model in training, z_glob of
the received model and z_prev of the device's previous model,

    l_con = -log( exp(s(z, z_glob) / T) / (exp(s(z, z_glob) / T) + exp(s(z, z_prev) / T)) ).

Deviations: the representation is the input of the network's last linear layer. No projection head is added (the paper's
has two layers to 256 values), so that the job's network stays unchanged. A network with such layers can be given. In a
device's first round there is no previous model, and l_con is left out. The previous model is the device's own from its
latest round that counted, and is stored on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from fedquilt.core import (
    Bundle,
    ClientContext,
    ClientResult,
    DeviceView,
    ForwardPass,
    Hooks,
    ModelError,
    Step,
    Task,
    TaskSpec,
)
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

TRAITS = replace(fedavg.METHOD.traits, private_data="its previous model", forward_passes=2, model_copies=2)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the contrastive loss."""

    mu: Annotated[float, Meta(ge=0)] = 1.0  # mu: weight of the contrastive loss; 0 is FedAvg
    temperature: Annotated[float, Meta(gt=0)] = 0.5  # T


class ContrastiveHooks:
    """Hooks that add the contrastive loss mu * l_con."""

    def __init__(self, mu: float, temperature: float, head: str) -> None:
        self._mu, self._temperature, self._head = mu, temperature, head
        self._representation: Any = None  # (n, features) that entered the last linear layer in the last forward pass

    def prepare(self, module: Any) -> Any:
        """Return the module with a hook that records the classifier's input."""
        module.get_submodule(self._head).register_forward_pre_hook(self._record_input)
        return module

    def penalty(self, forward: ForwardPass) -> Any:
        """Return the mini-batch's contrastive loss mu * l_con, a scalar (MOON, Eq. 3 and 4)."""
        import torch
        from torch.nn import functional as F

        from fedquilt.models.networks import traces

        module, names_by_alias = forward.module, traces.state_names_by_alias(forward.module)
        z, training_modes = self._representation, [(submodule, submodule.training) for submodule in module.modules()]
        other_z = []
        module.eval()  # forward passes of the anchors must not change statistics or use dropout
        with torch.no_grad():
            for anchor in ("start", "previous"):
                anchor_tensors = {place: forward.anchors[anchor][name] for place, name in names_by_alias.items()}
                torch.func.functional_call(module, anchor_tensors, (forward.x,), tie_weights=False)
                other_z.append(self._representation)
        for submodule, mode in training_modes:
            submodule.training = mode
        similarities = torch.stack([F.cosine_similarity(z, anchor_z, dim=1) for anchor_z in other_z], dim=1)  # (n, 2)
        targets = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        return self._mu * F.cross_entropy(similarities / self._temperature, targets)

    def _record_input(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._representation = inputs[0]


def init(bundle: Bundle, params: Params, seed: int) -> NetworkState:
    """Return FedAvg's first state for a network with a last linear layer.

    Raises:
        ModelError: If the network has no last linear layer.
    """
    initial = fedavg.init(bundle, params, seed)
    if initial.register.find_classifier() is None:
        raise ModelError("the network has no last linear layer, whose inputs MOON compares: choose another method")
    return initial


def send(state: NetworkState, device: DeviceView) -> TaskSpec:
    """Return the task spec to train, with two more forward passes if there is a previous model."""
    traits = TRAITS if device.rounds else replace(TRAITS, forward_passes=0)
    task_spec = local_training.training_task_spec(state, {"model": state.model}, traits)
    return replace(task_spec, params={**task_spec.params, "head": state.register.find_classifier()})


def work(task: Task, site: ClientContext) -> ClientResult:
    """Train with the contrastive loss if there is a previous model. The device keeps the new model."""
    hooks = Hooks()
    if site.private_state:
        contrastive = ContrastiveHooks(task.params["mu"], task.params["temperature"], task.params["head"])
        hooks = Hooks(
            prepare=contrastive.prepare,
            anchors={"previous": site.private_state},
            steps=(Step(penalty=contrastive.penalty),),
        )
    client_result = fedavg.work(task, site, hooks)
    return replace(client_result, private_state=client_result.bundles["model"])


METHOD = replace(
    fedavg.METHOD,
    traits=TRAITS,
    paper="arXiv 2103.16257",
    params=Params,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
)

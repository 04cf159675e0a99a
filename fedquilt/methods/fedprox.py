"""FedProx: federated averaging with a proximal term in the local objective.

Paper: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv 1812.06127),
Eq. 2: the local objective gains mu/2 * ||w - w_t||^2, hence its gradient mu * (w - w_t).

Deviations: none in the objective. Devices run unequal numbers of epochs, as in the paper's partial work, only in rounds
planned for energy (`[cohort] deadline`), and are weighted by their examples.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt.core import ClientContext, ClientResult, Hooks, Task
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the strength of the proximal term."""

    mu: Annotated[float, Meta(ge=0)] = 0.01  # mu: strength of the proximal term; 0 is FedAvg


def work(task: Task, site: ClientContext) -> ClientResult:
    """Train with the proximal term's gradient, mu * (w - w_t), added (FedProx, Eq. 2)."""
    mu = task.params["mu"]
    proximal_hooks = Hooks(correct_gradient=lambda gradient, value, anchors: gradient + mu * (value - anchors["start"]))
    return fedavg.work(task, site, proximal_hooks)


TRAITS = replace(fedavg.METHOD.traits, unequal_epochs=True)
METHOD = replace(fedavg.METHOD, paper="arXiv 1812.06127", params=Params, work=work, traits=TRAITS)

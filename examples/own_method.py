"""A method outside the checkout, a second FedProx. A job names it as `method = "own_method:METHOD"`.

A package gives the method a short name with [project.entry-points."fedquilt.methods"] mine = "own_method:METHOD".
"""

from dataclasses import dataclass

import fedquilt as fq
from fedquilt.core import ClientContext, ClientResult, Task


@dataclass(frozen=True)
class Params(fq.fedavg.Params):
    """Parameters of FedAvg, and the weight `mu` of the proximal term."""

    mu: float = 0.1


def work(task: Task, client: ClientContext) -> ClientResult:
    """Train like FedAvg, with the gradient of mu/2 * ||w - w_start||^2 added."""
    return fq.fedavg.work(
        task, client, fq.Hooks(correct_gradient=lambda g, w, at: g + task.params["mu"] * (w - at["start"]))
    )


METHOD = fq.method(fq.fedavg, params=Params, work=work, paper="arXiv 1812.06127")

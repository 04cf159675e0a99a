"""A method outside the checkout, FedProx written anew. A job names it as `method = "own_method:METHOD"`.

In a package of its own it gets a name by [project.entry-points."fedquilt.methods"] mine = "own_method:METHOD".
"""

from dataclasses import dataclass

import fedquilt as fq
from fedquilt.core import ClientContext, ClientResult, Task


@dataclass(frozen=True)
class Params(fq.fedavg.Params):
    """FedAvg's, and how strongly a device is pulled towards the received model."""

    mu: float = 0.1


def work(task: Task, client: ClientContext) -> ClientResult:
    """Train as FedAvg does, with the gradient of mu/2 * ||w - w_start||^2 added."""
    return fq.fedavg.work(
        task, client, fq.Hooks(correct_gradient=lambda g, w, at: g + task.params["mu"] * (w - at["start"]))
    )


METHOD = fq.method(fq.fedavg, params=Params, work=work, paper="arXiv 1812.06127")

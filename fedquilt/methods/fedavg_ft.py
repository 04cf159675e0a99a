"""FedAvg-FT: FedAvg, after which each device fine-tunes the global model on its own examples.

Paper: Yu, Bagdasaryan and Shmatikov, Salvaging Federated Learning by Local Adaptation, 2020 (arXiv 2002.04758), section
3, "fine-tuning": the baseline of personalised methods.

Deviations: the fine-tuned model is made for an evaluation and is not kept. All layers are tuned, by plain steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from fedquilt.methods import fedavg, perfedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the fine-tuning."""

    alpha: Annotated[float, Meta(ge=0)] = 0.01  # learning rate of the fine-tuning; 0 is FedAvg
    adapt_epochs: Annotated[int, Meta(ge=0)] = 5  # passes over a device's examples before it is evaluated


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2002.04758",
    params=Params,
    send=lambda state, device: perfedavg.with_adaptation(fedavg.send(state, device), state),
    check=perfedavg.check,
)

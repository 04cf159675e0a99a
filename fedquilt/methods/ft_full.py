"""FT-Full: the whole of a pre-trained network is fine-tuned, on the devices whose memory suffices.

Paper: FedStitch (arXiv 2409.07202), section V-A3, a baseline of its group 2: federated averaging of a pre-trained
model among the devices that can train all of it, 10 % of them with ResNet50.

Deviations: none known; the paper gives no memory model. A device can take part if its budget holds the engine and a
mini-batch's training by our own prediction (`models.footprint`), all of the batch at once, as an ordinary trainer
needs it; `at_once` = 1 suffices for our engines, unless batch norm is trained, which holds `batch` at once. A device
that has not reported its memory is asked. Where all have room it is FedAvg, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from fedquilt import tiers
from fedquilt.core import DeviceView, Order
from fedquilt.methods import fedavg


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and how many examples memory has to hold."""

    at_once: Annotated[int, Meta(ge=1)] | None = None  # examples that memory has to hold at once; none: `batch`


def limited(
    order: Order, state: fedavg.State, device: DeviceView, engines: tuple[str, ...], counted: int
) -> Order | None:
    """Order with the memory of the job's `at_once` examples; None if the device's budget does not hold it.

    Args:
        order: task as FedAvg predicts it.
        state: with the parameters and the bytes of an example.
        device: with its budget, if reported.
        engines: that may carry it out; their own memory counts too.
        counted: examples that the order's own figure covers.
    """
    more = max(0, (state.params["at_once"] or state.params["batch"]) - counted)
    work = msgspec.structs.replace(order.work, peak_bytes=order.work.peak_bytes + more * state.example_bytes)
    profile = device.profile
    known = [name for name in engines if profile and name in profile.engines]
    if profile and not any(tiers.fits(profile, name, work) for name in known):
        return None
    return replace(order, work=work)


def send(state: fedavg.State, device: DeviceView) -> Order | None:
    """Order training of the whole network, if the device's budget holds it."""
    return limited(fedavg.send(state, device), state, device, ("torch", "numpy"), fedavg.at_once(state))


METHOD = replace(fedavg.METHOD, paper="arXiv 2409.07202, section V-A3", params=Params, send=send)

"""FT-Full: devices with enough memory fine-tune all layers of a pre-trained network.

Paper: FedStitch (arXiv 2409.07202), section V-A3, a baseline of its group 2: federated averaging of a pre-trained
model among the devices that can train all of it, 10 % of them with ResNet50.

Deviations: none known, but the paper has no memory model. A device can take part if its budget holds the engine and the
training of a whole mini-batch, predicted by `costs.peak_memory`, as an ordinary trainer needs. For our engines
`at_once` = 1 is enough, unless batch norm is trained, which holds `batch` examples at once. A device that has not
reported its memory is selected. If all devices have enough memory, the result is bit-identical to FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from fedquilt.core import DeviceView, TaskSpec
from fedquilt.costs import peak_memory
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the number of examples that must fit in memory."""

    at_once: Annotated[int, Meta(ge=1)] | None = None  # examples that must fit in memory at once; None: `batch`


def limit_by_memory(
    task_spec: TaskSpec, state: NetworkState, device: DeviceView, engines: tuple[str, ...], predicted_examples: int
) -> TaskSpec | None:
    """Return the task spec with memory for `at_once` examples, or None if the device has less.

    Args:
        task_spec: Task spec with FedAvg's prediction.
        state: State with the parameters and the bytes of an example.
        device: Device with its memory budget, if reported.
        engines: Engines that can run the task. Memory includes that of the engine.
        predicted_examples: Number of examples in FedAvg's prediction.
    """
    extra_examples = max(0, (state.params["at_once"] or state.params["batch"]) - predicted_examples)
    work = msgspec.structs.replace(
        task_spec.work, peak_bytes=task_spec.work.peak_bytes + extra_examples * state.example_bytes
    )
    profile = device.profile
    usable_engines = [name for name in engines if profile and name in profile.engines]
    if profile and not peak_memory.fits_budget(profile.budget_bytes, usable_engines, work):
        return None
    return replace(task_spec, work=work)


def send(state: NetworkState, device: DeviceView) -> TaskSpec | None:
    """Return the task spec to train the whole network, or None if the device lacks the memory."""
    return limit_by_memory(
        fedavg.send(state, device), state, device, ("torch", "numpy"), local_training.minimum_batch(state)
    )


METHOD = replace(fedavg.METHOD, paper="arXiv 2409.07202, section V-A3", params=Params, send=send, common_task=False)

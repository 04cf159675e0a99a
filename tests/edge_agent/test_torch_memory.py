"""The torch engine plans its memory by `fedquilt.costs.peak_memory` and fits itself to its budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import Examples, Fit, Hooks, Step
from fedquilt.costs import peak_memory

NETWORK = {"name": "plain", "channels": 1, "classes": 2, "input": {"channels": 1, "size": 16}}
# no batch norm
WITHOUT = {
    "name": "cnn",
    "channels": 1,
    "size": 16,
    "classes": 2,
    "input": {"channels": 1, "size": 16},
}  # no batch norm


def planned(
    room_bytes: int, fit: Fit, hooks: Hooks = Hooks(), network: dict[str, Any] = NETWORK
) -> tuple[int, peak_memory.TrainingProperties]:
    """What the engine plans for a training with so much room beside torch at work and its margin, and what the
    network takes."""
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")  # before torch: it says how threads wait
    import torch

    from fedquilt.models.networks import registry

    torch.manual_seed(0)
    model = registry.build_network({key: value for key, value in network.items() if key != "input"})
    start = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    examples = Examples(np.zeros((16, 16, 16), np.uint8), np.arange(16) % 2)
    whole = math.ceil(peak_memory.PREDICTION_MARGIN * (peak_memory.FIRST_USE_BYTES["torch"] + room_bytes))
    engine = module.TorchEngine(whole + (module.GPU_BYTES if torch.cuda.is_available() else 0), base_bytes=0)
    assert engine.planned_bytes is None
    engine.train(network, start, examples, fit, tensors.seeded_rng(1), hooks=hooks)
    if not torch.cuda.is_available():  # as the engine lays small convolutions out
        model = model.to(memory_format=torch.channels_last)
    trained, _ = peak_memory.measure_training(model, torch.zeros(2, 1, 16, 16))
    return engine.planned_bytes - (peak_memory.GPU_KERNELS_BYTES if torch.cuda.is_available() else 0), trained


@pytest.mark.parametrize(("room_for", "at_once"), [(16, 16), (15, 8), (7, 4), (1, 1)])
def test_the_plan_is_the_prediction_for_the_micro_batch_that_fits(room_for: int, at_once: int) -> None:
    """A mini-batch of 16 is halved until it fits."""
    _, network = planned(0, Fit(batch=16), network=WITHOUT)
    told, _ = planned(peak_memory.training_bytes(network, room_for), Fit(batch=16), network=WITHOUT)
    assert told == peak_memory.FIRST_USE_BYTES["torch"] + peak_memory.training_bytes(network, at_once)


def test_one_example_that_does_not_fit_goes_through_in_pieces() -> None:
    _, network = planned(0, Fit(batch=16), network=WITHOUT)
    told, _ = planned(peak_memory.training_bytes(network, 0), Fit(batch=16), network=WITHOUT)
    assert told < peak_memory.FIRST_USE_BYTES["torch"] + peak_memory.training_bytes(network, 1)


@pytest.mark.parametrize(
    ("fit", "more"), [(Fit(batch=4, momentum=0.9), 1), (Fit(batch=4, optimizer="adam", lr=1e-3), 2)]
)
def test_what_an_optimizer_remembers_is_planned_for(fit: Fit, more: int) -> None:
    with_it, network = planned(10**9, fit)
    without, _ = planned(10**9, Fit(batch=4))
    assert with_it - without == pytest.approx(more * network.weights_bytes, abs=1)


def test_what_no_turn_moves_is_planned_without_gradients() -> None:
    head = Step(rate=lambda name: float(name.startswith("6.")))
    body = Step(rate=lambda name: float(not name.startswith("6.")))
    given = (Step(),), (head,), (head, head), (head, body)
    whole, one, two, parts = (planned(10**9, Fit(batch=4), Hooks(steps=steps))[0] for steps in given)
    assert whole == parts > one == two

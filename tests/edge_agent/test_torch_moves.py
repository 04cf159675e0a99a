"""The optimizer's step without torch's `Optimizer` class."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from fedquilt.core import Fit  # noqa: E402
from fedquilt.edge_agent.engines.torch.training_step import OptimizerStep  # noqa: E402

FITS = (
    Fit(),
    Fit(momentum=0.9),
    Fit(momentum=0.9, nesterov=True, weight_decay=1e-3),
    Fit(optimizer="adam"),
    Fit(optimizer="adam", weight_decay=0.01),
)


@pytest.mark.parametrize("fit", FITS, ids=str)
def test_steps_equal_those_of_torchs_optimizers_bit_for_bit(fit: Fit) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    twin = copy.deepcopy(model)
    own, theirs = list(model.parameters()), list(twin.parameters())
    moves = OptimizerStep({0.1: own[:2], 0.01: own[2:]}, fit)
    groups = [{"params": theirs[:2], "lr": 0.1}, {"params": theirs[2:], "lr": 0.01}]
    if fit.optimizer == "adam":
        optimizer = torch.optim.Adam(groups, weight_decay=fit.weight_decay)
    else:
        sgd = {"momentum": fit.momentum, "nesterov": fit.nesterov, "weight_decay": fit.weight_decay}
        optimizer = torch.optim.SGD(groups, **sgd)
    for number in range(5):
        x = torch.randn(8, 20)
        for module, stepper in ((model, moves), (twin, optimizer)):
            stepper.zero_grad()
            module(x).square().mean().backward()
            if number == 2:
                next(module.parameters()).grad = None
            stepper.step()
    assert all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))


def test_a_training_does_not_load_torchs_compiler() -> None:
    """It is 73 MB, and nothing here is compiled."""
    script = """
import sys
import numpy as np
from fedquilt.core import Examples, Fit  # noqa: E402
from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402
network = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
start = {name: value.numpy() for name, value in registry.build_network(network).state_dict().items()}
shown = Examples(np.zeros((6, 4), np.float32), np.array([0, 1, 0, 1, 0, 1]))
TorchEngine(10**9).train(network, start, shown, Fit(momentum=0.9), np.random.default_rng(0))
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

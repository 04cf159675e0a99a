"""Batch normalisation put back into networks from which it was folded away."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="its modules are changed")

import torch
from torch import nn

from fedquilt.tools.lab.papers import custom


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


def test_evaluation_stays_and_training_begins_where_it_is() -> None:
    model, x = network(), 3 + 2 * torch.randn(16, 1, 8, 8)
    with torch.no_grad():
        model[0].weight[2] = 0.0
        model[1].bias.copy_(torch.randn(4))
        assert custom.is_folded(model)
        before = model.eval()(x)
        assert not torch.allclose(model.train()(x), before, atol=0.1)
        model = network()
        model[0].weight[2] = 0.0
        before = model.eval()(x)
        custom.set_statistics_from_inputs(model, x)
        assert not custom.is_folded(model)
        assert torch.allclose(model.eval()(x), before, atol=1e-5)
        assert torch.allclose(model.train()(x), before, atol=1e-3)


def test_a_network_with_statistics_or_without_normalisation_is_not_folded() -> None:
    model = network()
    model.train()(torch.randn(4, 1, 8, 8))
    assert not custom.is_folded(model)
    assert not custom.is_folded(nn.Sequential(nn.Linear(2, 2)))

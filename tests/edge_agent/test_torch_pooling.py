"""Max pooling with channels last gives the bits of torch's own, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch_pooling: Any = pytest.importorskip("fedquilt.edge_agent.engines.torch_pooling")
torch: Any = pytest.importorskip("torch")
nn = torch.nn

LAYERS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, stride=2, padding=1),
    nn.MaxPool2d((3, 2), stride=(2, 1), dilation=(1, 2), ceil_mode=True),
]


def pooled(layer: Any, x: Any) -> tuple[Any, Any]:
    """The maxima, and the gradient of a sum of them by what was pooled."""
    x = x.clone().requires_grad_()
    found = nn.Sequential(nn.ReLU(), layer)(x)
    (found * torch.arange(found.numel()).view(found.shape)).sum().backward()
    return found.detach(), x.grad


@pytest.mark.parametrize("layer", LAYERS, ids=["2", "3 of 2, padded", "uneven"])
@pytest.mark.parametrize("channels", [1, 5])
def test_maxima_and_gradients_have_the_same_bits(layer: Any, channels: int) -> None:
    """Half of the numbers are zeros behind the ReLU, so that maxima have several places; one is no number."""
    x = torch.randn(3, channels, 9, 8, generator=torch.Generator().manual_seed(1))
    x[1, 0, 4, 4] = torch.nan
    quick = copy.deepcopy(layer)
    torch_pooling.quicken(quick)
    assert "forward" in vars(quick)
    for one, other in zip(pooled(layer, x), pooled(quick, x), strict=True):
        assert one.is_contiguous() == other.is_contiguous()
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert torch.equal(layer(x[2]), quick(x[2]))  # one picture alone: (channels, height, width)


def test_layers_that_return_places_are_left_alone() -> None:
    layer = nn.MaxPool2d(2, return_indices=True)
    torch_pooling.quicken(layer)
    assert len(layer(torch.randn(1, 2, 4, 4))) == 2

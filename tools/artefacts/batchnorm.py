"""Batch normalisation of published networks that was folded into their convolutions: put back, so that they can train.

A folded network is right in evaluation mode only: its normalisations are still there, with mean 0 and variance 1, and
in training mode they would normalise what was made never to be. With the statistics of some images, and scale and
shift that undo them, evaluation says the same as before, and training begins where evaluation is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def folded(model: nn.Module) -> bool:
    """Whether it has normalisations and none of them has any statistics."""
    own = [each for each in model.modules() if _normalises(each)]
    return bool(own) and all(not each.running_mean.any() and bool((each.running_var == 1).all()) for each in own)


def unfold(model: nn.Module, x: torch.Tensor) -> None:
    """Give every normalisation the statistics of the examples `x`, (n, ...) as the network takes them, in place."""
    import torch

    own = [each for each in model.modules() if _normalises(each)]
    handles = [each.register_forward_pre_hook(_take_over) for each in own]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()


def _normalises(layer: Any) -> bool:
    from torch import nn

    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None and layer.affine


def _take_over(layer: Any, inputs: tuple[Any, ...]) -> None:
    """With z the input: w (z - m) / sqrt(v + eps) + b stays the same function of z when m and v become its own."""
    z = inputs[0]
    axes = [axis for axis in range(z.ndim) if axis != 1]
    mean, variance = z.mean(dim=axes), z.var(dim=axes, unbiased=False)
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    layer.bias.copy_(layer.bias + scale * (mean - layer.running_mean))
    layer.weight.copy_(scale * (variance + layer.eps).sqrt())
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)

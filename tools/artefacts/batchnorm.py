"""Restoration of batch normalisation that was folded into convolutions.

A folded network is correct in evaluation mode only: the batch-norm layers remain, with mean 0 and variance 1, and
would normalise in training mode. Statistics of some images, with a scale and shift that cancel them, leave the output
unchanged and make training possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_folded(model: nn.Module) -> bool:
    """Return whether all batch-norm layers of a model have mean 0 and variance 1."""
    own = [each for each in model.modules() if _is_batch_norm(each)]
    return bool(own) and all(not each.running_mean.any() and bool((each.running_var == 1).all()) for each in own)


def set_statistics_from_inputs(model: nn.Module, x: torch.Tensor) -> None:
    """Set the statistics of all batch-norm layers to those of the inputs `x`, in place.

    The output in evaluation mode stays the same.
    """
    import torch

    own = [each for each in model.modules() if _is_batch_norm(each)]
    handles = [each.register_forward_pre_hook(_adopt_statistics) for each in own]
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        for handle in handles:
            handle.remove()


def _is_batch_norm(layer: Any) -> bool:
    from torch import nn

    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None and layer.affine


def _adopt_statistics(layer: Any, inputs: tuple[Any, ...]) -> None:
    # w (z - m) / sqrt(v + eps) + b must stay the same function of the input z when m and v become those of z
    z = inputs[0]
    axes = [axis for axis in range(z.ndim) if axis != 1]
    mean, variance = z.mean(dim=axes), z.var(dim=axes, unbiased=False)
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    layer.bias.copy_(layer.bias + scale * (mean - layer.running_mean))
    layer.weight.copy_(scale * (variance + layer.eps).sqrt())
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)

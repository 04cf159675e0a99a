"""Diagonal of the empirical Fisher information, from squared gradients of single examples.

F_j = mean over examples of (d log p(y | x) / d theta_j)^2, with the labels of the examples. Gradients of mini-batches
would give another value, because gradients are squared before the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

TOGETHER = 32  # gradients held at once, if there is room


def fisher_diagonal(
    model: nn.Module,
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    each: int = 1,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
) -> dict[str, torch.Tensor]:
    """Return the diagonal Fisher information of each parameter, float32 in the parameter's shape.

    Args:
        model: Network, in evaluation mode.
        parts: Inputs (n, ...) and labels (n,), whose gradients fit into memory together.
        each: Number of examples whose gradients are averaged before squaring.
        loss_of: Function from scores and y to their mean loss, used as -log p(y | x).
    """
    values = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.func.functional_call(model, (given, buffers), (x,)), y)

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    if any(isinstance(each, nn.RNNBase) for each in model.modules()):  # their kernels write in place: vmap refuses them

        def gradients(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            one = torch.func.grad(loss)
            found = [one(given, *some) for some in zip(x, y, strict=True)]
            return {name: torch.stack([some[name] for some in found]) for name in given}

    total, count = {name: torch.zeros_like(value) for name, value in values.items()}, 0
    for x, y in parts:
        whole = len(y) - len(y) % each
        stacks = [(x[:whole].unflatten(0, (-1, each)), y[:whole].unflatten(0, (-1, each)))] if whole else []
        if whole < len(y):
            stacks.append((x[None, whole:], y[None, whole:]))
        for some, labels in stacks:  # (groups, each, ...)
            for name, found in gradients(values, some, labels).items():
                total[name] += found.square().sum(dim=0)
            count += len(labels)
    return {name: value / max(count, 1) for name, value in total.items()}

"""Diagonal of the empirical Fisher information, from squared gradients of single examples.

F_j = mean over examples of (d log p(y | x) / d theta_j)^2, with the labels of the examples. Gradients of mini-batches
would give another value, because gradients are squared before the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

MAX_GRADIENTS = 32  # gradients held at once, if there is room


def fisher_diagonal(
    model: nn.Module,
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    group_size: int = 1,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
) -> dict[str, torch.Tensor]:
    """Return the diagonal Fisher information of each parameter, float32 in the parameter's shape.

    Args:
        model: Network, in evaluation mode.
        parts: Inputs (n, ...) and labels (n,), whose gradients fit into memory together.
        group_size: Number of examples whose gradients are averaged before squaring.
        loss_of: Function from scores and y to their mean loss, used as -log p(y | x).
    """
    values = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.func.functional_call(model, (parameters, buffers), (x,)), y)

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # vmap rejects kernels that write in place

        def gradients(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            gradient_of = torch.func.grad(loss)
            example_gradients = [gradient_of(parameters, *example) for example in zip(x, y, strict=True)]
            return {name: torch.stack([example[name] for example in example_gradients]) for name in parameters}

    total = {name: torch.zeros_like(value) for name, value in values.items()}
    count = 0
    for x, y in parts:
        grouped_count = len(y) - len(y) % group_size
        stacks = []
        if grouped_count:
            groups = (-1, group_size)
            stacks.append((x[:grouped_count].unflatten(0, groups), y[:grouped_count].unflatten(0, groups)))
        if grouped_count < len(y):
            stacks.append((x[None, grouped_count:], y[None, grouped_count:]))
        for inputs, labels in stacks:  # (groups, group_size, ...)
            for name, gradient_stack in gradients(values, inputs, labels).items():
                total[name] += gradient_stack.square().sum(dim=0)
            count += len(labels)
    return {name: value / max(count, 1) for name, value in total.items()}

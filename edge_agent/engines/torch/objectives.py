"""Losses and targets of `objectives` as torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from fedquilt.core import TaskKind


def targets_tensor(task: TaskKind, y: np.ndarray) -> torch.Tensor:
    """Return targets in the type of the task's loss: int64 (n,), or float32 (n, outputs)."""
    return torch.from_numpy(y.astype(np.int64 if task == "classes" else np.float32))


def total_loss(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of the examples' losses, a scalar."""
    if task == "classes":
        return F.cross_entropy(scores, y, reduction="sum")
    return _element_losses(task, scores, y).sum() / scores.shape[1]


def example_losses(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of each example, (n,)."""
    if task == "classes":
        return F.cross_entropy(scores, y, reduction="none")
    return _element_losses(task, scores, y).mean(dim=1)


def _element_losses(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if task == "regression":
        return F.mse_loss(scores, y, reduction="none")
    return F.binary_cross_entropy_with_logits(scores, y, reduction="none")

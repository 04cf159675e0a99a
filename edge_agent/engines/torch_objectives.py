"""Losses of `objectives` in torch, and targets as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from fedquilt.core import TaskKind


def targets(task: TaskKind, y: np.ndarray) -> torch.Tensor:
    """Targets in the type of the task's loss: int64 (n,), or float32 (n, outputs)."""
    return torch.from_numpy(y.astype(np.int64 if task == "classes" else np.float32))


def total(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum of the examples' losses, a scalar."""
    if task == "classes":
        return F.cross_entropy(scores, y, reduction="sum")
    return _elements(task, scores, y).sum() / scores.shape[1]


def each(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss of each example, (n,)."""
    if task == "classes":
        return F.cross_entropy(scores, y, reduction="none")
    return _elements(task, scores, y).mean(dim=1)


def _elements(task: TaskKind, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if task == "regression":
        return F.mse_loss(scores, y, reduction="none")
    return F.binary_cross_entropy_with_logits(scores, y, reduction="none")

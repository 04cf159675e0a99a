"""Losses that [params] names, as sums over examples, so that a mini-batch can be divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedquilt.core import Choice, JobError, TaskKind
from fedquilt.edge_agent.engines.torch import own_functions, training_step
from fedquilt.formats import training_choices

Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (scores, targets) -> sum of the examples' losses


@dataclass(frozen=True)
class MixedTargets:
    """Targets of examples that mixup has mixed from two each."""

    first: torch.Tensor
    second: torch.Tensor
    share: float  # of the first

    def __len__(self) -> int:
        return len(self.first)


class TrainingLoss:
    """Loss of a training.

    Args:
        choice: Loss in [params], "" for that of the task.
        task: Kind of prediction.
        outputs: Outputs of the network.
        place: Device of the scores.

    Raises:
        JobError: If there is no such loss, or the loss does not fit the network.
    """

    def __init__(self, choice: Choice, task: TaskKind, outputs: int, place: torch.device) -> None:
        name, arguments = training_choices.parse_loss(choice)
        self._weights: np.ndarray | None = None  # of classes, by whose sum the loss is divided
        if not name:
            self._sum: Sum = lambda scores, y: training_step.total_loss(task, scores, y)
            return
        if name not in training_choices.LOSSES:
            self._sum = load_own_loss(name, arguments)
            return
        if (wanted := training_choices.LOSSES[name][1]) != task:
            raise JobError(
                f"[params] loss = {name!r} is for task = {wanted!r}, and the network's task is {task!r}: "
                "take another loss, or set `task` in [data] and [model]"
            )
        given = getattr(arguments, "weights", ()) or getattr(arguments, "quantiles", ())
        if given and len(given) not in ((1, outputs) if name == "quantile" else (outputs,)):
            key = "quantiles" if name == "quantile" else "weights"
            raise JobError(
                f"[params] loss {name!r}: {key} has {len(given)} numbers, and the network has {outputs} outputs: "
                "give one for each"
            )
        each = torch.tensor(given, device=place) if given else None
        self._sum = _make_sum(name, arguments, each)
        if name == "cross_entropy" and given:
            self._weights = np.asarray(given)

    def total(self, scores: torch.Tensor, y: torch.Tensor | MixedTargets) -> torch.Tensor:
        """Return the sum of the examples' losses."""
        if isinstance(y, MixedTargets):
            return y.share * self._sum(scores, y.first) + (1 - y.share) * self._sum(scores, y.second)
        return self._sum(scores, y)

    def divisor(self, y: np.ndarray) -> float:
        """Return the divisor of a mini-batch's sum for the mean in torch."""
        return float(len(y) if self._weights is None else self._weights[y].sum())


def _make_sum(name: str, arguments: Any, each: torch.Tensor | None) -> Sum:
    def focal(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(scores, y, reduction="none")
        losses = (1 - torch.exp(-entropy)) ** arguments.gamma * entropy
        return (losses if each is None else losses * each[y]).sum()

    def quantile(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert each is not None
        error = y - scores
        return torch.maximum(each * error, (each - 1) * error).sum() / scores.shape[1]

    sums: Mapping[str, Sum] = {
        "cross_entropy": lambda scores, y: F.cross_entropy(
            scores, y, weight=each, label_smoothing=arguments.smoothing, reduction="sum"
        ),
        "focal": focal,
        "bce": lambda scores, y: (
            F.binary_cross_entropy_with_logits(scores, y, pos_weight=each, reduction="sum") / scores.shape[1]
        ),
        "mse": lambda scores, y: F.mse_loss(scores, y, reduction="sum") / scores.shape[1],
        "huber": lambda scores, y: F.huber_loss(scores, y, delta=arguments.delta, reduction="sum") / scores.shape[1],
        "quantile": quantile,
    }
    return sums[name]


def load_own_loss(name: str, arguments: Mapping[str, Any]) -> Sum:
    """Return the loss of a plug-in: a function of scores, targets and arguments with one loss for each example.

    Raises:
        JobError: If there is no such function, or it does not take the arguments. A call of the loss raises JobError if
            the result is not one loss for each example.
    """
    function = own_functions.load_function("loss", name, arguments, values=2)

    def own(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = function(scores, y, **arguments)
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if shape != (len(y),):
            raise JobError(
                f"[params] loss {name!r} returned {shape} for {len(y)} examples: return one loss for each, "
                f"a tensor of shape ({len(y)},), without their mean"
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise JobError(
                f"[params] loss {name!r} has no gradient: compute the losses from the scores with torch, without "
                "detach, item or numpy"
            )
        total: torch.Tensor = found.sum()
        return total

    return own

"""Optimizer steps by torch's functions, without torch's `Optimizer` class.

An object of that class imports torch's compiler and sympy: 73 MB and a second or more in every training process, on
boards whose whole budget may be 512 MB. The functions give bit-identical results without these imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedquilt.core import Fit

BETAS = 0.9, 0.999
EPS = 1e-8


class OptimizerStep:
    """Optimizer of `Fit` for tensors grouped by learning rate, usable with `torch.amp.GradScaler`.

    Args:
        groups: Tensors by learning rate, updated from their `.grad`.
        fit: Optimizer settings.
    """

    def __init__(self, groups: Mapping[float, Sequence[torch.Tensor]], fit: Fit) -> None:
        self._fit = fit
        self._groups = [_ParameterGroup(rate, list(values)) for rate, values in groups.items()]
        self.param_groups: list[dict[str, Any]] = [{"params": group.values} for group in self._groups]

    def zero_grad(self) -> None:
        for group in self._groups:
            for value in group.values:
                value.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for group in self._groups:
                rows = [i for i, value in enumerate(group.values) if value.grad is not None]
                if self._fit.optimizer == "adam":
                    group.adam(rows, self._fit)
                else:
                    group.sgd(rows, self._fit)


class _ParameterGroup:
    """Tensors of one learning rate, and the optimizer's state of each."""

    def __init__(self, rate: float, values: list[torch.Tensor]) -> None:
        self._rate, self.values = rate, values
        self._first: list[torch.Tensor | None] = [None] * len(values)
        self._second: list[torch.Tensor | None] = [None] * len(values)
        self._steps = [torch.tensor(0.0) for _ in values]

    def sgd(self, rows: Sequence[int], fit: Fit) -> None:
        buffers = [self._first[i] for i in rows]
        sgd(
            [self.values[i] for i in rows],
            [_require_gradient(self.values[i]) for i in rows],
            buffers,
            weight_decay=fit.weight_decay,
            momentum=fit.momentum,
            lr=self._rate,
            dampening=0.0,
            nesterov=fit.nesterov,
            maximize=False,
        )
        for i, buffer in zip(rows, buffers, strict=True):
            self._first[i] = buffer

    def adam(self, rows: Sequence[int], fit: Fit) -> None:
        for i in rows:
            if self._first[i] is None:
                self._first[i] = torch.zeros_like(self.values[i])
                self._second[i] = torch.zeros_like(self.values[i])
        adam(
            [self.values[i] for i in rows],
            [_require_gradient(self.values[i]) for i in rows],
            [self._first[i] for i in rows],
            [self._second[i] for i in rows],
            [],
            [self._steps[i] for i in rows],
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=self._rate,
            weight_decay=fit.weight_decay,
            eps=EPS,
            maximize=False,
        )


def _require_gradient(value: torch.Tensor) -> torch.Tensor:
    assert value.grad is not None
    return value.grad

"""One step of torch training: losses, gradients of micro-batches, correction, clipping and optimizer.

`OptimizerStep` calls torch's functions without torch's `Optimizer` class. An object of that class imports torch's
compiler and sympy: 73 MB and a second or more in every training process, on boards whose whole budget may be 512 MB.
The functions give bit-identical results without these imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedquilt.core import Fit, Hooks, ModelError, Step, TaskKind, Tensors
from fedquilt.edge_agent.engines import training
from fedquilt.edge_agent.engines.torch import recomputation
from fedquilt.models.networks import register_trace

BETAS, EPSILON = (0.9, 0.999), 1e-8
FIRST_SCALE = 2.0**10  # of float16's loss: torch's 2**16 overflows in, and skips, the first steps of short tasks

Anchors = Mapping[str, Mapping[str, torch.Tensor]]


class OptimizerStep:
    """Optimizer of `Fit` for tensors grouped by learning rate, usable with `torch.amp.GradScaler`.

    Args:
        groups: Tensors by learning rate, updated from their `.grad`.
        fit: Optimizer settings.
    """

    def __init__(self, groups: Mapping[float, Sequence[torch.Tensor]], fit: Fit) -> None:
        self._fit = fit
        self.param_groups: list[dict[str, Any]] = [{"lr": rate, "params": some} for rate, some in groups.items()]
        self._momenta: dict[torch.Tensor, torch.Tensor | None] = {}
        self._moments: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # Adam's, and its steps

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                value.grad = None

    def step(self) -> None:
        move = self._adam if self._fit.optimizer == "adam" else self._sgd
        with torch.no_grad():
            for group in self.param_groups:
                moved = [value for value in group["params"] if value.grad is not None]
                move(moved, [value.grad for value in moved], group["lr"])

    def _sgd(self, moved: list[torch.Tensor], gradients: list[torch.Tensor], rate: float) -> None:
        buffers = [self._momenta.get(value) for value in moved]
        sgd(
            moved,
            gradients,
            buffers,
            weight_decay=self._fit.weight_decay,
            momentum=self._fit.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=self._fit.nesterov,
            maximize=False,
        )
        self._momenta.update(zip(moved, buffers, strict=True))

    def _adam(self, moved: list[torch.Tensor], gradients: list[torch.Tensor], rate: float) -> None:
        for value in moved:
            if value not in self._moments:
                self._moments[value] = torch.zeros_like(value), torch.zeros_like(value), torch.tensor(0.0)
        held = [self._moments[value] for value in moved]
        adam(
            moved,
            gradients,
            [first for first, _, _ in held],
            [second for _, second, _ in held],
            [],
            [steps for _, _, steps in held],
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=rate,
            weight_decay=self._fit.weight_decay,
            eps=EPSILON,
            maximize=False,
        )


class Stepper:
    """Optimizer and gradients of one `fedquilt.core.Step`.

    Args:
        half: 16-bit type to compute in, or None for 32 bits.
        task: Kind of prediction, which decides the loss.

    Raises:
        ModelError: If the step would update no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        fit: Fit,
        hooks: Hooks,
        anchors: Anchors,
        half: torch.dtype | None,
        task: TaskKind = "classes",
    ) -> None:
        self._model, self._step, self._fit, self._half, self._task = model, step, fit, half, task
        self._correct, self._anchors, self._alone = hooks.correct, anchors, len(hooks.steps) == 1
        rates = {name: step.rate(name) for name, _ in model.named_parameters()}
        self._moved = {name: value for name, value in model.named_parameters() if rates[name] > 0}
        if not self._moved:
            raise ModelError("the method holds every tensor of this network still: there is nothing to train")
        self._at = {name: {key: held[name] for key, held in anchors.items()} for name in self._moved if self._correct}
        groups: dict[float, list[torch.Tensor]] = {}
        for name, value in self._moved.items():
            groups.setdefault(rates[name], []).append(value)
        self._moves: Any = OptimizerStep({fit.lr * rate: some for rate, some in groups.items()}, fit)
        place = next(iter(self._moved.values())).device.type
        self._scaler = torch.amp.GradScaler(place, init_scale=FIRST_SCALE, enabled=half is torch.float16)
        self._autocast = torch.autocast(place, dtype=half) if half else contextlib.nullcontext()
        self._enable_gradients()

    def step(
        self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int, piece_bytes: int | None = None
    ) -> list[torch.Tensor]:
        """Take a step on a mini-batch of `count` examples given in parts.

        Args:
            parts: Inputs and targets of each micro-batch.
            count: Number of examples in all parts.
            piece_bytes: Most bytes of recomputed tensors held at once, or None to save all tensors.

        Returns:
            Share of each part in the mean loss before the step, without penalty, as scalars on the device. Reading a
            scalar waits for the device. A penalty that is not finite is returned as the loss.
        """
        if not self._alone:
            self._enable_gradients()
        if self._step.begin:
            self._step.begin(self._model)
        self._moves.zero_grad()
        losses = []
        for x, y in parts:
            passed = partial(self._training_and_task_loss, x, y, count)
            if piece_bytes is None:
                loss, told = passed()
            else:
                loss, told = recomputation.run_with_recomputation(self._model, passed, (x, y), piece_bytes)
            losses.append(told)
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._moves)
        if correct := self._correct:
            for name, value in self._moved.items():
                if value.grad is not None:
                    value.grad = correct(value.grad, value.detach(), self._at[name])
        if self._fit.clip > 0:
            nn.utils.clip_grad_norm_(self._moved.values(), self._fit.clip)
        self._scaler.step(self._moves)
        self._scaler.update()
        return losses

    def _training_and_task_loss(
        self, x: torch.Tensor, y: torch.Tensor, divisor: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss with penalty, for the gradient, and the loss to report."""
        with self._autocast:
            scores = self._model(x)
            loss = total_loss(self._task, scores, y) / divisor
            if not self._step.penalty:
                return loss, loss.detach()
            extra = self._step.penalty(self._model, x, scores, self._anchors) * (len(y) / divisor)
            return loss + extra, loss.detach() + 0.0 * extra.detach()

    def _enable_gradients(self) -> None:
        for name, value in self._model.named_parameters():
            value.requires_grad_(name in self._moved)


def enable_gradients(model: nn.Module, hooks: Hooks) -> None:
    """Enable gradients of the tensors that any step updates, and disable all others."""
    for name, value in model.named_parameters():
        value.requires_grad_(any(step.rate(name) > 0 for step in hooks.steps))


def freeze_statistics(model: nn.Module, hooks: Hooks) -> None:
    """Set each module with buffers to evaluation mode, if no step trains a tensor of the module.

    So frozen batch normalisation keeps its statistics. A module around other modules keeps its mode, as do frozen
    modules without buffers: dropout in them belongs to the training.
    """
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers or any(module.children()):
            continue
        own = [f"{path}.{leaf}" if path else leaf for leaf in (*dict(module.named_parameters(recurse=False)), *buffers)]
        if not any(step.rate(name) > 0 for step in hooks.steps for name in own):
            module.training = False


def anchor_tensors(model: nn.Module, hooks: Hooks) -> Anchors:
    """Return the method's anchors and the "start" on the model's device, or {} if no hook uses them.

    Raises:
        ModelError: If an anchor does not fit the network.
    """
    if not hooks.correct and not any(step.penalty for step in hooks.steps):
        return {}
    held = register_trace.state_without_aliases(model)
    place = next(iter(held.values())).device
    training.require_anchors(hooks.anchors, {name: tuple(value.shape) for name, value in model.named_parameters()})

    return build_anchors({name: value.detach().clone() for name, value in held.items()}, hooks.anchors, place)


def build_anchors(start: Mapping[str, torch.Tensor], anchors: Mapping[str, Tensors], place: torch.device) -> Anchors:
    """Return anchors as tensors on a device, floats in 32 bits, with the "start" among them."""
    found = {"start": start}
    for anchor, arrays in anchors.items():
        kept = {name: torch.tensor(array, device=place) for name, array in arrays.items()}
        found[anchor] = {name: value.float() if value.is_floating_point() else value for name, value in kept.items()}
    return found


def targets_tensor(task: TaskKind, y: np.ndarray) -> torch.Tensor:
    """Return targets of `objectives` in the type of the task's loss: int64 (n,), or float32 (n, outputs)."""
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

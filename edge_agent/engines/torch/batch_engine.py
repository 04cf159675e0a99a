"""Batched training of several devices in one graph, for simulated fleets.

Parameters are stacked, (devices, ...), and each layer is one batched product over all devices. `torch.func.vmap` builds
the same graph, but takes longer for small layers. Losses are added up, so that each device's gradient is its own. The
order of examples and the steps are those of `engine`. Results are equal to float tolerance, not bit-identical,
because products are summed in another order.

Supported are networks of linear layers and functions without parameters, with or without `Hooks.correct_gradient`.
Everything else uses the loop: changes of a method to the network or its steps, batch norm and dropout, whose state
differs by device, and convolutions, which would become grouped and gain nothing (13 ms per device and step of 32 images
on one core either way).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedquilt import metrics
from fedquilt.edge_agent.engines import evaluation_sums, training
from fedquilt.edge_agent.engines.batch_training import BatchTrainer, TrainCall, Trained
from fedquilt.edge_agent.engines.torch import training_step
from fedquilt.edge_agent.engines.torch.engine import TorchEngine
from fedquilt.formats import training_choices
from fedquilt.models.networks import registry

PLAIN = (
    nn.Sequential,
    nn.Flatten,
    nn.Identity,
    nn.Linear,
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
)
"""Modules that `forward` handles. Their only state is in parameters, and one product for all devices is faster.

Modules that are neither a container, a linear layer nor a flattening work element by element.
"""


class BatchedTorchEngine(BatchTrainer, TorchEngine):
    def __init__(self, budget_bytes: int, **options: Any) -> None:
        super().__init__(budget_bytes, **options)
        self._plain: dict[bytes, nn.Module | None] = {}  # network table -> the network, or None if it cannot be batched

    def _batch_key(self, call: TrainCall) -> Hashable | None:
        if (
            call.fit.mixed
            or training_choices.describe_torch_choices(vars(call.fit))
            or self._batchable_network(call.table, call.network) is None
        ):
            return None
        x, y, steps_per_epoch = call.examples.x, call.examples.y, math.ceil(len(call.examples) / call.fit.batch)
        return call.table, call.fit, x.shape[1:], x.dtype.str, y.shape[1:], steps_per_epoch

    def _train_batch(self, calls: Sequence[TrainCall]) -> Sequence[Trained | Exception]:
        return _DeviceBatch(self._plain[calls[0].table], calls, self._device).train()

    def _batchable_network(self, table: bytes, network: Mapping[str, Any]) -> nn.Module | None:
        if table not in self._plain:
            model = registry.build_network(network).to(self._device)
            has_plain_modules = all(type(module) in PLAIN for module in model.modules())
            has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            # All state is in parameters, and no parameter is used in two places.
            has_plain_parameters = 0 < len(list(model.parameters())) == len(model.state_dict())
            self._plain[table] = model if has_plain_modules and has_plain_parameters and not has_hooks else None
        return self._plain[table]


def forward(module: nn.Module, values: Mapping[str, torch.Tensor], x: torch.Tensor, prefix: str = "") -> torch.Tensor:
    """Return the scores of a network of modules in `PLAIN`, with separate parameters for each device."""
    if isinstance(module, nn.Sequential):
        for name, child in module._modules.items():  # `named_children` omits repeated modules
            assert child is not None
            x = forward(child, values, x, f"{prefix}{name}.")
    elif isinstance(module, nn.Linear):
        # weight @ x^T instead of x @ weight^T: the weight's gradient has the weight's memory order then, in a third
        # of the time
        weight = values[f"{prefix}weight"]  # (devices, out, in)
        bias = values[f"{prefix}bias"].unsqueeze(2) if module.bias is not None else weight.new_zeros(())
        scores = torch.baddbmm(bias, weight, x.flatten(1, -2).transpose(1, 2))  # (devices, out, n * ...)
        x = scores.transpose(1, 2).unflatten(1, x.shape[1:-1])
    elif isinstance(module, nn.Flatten):
        x = x.flatten(*(axis + 1 if axis >= 0 else axis for axis in (module.start_dim, module.end_dim)))
    else:
        x = module(x)
    return x


class _DeviceBatch:
    def __init__(self, model: nn.Module | None, calls: Sequence[TrainCall], device: torch.device) -> None:
        assert model is not None
        self._model, self._calls, self._device, self._fit = model, calls, device, calls[0].fit
        self._task = metrics.task_from_network(calls[0].network)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for call in calls:
            training.require_shapes(call.start, shapes)
            training.require_anchors(call.hooks.anchors, shapes)
        self._names = list(shapes)
        # Shape (devices, ...).
        self._values = [self._stack_parameters([call.start[name] for call in calls]) for name in self._names]
        self._anchors = [self._device_anchors(index) for index in range(len(calls))]
        self._optimizer = training_step.OptimizerStep({self._fit.lr: self._values}, self._fit)
        self._failed: dict[int, Exception] = {}
        self._accounts = [training.TrainingProgress(len(call.examples), self._fit, call.progress) for call in calls]
        # Shape (epochs, examples), drawn in the loop's order, as is the seed after them.
        self._example_orders = [training.draw_orders(len(call.examples), self._fit.epochs, call.rng) for call in calls]
        for call in calls:
            call.rng.integers(2**53)
        self._are_targets_checked = False

    def train(self) -> list[Trained | Exception]:
        steps_per_epoch = math.ceil(len(self._calls[0].examples) / self._fit.batch)
        for epoch in range(self._fit.epochs):
            for step in range(steps_per_epoch):
                start = step * self._fit.batch
                self._train_step(
                    [device_orders[epoch][start : start + self._fit.batch] for device_orders in self._example_orders]
                )
        arrays = [value.detach().cpu().numpy() for value in self._values]
        return [
            self._failed.get(index)
            or (
                {name: array[index].copy() for name, array in zip(self._names, arrays, strict=True)},
                account.metrics(),
            )
            for index, account in enumerate(self._accounts)
        ]

    def _train_step(self, rows: Sequence[np.ndarray]) -> None:
        counts = [len(device_rows) for device_rows in rows]
        longest = max(counts)
        y = np.zeros((len(rows), longest, *self._calls[0].examples.y.shape[1:]), self._calls[0].examples.y.dtype)
        for index, (call, device_rows) in enumerate(zip(self._calls, rows, strict=True)):
            y[index, : len(device_rows)] = call.examples.y[device_rows]
        targets = training_step.targets_tensor(self._task, y).to(self._device)
        scores = self._compute_scores(
            self._prepare_inputs(
                [
                    device_rows if len(device_rows) == longest else np.resize(device_rows, longest)
                    for device_rows in rows
                ]
            )
        )
        example_losses = training_step.example_losses(self._task, scores.flatten(0, 1), targets.flatten(0, 1))
        losses = example_losses.view(len(rows), longest)
        if min(counts) < longest:  # padded rows have weight 0
            mask = torch.arange(longest)[None, :] < torch.tensor(counts)[:, None]
            losses = torch.where(mask.to(self._device), losses, losses.new_zeros(()))
        mean_losses = losses.sum(dim=1) / torch.tensor(counts, device=self._device)  # (devices,)
        gradients = torch.autograd.grad(mean_losses.sum(), self._values)
        with torch.no_grad():
            self._apply_gradients(self._clip_gradients(self._correct_gradients(list(gradients))))
        self._record_losses(mean_losses.detach().tolist(), counts)

    def _record_losses(self, losses: Sequence[float], counts: Sequence[int]) -> None:
        for index, (account, loss, count) in enumerate(zip(self._accounts, losses, counts, strict=True)):
            if index not in self._failed:
                try:
                    account.add_step(loss, count)
                except Exception as error:
                    self._failed[index] = error

    def _correct_gradients(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if not any(call.hooks.correct_gradient for call in self._calls):
            return gradients
        for number, (name, gradient) in enumerate(zip(self._names, gradients, strict=True)):
            parts = [
                call.hooks.correct_gradient(gradient[index], self._values[number][index], self._anchors[index][name])
                if call.hooks.correct_gradient
                else gradient[index]
                for index, call in enumerate(self._calls)
            ]
            gradients[number] = torch.stack(parts)
        return gradients

    def _clip_gradients(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        # The norm is that of each device, as in `torch.nn.utils.clip_grad_norm_`.
        if self._fit.clip <= 0:
            return gradients
        squares = [gradient.flatten(1).square().sum(dim=1) for gradient in gradients]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        shrink = (self._fit.clip / (norms + 1e-6)).clamp(max=1.0)  # (devices,)
        return [gradient * shrink.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]

    def _apply_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        # The optimizer works element by element, so that stacked tensors are separate steps.
        for value, gradient in zip(self._values, gradients, strict=True):
            value.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _compute_scores(self, x: torch.Tensor) -> torch.Tensor:
        scores = forward(self._model, dict(zip(self._names, self._values, strict=True)), x)
        if not self._are_targets_checked:
            if scores.ndim != 3:
                raise RuntimeError("the network does not return one number per class or output")
            for call in self._calls:
                evaluation_sums.require_targets(call.examples, scores.shape[2], self._task)
            self._are_targets_checked = True
        return scores

    def _prepare_inputs(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        x = np.concatenate([call.examples.x[device_rows] for call, device_rows in zip(self._calls, rows, strict=True)])
        ready = training.network_inputs(x, self._calls[0].network)
        return torch.from_numpy(ready).to(self._device).unflatten(0, (len(rows), -1))

    def _device_anchors(self, index: int) -> dict[str, dict[str, torch.Tensor]]:
        call = self._calls[index]
        if not call.hooks.correct_gradient:
            return {}
        start = {name: value[index].detach().clone() for name, value in zip(self._names, self._values, strict=True)}
        anchors = training_step.build_anchors(start, call.hooks.anchors, self._device)
        return {name: {key: anchor[name] for key, anchor in anchors.items()} for name in self._names}

    def _stack_parameters(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        value = torch.from_numpy(np.stack([np.asarray(array, np.float32) for array in arrays]))
        return value.to(self._device).requires_grad_()
